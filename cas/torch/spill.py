"""Memory given back: tensors held in RAM become private mappings of their chunks in a store.

A storage's bytes are put into the store, and the storage then exchanges its memory for a private
mapping (copy on write) of the chunk files. The storage object stays the one it was, so whatever
uses it follows: parameters, views, aliases, tied weights, a state dict that somebody made, a saved
graph. Reading costs clean file pages that the kernel may drop; a write gets a page of its own and
reaches neither the store nor anybody else.

The mapping lives as long as the storage does. Neither the end of the writer nor a gc that removes
the chunks ends it: an unlinked file keeps its blocks until it is unmapped.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cas.errors import Refused
from cas.torch.mapping import MIN_MAPPED, ChunkFiles, Mapper, is_mapping
from cas.torch.memory import anonymous_bytes, return_freed_memory
from cas.torch.streaming import ChunkSink, is_plain, put_storage

log = logging.getLogger("cas.torch.spill")

#: The heap is handed back to the kernel whenever this much was freed.
_TRIM_BYTES: Final = 256 << 20

Target: TypeAlias = "torch.nn.Module | Iterable[Any]"


class StoreWriter(ChunkSink, ChunkFiles, Protocol):
    """What spilling needs of a store's writer."""


class SpillUnsupported(Refused):
    """This torch cannot exchange a storage's memory."""

    def __init__(self, missing: str) -> None:
        self.missing = missing
        super().__init__(
            f"torch {torch.__version__} has no {missing}, without which a model in memory cannot "
            "be moved into the store; install torch 2.13, or load the model with "
            "`cas.torch.load_into`"
        )


@dataclass(frozen=True, slots=True)
class Spilled:
    """What a spill did. ``held_bytes`` could have been freed, but something else holds them."""

    moved_bytes: int = 0
    moved_storages: int = 0
    held_bytes: int = 0


def spill(
    target: Target,
    writer: StoreWriter,
    *,
    min_size: int = MIN_MAPPED,
    mapper: Mapper | None = None,
) -> Spilled:
    """Move the tensors of a module, or those given, from memory into the store.

    The tensors stay the objects they are, with their values, strides, views and aliases. Left
    alone are storages below ``min_size``, those that take no memory of their own (mapped from a
    file, shared with other processes, spilled before), those on devices, and those whose memory
    something besides tensors uses (a numpy array, a DLPack consumer): it would not be freed, or
    would be freed under them. A wrapper subclass is spilled by its inner tensors.

    Nothing else may write to the tensors meanwhile, and what keeps a raw address of one
    (``data_ptr()``) must ask for it again, as after `Module.to`. A spilled tensor cannot be
    resized in place, and is not spilled again after it was written to.

    Args:
        target: a module (its parameters, buffers and tensor attributes), or tensors; anything else
            among those is passed over.
        min_size: of storages, in bytes; a smaller one stays in memory.
        mapper: makes the mappings; one of the writer's own by default.

    Raises:
        SpillUnsupported: torch is too old.
        NoSpace, ChunkDamaged: what was moved until then is in the store, the rest in memory, and
            every tensor can be used as before.
    """
    _require_support()
    mapper = mapper or Mapper(writer, min_size=min_size)
    found = _candidates(target, max(min_size, mapper.min_size, 1))
    if not found:
        return Spilled()
    free = _held_by_tensors_only(found)
    if len(free) < len(found):
        gc.collect()  # the holder may be garbage: a graph that nothing uses any more
        free = _held_by_tensors_only(found)
    moved = storages = pending = 0
    try:
        for key in [key for key in found if key in free]:
            size = _move(found.pop(key).untyped_storage(), writer, mapper)
            moved, storages, pending = moved + size, storages + (size > 0), pending + size
            if pending >= _TRIM_BYTES:
                return_freed_memory()
                pending = 0
    finally:
        return_freed_memory()
    held = sum(tensor.untyped_storage().nbytes() for tensor in found.values())
    if held:
        log.info("%d bytes stay in memory: something besides tensors holds them", held)
    return Spilled(moved, storages, held)


def _move(storage: torch.UntypedStorage, writer: StoreWriter, mapper: Mapper) -> int:
    """Exchange a storage's memory for a mapping; the bytes freed, 0 where none can be made."""
    mapping = mapper.mapped(put_storage(writer, storage))
    if mapping is None:
        return 0
    storage._swap_data_ptr_(mapping)  # type: ignore[attr-defined]
    return storage.nbytes()


# --- what to move -------------------------------------------------------------------------------


def _candidates(target: Target, min_size: int) -> dict[int, torch.Tensor]:
    """A tensor for each storage that takes memory of its own, by the storage's address."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    for tensor in plain_tensors(_tensors_of(target)):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and _is_worth_moving(storage, min_size):
            found[storage._cdata] = tensor
        seen.add(storage._cdata)
    return found


def _is_worth_moving(storage: torch.UntypedStorage, min_size: int) -> bool:
    size = storage.nbytes()
    if storage.device.type != "cpu" or size < min_size or is_mapping(storage):
        return False
    if torch.cuda.is_initialized() and storage.is_pinned():  # type: ignore[no-untyped-call]
        return False
    # At least half, for all of it is hashed and written.
    return anonymous_bytes(storage.data_ptr(), size) * 2 >= size


def _tensors_of(target: Target) -> Iterator[Any]:
    if not isinstance(target, torch.nn.Module):
        yield from target
        return
    yield from target.parameters()
    yield from target.buffers()
    for module in target.modules():
        yield from list(vars(module).values())  # an export makes constants of tensor attributes


def plain_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among ``values``, and of wrapper subclasses the tensors inside, that are bytes
    of a storage and nothing on top."""
    for value in values:
        if not issubclass(type(value), torch.Tensor) or is_lazy(value):
            continue
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            yield from plain_tensors(getattr(value, name) for name in names)
        elif is_plain(value):
            yield value


# --- who else uses it ---------------------------------------------------------------------------


def _held_by_tensors_only(found: dict[int, torch.Tensor]) -> set[int]:
    """The storages whose every reference is a tensor that Python knows of.

    Tensors follow when a storage exchanges its memory. A numpy array or a DLPack consumer does
    not: it keeps the address, and is seen here as a storage that was lent out (numpy), or as a
    reference to the storage or to one of its tensors for which there is no tensor.
    """
    tensors = _tensors_by_storage(found)
    views = Counter(id(tensor._base) for group in tensors.values() for tensor in group.values())
    one_tensor, one_storage = _reference_counts()
    free = set()
    for key, group in tensors.items():
        storage = found[key].untyped_storage()
        if not storage.resizable():  # also what torch borrowed from elsewhere
            continue
        if _storage_references(storage) != len(group) + one_storage:
            continue
        if all(
            _references(t) == one_tensor + views[id(t)] + _gradient_references(t)
            for t in group.values()
        ):
            free.add(key)
    return free


def _gradient_references(tensor: torch.Tensor) -> int:
    """1 if autograd holds a weight to accumulate its gradient, as it does once it was used."""
    if not (tensor.requires_grad and tensor.is_leaf) or tensor.is_inference():
        return 0
    before = _references(tensor)
    with torch.inference_mode(False):
        node = torch.autograd.graph.get_gradient_edge(tensor).node
    # Asking makes the node where there was none, and that one holds the tensor from now on.
    made = _references(tensor) - before
    del node
    return 1 - made


def _tensors_by_storage(found: dict[int, torch.Tensor]) -> dict[int, dict[int, torch.Tensor]]:
    """Every tensor of the process that uses one of the storages, by storage and identity."""
    groups: dict[int, dict[int, torch.Tensor]] = {key: {} for key in found}
    with torch._C.DisableTorchFunctionSubclass():
        # No list or tuple is built of them: it would be one of the objects, and a cycle.
        for value in chain(found.values(), gc.get_objects()):
            if not issubclass(type(value), torch.Tensor):
                continue
            # A view's base may be a tensor that only the view holds.
            for tensor in (value, value._base):
                key = None if tensor is None else _storage_address(tensor)
                if tensor is not None and key in groups:
                    groups[key][id(tensor)] = tensor
    return groups


def _storage_address(tensor: torch.Tensor) -> int | None:
    try:
        return int(torch.Tensor.untyped_storage(tensor)._cdata)  # whatever a subclass makes of it
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, uninitialized and the like
        return None


def _reference_counts() -> tuple[int, int]:
    """What this torch counts for a tensor that Python holds, and for a storage beside its
    tensors."""
    tensor = torch.empty(1)
    return _references(tensor), _storage_references(tensor.untyped_storage()) - 1


def _references(tensor: torch.Tensor) -> int:
    return int(tensor._use_count())  # type: ignore[attr-defined]


def _storage_references(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def _require_support() -> None:
    needed = (
        (torch.UntypedStorage, "_swap_data_ptr_"),
        (torch.Tensor, "_use_count"),
        (torch._C, "_storage_Use_Count"),
    )
    for owner, name in needed:
        if not hasattr(owner, name):
            raise SpillUnsupported(f"{owner.__name__}.{name}")
