"""What the parts of one open store share."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cas import fsio
from cas.closures import Closure
from cas.config import Config
from cas.digest import Digest
from cas.errors import ManifestDamaged, ReadOnlyStore, UsageError
from cas.header import Header
from cas.index import Index
from cas.layout import Layout
from cas.leases import Lease
from cas.manifest import Manifest
from cas.modes import Modes
from cas.reading import Buffers
from cas.strictjson import MAX_DOCUMENT_BYTES

#: Threads that hash and write. Twice the cores keep both busy while some wait for the disk.
DEFAULT_WORKERS = min(8, 2 * (os.cpu_count() or 1))
#: Bytes of buffers that one operation may hold at a time, however large the data.
DEFAULT_BUFFER_BYTES = 64 << 20


@dataclass(slots=True)
class Context:
    layout: Layout
    header: Header
    config: Config
    modes: Modes
    read_only: bool
    clock: Callable[[], float] = time.time
    workers: int = DEFAULT_WORKERS
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    #: Settings that beat the store's own, as text; checked when the store was opened.
    overrides: Mapping[str, str] = field(default_factory=dict)
    _index: Index | None = field(default=None, init=False)
    _buffers: Buffers | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)
    _mutex: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def chunk_size(self) -> int:
        return self.header.chunk_size

    @property
    def buffers(self) -> Buffers:
        """Chunk buffers, for all threads and operations."""
        with self._mutex:
            if self._buffers is None:
                self._buffers = Buffers(self.chunk_size)
            return self._buffers

    @property
    def index(self) -> Index:
        """The index, opened (and if need be rebuilt) at first use.

        Raises:
            ReadOnlyStore: readers of a read-only store do without the index.
            UsageError: the store was closed.
        """
        self.require_writable("use the index")
        with self._mutex:
            if self._closed:
                raise UsageError("this store was closed; open it again")
            if self._index is None:
                with fsio.os_errors(self.layout.root):
                    self._index = Index.open(self.layout, self.modes, self.clock)
            return self._index

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            index, self._index = self._index, None
        if index is not None:
            index.close()

    def settings(self) -> Config:
        """The store's configuration as it is now, others may have changed it, and overridden.

        Raises:
            StoreDamaged
        """
        return Config.load(self.layout).overridden(self.overrides)

    def now(self) -> int:
        """Whole seconds since the epoch."""
        return int(self.clock())

    def require_writable(self, operation: str) -> None:
        if self.read_only:
            raise ReadOnlyStore(self.layout.root, operation)

    @contextlib.contextmanager
    def lease(self) -> Iterator[Lease]:
        """A lease for the length of the block, with a staging directory that goes with it."""
        with fsio.os_errors(self.layout.root):
            lease = Lease(self.layout, self.modes)
        staging = self.layout.staging(lease.id)
        try:
            with fsio.os_errors(staging):
                fsio.make_directory(staging, self.modes.directory)
            yield lease
        finally:
            if lease.is_mine:  # a forked child that leaves the block must not take its parent's
                # Staging first: a staging directory without a live lease is gc's to remove.
                fsio.remove_tree(staging)
            lease.close()

    def load_manifest(self, digest: Digest) -> Manifest:
        """Read and check the manifest ``digest``.

        Raises:
            ManifestDamaged: it is missing, altered or malformed.
            PermissionRefused
        """
        return Manifest.parse(read_manifest(self.layout.manifest(digest), digest))

    def load_closure(self, digest: Digest) -> Closure:
        """The chunks of the manifest ``digest``, in a fraction of the time of `load_manifest`.

        Raises:
            ManifestDamaged: it is missing, altered or malformed.
            PermissionRefused
        """
        return Closure.parse(read_manifest(self.layout.manifest(digest), digest))


class HasContext(Protocol):
    """What works on a store as a whole needs of it; a `cas.Store`, as a rule."""

    @property
    def context(self) -> Context: ...


def read_manifest(path: Path, digest: Digest) -> bytes:
    """The bytes of a manifest's file, which are what its digest promises.

    Raises:
        ManifestDamaged, PermissionRefused
    """
    try:
        with fsio.os_errors(path, "read"), open(path, "rb") as file:
            data = file.read(MAX_DOCUMENT_BYTES + 1)
    except FileNotFoundError:
        raise ManifestDamaged(str(digest), "is missing") from None
    except OSError as error:
        raise ManifestDamaged(str(digest), f"cannot be read ({error.strerror})") from error
    if Digest.of(data) != digest:
        raise ManifestDamaged(str(digest), "does not match its digest")
    return data
