"""From recipes to files: stream the chunks, verify each as it passes, rename at the end.

Every file is written to a temporary in the target's directory. Only when all are complete and
durable are they renamed, so a failure leaves no output file, and old outputs as they were.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from cas import chunkfiles, filesystems, fsio
from cas.chunkfiles import Need
from cas.context import Context
from cas.digest import Digest, long_hasher
from cas.errors import NoSpace, PermissionRefused, Refused
from cas.manifest import ChunkPart, DataPart, Part, Recipe, ZeroPart
from cas.modes import process_umask
from cas.progress import Progress

#: A longer zero run is left out of what is gathered and written.
SPARSE_BYTES = 1 << 20

_ZEROS = bytes(1 << 20)


def check_directory(directory: Path) -> None:
    """Make ``directory`` if need be, and see that files can be created in it.

    Raises:
        Refused: it is a file or lies below one.
        PermissionRefused: it cannot be written.
    """
    try:
        with fsio.os_errors(directory, "write to"):
            if not directory.is_dir():
                fsio.make_parents(directory, 0o777 & ~process_umask())
            probe = directory / f".cas-{secrets.token_hex(6)}.tmp"
            fsio.create_file(probe, b"", mode=0o600, sync=False)
            fsio.unlink(probe)
    except (FileExistsError, NotADirectoryError):
        raise Refused(
            f"the output directory {directory} is a file, or lies below one; choose another"
        ) from None


def check_targets(directory: Path, names: Iterable[str]) -> None:
    """See before the work begins that no directory stands where a file should go.

    Raises:
        PermissionRefused
    """
    for name in names:
        if (directory / name).is_dir():
            raise PermissionRefused(directory / name, "replace", "it is a directory")


def check_space(directory: Path, recipes: Mapping[str, Recipe]) -> None:
    """Say before the work begins that the files cannot fit.

    Raises:
        NoSpace: with the bytes needed and free.
    """
    needed = sum(_stored_bytes(recipe) for recipe in recipes.values())
    free = filesystems.free_bytes(directory)
    if needed > free:
        raise NoSpace(directory, needed=needed, free=free)


def _explain(
    error: NoSpace,
    directory: Path,
    recipes: Mapping[str, Recipe],
    context: Context,
    published: int,
) -> None:
    """Say of a disk that filled up meanwhile what the files need, without what was begun."""
    error.needed = sum(_stored_bytes(recipe) for recipe in recipes.values())
    error.remaining = None
    changed = f"no file in {directory} was changed"
    if published:
        changed = f"{published} of {len(recipes)} files in {directory} were changed"
    error.kept = f"nothing in the store was lost, and {changed}"
    with contextlib.suppress(OSError):
        error.free = filesystems.free_bytes(directory)
        if os.stat(directory).st_dev != os.stat(context.layout.root).st_dev:
            error.advice = "free space there, or choose another output directory"


class Assembly:
    """Files under way to a directory: `write` each, then `publish` all. Made by `assembling`."""

    def __init__(
        self, context: Context, directory: Path, progress: Progress, pool: ThreadPoolExecutor
    ) -> None:
        self._context = context
        self._directory = directory
        self._progress = progress
        self._pool = pool
        self._buffers = context.buffers
        self._written: list[tuple[Path, Path]] = []
        #: How many files have their names.
        self.published = 0

    def write(self, name: str, recipe: Recipe, *, verify: bool = True) -> None:
        """Write one file under a temporary name, durably.

        Without ``verify`` the kernel copies the bytes (sharing blocks where the filesystem can),
        and only sizes are checked.

        Raises:
            ChunkMissing, ChunkDamaged: naming the chunk, the file and its byte range.
            NoSpace
        """
        self._write(name, recipe, verify, None)

    def write_hashed(self, name: str, recipe: Recipe) -> Digest:
        """`write`, and the BLAKE3 of the whole file."""
        hasher = long_hasher()
        self._write(name, recipe, True, hasher)
        return Digest(hasher.digest())

    def _write(self, name: str, recipe: Recipe, verify: bool, hasher: blake3 | None) -> None:
        temporary = self._directory / f".{name}.{secrets.token_hex(6)}.tmp"
        self._written.append((temporary, self._directory / name))
        with fsio.os_errors(temporary):
            fsio.step("create", temporary)
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                # Zero runs stay holes. Blocks are not reserved: writing to reserved ones was a
                # fifth slower, and whether they fit was checked before.
                os.ftruncate(fd, recipe.size)
                self._fill(fd, name, recipe, verify, hasher)
                fsio.step("sync", temporary)
                os.fsync(fd)
            finally:
                os.close(fd)

    def publish(self) -> list[Path]:
        """Give every file its name; return the paths.

        Raises:
            PermissionRefused: a directory stands where a file should go.
        """
        with fsio.os_errors(self._directory):
            for temporary, target in self._written:
                try:
                    fsio.rename(temporary, target)
                except IsADirectoryError:
                    raise PermissionRefused(target, "replace", "it is a directory") from None
                self.published += 1
            fsio.sync_path(self._directory)
        return [target for _, target in self._written]

    def discard(self) -> None:
        """Remove what was not published."""
        for temporary, _ in self._written:
            with contextlib.suppress(OSError):  # an earlier error is the one to report
                fsio.unlink(temporary)

    def _fill(
        self, fd: int, name: str, recipe: Recipe, verify: bool, hasher: blake3 | None
    ) -> None:
        """Write the spans in parallel, and hash them in order as they come out."""
        window: deque[tuple[_Span, Future[bytearray | None]]] = deque()
        # One more than the workers: a finished span waits here while it is hashed.
        limit = self._context.workers + 1
        try:
            for span in _spans(recipe, self._context.chunk_size):
                if len(window) >= limit:
                    self._finish(*window.popleft(), hasher)
                write = self._write_verified if verify else self._write_copied
                window.append((span, self._pool.submit(write, name, span, fd)))
            while window:
                self._finish(*window.popleft(), hasher)
        finally:
            _drain(window)  # before the descriptor is closed under a running worker

    def _finish(self, span: _Span, future: Future[bytearray | None], hasher: blake3 | None) -> None:
        buffer = future.result()
        if hasher is not None:
            if buffer is None:
                for start in range(0, span.length, len(_ZEROS)):
                    hasher.update(_ZEROS[: span.length - start])
            else:
                hasher.update(memoryview(buffer)[: span.length])
        if buffer is not None:
            self._buffers.give(buffer)
        self._progress.advance(span.length)

    def _write_verified(self, name: str, span: _Span, fd: int) -> bytearray | None:
        """Gather a span in a buffer, checked, and write it: what is written is what was hashed."""
        if span.is_zero:
            return None  # the file has zeros there already
        buffer = self._buffers.take(max(span.length, self._context.chunk_size))
        view = memoryview(buffer)
        position = 0
        for part in span.parts:
            into = view[position : position + part.length]
            if isinstance(part, ChunkPart):
                self._read(part, into, Need(name, span.offset + position, part.length))
            else:
                into[:] = part.data if isinstance(part, DataPart) else bytes(part.length)
            position += part.length
        fsio.write_all(fd, view[:position], span.offset)
        fsio.begin_write_out(fd, span.offset, position)
        return buffer

    def _read(self, part: ChunkPart, into: memoryview, need: Need) -> None:
        path = self._context.layout.chunk(part.digest)
        if part.length == part.size:
            chunkfiles.read_into(path, part.digest, part.size, into, need=need)
        else:
            whole = memoryview(bytearray(part.size))
            chunkfiles.read_into(path, part.digest, part.size, whole, need=need)
            into[:] = whole[part.offset : part.offset + part.length]

    def _write_copied(self, name: str, span: _Span, fd: int) -> None:
        """Let the kernel copy."""
        offset = span.offset
        for part in span.parts:
            if isinstance(part, ChunkPart):
                path = self._context.layout.chunk(part.digest)
                _copy_part(path, part, fd, offset, Need(name, offset, part.length))
            elif isinstance(part, DataPart):
                fsio.write_all(fd, part.data, offset)
            offset += part.length


@contextlib.contextmanager
def assembling(
    context: Context, recipes: Mapping[str, Recipe], directory: Path, progress: Progress
) -> Iterator[Assembly]:
    """An `Assembly` into ``directory`` for the length of the block; what it does not publish, goes.

    ``recipes`` are all that will be written: whether they fit is checked first. The caller holds a
    lease on their chunks.

    Raises:
        NoSpace, Refused, PermissionRefused: the directory.
    """
    check_directory(directory)
    check_targets(directory, recipes)
    check_space(directory, recipes)
    progress.start("assemble", sum(recipe.size for recipe in recipes.values()))
    with ThreadPoolExecutor(context.workers, thread_name_prefix="cas-assemble") as pool:
        assembly = Assembly(context, directory, progress, pool)
        try:
            yield assembly
        except NoSpace as error:
            assembly.discard()
            if error.path.parent == directory:
                _explain(error, directory, recipes, context, assembly.published)
            raise
        finally:
            assembly.discard()
            context.buffers.drop()
    progress.finish()


# --- spans --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive parts that one worker writes at once, or one zero run."""

    offset: int
    length: int
    parts: tuple[Part, ...]

    @property
    def is_zero(self) -> bool:
        return all(isinstance(part, ZeroPart) for part in self.parts)


def _spans(recipe: Recipe, span_bytes: int) -> Iterator[_Span]:
    """Group parts so that each worker writes about a chunk at a time."""
    start = length = 0
    parts: list[Part] = []
    for part in recipe.parts:
        alone = isinstance(part, ZeroPart) and part.length >= SPARSE_BYTES
        if parts and (alone or length + part.length > span_bytes):
            yield _Span(start, length, tuple(parts))
            start, length, parts = start + length, 0, []
        parts.append(part)
        length += part.length
        if alone:
            yield _Span(start, length, tuple(parts))
            start, length, parts = start + length, 0, []
    if parts:
        yield _Span(start, length, tuple(parts))


def _drain(window: deque[tuple[_Span, Future[bytearray | None]]]) -> None:
    for _, future in window:
        future.cancel()
    for _, future in window:
        if not future.cancelled():
            future.exception()


# --- files --------------------------------------------------------------------------------------


def _stored_bytes(recipe: Recipe) -> int:
    return sum(part.length for part in recipe.parts if not isinstance(part, ZeroPart))


def _copy_part(path: Path, part: ChunkPart, fd: int, offset: int, need: Need) -> None:
    source = chunkfiles.open_chunk(path, part.digest, need)
    try:
        size = os.fstat(source).st_size
        if size != part.size:
            detail = f"it has {size} bytes instead of {part.size}"
            raise chunkfiles.damaged(part.digest, path, detail, need)
        begin, left = part.offset, part.length
        while left:
            count = _copy_range(source, fd, left, begin, offset)
            if count == 0:
                raise chunkfiles.damaged(part.digest, path, "it ended early", need)
            begin, offset, left = begin + count, offset + count, left - count
    finally:
        os.close(source)


def _copy_range(source: int, target: int, count: int, begin: int, offset: int) -> int:
    """copy_file_range(2), or one read and write where the two files do not support it."""
    try:
        return os.copy_file_range(source, target, count, begin, offset)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    data = os.pread(source, min(count, 1 << 20), begin)
    fsio.write_all(target, data, offset)
    return len(data)
