"""Loading a model without ever holding it: tensor by tensor, through the store, back as a mapping.

Memory held at any time is one tensor of the checkpoint with what is made of it, and the tensors
that are too small to map.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cas.errors import UsageError
from cas.torch.checkpoint import Checkpoint
from cas.torch.mapping import MIN_MAPPED, Mapper
from cas.torch.memory import return_freed_memory
from cas.torch.spill import StoreWriter
from cas.torch.streaming import is_plain, memory_view, put_storage

Transform: TypeAlias = "Callable[[str, torch.Tensor], torch.Tensor | None]"
Source: TypeAlias = (
    "str | os.PathLike[str] | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
)

#: The heap is handed back to the kernel whenever tensors of this size went through it.
_TRIM_BYTES: Final = 256 << 20


class StateMismatch(UsageError):
    """A checkpoint's tensors are not those of the module."""

    def __init__(
        self,
        module: str,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        detail: str = "",
    ) -> None:
        self.missing = missing
        self.unexpected = unexpected
        said = [
            *([f"{len(missing)} missing ({_some(missing)})"] if missing else []),
            *([f"{len(unexpected)} unexpected ({_some(unexpected)})"] if unexpected else []),
            *([detail] if detail else []),
        ]
        super().__init__(
            f"the checkpoint does not fit {module}: {'; '.join(said)}. Is it that of another "
            "model? With strict=False, missing and unexpected names are let pass"
        )


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load left over.

    ``missing`` and ``unexpected`` are empty after a strict load. ``unmaterialized`` are the
    parameters and buffers that are still on the meta device: buffers that no checkpoint holds
    (``persistent=False``), for the caller to compute.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unmaterialized: tuple[str, ...]


def load_into(
    module: torch.nn.Module,
    source: Source,
    writer: StoreWriter,
    *,
    transform: Transform | None = None,
    strict: bool = True,
    min_size: int = MIN_MAPPED,
    mapper: Mapper | None = None,
) -> Loaded:
    """Load a checkpoint into a module, one tensor at a time, as mappings of chunks in the store.

    Make the module on the meta device, so that it takes no memory before::

        with torch.device("meta"):
            model = Model(config)
        load_into(model, "model.safetensors", writer, transform=quantize_one)

    The module's tensors are replaced, as ``load_state_dict(..., assign=True)`` does it: shapes are
    checked, dtypes are the checkpoint's (or the transform's). What the module ties (one parameter
    under two names) stays tied, and the checkpoint may hold it under one of the names. The module
    stays valid after the writer is closed.

    Args:
        source: a safetensors file, the index of a sharded one, or a directory with either; a state
            dict; or any iterable of (name, tensor), such as a generator that assembles tensors.
        transform: makes of each name and tensor what is loaded in its place (quantised, packed,
            cast); None leaves the tensor out. It may return the tensor itself.
        strict: whether names that the module or the checkpoint has alone are an error.
        min_size: tensors of fewer bytes are kept in memory.
        mapper: makes the mappings; one of the writer's own by default.

    Raises:
        StateMismatch: names, with ``strict``; shapes always.
        CheckpointNotFound, CheckpointDamaged, PermissionRefused: the files.
        NoSpace: and after every error but a shape's, the module is as it was before.
    """
    keeper = _Keeper(writer, mapper or Mapper(writer, min_size=min_size))
    tied = _tied_names(module)
    if isinstance(source, (str, os.PathLike)):
        with Checkpoint(Path(source)) as checkpoint:
            if strict and _is_plainly_loaded(module):
                _check_names(module, checkpoint.names(), tied, transform is not None)
            loaded = keeper.keep_all(checkpoint.tensors(), transform)
    else:
        pairs = source.items() if isinstance(source, Mapping) else source
        loaded = keeper.keep_all(pairs, transform)
    return _assign(module, loaded, tied, strict)


class _Keeper:
    """Turns tensors into equal ones that lie in mapped chunk files."""

    def __init__(self, writer: StoreWriter, mapper: Mapper) -> None:
        self._writer = writer
        self._mapper = mapper
        # What was made of the memory of earlier tensors, for as long as that memory is theirs.
        self._made: dict[Any, tuple[StorageWeakRef, torch.Tensor]] = {}

    def keep_all(
        self, pairs: Iterable[tuple[str, torch.Tensor]], transform: Transform | None
    ) -> dict[str, torch.Tensor]:
        kept: dict[str, torch.Tensor] = {}
        passed = 0
        for name, tensor in pairs:
            if not isinstance(tensor, torch.Tensor):  # the extra state of a module
                kept[name] = tensor
                continue
            made = tensor if transform is None else transform(name, tensor)
            if made is not None:
                kept[name] = self.keep(made)
            passed += tensor.nbytes
            del tensor, made  # before the next one is made
            if passed >= _TRIM_BYTES:
                return_freed_memory()
                passed = 0
        return_freed_memory()
        return kept

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its bytes mapped; a subclass is rebuilt around its inner tensors."""
        if is_traceable_wrapper_subclass(tensor):
            return self._rebuilt(tensor)
        plain = tensor.detach()
        if not is_plain(plain) or plain.device.type != "cpu":
            return plain
        storage = plain.untyped_storage()
        place = (storage._cdata, plain.storage_offset(), plain.shape, plain.stride(), plain.dtype)
        known = self._made.get(place)
        if known is not None and not known[0].expired():  # type: ignore[no-untyped-call]
            return known[1]
        kept = self._mapped(plain)
        self._made[place] = (StorageWeakRef(storage), kept)  # type: ignore[no-untyped-call]
        return kept

    def _rebuilt(self, tensor: Any) -> torch.Tensor:
        names, context = tensor.__tensor_flatten__()
        inner = {name: self.keep(getattr(tensor, name)) for name in names}
        rebuilt: torch.Tensor = type(tensor).__tensor_unflatten__(
            inner, context, tensor.size(), tensor.stride()
        )
        return rebuilt

    def _mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes < max(self._mapper.min_size, 1):
            return tensor.clone()  # its storage may be a whole file
        view = memory_view(tensor)
        if view is None:
            recipe, offset = put_storage(self._writer, tensor.untyped_storage()), None
        else:
            recipe, offset = self._writer.put(view), 0
        storage = self._mapper.storage(recipe)
        empty = torch.empty(0, dtype=tensor.dtype)
        start = tensor.storage_offset() if offset is None else offset
        return empty.set_(storage, start, tensor.size(), tensor.stride())


# --- names --------------------------------------------------------------------------------------


def _tied_names(module: torch.nn.Module) -> list[tuple[str, ...]]:
    """The groups of names under which the module holds one and the same tensor."""
    names: dict[int, list[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _is_plainly_loaded(module: torch.nn.Module) -> bool:
    """Whether names alone decide what fits: no submodule renames or accepts others as it loads."""
    stock = torch.nn.Module._load_from_state_dict
    return all(
        type(part)._load_from_state_dict is stock and not part._load_state_dict_pre_hooks
        for part in module.modules()
    )


def _check_names(
    module: torch.nn.Module,
    names: Iterable[str],
    tied: list[tuple[str, ...]],
    may_leave_out: bool,
) -> None:
    """See that names fit before the work begins.

    Raises:
        StateMismatch
    """
    given = dict.fromkeys(names)
    wanted = dict.fromkeys(module.state_dict())
    excused = {name for group in tied if not given.keys().isdisjoint(group) for name in group}
    missing = tuple(name for name in wanted if name not in given and name not in excused)
    unexpected = () if may_leave_out else tuple(name for name in given if name not in wanted)
    if missing or unexpected:
        raise StateMismatch(type(module).__name__, missing, unexpected)


# --- assigning ----------------------------------------------------------------------------------


def _assign(
    module: torch.nn.Module,
    loaded: dict[str, torch.Tensor],
    tied: list[tuple[str, ...]],
    strict: bool,
) -> Loaded:
    kind = type(module).__name__
    if strict and _is_plainly_loaded(module):
        _check_names(module, loaded, tied, may_leave_out=False)
    values = _parameters(module, _with_ties(loaded, tied))
    try:
        result = module.load_state_dict(values, strict=False, assign=True)
    except RuntimeError as error:  # what torch says about shapes, a line for each
        lines = [line.strip() for line in str(error).splitlines()]
        raise StateMismatch(kind, detail="; ".join(lines[1:4] or lines)) from error
    missing, unexpected = tuple(result.missing_keys), tuple(result.unexpected_keys)
    if strict and (missing or unexpected):
        raise StateMismatch(kind, missing, unexpected)
    return Loaded(missing, unexpected, tuple(_on_meta(module)))


def _with_ties(
    loaded: Mapping[str, torch.Tensor], tied: list[tuple[str, ...]]
) -> dict[str, torch.Tensor]:
    """One tensor for all names of a tie, unless the checkpoint has different ones for them."""
    values = dict(loaded)
    for group in tied:
        held = [loaded[name] for name in group if name in loaded]
        if held:
            values.update((n, held[0]) for n in group if loaded.get(n, held[0]) is held[0])
    return values


def _parameters(
    module: torch.nn.Module, values: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The values as what the module has in their place; one parameter for one tensor."""
    slots = module.state_dict(keep_vars=True)
    made: dict[int, torch.nn.Parameter] = {}
    result: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        slot = slots.get(name)
        if not isinstance(slot, torch.nn.Parameter):
            result[name] = value
            continue
        if not (value.is_floating_point() or value.is_complex()):
            slot.requires_grad_(False)  # torch gives the new one the old one's wish
        if id(value) not in made:
            made[id(value)] = torch.nn.Parameter(value, requires_grad=slot.requires_grad)
        result[name] = made[id(value)]
    return result


def _on_meta(module: torch.nn.Module) -> Iterator[str]:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device.type == "meta":
            yield name
