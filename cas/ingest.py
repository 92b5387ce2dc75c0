"""From bytes to chunk files: cut, hash, look up, stage. Hashing and writing run in threads.

A worker takes one chunk through every step: hash it, lease its digest, ask the index whether it is
known, and if not write it to the staging directory. The caller's memory is read where it lies, and
new chunks are written from a copy, of one chunk for each worker; a stream is read into a ring of
buffers. So the memory held does not depend on the length of either.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cas import chunkfiles, fsio, reading
from cas.chunking import cut
from cas.context import Context
from cas.digest import Digest
from cas.errors import NoSpace, SourceChanged, UsageError
from cas.index import Entry, is_known
from cas.leases import Lease
from cas.manifest import ChunkPart, Part, Recipe, ZeroPart, chunk_sizes
from cas.progress import Progress
from cas.room import check_room
from cas.writebehind import WriteBehind

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Staged bytes after which they are published, so that a crash late in a long write costs little.
BARRIER_BYTES = 256 << 20
#: A larger chunk is on its way to the disk as soon as it is staged, so that the syncs of the
#: barrier find one journal commit to do. Smaller ones are left to the barrier.
WRITE_OUT_EACH = 256 << 10
#: Bytes that may be on their way to the disk: enough to keep it busy while others hash, few enough
#: that a memory limit does not stop the writing.
WRITING_BYTES = 64 << 20
#: The same in files: each takes a descriptor, of which a process may have no more than 1024.
WRITING_FILES = 64
#: Chunks hashed before the index is asked about them, all at once.
LOOKUP_CHUNKS = 8
#: Pieces staged after which they are published too: the mutex is held for each of them.
BARRIER_CHUNKS = 2048
#: From this many smaller files on, one syncfs is cheaper than as many syncs.
SYNCFS_FILES = 16


class Readable(Protocol):
    """A binary stream: `readinto` fills the front of a buffer, returns how much, 0 at the end."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


class Piece(Protocol):
    """One chunk's bytes, which a producer makes ready in memory of its own."""

    def ready(self) -> memoryview:
        """Wait for the bytes. They stay as they are until `release`."""

    def release(self) -> None:
        """The memory is not needed any more. Also called for a piece that was never ready."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What a writer has taken in so far. ``new_bytes`` is what the store's chunks grew by."""

    logical_bytes: int = 0
    new_bytes: int = 0
    chunks: int = 0
    new_chunks: int = 0


class Ingest:
    """One writer's ingest. `put` may be called from several threads."""

    def __init__(
        self, context: Context, lease: Lease, progress: Progress, published: Callable[[], None]
    ) -> None:
        self._context = context
        self._published = published
        self._layout = context.layout
        self._lease = lease
        self._progress = progress
        self._pool = ThreadPoolExecutor(context.workers, thread_name_prefix="cas-ingest")
        self._mutex = threading.Lock()
        self._telling = threading.Lock()
        self._buffers = context.buffers
        self._writing = WriteBehind(WRITING_BYTES, WRITING_FILES)
        self._filesystem = fsio.FilesystemSync(context.layout.tmp)
        self._broken: OSError | None = None
        self._publishing = threading.Lock()
        self._settled: dict[Digest, int] = {}
        self._expect_new = False  # a guess from the chunk before
        self._running: dict[Digest, Future[None]] = {}
        self._staged: dict[Digest, int] = {}
        self._staged_bytes = 0
        self._renamed_into: set[Path] = set()
        self._published_bytes = 0
        self._counters = Counters()
        self._zero_digests: dict[int, Digest] = {}

    @property
    def counters(self) -> Counters:
        with self._mutex:
            return self._counters

    @property
    def published_bytes(self) -> int:
        """The bytes of new chunks that stay in the store however this ends."""
        return self._published_bytes

    def path_of(self, digest: Digest) -> Path:
        """Where the chunk lies now; valid for as long as the caller holds an open descriptor."""
        with self._mutex:
            staged = digest in self._staged
        return self._layout.staged(self._lease.id, digest) if staged else self._layout.chunk(digest)

    def open_chunk(self, digest: Digest) -> int:
        """A read-only descriptor of a chunk, staged or published.

        Raises:
            ChunkMissing
        """
        path = self.path_of(digest)
        if path.parent.name == self._lease.id:
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # published between the two lines
                path = self._layout.chunk(digest)
        return chunkfiles.open_chunk(path, digest)

    def stream(self, recipe: Recipe) -> Iterator[memoryview]:
        """The bytes of what was put, in order; see `cas.reading.stream`."""
        return reading.stream(
            recipe, self.path_of, self._pool, self._buffers, self._context.workers
        )

    def forget(self, digest: Digest) -> None:
        """Ask the index about a chunk again when it is put next, unless it is only staged."""
        with self._mutex:
            if digest not in self._staged:
                self._settled.pop(digest, None)

    # --- taking bytes in ------------------------------------------------------------------------

    def put(self, data: Buffer) -> Recipe:
        """Take in one contiguous buffer, a chunk at a time. Cuts start at its first byte.

        Raises:
            UsageError: the buffer is not C-contiguous.
            NoSpace: before anything is written, if what is new of it cannot fit.
        """
        view = as_bytes(data)
        if not view:
            return Recipe()
        pieces = [view[o : o + n] for o, n in cut(len(view), self._context.chunk_size)]
        check_room(self._context, pieces, self._settled)
        parts = self._take_views(pieces) if len(pieces) == 1 else self._take_all(pieces)
        self._account(len(view))
        return Recipe.concat([Recipe(tuple(parts))])

    def put_stream(self, stream: Readable) -> Recipe:
        """Take in all that ``stream`` gives, through a ring of buffers."""
        size = self._context.chunk_size
        ring: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        spare = max(2, min(self._context.buffer_bytes // size, 2 * self._context.workers))
        parts: list[Part] = []
        window: deque[tuple[Future[list[Part]], bytearray]] = deque()
        total = 0
        try:
            while True:
                if ring.empty() and spare:
                    spare -= 1
                    ring.put(self._buffers.take(size))
                elif ring.empty():
                    parts += _collect(window, ring)
                buffer = ring.get()
                count = _fill(stream, memoryview(buffer))
                if count == 0:
                    ring.put(buffer)
                    break
                total += count
                piece = memoryview(buffer)[:count]
                window.append((self._pool.submit(self._take, [piece], True), buffer))
        finally:
            while window:
                parts += _collect(window, ring)
            while not ring.empty():
                self._buffers.give(ring.get())
        self._account(total)
        return Recipe.concat([Recipe(tuple(parts))])

    def put_pieces(self, pieces: Iterable[Piece]) -> Recipe:
        """Take in what a producer makes ready, each piece as one chunk.

        Pieces are waited for in worker threads. ``pieces`` bounds how many there are at a time,
        by blocking while too many of them are not released yet.
        """
        parts: list[Part] = []
        window: deque[Future[Part]] = deque()
        try:
            for piece in pieces:
                future = self._pool.submit(self._take_piece, piece)
                future.add_done_callback(functools.partial(_release_if_cancelled, piece))
                window.append(future)
                while window and window[0].done():
                    parts.append(window.popleft().result())
            while window:
                parts.append(window.popleft().result())
        finally:
            futures.wait([future for future in window if not future.cancel()])
        self._account(sum(part.length for part in parts))
        return Recipe.concat([Recipe(tuple(parts))])

    def _take_piece(self, piece: Piece) -> Part:
        try:
            view = piece.ready()
            if not 0 < len(view) <= self._context.chunk_size:
                raise UsageError(
                    f"a piece has 1 to {self._context.chunk_size} bytes (the chunk size), "
                    f"not {len(view)}"
                )
            return self._take([view], True)[0]
        finally:
            piece.release()

    def _take_all(self, pieces: list[memoryview]) -> list[Part]:
        """Take pieces in parallel, in order; a bounded number of them is under way."""
        workers = self._context.workers
        # Several to a task where there are enough of them: one look-up for all.
        each = 1 if self._expect_new else max(1, min(LOOKUP_CHUNKS, len(pieces) // (2 * workers)))
        parts: list[Part] = []
        window: deque[Future[list[Part]]] = deque()
        try:
            for start in range(0, len(pieces), each):
                if len(window) >= 2 * workers:
                    parts += window.popleft().result()
                window.append(self._pool.submit(self._take_views, pieces[start : start + each]))
            while window:
                parts += window.popleft().result()
        except NoSpace as error:
            error.remaining = sum(map(len, pieces)) - sum(part.length for part in parts)
            raise
        finally:
            # The views must not be in use when the caller gets its memory back.
            for future in window:
                future.cancel()
            for future in window:
                if not future.cancelled():
                    future.exception()
        return parts

    def _take_views(self, views: list[memoryview]) -> list[Part]:
        """Store chunks of the caller's memory.

        A new chunk is written from a copy that was hashed, for the caller's memory may change, so
        where new ones are to be expected the copy is made first, and hashed once. Known ones need
        none, and are hashed where they are.
        """
        if len(views) > 1 or not self._expect_new:
            return self._take(views, False)
        with self._copied(views[0]) as copy:
            return self._take([copy], True)

    def _take(self, views: list[memoryview], owned: bool) -> list[Part]:
        """Store some chunks. ``owned`` memory is a buffer of ours: nobody else can change it."""
        parts: list[Part] = []
        chunks: dict[Digest, memoryview] = {}
        for view in views:
            digest = Digest.of(view)
            if digest == self._zero_digest(view):
                parts.append(ZeroPart(len(view)))
            else:
                parts.append(ChunkPart.whole(digest, len(view)))
                chunks[digest] = view
        self._settle(chunks, owned)
        with self._telling:  # a lock of its own: a display may ask for the counters
            self._progress.advance(sum(map(len, views)))
        return parts

    def _zero_digest(self, view: memoryview) -> Digest | None:
        """The digest that ``view`` has if it is all zeros; None if a first look rules that out."""
        if any(view[:64]):
            return None
        size = len(view)
        if size not in self._zero_digests:
            self._zero_digests[size] = Digest.of(bytes(size))
        return self._zero_digests[size]

    def _settle(self, chunks: dict[Digest, memoryview], owned: bool) -> None:
        """Return when the chunks are in files. One thread sees to each, others wait for it."""
        mine: dict[Digest, Future[None]] = {}
        others: list[Future[None]] = []
        with self._mutex:
            for digest in chunks:
                if digest in self._running:
                    others.append(self._running[digest])
                elif digest not in self._settled:
                    mine[digest] = self._running[digest] = Future()
        if mine:
            self._settle_mine({digest: chunks[digest] for digest in mine}, mine, owned)
        for other in others:  # after our own, for which their thread may be waiting
            other.result()

    def _settle_mine(
        self, chunks: dict[Digest, memoryview], running: dict[Digest, Future[None]], owned: bool
    ) -> None:
        try:
            self._find_or_stage(chunks, owned)
        except BaseException as error:
            for future in running.values():
                future.set_exception(error)
            raise
        else:
            for future in running.values():
                future.set_result(None)
        finally:
            with self._mutex:
                for digest in running:
                    del self._running[digest]

    def _find_or_stage(self, chunks: dict[Digest, memoryview], owned: bool) -> None:
        self._lease.add_chunks(tuple(chunks))  # before the question: gc must see what we rely on
        with self._context.index.write() as txn:
            known = {d for d, view in chunks.items() if is_known(self._layout, txn, d, len(view))}
        for digest, view in chunks.items():
            if digest not in known:
                staged = self._layout.staged(self._lease.id, digest)
                if owned:
                    self._write(view, staged)
                else:
                    self._copy_and_write(digest, view, staged)
            self._note(digest, len(view), new=digest not in known)

    def recall(self, recipe: Recipe) -> bool:
        """Take in bytes that need not be read, since ``recipe`` is known to give them.

        False, and nothing happened, if not all of its chunks are in the store.
        """
        with self._mutex:
            fresh = {d: n for d, n in chunk_sizes([recipe]).items() if d not in self._settled}
        self._lease.add_chunks(fresh)  # before the question, as always
        with self._context.index.write() as txn:
            if not all(is_known(self._layout, txn, *item) for item in fresh.items()):
                return False
        for digest, size in fresh.items():
            self._note(digest, size, new=False)
        with self._telling:
            self._progress.advance(recipe.size)
        self._account(recipe.size)
        return True

    def _note(self, digest: Digest, size: int, *, new: bool) -> None:
        """Count a chunk that is in a file, and publish when enough of them are staged."""
        with self._mutex:
            self._settled[digest] = size
            self._expect_new = new
            if new:
                self._staged[digest] = size
                self._staged_bytes += size
            old = self._counters
            self._counters = Counters(
                old.logical_bytes,
                old.new_bytes + (size if new else 0),
                old.chunks + 1,
                old.new_chunks + new,
            )
            full = self._staged_bytes >= BARRIER_BYTES or len(self._staged) >= BARRIER_CHUNKS
        if full:
            self.publish()

    def _write(self, view: memoryview, path: Path) -> None:
        mode = self._context.modes.data
        with fsio.os_errors(path):
            if len(view) < WRITE_OUT_EACH:
                fsio.create_file(path, view, mode=mode, sync=False)
                return
            self._require_unbroken()
            fd = fsio.create_begun(path, view, mode=mode)
            with self._breaking():
                self._writing.add(fd, len(view))

    def _copy_and_write(self, digest: Digest, view: memoryview, path: Path) -> None:
        """Write a chunk from a copy that has the digest, whatever happens to the source.

        Raises:
            SourceChanged: the source is not what was hashed any more.
        """
        with self._copied(view) as copy:
            if Digest.of(copy) != digest:
                raise SourceChanged(len(view))
            self._write(copy, path)

    @contextlib.contextmanager
    def _copied(self, view: memoryview) -> Iterator[memoryview]:
        buffer = self._buffers.take(max(len(view), self._context.chunk_size))
        try:
            copy = memoryview(buffer)[: len(view)]
            copy[:] = view
            yield copy
        finally:
            self._buffers.give(buffer)

    def _account(self, nbytes: int) -> None:
        with self._mutex:
            old = self._counters
            self._counters = Counters(
                old.logical_bytes + nbytes, old.new_bytes, old.chunks, old.new_chunks
            )

    # --- publishing -----------------------------------------------------------------------------

    def publish(self) -> None:
        """The barrier: make what is staged durable, give it its final names, enter it."""
        with self._publishing:
            with self._mutex:
                batch = dict(self._staged)
                self._staged_bytes = 0
            if not batch and not self._renamed_into:
                return
            with fsio.os_errors(self._layout.root):
                self._sync(batch)
                self._move(batch)
        self._published()

    def _require_unbroken(self) -> None:
        if self._broken is not None:
            raise self._broken

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """An `OSError` in the block ends all publishing, also one that says that the disk is full.

        After a failed sync the kernel may count the lost pages as clean, so a second one can
        succeed without having written them.
        """
        try:
            yield
        except OSError as error:
            self._broken = error
            raise

    def _sync(self, batch: dict[Digest, int]) -> None:
        self._require_unbroken()
        with self._breaking():
            self._writing.drain()
            small = sum(size < WRITE_OUT_EACH for size in batch.values())
            if small >= SYNCFS_FILES:
                self._filesystem.sync()
                return
            for digest in batch:
                fsio.sync_path(self._layout.staged(self._lease.id, digest))

    def _move(self, batch: dict[Digest, int]) -> None:
        now = self._context.now()
        with self._context.index.write() as txn:
            for digest, size in batch.items():
                target = self._layout.chunk(digest)
                # Kept until it is synced: if this fails, another try must not leave it out.
                self._renamed_into.add(target.parent)
                fsio.rename(self._layout.staged(self._lease.id, digest), target)
                with self._mutex:
                    del self._staged[digest]
                txn.put(digest, Entry(size, now, 0))
            with self._breaking():
                fsio.sync_directories(self._renamed_into)
            self._renamed_into.clear()
        self._published_bytes += sum(batch.values())

    def close(self) -> None:
        """Stop the threads; what they have begun is finished first."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._writing.close()
        self._filesystem.close()
        self._buffers.drop()


def as_bytes(data: Buffer) -> memoryview:
    """All of a buffer as single bytes; UsageError if it is not C-contiguous."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, BufferError) as error:
        raise UsageError(f"not a contiguous buffer of bytes: {error}") from None


def _release_if_cancelled(piece: Piece, future: Future[Part]) -> None:
    """Whoever cancels it (a writer that is closed, say): a producer may wait for the memory."""
    if future.cancelled():
        piece.release()


def _collect(
    window: deque[tuple[Future[list[Part]], bytearray]], ring: queue.SimpleQueue[bytearray]
) -> list[Part]:
    future, buffer = window.popleft()
    try:
        return future.result()
    finally:
        ring.put(buffer)


def _fill(stream: Readable, view: memoryview) -> int:
    """Read until ``view`` is full or the stream ends, so that cuts do not depend on short reads."""
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if count is None or not 0 <= count <= len(view) - done:
            raise UsageError(
                f"the stream's readinto gave {count!r}; a blocking binary stream is needed"
            )
        if count == 0:
            break
        done += count
    return done
