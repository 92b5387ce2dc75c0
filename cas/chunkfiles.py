"""Chunk files: finding, opening and checking them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cas import fsio
from cas.digest import Digest
from cas.errors import ChunkDamaged, ChunkError, ChunkMissing
from cas.layout import FANOUT, Layout, parse_digest_name

_E = TypeVar("_E", bound=ChunkError)


@dataclass(frozen=True, slots=True)
class Need:
    """Which bytes of which file needed a chunk, for the error that says so."""

    file: str
    offset: int
    length: int


def size_on_disk(path: Path) -> int | None:
    """The file's size in bytes, or None if there is no file."""
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def missing(digest: Digest, path: Path, need: Need | None = None) -> ChunkMissing:
    return _error(ChunkMissing, digest, path, "", need)


def damaged(digest: Digest, path: Path, detail: str, need: Need | None = None) -> ChunkDamaged:
    return _error(ChunkDamaged, digest, path, detail, need)


def _error(kind: type[_E], digest: Digest, path: Path, detail: str, need: Need | None) -> _E:
    if need is None:
        return kind(str(digest), path, detail=detail)
    return kind(
        str(digest), path, detail=detail, file=need.file, offset=need.offset, length=need.length
    )


def open_chunk(path: Path, digest: Digest, need: Need | None = None) -> int:
    """A read-only descriptor that the caller closes.

    Raises:
        ChunkMissing
    """
    try:
        with fsio.os_errors(path, "read"):
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise missing(digest, path, need) from None


def read_into(
    path: Path,
    digest: Digest,
    size: int,
    buffer: memoryview,
    *,
    need: Need | None = None,
) -> memoryview:
    """Read the whole chunk into the front of ``buffer``, check it, and return that part of it.

    The bytes returned are the bytes hashed: the copy in ``buffer``.

    Raises:
        ChunkMissing: there is no such file.
        ChunkDamaged: its size or content is not what the digest promises.
    """
    fd = open_chunk(path, digest, need)
    try:
        actual = os.fstat(fd).st_size
        if actual != size:
            raise damaged(digest, path, f"it has {actual} bytes instead of {size}", need)
        view = buffer[:size]
        done = 0
        while done < size:
            count = os.preadv(fd, [view[done:]], done)
            if count == 0:
                raise damaged(digest, path, f"it ended after {done} of {size} bytes", need)
            done += count
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EISDIR):
            raise
        raise damaged(digest, path, f"reading failed: {error.strerror}", need) from error
    finally:
        os.close(fd)
    if Digest.of(view) != digest:
        raise damaged(digest, path, "its content does not match its digest", need)
    return view


def require(layout: Layout, chunks: Mapping[Digest, int]) -> None:
    """Check that every chunk's file is there and has its size.

    Raises:
        ChunkMissing, ChunkDamaged
    """
    for digest, size in chunks.items():
        path = layout.chunk(digest)
        found = size_on_disk(path)
        if found is None:
            raise missing(digest, path)
        if found != size:
            raise damaged(digest, path, f"it has {found} bytes instead of {size}")


def walk(directory: Path, only: str = "") -> Iterator[tuple[Digest, os.DirEntry[str]]]:
    """Every file below ``chunks/``, ``manifests/`` or ``actions/`` with a digest's name in place.

    With ``only``, two hexadecimal digits, those whose names begin with them.
    """
    top = str(directory)
    for prefix in (only,) if only else FANOUT:
        try:
            entries = os.scandir(f"{top}/{prefix}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        with entries:
            for entry in entries:
                digest = parse_digest_name(entry.name)
                if digest is not None and entry.name.startswith(prefix):
                    yield digest, entry


def unmarked(directory: Path, marked: Container[bytes]) -> tuple[int, list[Digest]]:
    """How many files `walk` would find, and the digests of those that are not ``marked``.

    It makes no object for the others, of which a large store has a million.
    """
    top = str(directory)
    count = 0
    found = []
    for prefix in FANOUT:
        try:
            names = os.listdir(f"{top}/{prefix}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            try:
                is_marked = bytes.fromhex(name) in marked
            except ValueError:
                continue
            if is_marked:
                count += 1
            elif (digest := parse_digest_name(name)) is not None and name.startswith(prefix):
                count += 1
                found.append(digest)
    return count, found


def stat_in(directory: str, digest: Digest) -> os.stat_result:
    """What is known of a file that `unmarked` found below ``directory``.

    Raises:
        FileNotFoundError: it is gone again.
    """
    name = digest.hex()
    return os.lstat(f"{directory}/{name[:2]}/{name}")


def total_size(layout: Layout) -> tuple[int, int]:
    """(number, bytes) of all chunk files, by walking them."""
    count = size = 0
    for _, entry in walk(layout.chunks):
        with contextlib.suppress(FileNotFoundError):  # a gc is running
            size += entry.stat().st_size
            count += 1
    return count, size
