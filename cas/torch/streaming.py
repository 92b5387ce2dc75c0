"""The bytes of a tensor or a storage, handed to a writer without a second copy in memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cas.errors import UsageError
from cas.manifest import Recipe

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Device memory comes over in pieces of this size; the host never holds more than one.
DEVICE_PIECE = 4 << 20


class Readable(Protocol):
    """What `ChunkSink.put_stream` reads from."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class ChunkSink(Protocol):
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
    return _view_memory(storage.data_ptr(), storage.nbytes(), storage)


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
    return _view_memory(tensor.data_ptr(), length, tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are the bytes of a strided storage, with nothing on top."""
    if not _is_plain_type(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_mkldnn or tensor.is_nested:
        return False
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.device.type != "meta" and not torch._is_functional_tensor(tensor)


def put_storage(writer: ChunkSink, storage: torch.UntypedStorage) -> Recipe:
    """Store all bytes of a storage: from host memory in place, from a device piece by piece.

    Raises:
        UnsupportedTensor: the storage has no bytes (meta).
    """
    _check_device(storage.device)
    if storage.device.type == "cpu":
        return writer.put(storage_view(storage))
    return writer.put_stream(_DeviceReader(storage))


def put_tensor(writer: ChunkSink, tensor: torch.Tensor) -> Recipe:
    """Store the elements of a tensor in row-major order, whatever its strides.

    Raises:
        UnsupportedTensor: a sparse, mkldnn, quantized, nested, meta or fake tensor, or a subclass.
    """
    _check_tensor(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.device.type == "cpu":
        length = plain.numel() * plain.element_size()
        return writer.put(_view_memory(plain.data_ptr(), length, plain))
    return writer.put_stream(_DeviceReader.of_tensor(plain))


class _DeviceReader:
    """Reads device memory through the host, one bounded piece at a time."""

    def __init__(
        self, storage: torch.UntypedStorage, offset: int = 0, length: int | None = None
    ) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
            storage, 0, (storage.nbytes(),), (1,)
        )
        self._position = offset
        self._end = storage.nbytes() if length is None else offset + length

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> _DeviceReader:
        """The bytes of a contiguous tensor."""
        start = int(tensor.storage_offset()) * tensor.element_size()
        return cls(tensor.untyped_storage(), start, tensor.numel() * tensor.element_size())

    def readinto(self, buffer: memoryview, /) -> int:
        count = min(len(buffer), DEVICE_PIECE, self._end - self._position)
        if count <= 0:
            return 0
        piece = self._bytes[self._position : self._position + count].cpu()
        buffer[:count] = _view_memory(piece.data_ptr(), count, piece)
        self._position += count
        return count


def _view_memory(address: int, length: int, owner: Any) -> memoryview:
    if length == 0:
        return memoryview(b"")
    array = (ctypes.c_ubyte * length).from_address(address)
    # The array does not own its memory; whoever holds the view must hold the owner too.
    array.owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


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
    if tensor.is_quantized:
        raise UnsupportedTensor("a quantized tensor", "store its `.int_repr()` and its scales")
