"""For tests and benchmarks: devices that are slow or strict, and what every copier must do."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cas.torch.devices import Copier, Copy, HostBuffer, RowMajor, Source, copy_now, plain_torch


class SlowDevice:
    """A `Copier` that does one copy after the other in a thread of its own, like a DMA engine.

    The tensors lie in host memory. ``before_copy`` is called with the number of each copy (from 0)
    and its bytes, in that thread, before any byte moves: it may sleep, wait or raise. ``begun`` and
    ``done`` count copies that were asked for and that ended, well or not.
    """

    def __init__(self, before_copy: Callable[[int, int], None] = lambda number, nbytes: None):
        self.before_copy = before_copy
        self.begun = 0
        self.done = 0
        self.buffers = 0
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="slow-device")

    @classmethod
    def of_bandwidth(cls, bytes_per_second: float) -> SlowDevice:
        """A device whose copies take their time and no processor."""
        return cls(lambda number, nbytes: time.sleep(nbytes / bytes_per_second))

    def allocate(self, nbytes: int) -> HostBuffer:
        self.buffers += 1
        with plain_torch():
            return HostBuffer(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"))

    def open(self, tensor: torch.Tensor) -> Source:
        return _SlowSource(self, RowMajor(tensor))

    def close(self) -> None:
        self._engine.shutdown()

    def begin(self, data: RowMajor, offset: int, nbytes: int, buffer: HostBuffer) -> Copy:
        number = self.begun
        self.begun += 1
        return _SlowCopy(self._engine.submit(self._copy, number, data, offset, nbytes, buffer))

    def _copy(
        self, number: int, data: RowMajor, offset: int, nbytes: int, buffer: HostBuffer
    ) -> None:
        try:
            self.before_copy(number, nbytes)
            data.copy_to(buffer, offset, nbytes)
        finally:
            self.done += 1


@dataclass(frozen=True, slots=True)
class _SlowSource:
    device: SlowDevice
    data: RowMajor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def begin(self, offset: int, nbytes: int, buffer: HostBuffer) -> Copy:
        return self.device.begin(self.data, offset, nbytes, buffer)


@dataclass(frozen=True, slots=True)
class _SlowCopy:
    future: Future[None]

    def wait(self) -> None:
        self.future.result()

    def settle(self) -> None:
        self.future.exception()


# --- CUDA without a GPU -------------------------------------------------------------------------


@dataclass(eq=False)
class FakeStream:
    """Work in order, none of which happens before somebody has to see its effect."""

    queued: deque[Callable[[], None]] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class FakeEvent:
    stream: FakeStream
    position: int


class FakeCuda:
    """`CudaCopies` on host memory, stricter than the real thing.

    What is queued happens as late as the rules allow: when an event behind it is synchronized, or
    work that waits for it has to happen. Whoever forgets to wait sees old bytes, every time.
    ``current`` is the stream that "this thread" queues on by default.
    """

    def __init__(self, *, pinned_buffers: int | None = None) -> None:
        self.current = FakeStream()
        self.pinned_buffers = pinned_buffers
        self.pinned_made = 0
        self._mutex = threading.RLock()
        self._ended: dict[FakeStream, int] = {}

    def new_stream(self, device: torch.device) -> FakeStream:
        return FakeStream()

    def wait_for_current_stream(self, stream: FakeStream) -> None:
        event = self.record(self.current)
        self.queue(lambda: self.synchronize(event), stream)

    def copy(self, stream: FakeStream, target: torch.Tensor, source: torch.Tensor) -> None:
        def work() -> None:
            with plain_torch():
                copy_now(target, source)

        self.queue(work, stream)

    def record(self, stream: FakeStream) -> FakeEvent:
        with self._mutex:
            return FakeEvent(stream, self._ended.get(stream, 0) + len(stream.queued))

    def synchronize(self, event: FakeEvent) -> None:
        with self._mutex:
            while self._ended.get(event.stream, 0) < event.position:
                work = event.stream.queued.popleft()
                self._ended[event.stream] = self._ended.get(event.stream, 0) + 1
                work()

    def pinned(self, device: torch.device, nbytes: int) -> torch.Tensor:
        if self.pinned_buffers is not None and self.pinned_made >= self.pinned_buffers:
            raise RuntimeError("CUDA error: out of memory\nset CUDA_LAUNCH_BLOCKING=1")
        self.pinned_made += 1
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def queue(self, work: Callable[[], None], stream: FakeStream | None = None) -> None:
        """Let ``work`` happen on a stream (the current one)."""
        with self._mutex:
            (self.current if stream is None else stream).queued.append(work)


# --- what every copier must do ------------------------------------------------------------------


def check_contract(copier: Copier, device: torch.device) -> None:
    """
    Raises:
        AssertionError: the copier breaks a promise of the protocol; the message says which.
    """
    for check in CONTRACT:
        check(copier, device)


def check_many_copies_at_once(copier: Copier, device: torch.device) -> None:
    """Copies under way at the same time do not disturb each other, or what lies beside them."""
    tensor = torch.arange(40_000, dtype=torch.int32, device=device)
    expected = tensor.cpu().numpy().tobytes()
    source = copier.open(tensor)
    _require(source.nbytes == 160_000, "a source has the tensor's bytes")
    size = 16_384
    under_way = []
    for offset in range(0, source.nbytes, size):
        nbytes = min(size, source.nbytes - offset)
        buffer = copier.allocate(size + 64)
        buffer.tensor.fill_(7)
        under_way.append((offset, nbytes, buffer, source.begin(offset, nbytes, buffer)))
    for offset, nbytes, buffer, copy in reversed(under_way):
        copy.wait()
        copy.wait()
        copy.settle()
        _require(
            bytes(buffer.view[:nbytes]) == expected[offset : offset + nbytes],
            f"bytes {offset} to {offset + nbytes} arrive",
        )
        _require(bytes(buffer.view[nbytes:]) == b"\7" * (size + 64 - nbytes), "no others change")


def check_waiting_in_another_thread(copier: Copier, device: torch.device) -> None:
    """The thread that needs the bytes waits for them."""
    tensor = torch.arange(100_000, dtype=torch.int64, device=device)
    source = copier.open(tensor)
    buffer = copier.allocate(source.nbytes)
    copy = source.begin(0, source.nbytes, buffer)
    found: list[bytes] = []

    def consume() -> None:
        copy.wait()
        found.append(bytes(buffer.view))

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    _require(found == [tensor.cpu().numpy().tobytes()], "another thread sees the bytes")


def check_settling_without_waiting(copier: Copier, device: torch.device) -> None:
    """After `Copy.settle` the buffer is nobody else's, though its bytes were never asked for."""
    source = copier.open(torch.ones(1 << 20, dtype=torch.uint8, device=device))
    buffer = copier.allocate(1 << 20)
    copy = source.begin(0, 1 << 20, buffer)
    copy.settle()
    buffer.tensor.fill_(2)
    copy.settle()
    _require(bool((buffer.tensor == 2).all()), "nothing writes to a settled buffer")


def check_layouts(copier: Copier, device: torch.device) -> None:
    """Views of all kinds come over in row-major order."""
    base = torch.arange(5 * 8 * 6 * 4, dtype=torch.int32, device=device).view(5, 8, 6, 4)
    views = {
        "an offset": base[2:4],
        "a permutation": base.permute(3, 1, 0, 2),
        "channels last": base.to(memory_format=torch.channels_last),
        "a step": base[:, ::3, 1:, ::2],
        "an expansion": base[:, :1, :1].expand(5, 3, 7, 4),
        "no elements": base[:, 4:4],
        "one element": base[1, 2, 3, 1],
        "a parameter": torch.nn.Parameter(base.float()).transpose(0, 3),
    }
    for name, tensor in views.items():
        for piece in (16, 96, 1 << 20):
            _require(_bring(copier, tensor, piece) == _row_major(tensor), f"{name}, by {piece}")


def check_dtypes(copier: Copier, device: torch.device) -> None:
    """Elements of any kind are their bytes, contiguous or not."""
    numbers = torch.arange(96, device=device).view(8, 12)
    complex_numbers = torch.complex(numbers.float(), -numbers.float())
    tensors = [numbers.to(dtype) for dtype in _DTYPES]
    packed = numbers.to(torch.uint8)
    tensors += [packed.view(dtype) for dtype in _PACKED]
    tensors += [complex_numbers, complex_numbers.conj(), complex_numbers.conj().imag]
    for tensor in tensors:
        for view in (tensor, tensor.t(), tensor[1:, ::2]):
            _require(_bring(copier, view, 32) == _row_major(view), f"{view.dtype}")


def check_surroundings(copier: Copier, device: torch.device) -> None:
    """Modes that the caller is under do not reach the copies."""
    real = torch.arange(1000, dtype=torch.float32, device=device).requires_grad_()
    expected = _row_major(real)
    with FakeTensorMode(), torch.device("meta"):
        _require(_bring(copier, real, 512) == expected, "under fake tensors")
    with torch.inference_mode():
        buffer = copier.allocate(4000)
        _require(_bring(copier, real.detach() + 0, 512) == expected, "in inference mode")
    copy = copier.open(real.detach()).begin(0, 4000, buffer)
    copy.wait()
    _require(bytes(buffer.view) == expected, "with a buffer made in inference mode")


#: What `check_contract` checks.
CONTRACT: Final[tuple[Callable[[Copier, torch.device], None], ...]] = (
    check_many_copies_at_once,
    check_waiting_in_another_thread,
    check_settling_without_waiting,
    check_layouts,
    check_dtypes,
    check_surroundings,
)

_DTYPES: Final = (
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
#: Kinds that torch can hold and view but not convert to.
_PACKED: Final = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


def _bring(copier: Copier, tensor: torch.Tensor, piece: int) -> bytes:
    """A tensor's bytes by way of ``copier``, in pieces, from one buffer."""
    source = copier.open(tensor)
    buffer = copier.allocate(piece)
    found = bytearray()
    for offset in range(0, source.nbytes, piece):
        nbytes = min(piece, source.nbytes - offset)
        copy = source.begin(offset, nbytes, buffer)
        copy.wait()
        found += buffer.view[:nbytes]
    return bytes(found)


def _row_major(tensor: torch.Tensor) -> bytes:
    """The same bytes the simple way, on the host."""
    if not tensor.numel():
        return b""
    plain = tensor.detach()
    if plain.element_size() == 1:  # not every such dtype can be copied as what it is
        plain = plain.view(torch.uint8)
    plain = plain.cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise AssertionError(f"the copier breaks a promise: {promise}")
