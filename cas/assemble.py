"""From a manifest to files: stream the chunks, verify each as it passes, rename at the end.

Every file is written to a temporary in the target's directory. Only when all are complete and
durable are they renamed, so a failure leaves no output file, and old outputs as they were.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cas import chunkfiles, fsio
from cas.chunkfiles import Need
from cas.context import Context
from cas.digest import Digest
from cas.errors import NoSpace, PermissionRefused, Refused
from cas.manifest import ChunkPart, DataPart, FileEntry, Manifest, Part, ZeroPart
from cas.progress import Progress

#: A file with a longer zero run is left sparse there instead of being preallocated.
SPARSE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive parts that one worker writes at once."""

    offset: int
    parts: tuple[Part, ...]


def check_directory(directory: Path) -> None:
    """Make ``directory`` if need be, and see that files can be created in it.

    Raises:
        Refused: it is a file or lies below one.
        PermissionRefused: it cannot be written.
    """
    try:
        with fsio.os_errors(directory, "write to"):
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / f".cas-{secrets.token_hex(6)}.tmp"
            fsio.create_file(probe, b"", mode=0o600, sync=False)
            fsio.unlink(probe)
    except (FileExistsError, NotADirectoryError):
        raise Refused(
            f"the output directory {directory} is a file, or lies below one; choose another"
        ) from None


def check_space(directory: Path, needed: int) -> None:
    """Say before the work begins that the files cannot fit.

    Raises:
        NoSpace: with the bytes needed and free.
    """
    free = fsio.free_bytes(directory)
    if needed > free:
        raise NoSpace(directory, needed=needed, free=free)


def assemble(
    context: Context,
    manifest: Manifest,
    directory: Path,
    progress: Progress,
    *,
    verify: bool = True,
) -> list[Path]:
    """Write the manifest's files into ``directory``; the caller holds a lease on the manifest.

    Without ``verify`` the kernel copies the bytes (sharing blocks where the filesystem can), and
    only sizes are checked.

    Raises:
        ChunkMissing, ChunkDamaged: naming the chunk, the file and its byte range.
        NoSpace, Refused, PermissionRefused: the directory.
    """
    check_directory(directory)
    check_space(directory, sum(_stored_bytes(entry) for entry in manifest.files))
    progress.start("assemble", manifest.size)
    temporaries: list[tuple[Path, Path]] = []
    try:
        with ThreadPoolExecutor(context.workers, thread_name_prefix="cas-assemble") as pool:
            for entry in manifest.files:
                target = directory / entry.name
                temporary = directory / f".{entry.name}.{secrets.token_hex(6)}.tmp"
                temporaries.append((temporary, target))
                with fsio.os_errors(temporary):
                    _write_file(context, entry, temporary, pool, progress, verify)
        with fsio.os_errors(directory):
            _rename_all(temporaries)
            fsio.sync_path(directory)
    except BaseException:
        for temporary, _ in temporaries:
            with contextlib.suppress(OSError):  # the first error is the one to report
                fsio.unlink(temporary)
        raise
    progress.finish()
    return [target for _, target in temporaries]


def _rename_all(files: Iterable[tuple[Path, Path]]) -> None:
    for temporary, target in files:
        try:
            fsio.rename(temporary, target)
        except IsADirectoryError:
            raise PermissionRefused(target, "replace", "it is a directory") from None


def _stored_bytes(entry: FileEntry) -> int:
    return sum(part.length for part in entry.recipe.parts if not isinstance(part, ZeroPart))


def _write_file(
    context: Context,
    entry: FileEntry,
    temporary: Path,
    pool: ThreadPoolExecutor,
    progress: Progress,
    verify: bool,
) -> None:
    fsio.step("create", temporary)
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _reserve(fd, entry)
        spans = _spans(entry, context.chunk_size)
        write = _write_verified if verify else _write_copied
        window: deque[Future[int]] = deque()
        try:
            for span in spans:
                if len(window) >= 2 * context.workers:
                    progress.advance(window.popleft().result())
                window.append(pool.submit(write, context, entry.name, span, fd))
            while window:
                progress.advance(window.popleft().result())
        finally:
            _drain(window)  # before the descriptor is closed under a running worker
        fsio.step("sync", temporary)
        os.fsync(fd)
    finally:
        os.close(fd)


def _drain(window: deque[Future[int]]) -> None:
    for future in window:
        future.cancel()
    for future in window:
        if not future.cancelled():
            future.exception()


def _reserve(fd: int, entry: FileEntry) -> None:
    """Give the file its size: reserved on the disk, or sparse if it has long zero runs."""
    if entry.size == 0:
        return
    stored = _stored_bytes(entry)
    if entry.size - stored < SPARSE_BYTES:
        try:
            os.posix_fallocate(fd, 0, entry.size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, entry.size)


def _spans(entry: FileEntry, span_bytes: int) -> Iterator[_Span]:
    """Group parts so that each worker writes about a chunk; zero runs are already there."""
    offset = start = 0
    parts: list[Part] = []
    for part in entry.recipe.parts:
        length = offset - start
        if parts and length + part.length > span_bytes:
            yield _Span(start, tuple(parts))
            parts, start = [], offset
        parts.append(part)
        offset += part.length
    if parts:
        yield _Span(start, tuple(parts))


def _write_verified(context: Context, file: str, span: _Span, fd: int) -> int:
    """Read, hash and write a span; the bytes written are the bytes that were hashed."""
    offset = span.offset
    for part in span.parts:
        if isinstance(part, ChunkPart):
            need = Need(file, offset, part.length)
            path = context.layout.chunk(part.digest)
            buffer = memoryview(bytearray(part.size))
            view = chunkfiles.read_into(path, part.digest, part.size, buffer, need=need)
            fsio.write_all(fd, view[part.offset : part.offset + part.length], offset)
        elif isinstance(part, DataPart):
            fsio.write_all(fd, part.data, offset)
        offset += part.length
    fsio.start_writeback(fd, span.offset, offset - span.offset)
    return offset - span.offset


def _write_copied(context: Context, file: str, span: _Span, fd: int) -> int:
    """Let the kernel copy; falls back to reading and writing where it cannot."""
    offset = span.offset
    for part in span.parts:
        if isinstance(part, ChunkPart):
            need = Need(file, offset, part.length)
            path = context.layout.chunk(part.digest)
            _copy_part(path, part.digest, part, fd, offset, need)
        elif isinstance(part, DataPart):
            fsio.write_all(fd, part.data, offset)
        offset += part.length
    return offset - span.offset


def _copy_part(
    path: Path, digest: Digest, part: ChunkPart, fd: int, offset: int, need: Need
) -> None:
    source = chunkfiles.open_chunk(path, digest, need)
    try:
        size = os.fstat(source).st_size
        if size != part.size:
            detail = f"it has {size} bytes instead of {part.size}"
            raise chunkfiles.damaged(digest, path, detail, need)
        begin, left = part.offset, part.length
        while left:
            count = _copy_range(source, fd, left, begin, offset)
            if count == 0:
                raise chunkfiles.damaged(digest, path, "it ended early", need)
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
