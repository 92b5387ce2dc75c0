"""The LMDB index: chunk digest -> size and stamps. Derived from the files, rebuilt when in doubt.

Its write lock is the store's mutex: every decision that pairs a chunk file with its entry is made
inside `Index.write`. Around each transaction the process holds ``locks/index`` shared, and looks
whether ``index/data.mdb`` is still the file it has open; putting an index in place takes the lock
exclusively. So no two processes ever decide under different indexes, even when somebody deletes
the directory while they run.

A clean close leaves a stamp of the data file. An index that is missing, does not open, or whose
stamp does not fit and that then fails LMDB's structural check, is rebuilt from the chunk files.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import lmdb

from cas import chunkfiles, fsio
from cas.database import (
    DAMAGE,
    Absent,
    Database,
    Entry,
    Stuck,
    Transaction,
    find_damage,
    identity,
    is_in_use,
    lmdb_errors,
)
from cas.digest import Digest
from cas.errors import NoSpace, Refused, StoreDamaged
from cas.layout import Layout
from cas.locks import FileLock
from cas.modes import Modes
from cas.stamps import Stamp

__all__ = ["Absent", "Entry", "Index", "Stuck", "Transaction", "is_known"]

logger = logging.getLogger(__name__)


class Index:
    """A process's handle on one store's index. Thread safe; one per store and process.

    LMDB must not be opened twice by one process, so handles are shared: use `Index.open`, and
    `close` as often.
    """

    _open: ClassVar[dict[tuple[int, int], Index]] = {}
    _registry = threading.Lock()

    def __init__(self, layout: Layout, modes: Modes, clock: Callable[[], float]) -> None:
        self.layout = layout
        self.path = layout.index
        self.modes = modes
        self.clock = clock
        self._users = 0
        self._pid = os.getpid()
        self._mutex = threading.RLock()
        self._depth = 0
        self._lock = FileLock.open(layout.index_lock, modes.file)
        self._gate = FileLock.open(layout.index_gate, modes.file)
        self._write_lock = FileLock.open(layout.write_lock, modes.file)
        self._stamp = Stamp(layout.index)
        self._suspect = False
        self._database: Database | None = None

    @classmethod
    def open(cls, layout: Layout, modes: Modes, clock: Callable[[], float] = time.time) -> Index:
        stat = os.stat(layout.root)
        key = (stat.st_dev, stat.st_ino)
        with cls._registry:
            index = cls._open.get(key)
            if index is None:
                index = cls._open[key] = cls(layout, modes, clock)
            index._require_own_process()
            index._users += 1
            return index

    @classmethod
    def after_fork(cls) -> None:
        """Keep a child from using, or closing, what it inherited.

        LMDB forbids both: a close in the child would end its parent's read transactions.
        """
        cls._registry = threading.Lock()
        for index in cls._open.values():
            if index._database is not None:  # never collected, so never closed
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(index._database.env))

    def _require_own_process(self) -> None:
        if self._pid != os.getpid():
            raise Refused(
                "this store was open when fork() made this process; close it before forking, or "
                "start workers by spawn or forkserver"
            )

    def close(self) -> None:
        """Give the handle back; the last one closes the database and leaves a stamp."""
        if self._pid != os.getpid():
            return
        with self._registry:
            self._users -= 1
            if self._users > 0:
                return
            for key in [key for key, index in self._open.items() if index is self]:
                del self._open[key]
            # Still inside the registry: LMDB must be closed before this process opens it again.
            with self._mutex:
                self._close_database()
                for lock in (self._lock, self._gate, self._write_lock):
                    lock.close()

    # --- transactions ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """The store's mutex. Changes are durable when the block ends, and undone if it raises."""
        with (
            self._current() as database,
            self._alone(),
            fsio.os_errors(self.path),
            self._notice_damage(),
        ):
            txn = database.begin(write=True)
            transaction = Transaction(txn, database.tables)
            try:
                yield transaction
                transaction.settle()
            except BaseException:
                txn.abort()
                raise
            fsio.step("index-commit", self.path)
            txn.commit()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for other writers where Ctrl-C is heard: LMDB's mutex, taken next, is then free."""
        self._write_lock.exclusive()
        try:
            yield
        finally:
            self._write_lock.unlock()

    @contextlib.contextmanager
    def read(self) -> Iterator[Transaction]:
        """A consistent view; waits for other threads of this process, not for other processes."""
        with (
            self._current() as database,
            self._notice_damage(),
            database.begin(write=False) as txn,
        ):
            yield Transaction(txn, database.tables)

    @contextlib.contextmanager
    def read_if_possible(self) -> Iterator[Transaction]:
        """`read`; or nothing, of an index that is missing where the disk is too full to make it."""
        with self._mutex:
            if self._is_possible():
                with self.read() as txn:
                    yield txn
            else:
                yield Absent()

    @contextlib.contextmanager
    def exclude(self) -> Iterator[Transaction]:
        """The store's mutex, for who only removes files: it is to be had on a full disk too.

        It is `write`, except where the index is missing or damaged and there is no room to make
        it: then ``locks/index`` is held exclusively. Every transaction of every process holds it
        shared, so nobody decides anything meanwhile.
        """
        with self._mutex:
            if self._is_possible():
                with self.write() as txn:
                    yield txn
                return
            self._take(FileLock.exclusive)
            try:
                yield Absent()
            finally:
                self._lock.unlock()

    def _is_possible(self) -> bool:
        """Whether there can be a transaction: False if that takes space which is not there."""
        try:
            with self._current():
                return True
        except NoSpace:
            return False

    @contextlib.contextmanager
    def _current(self) -> Iterator[Database]:
        """Hold the shared lock over the database that ``index/`` names now."""
        self._require_own_process()
        with self._mutex:
            if self._depth:
                raise RuntimeError("index transactions do not nest")
            self._depth += 1
            try:
                while True:
                    self._take(FileLock.shared)
                    database = self._database
                    current = database and database.identity == identity(self.path)
                    if database and current and not self._suspect:
                        break
                    self._lock.unlock()  # flock cannot upgrade in one step, hence the loop
                    self._reopen()
                yield database
            finally:
                self._lock.unlock()
                self._depth -= 1

    def _take(self, lock: Callable[[FileLock], None]) -> None:
        """Lock ``locks/index``, shared or exclusive.

        flock lets those who share pass one who wants it alone, for ever if they are many. So all
        come through a gate, and who waits for the exclusive lock keeps it shut.
        """
        self._gate.exclusive()
        try:
            lock(self._lock)
            while not self._lock.is_current():  # its file was deleted, perhaps with all the store
                self._lock.close()
                self._lock = FileLock.open(self.layout.index_lock, self.modes.file)
                lock(self._lock)
        finally:
            self._gate.unlock()

    @contextlib.contextmanager
    def _notice_damage(self) -> Iterator[None]:
        """Damage that shows only in use has the index rebuilt at next use."""
        with lmdb_errors(self.path):
            try:
                yield
            except DAMAGE as error:
                self._suspect = True
                self._stamp.forget()
                raise StoreDamaged(
                    self.path, f"is damaged ({error}); it is rebuilt at its next use"
                ) from error

    def reconcile(self) -> int:
        """Remove the entries whose chunk file is gone (a gc was killed); return how many.

        An index whose totals are not the sum of its entries is rebuilt.
        """
        digests = []
        size = 0
        with self.read() as txn:
            for digest, entry in txn.items():
                digests.append(digest)
                size += entry.size
            sound = txn.totals() == (len(digests), size)
        if not sound:
            self.rebuild("its totals are wrong")
            return 0
        lost = [d for d in digests if chunkfiles.size_on_disk(self.layout.chunk(d)) is None]
        for start in range(0, len(lost), 1024):
            with self.write() as txn:
                for digest in lost[start : start + 1024]:
                    if chunkfiles.size_on_disk(self.layout.chunk(digest)) is None:
                        txn.delete(digest)
        return len(lost)

    # --- opening, checking, rebuilding ----------------------------------------------------------

    def rebuild(self, reason: str = "as asked") -> None:
        """Throw the index away and make it again from the chunk files."""
        self._require_own_process()
        with self._mutex:
            self._take(FileLock.exclusive)
            try:
                self._close_environment()
                self._build(reason)
            finally:
                self._lock.unlock()

    def _reopen(self) -> None:
        self._close_environment()
        self._take(FileLock.exclusive)
        try:
            reason = self._why_not_usable()
            if reason is None:
                try:
                    # A full disk or a missing permission is no reason to throw it away.
                    with fsio.os_errors(self.path), lmdb_errors(self.path):
                        self._database = Database(self.path, self.modes.file)
                    # A process that dies, of LMDB itself perhaps, leaves none for the next one.
                    self._stamp.take()
                    return
                except (lmdb.Error, OSError) as error:
                    reason = f"it does not open ({error})"
            self._build(reason)
        finally:
            self._lock.unlock()

    def _why_not_usable(self) -> str | None:
        data = self.path / "data.mdb"
        if self._suspect:
            return "it was found damaged in use"
        if not data.is_file():
            return "it is missing"
        fits = self._stamp.fits()
        if fits is not None:  # written by nobody; but bits rot, and LMDB might crash
            return None if fits else "it is not as it was left"
        if is_in_use(self.path):
            return None  # then it was checked, and has changed since by transactions only
        return find_damage(self.path)

    def _build(self, reason: str) -> None:
        """Make a new index beside the old one and swap. The caller holds the lock exclusively."""
        if self.path.exists() or next(iter(chunkfiles.walk(self.layout.chunks)), None):
            logger.warning("rebuilding the index of %s: %s", self.layout.root, reason)
        fresh = self.layout.tmp / f"index-{secrets.token_hex(8)}"
        try:
            self._make(fresh)
        except BaseException:
            fsio.remove_tree(fresh)  # on a full disk, nothing but the error should stay
            raise
        old = self.layout.tmp / f"index-{secrets.token_hex(8)}"
        if self.path.exists():
            fsio.rename(self.path, old)
        fsio.rename(fresh, self.path)
        fsio.sync_path(self.layout.root)
        fsio.remove_tree(old)
        self._database = Database(self.path, self.modes.file)
        self._suspect = False

    def _make(self, path: Path) -> None:
        with fsio.os_errors(path), lmdb_errors(path):
            fsio.make_directory(path, self.modes.directory)
            # What is found may have been renamed into place by a process that was killed before
            # it synced the directory; an entry says that the name is durable.
            fsio.sync_filesystem(self.layout.chunks)
            database = Database(path, self.modes.file, create=True)
            try:
                self._fill(database)
            finally:
                database.close()

    def _fill(self, database: Database) -> None:
        now = int(self.clock())
        for batch in _batched(chunkfiles.walk(self.layout.chunks), 20_000):
            with database.begin(write=True) as txn:
                transaction = Transaction(txn, database.tables)
                for digest, file in batch:
                    with contextlib.suppress(FileNotFoundError):
                        transaction.put(digest, Entry(file.stat().st_size, now, 0))
                transaction.settle()
        database.env.sync(True)

    # --- closing --------------------------------------------------------------------------------

    def _close_environment(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _close_database(self) -> None:
        """Close, and if nobody is in a transaction record that the file is sound as it is."""
        if self._database is None:
            return
        known = self._database.identity
        self._close_environment()
        if self._suspect:
            return
        if not self._lock.try_exclusive():
            return
        try:
            if known == identity(self.path):
                self._stamp.leave(self.modes.file)
        except OSError as error:  # a hint for the next open; a full disk must not fail a close
            logger.info("no stamp left for %s: %s", self.path, error)
        finally:
            self._lock.unlock()


os.register_at_fork(after_in_child=Index.after_fork)


def _batched(
    items: Iterable[tuple[Digest, os.DirEntry[str]]], size: int
) -> Iterator[list[tuple[Digest, os.DirEntry[str]]]]:
    batch: list[tuple[Digest, os.DirEntry[str]]] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def is_known(layout: Layout, txn: Transaction, digest: Digest, size: int) -> bool:
    """Whether a chunk has an entry, and a file of the right size; asked under the mutex."""
    entry = txn.get(digest)
    return (
        entry is not None
        and entry.size == size
        and chunkfiles.size_on_disk(layout.chunk(digest)) == size
    )
