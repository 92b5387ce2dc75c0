"""A tensor as a stream of chunks, through a few host buffers that are filled while others are read.

The thread that puts begins copies; worker threads wait for them, hash, write and give the buffers
back. So a device copies, the workers hash and the disk writes at the same time, and what is held on
the host is the ring, however large the tensor. Which device it is, only the copier knows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import torch

from cas.ingest import Piece
from cas.manifest import Recipe
from cas.torch.devices import Copier, Copy, HostBuffer, copier_for

log = logging.getLogger("cas.torch.ring")

#: Host memory of one ring. Beyond a buffer in each worker's hands, a few are needed for copies
#: under way: a store has 8 workers at most, and usually chunks of 4 MiB.
RING_BYTES: Final = 32 << 20
MIN_BUFFERS: Final = 3
MAX_BUFFERS: Final = 16


class PieceSink(Protocol):
    """The part of a store's writer that a ring feeds."""

    @property
    def chunk_size(self) -> int: ...

    def put_pieces(self, pieces: Iterable[Piece], /) -> Recipe: ...


class Ring:
    """At most ``buffers`` host buffers of ``buffer_bytes`` each, made when first needed.

    ``peak`` is the largest number that were in use at a time. One ring serves one stream at a
    time.
    """

    def __init__(self, copier: Copier, *, buffer_bytes: int, buffers: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.buffers = buffers
        self.peak = 0
        self._copier = copier
        self._permits = threading.Semaphore(buffers)
        self._mutex = threading.Lock()
        self._free: list[HostBuffer] = []
        self._used: set[RingPiece] = set()

    @property
    def in_use(self) -> int:
        """Buffers that a copy fills or a worker reads now."""
        with self._mutex:
            return len(self._used)

    @contextlib.contextmanager
    def stream(self, tensor: torch.Tensor) -> Iterator[Iterator[RingPiece]]:
        """The tensor's bytes in row-major order, cut at multiples of ``buffer_bytes``.

        Asking for the next piece blocks while all buffers are in use. When the block is left,
        however it is, nothing writes to a buffer or reads the tensor's memory any more.
        """
        try:
            yield self._pieces(tensor)
        finally:
            with self._mutex:
                left = list(self._used)
            for piece in left:
                piece.release()

    def _pieces(self, tensor: torch.Tensor) -> Iterator[RingPiece]:
        source = self._copier.open(tensor)
        for offset in range(0, source.nbytes, self.buffer_bytes):
            nbytes = min(self.buffer_bytes, source.nbytes - offset)
            buffer = self._take()
            try:
                copy = source.begin(offset, nbytes, buffer)
            except BaseException:
                self._permits.release()
                raise
            piece = RingPiece(self, copy, buffer, nbytes)
            with self._mutex:
                self._used.add(piece)
                self.peak = max(self.peak, len(self._used))
            yield piece

    def _take(self) -> HostBuffer:
        self._permits.acquire()
        try:
            with self._mutex:
                if self._free:
                    return self._free.pop()
            return self._copier.allocate(self.buffer_bytes)
        except BaseException:
            self._permits.release()
            raise

    def give_back(self, piece: RingPiece, buffer: HostBuffer | None) -> None:
        """End a piece's use of its buffer. None if the buffer is not to be used again."""
        with self._mutex:
            if piece not in self._used:
                return
            self._used.discard(piece)
            if buffer is not None:
                self._free.append(buffer)
        self._permits.release()


class RingPiece:
    """A piece under way, as `Writer.put_pieces` takes it."""

    def __init__(self, ring: Ring, copy: Copy, buffer: HostBuffer, nbytes: int) -> None:
        self._ring = ring
        self._copy = copy
        self._buffer = buffer
        self._nbytes = nbytes

    def ready(self) -> memoryview:
        self._copy.wait()
        return self._buffer.view[: self._nbytes]

    def release(self) -> None:
        buffer: HostBuffer | None = self._buffer
        try:
            self._copy.settle()
        except Exception:
            # Whoever waits for this piece's bytes gets the same error; here it only means that
            # nobody can say when the device is done with the buffer.
            log.debug("a copy did not settle; its buffer is dropped", exc_info=True)
            buffer = None
        self._ring.give_back(self, buffer)


def put_through_ring(
    writer: PieceSink, tensor: torch.Tensor, *, copier: Copier | None = None
) -> Recipe:
    """Store a strided tensor's elements in row-major order, whatever device they are on.

    ``copier`` is the tensor's device's unless given.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return Recipe()
    chosen = copier_for(tensor.device) if copier is None else copier
    size = writer.chunk_size
    buffers = max(MIN_BUFFERS, min(MAX_BUFFERS, RING_BYTES // size))
    ring = Ring(chosen, buffer_bytes=min(size, nbytes), buffers=buffers)
    with ring.stream(tensor) as pieces:
        return writer.put_pieces(pieces)
