"""The bytes of a tensor or a storage, handed to a writer without a second copy in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cas.errors import UsageError
from cas.manifest import Recipe
from cas.torch.devices import bytes_of, view_memory
from cas.torch.ring import PieceSink, put_through_ring

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Readable(Protocol):
    """What `ChunkSink.put_stream` reads from."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class ChunkSink(PieceSink, Protocol):
    """The part of a store's writer that takes bytes."""

    def put(self, data: Buffer, /) -> Recipe: ...

    def put_stream(self, source: Readable, /) -> Recipe: ...


class UnsupportedTensor(UsageError):
    """A tensor without plain bytes of its own: there is nothing to store."""

    def __init__(self, what: str, advice: str) -> None:
        self.what = what
        super().__init__(f"cannot store {what}: {advice}")


def storage_view(storage: torch.UntypedStorage) -> memoryview:
    """All bytes of a CPU storage as they lie in memory. The view keeps the storage alive.

    Raises:
        UnsupportedTensor: the storage is not in host memory.
    """
    _check_device(storage.device)
    if storage.device.type != "cpu":
        raise UnsupportedTensor(
            f"a view of {storage.device} memory", "copy it with put_storage, which streams it"
        )
    return view_memory(storage.data_ptr(), storage.nbytes(), storage)


def memory_view(tensor: torch.Tensor) -> memoryview | None:
    """The bytes a tensor occupies, in memory order, or None where they are not one plain range.

    A range of its own is what a permuted or channels-last tensor has; an expanded or strided view
    has not. Only host memory counts. The view keeps the tensor alive.
    """
    if not is_plain(tensor) or tensor.device.type != "cpu":
        return None
    if not _is_dense(tensor):
        return None
    length = tensor.numel() * tensor.element_size()
    return view_memory(tensor.data_ptr(), length, tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are the bytes of a strided storage, with nothing on top."""
    if not _is_plain_type(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_mkldnn or tensor.is_nested:
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.device.type != "meta" and not _is_wrapped(tensor)


def put_storage(writer: ChunkSink, storage: torch.UntypedStorage) -> Recipe:
    """Store all bytes of a storage: from host memory in place, from a device through a ring.

    On the host that takes the ring's few buffers, and on the device nothing. What was queued on
    the device's current stream is waited for first; the caller must keep other threads and streams
    from changing the storage meanwhile.

    Raises:
        UnsupportedTensor: the storage has no bytes (meta).
    """
    _check_device(storage.device)
    if storage.device.type == "cpu":
        return writer.put(storage_view(storage))
    return put_through_ring(writer, bytes_of(storage))


def put_tensor(writer: ChunkSink, tensor: torch.Tensor) -> Recipe:
    """Store the elements of a tensor in row-major order, whatever its strides.

    Nothing of the tensor's size is allocated for that, on the host or on its device: what is not
    contiguous is made so chunk by chunk.

    Raises:
        UnsupportedTensor: a sparse, mkldnn, quantized, nested, meta or fake tensor, a subclass (see
            `inner_tensors`), or a tensor inside a transformation.
    """
    _check_tensor(tensor)
    plain = tensor.detach()
    in_place = plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
    if plain.device.type == "cpu" and in_place:
        length = plain.numel() * plain.element_size()
        return writer.put(view_memory(plain.data_ptr(), length, plain))
    return put_through_ring(writer, plain)


def inner_tensors(tensor: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a tensor consists of, by name; a plain one is its own only one.

    A quantized weight of torchao, for example, has its packed data and its scales:
    ``("layer.weight.qdata", ...), ("layer.weight.scale", ...)``. Their bytes are what there is to
    store of it.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        inner = f"{name}.{attribute}" if name else attribute
        yield from inner_tensors(getattr(tensor, attribute), inner)


def _is_plain_type(tensor: torch.Tensor) -> bool:
    # By type, not isinstance: a quantized wrapper that serves as a parameter passes for one.
    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return True
    return issubclass(kind, torch.nn.Parameter) and not is_traceable_wrapper_subclass(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides visit every element of one gapless range exactly once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a transformation (functionalize, vmap, grad) stands between us and the memory."""
    return torch._is_functional_tensor(tensor) or (
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _check_device(device: torch.device) -> None:
    if device.type == "meta":
        raise UnsupportedTensor(
            "a meta or fake tensor", "it has a shape but no bytes; load the real weights first"
        )


def _check_tensor(tensor: torch.Tensor) -> None:
    _check_device(tensor.device)
    if not _is_plain_type(tensor):
        raise UnsupportedTensor(
            f"a {type(tensor).__name__}", "store its inner tensors (`__tensor_flatten__`) instead"
        )
    if tensor.is_mkldnn or tensor.layout is not torch.strided or tensor.is_nested:
        raise UnsupportedTensor(
            f"a tensor of layout {tensor.layout}", "convert it with `.to_dense()` first"
        )
    if _is_wrapped(tensor):
        raise UnsupportedTensor(
            "a tensor inside a torch.func transformation", "store it before or after that"
        )
    if tensor.is_quantized:
        raise UnsupportedTensor("a quantized tensor", "store its `.int_repr()` and its scales")
