"""Leases: what a live process is using, for gc to see.

A lease is a file that its process holds with flock, to which it appends the digests it relies on.
The lock dies with the process, however it dies, so there is nothing to judge by age or pid.

Records are 33 bytes: ``c`` and a chunk's digest, or ``m`` and a manifest's digest (which stands
for its chunks too). A torn last record is one whose use has not begun, and is ignored.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from cas import fsio
from cas.digest import DIGEST_SIZE, Digest
from cas.layout import Layout, is_writer_id
from cas.locks import FileLock
from cas.modes import Modes

_RECORD = 1 + DIGEST_SIZE
#: A lease of any length is read in about a MiB of memory, besides what it protects.
_RECORDS_AT_ONCE = 32768


@dataclass(slots=True)
class Leased:
    """The union of what some leases protect."""

    chunks: set[Digest] = field(default_factory=set)
    manifests: set[Digest] = field(default_factory=set)

    def add_records(self, data: bytes) -> None:
        for start in range(0, len(data) - _RECORD + 1, _RECORD):
            kind = data[start : start + 1]
            digest = Digest(data[start + 1 : start + _RECORD])
            if kind == b"m":
                self.manifests.add(digest)
            else:  # a flipped kind byte must protect too much rather than too little
                self.chunks.add(digest)


class Lease:
    """This process's protection of digests, from creation to `close`. Thread safe."""

    def __init__(self, layout: Layout, modes: Modes) -> None:
        self.layout = layout
        self.id, self._lock = _create(layout, modes)
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._held: set[bytes] = set()
        self._size = 0

    def add_chunks(self, digests: Iterable[Digest]) -> None:
        """Protect chunks; they are protected when this returns."""
        self._add(b"c", digests)

    def add_manifest(self, digest: Digest) -> None:
        """Protect a manifest and every chunk that it names."""
        self._add(b"m", (digest,))

    def _add(self, kind: bytes, digests: Iterable[Digest]) -> None:
        with self._mutex:
            fresh = [kind + digest for digest in digests if kind + digest not in self._held]
            if fresh:
                fsio.step("lease", self._lock.path)
                data = b"".join(fresh)
                with fsio.os_errors(self._lock.path):
                    # At its own offset: what a full disk cut short is overwritten by the next
                    # attempt, instead of putting every later record out of step.
                    fsio.write_all(self._lock.fd, data, self._size)
                self._size += len(data)
                self._held.update(fresh)

    @property
    def is_mine(self) -> bool:
        """False in a child that inherited the lease through fork()."""
        return self._pid == os.getpid()

    def close(self) -> None:
        """End the protection. A forked child only closes its copy of the descriptor."""
        if self._lock.fd >= 0:
            if self.is_mine:
                fsio.unlink(self._lock.path)
            self._lock.close()


def _create(layout: Layout, modes: Modes) -> tuple[str, FileLock]:
    while True:
        writer = secrets.token_hex(16)
        path = layout.lease(writer)
        fsio.step("create", path)
        lock = FileLock.create(path, modes.file, locked=True)
        if lock is None:
            continue
        # Where it could be seen before it was locked, a gc may have taken it for a dead one and
        # removed it: then the path names something else, or nothing. Take another name.
        if lock.is_current():
            return writer, lock
        lock.close()


def read_live(layout: Layout) -> Leased:
    """What live processes protect now."""
    leased = Leased()
    for writer in _writers(layout):
        with contextlib.suppress(FileNotFoundError), _probe(layout, writer) as lock:
            if not lock.try_exclusive():
                for piece in _pieces(lock.fd):
                    leased.add_records(piece)
    return leased


def is_live(layout: Layout, writer: str) -> bool:
    """Whether the process that took this lease still holds it."""
    try:
        with _probe(layout, writer) as lock:
            return not lock.try_exclusive()
    except FileNotFoundError:
        return False


def remove_dead(layout: Layout, writer: str, clean: Callable[[], None]) -> bool:
    """Call ``clean`` and unlink the lease, if its process is gone; False if it is not.

    The lock is held meanwhile: a writer that has just created the file, and was not quick enough
    to lock it, finds it taken and chooses another name instead of losing what it stages.
    """
    try:
        with _probe(layout, writer) as lock:
            if not lock.try_exclusive():
                return False
            clean()
            fsio.unlink(lock.path)
            return True
    except FileNotFoundError:  # no lease: a writer removes it last, and takes it first
        clean()
        return True


@contextlib.contextmanager
def _probe(layout: Layout, writer: str) -> Iterator[FileLock]:
    """Another process's lease, to try its lock; reading is all the permission that needs.

    Raises:
        FileNotFoundError: the writer has ended, or what has its name is no file.
        PermissionRefused
    """
    path = layout.lease(writer)
    with fsio.os_errors(path, "read"):
        lock = FileLock.find(path)
    try:
        yield lock
    finally:
        lock.close()


def _pieces(fd: int) -> Iterator[bytes]:
    """A file in pieces of whole records, through a descriptor: its name may be gone by now."""
    offset = 0
    while piece := os.pread(fd, _RECORDS_AT_ONCE * _RECORD, offset):
        yield piece
        if len(piece) % _RECORD:
            return  # the torn last record; pread gives less than was asked for only at the end
        offset += len(piece)


def _writers(layout: Layout) -> list[str]:
    try:
        return [name for name in os.listdir(layout.leases) if is_writer_id(name)]
    except FileNotFoundError:  # a read-only copy without its empty directories
        return []
