"""Copying a range of a tensor's bytes into host memory, on whatever device the tensor lies.

A `Copier` is what a device can do: give a host buffer, and begin a copy into it that somebody
waits for later. `cas.torch.ring` turns that into a stream of chunks and knows nothing of devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

log = logging.getLogger("cas.torch.devices")

#: How an element is moved: as an integer of its size, so that no dtype needs a kernel of its own.
_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Host memory that a device copies into. ``tensor`` is uint8; ``view`` shows the same bytes."""

    tensor: torch.Tensor
    pinned: bool = False
    view: memoryview = field(init=False, repr=False)

    def __post_init__(self) -> None:
        view = view_memory(self.tensor.data_ptr(), self.tensor.numel(), self.tensor)
        object.__setattr__(self, "view", view)


class Copy(Protocol):
    """A copy that has begun. Both methods may be called from any thread, more than once."""

    def wait(self) -> None:
        """Return when the bytes are in the buffer. Raises what went wrong with the copy."""

    def settle(self) -> None:
        """Return when nothing writes to the buffer any more, whether or not the bytes arrived."""


class Source(Protocol):
    """One tensor's bytes in row-major order, on a device."""

    @property
    def nbytes(self) -> int: ...

    def begin(self, offset: int, nbytes: int, buffer: HostBuffer) -> Copy:
        """Begin to copy bytes ``offset`` to ``offset + nbytes`` to the front of ``buffer``.

        Both are multiples of the element's size. The source's memory must stay as it is until the
        copy is settled. If this raises, nothing writes to the buffer any more.
        """


class Copier(Protocol):
    """A way to bring a device's bytes to the host."""

    def allocate(self, nbytes: int) -> HostBuffer:
        """A buffer for this copier, which gives its memory back when it is dropped."""

    def open(self, tensor: torch.Tensor) -> Source:
        """A strided tensor as a source; its copies see all that this thread has queued so far.

        The source holds the tensor's memory. No memory is taken on the device, save for a tensor
        that is not contiguous: the ranges that `Source.begin` is asked for pass through a
        contiguous copy there, one at a time.
        """


def copier_for(device: torch.device) -> Copier:
    """The best copier for a device: pinned buffers and a stream of its own for CUDA and ROCm."""
    return CudaCopier(device) if device.type == "cuda" else PageableCopier()


# --- plain copies -------------------------------------------------------------------------------


class PageableCopier:
    """Copies into ordinary memory, in the thread that waits for the bytes.

    Works for any device. Workers that each copy and then hash still keep copying and hashing
    going at the same time.
    """

    def allocate(self, nbytes: int) -> HostBuffer:
        with plain_torch():
            return HostBuffer(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    def open(self, tensor: torch.Tensor) -> Source:
        # Another thread copies, on another stream: what is queued here must be done before.
        synchronize(tensor.device)
        return _PageableSource(RowMajor(tensor))


class _PageableSource:
    def __init__(self, data: RowMajor) -> None:
        self._data = data

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def begin(self, offset: int, nbytes: int, buffer: HostBuffer) -> Copy:
        return _DeferredCopy(self._data, offset, nbytes, buffer)


class _DeferredCopy:
    """Does the copy when it is waited for."""

    def __init__(self, data: RowMajor, offset: int, nbytes: int, buffer: HostBuffer) -> None:
        self._arguments = (data, offset, nbytes, buffer)
        self._mutex = threading.Lock()
        self._done = False

    def wait(self) -> None:
        data, offset, nbytes, buffer = self._arguments
        with self._mutex:
            if not self._done:
                data.copy_to(buffer, offset, nbytes)
                self._done = True

    def settle(self) -> None:
        with self._mutex:  # a copy that has not begun never will
            self._done = True


def synchronize(device: torch.device) -> None:
    """Wait for what this thread has queued on the device's current stream."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        torch.accelerator.current_stream(device).synchronize()


# --- CUDA ---------------------------------------------------------------------------------------


class CudaCopies(Protocol):
    """What `CudaCopier` needs of CUDA; streams and events are opaque to it."""

    def new_stream(self, device: torch.device) -> Any: ...

    def wait_for_current_stream(self, stream: Any) -> None:
        """Let what is queued on ``stream`` from now on begin after this thread's work so far."""

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy to the host on ``stream``. This thread's stream and device do not change."""

    def record(self, stream: Any) -> Any:
        """An event behind all that is queued on ``stream``."""

    def synchronize(self, event: Any) -> None: ...

    def pinned(self, device: torch.device, nbytes: int) -> torch.Tensor: ...


class TorchCuda:
    """`CudaCopies` by way of ``torch.cuda``."""

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def wait_for_current_stream(self, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            # On its way to the host, torch conjugates and negates in the target, and does not wait
            # for an asynchronous copy to end first.
            plain = source.resolve_conj().resolve_neg()
            target.copy_(plain, non_blocking=True)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # A waiting worker sleeps: a spinning one would take a core from those that hash.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def pinned(self, device: torch.device, nbytes: int) -> torch.Tensor:
        with torch.cuda.device(device):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class CudaCopier:
    """Asynchronous copies on a stream of their own, into pinned buffers where that is possible.

    No call of ``record_stream`` is needed, and none is made, since it would delay the reuse of
    device memory: a source holds the tensor's memory, and whoever holds the source waits on the
    host for each copy before dropping it.
    """

    def __init__(self, device: torch.device, cuda: CudaCopies | None = None) -> None:
        self._device = device
        self._cuda: CudaCopies = TorchCuda() if cuda is None else cuda
        self._stream = self._cuda.new_stream(device)

    def allocate(self, nbytes: int) -> HostBuffer:
        with plain_torch():
            try:
                return HostBuffer(self._cuda.pinned(self._device, nbytes), pinned=True)
            except RuntimeError as error:
                _PinningFailed.say_once(nbytes, error)
            # The driver stages copies into ordinary memory itself; the rest is the same.
            return HostBuffer(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    def open(self, tensor: torch.Tensor) -> Source:
        self._cuda.wait_for_current_stream(self._stream)
        return _CudaSource(RowMajor(tensor), self._stream, self._cuda)


class _PinningFailed:
    """Process-wide, since the reason is: a limit on locked memory."""

    said = False

    @classmethod
    def say_once(cls, nbytes: int, error: RuntimeError) -> None:
        if not cls.said:
            cls.said = True
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            log.warning(
                "cannot pin %d bytes of host memory, so copies from the GPU go through pageable "
                "memory, which is slower (see `ulimit -l`): %s",
                nbytes,
                reason,
            )


class _CudaSource:
    def __init__(self, data: RowMajor, stream: Any, cuda: CudaCopies) -> None:
        self._data = data
        self._stream = stream
        self._cuda = cuda

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    def begin(self, offset: int, nbytes: int, buffer: HostBuffer) -> Copy:
        try:
            self._data.copy_to(buffer, offset, nbytes, self._queue)
        except BaseException:
            self._cuda.synchronize(self._cuda.record(self._stream))  # part of it may be queued
            raise
        return _CudaCopy(self._cuda.record(self._stream), self._data, self._cuda)

    def _queue(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._cuda.copy(self._stream, target, source)


class _CudaCopy:
    def __init__(self, event: Any, data: RowMajor, cuda: CudaCopies) -> None:
        self._event = event
        self._data = data  # the device's memory, until the copy is dropped
        self._cuda = cuda

    def wait(self) -> None:
        self._cuda.synchronize(self._event)

    settle = wait


# --- a tensor's bytes in row-major order --------------------------------------------------------

CopyTensor: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], None]"


def copy_now(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


class RowMajor:
    """Ranges of a strided tensor's bytes, in row-major order of its elements."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with plain_torch():
            self._elements = _carried(tensor.detach())
            self._bytes = _byte_range(self._elements)
        self.nbytes = tensor.numel() * tensor.element_size()

    def copy_to(
        self, buffer: HostBuffer, offset: int, nbytes: int, copy: CopyTensor = copy_now
    ) -> None:
        """Copy ``nbytes`` from ``offset`` on to the front of ``buffer``, by means of ``copy``."""
        with plain_torch():
            target = buffer.tensor[:nbytes]
            if self._bytes is not None:
                copy(target, self._bytes[offset : offset + nbytes])
            else:
                self._copy_slabs(target, offset, nbytes, copy)

    def _copy_slabs(self, target: torch.Tensor, offset: int, nbytes: int, copy: CopyTensor) -> None:
        elements = target.view(self._elements.dtype)
        size = self._elements.element_size()
        position = 0
        for slab in slabs(self._elements, offset // size, (offset + nbytes) // size):
            copy(elements[position : position + slab.numel()].view(slab.shape), slab)
            position += slab.numel()


def slabs(tensor: torch.Tensor, first: int, end: int) -> Iterator[torch.Tensor]:
    """Views that hold, one after the other, the elements ``first`` to ``end`` in row-major order.

    At most two for each dimension: what is left of a row, whole rows, what begins a row.
    """
    if first >= end:
        return
    if end - first == tensor.numel():
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    begin, stop = -(-first // row), end // row
    if begin > stop:  # within one row
        yield from slabs(tensor[stop], first - stop * row, end - stop * row)
        return
    if first % row:
        yield from slabs(tensor[begin - 1], first % row, row)
    if begin < stop:
        yield tensor[begin:stop]
    if end % row:
        yield from slabs(tensor[stop], 0, end % row)


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():
        return tensor  # the copy has to conjugate or negate
    carrier = _CARRIERS.get(tensor.element_size())
    return tensor if carrier is None else tensor.view(carrier)


def _byte_range(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's bytes as they lie in its storage, if that is row-major order already."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    start = int(tensor.storage_offset()) * tensor.element_size()
    length = tensor.numel() * tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (length,), (1,))


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage as a uint8 tensor that shares its memory."""
    with plain_torch():
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Operations act on real memory, whatever tracing or mode the caller is under.

    An export calls us under fake tensors or inference mode, say, and a tensor allocated in
    inference mode could not be written to outside.
    """
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


def view_memory(address: int, length: int, owner: Any) -> memoryview:
    """``length`` bytes at ``address``; the view keeps ``owner`` alive."""
    if length == 0:
        return memoryview(b"")
    array = (ctypes.c_ubyte * length).from_address(address)
    # The array does not own its memory; whoever holds the view must hold the owner too.
    array.owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
