"""Reading a recipe's bytes in order, with a bounded number of chunks read and checked ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cas import chunkfiles
from cas.digest import Digest
from cas.errors import ChunkMissing
from cas.layout import Layout
from cas.manifest import ChunkPart, DataPart, Recipe

Locate = Callable[[Digest], Path]

_ZEROS = bytes(1 << 20)


class Buffers:
    """Buffers for chunks, kept for the next use: fresh memory costs more than filling it.

    One pool serves all that is done with a store, so that an assembly fills the very buffers that
    the ingest before it has left. ``size`` is the store's chunk size, in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: deque[bytearray] = deque()  # its ends are safe to use from several threads

    def take(self, size: int) -> bytearray:
        """A buffer of at least ``size`` bytes with any content."""
        try:
            buffer = self._free.pop()
        except IndexError:
            return bytearray(max(size, self._size))
        return buffer if len(buffer) >= size else bytearray(size)

    def give(self, buffer: bytearray) -> None:
        """Take a buffer back; nobody uses it any more."""
        self._free.append(buffer)

    def drop(self) -> None:
        """Give the memory of all that are not in use back."""
        self._free.clear()


def read_part(part: ChunkPart, locate: Locate, buffer: bytearray) -> memoryview:
    """The part's bytes, read into ``buffer`` and checked against the chunk's digest.

    Raises:
        ChunkMissing, ChunkDamaged
    """
    view = memoryview(buffer)
    try:
        whole = chunkfiles.read_into(locate(part.digest), part.digest, part.size, view)
    except ChunkMissing:  # it may just have been published: renamed between the two steps
        whole = chunkfiles.read_into(locate(part.digest), part.digest, part.size, view)
    return whole[part.offset : part.offset + part.length]


def stream(
    recipe: Recipe, locate: Locate, pool: ThreadPoolExecutor, buffers: Buffers, ahead: int
) -> Iterator[memoryview]:
    """Yield the recipe's bytes in order; each piece is valid until the next is asked for.

    Up to ``ahead`` chunks are read and checked in ``pool`` meanwhile.

    Raises:
        ChunkMissing, ChunkDamaged
    """
    window: deque[tuple[Future[memoryview], bytearray]] = deque()
    upcoming = recipe.chunks()
    try:
        for part in recipe.parts:
            if isinstance(part, DataPart):
                yield memoryview(part.data)
            elif isinstance(part, ChunkPart):
                while len(window) < ahead and (following := next(upcoming, None)):
                    buffer = buffers.take(following.size)
                    window.append((pool.submit(read_part, following, locate, buffer), buffer))
                future, buffer = window.popleft()
                yield future.result()
                buffers.give(buffer)
            else:
                yield from _zeros(part.length)
    finally:
        for future, _ in window:
            future.cancel()


class PlainReader:
    """Reads what a writer has put without its threads, its locks or the index.

    That works where a writer's own methods do not: in a child that fork() made, and after the
    writer's end. Nothing is protected from gc by it.
    """

    def __init__(self, layout: Layout, writer: str) -> None:
        self._layout = layout
        self._writer = writer

    def stream(self, recipe: Recipe) -> Iterator[memoryview]:
        """As `Writer.stream`, one chunk after the other."""
        buffers = Buffers(0)
        for part in recipe.parts:
            if isinstance(part, DataPart):
                yield memoryview(part.data)
            elif isinstance(part, ChunkPart):
                buffer = buffers.take(part.size)
                yield read_part(part, self._path_of, buffer)
                buffers.give(buffer)
            else:
                yield from _zeros(part.length)

    def read(self, recipe: Recipe, offset: int = 0, length: int | None = None) -> bytes:
        """As `Writer.read`."""
        count = recipe.size - offset if length is None else length
        return b"".join(bytes(piece) for piece in self.stream(recipe.slice(offset, count)))

    def _path_of(self, digest: Digest) -> Path:
        staged = self._layout.staged(self._writer, digest)
        return staged if staged.exists() else self._layout.chunk(digest)


def _zeros(length: int) -> Iterator[memoryview]:
    for start in range(0, length, len(_ZEROS)):
        yield memoryview(_ZEROS)[: min(len(_ZEROS), length - start)]
