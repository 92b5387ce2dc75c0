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
import json
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lmdb
from lmdb import verify as lmdb_verify

from cas import chunkfiles, fsio
from cas.digest import Digest
from cas.errors import Refused
from cas.layout import Layout

logger = logging.getLogger(__name__)

SCHEMA = b"1"
#: Address space, not memory or disk. A process with a smaller limit falls back to less.
_MAP_SIZES = (64 << 30, 4 << 30, 512 << 20)
_VALUE = struct.Struct("<QQQ")
_COUNTER = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index knows of a chunk; times are whole seconds since the epoch."""

    size: int
    last_seen: int
    last_verified: int


class Transaction:
    """Reads, and in a write transaction changes, entries. Valid inside its ``with`` only."""

    def __init__(self, txn: lmdb.Transaction, chunks: Any, meta: Any) -> None:
        self._txn = txn
        self._chunks = chunks
        self._meta = meta
        self._delta = [0, 0]

    def get(self, digest: Digest) -> Entry | None:
        value = self._txn.get(digest, db=self._chunks)
        if value is None or len(value) != _VALUE.size:
            return None
        return Entry(*_VALUE.unpack(value))

    def put(self, digest: Digest, entry: Entry) -> None:
        """Insert or replace an entry."""
        old = self.get(digest)
        value = _VALUE.pack(entry.size, entry.last_seen, entry.last_verified)
        self._txn.put(digest, value, db=self._chunks)
        self._delta[0] += old is None
        self._delta[1] += entry.size - (0 if old is None else old.size)

    def delete(self, digest: Digest) -> None:
        """Remove an entry, if there is one."""
        old = self.get(digest)
        if old is not None:
            self._txn.delete(digest, db=self._chunks)
            self._delta[0] -= 1
            self._delta[1] -= old.size

    def items(self) -> Iterator[tuple[Digest, Entry]]:
        """All entries in digest order."""
        for key, value in self._txn.cursor(db=self._chunks):
            if len(key) == 32 and len(value) == _VALUE.size:
                yield Digest(bytes(key)), Entry(*_VALUE.unpack(value))

    def totals(self) -> tuple[int, int]:
        """(number of chunks, their bytes)."""
        value = self._txn.get(b"totals", db=self._meta)
        count, size = (0, 0) if value is None else _COUNTER.unpack(value)
        return (count + self._delta[0], size + self._delta[1])

    def settle(self) -> None:
        """Write the totals that this transaction's changes make."""
        if any(self._delta):
            count, size = self.totals()
            value = _COUNTER.pack(max(count, 0), max(size, 0))
            self._txn.put(b"totals", value, db=self._meta)
            self._delta = [0, 0]


class _Database:
    """One open LMDB environment and the identity of its file."""

    def __init__(self, path: Path, mode: int) -> None:
        self.env = _open_environment(path, mode)
        try:
            self.chunks = self.env.open_db(b"chunks")
            self.meta = self.env.open_db(b"meta")
            self.identity = _identity(path)
            _set_modes(path, mode)
            with self.env.begin(write=True) as txn:
                if (txn.get(b"schema", db=self.meta) or SCHEMA) != SCHEMA:
                    raise lmdb.VersionMismatchError("another schema of this library")
                if txn.get(b"schema", db=self.meta) is None:
                    txn.put(b"schema", SCHEMA, db=self.meta)
            self.env.reader_check()
        except BaseException:
            self.env.close()
            raise

    def begin(self, write: bool) -> lmdb.Transaction:
        try:
            return self.env.begin(write=write)
        except lmdb.MapResizedError:  # another process has a larger map
            self.env.set_mapsize(0)
            return self.env.begin(write=write)


def _open_environment(path: Path, mode: int) -> lmdb.Environment:
    for size in _MAP_SIZES:
        with contextlib.suppress(lmdb.MemoryError):
            # Never writemap: a full disk would then be a SIGBUS instead of an error.
            return lmdb.open(
                str(path), map_size=size, max_dbs=4, mode=mode, max_readers=1024, readahead=False
            )
    raise Refused(f"{path} cannot be mapped: raise the address space limit (ulimit -v)")


def _set_modes(path: Path, mode: int) -> None:
    """LMDB creates its files under the process's umask; a shared store has its own."""
    for file in (path / "data.mdb", path / "lock.mdb"):
        with contextlib.suppress(PermissionError):  # another user's file: its mode is right
            os.chmod(file, mode)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = os.stat(path / "data.mdb")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (stat.st_dev, stat.st_ino)


class Index:
    """A process's handle on one store's index. Thread safe; one per store and process.

    LMDB must not be opened twice by one process, so handles are shared: use `Index.open`, and
    `close` as often.
    """

    _open: ClassVar[dict[tuple[int, int], Index]] = {}
    _registry = threading.Lock()

    def __init__(self, layout: Layout, modes: fsio.Modes, clock: Callable[[], float]) -> None:
        self.layout = layout
        self.modes = modes
        self.clock = clock
        self._users = 0
        self._pid = os.getpid()
        self._mutex = threading.RLock()
        self._depth = 0
        self._lock = fsio.FileLock.open(layout.index_lock, modes.file)
        self._database: _Database | None = None

    @classmethod
    def open(
        cls, layout: Layout, modes: fsio.Modes, clock: Callable[[], float] = time.time
    ) -> Index:
        stat = os.stat(layout.root)
        key = (stat.st_dev, stat.st_ino)
        with cls._registry:
            index = cls._open.get(key)
            if index is None or index._pid != os.getpid():
                index = cls._open[key] = cls(layout, modes, clock)
            index._users += 1
            return index

    def close(self) -> None:
        """Give the handle back; the last one closes the database and leaves a stamp."""
        with self._registry:
            self._users -= 1
            if self._users > 0:
                return
            for key in [key for key, index in self._open.items() if index is self]:
                del self._open[key]
        with self._mutex:
            if self._pid == os.getpid():
                self._close_database()
            self._lock.close()

    # --- transactions ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def write(self) -> Iterator[Transaction]:
        """The store's mutex. Changes are durable when the block ends, and undone if it raises."""
        path = self.layout.index
        with self._current() as database, fsio.os_errors(path), _lmdb_errors(path):
            txn = database.begin(write=True)
            transaction = Transaction(txn, database.chunks, database.meta)
            try:
                yield transaction
                transaction.settle()
            except BaseException:
                txn.abort()
                raise
            fsio.step("index-commit", path)
            txn.commit()

    @contextlib.contextmanager
    def read(self) -> Iterator[Transaction]:
        """A consistent view; does not wait for writers."""
        with (
            self._current() as database,
            _lmdb_errors(self.layout.index),
            database.begin(write=False) as txn,
        ):
            yield Transaction(txn, database.chunks, database.meta)

    @contextlib.contextmanager
    def _current(self) -> Iterator[_Database]:
        """Hold the shared lock over the database that ``index/`` names now."""
        if self._pid != os.getpid():
            raise Refused("this store was opened before fork(); open it again in the child process")
        with self._mutex:
            if self._depth:
                raise RuntimeError("index transactions do not nest")
            self._depth += 1
            try:
                while True:
                    self._lock.shared()
                    database = self._database
                    if database and database.identity == _identity(self.layout.index):
                        break
                    self._lock.unlock()  # flock cannot upgrade in one step, hence the loop
                    self._reopen()
                yield database
            finally:
                self._lock.unlock()
                self._depth -= 1

    # --- opening, checking, rebuilding ----------------------------------------------------------

    def rebuild(self) -> None:
        """Throw the index away and make it again from the chunk files."""
        with self._mutex:
            self._lock.exclusive()
            try:
                self._close_environment()
                self._build("as asked")
            finally:
                self._lock.unlock()

    def _reopen(self) -> None:
        self._close_environment()
        self._lock.exclusive()
        try:
            reason = self._why_not_usable()
            if reason is None:
                try:
                    self._database = _Database(self.layout.index, self.modes.file)
                    return
                except (lmdb.Error, OSError) as error:
                    if isinstance(error, OSError) and fsio.translate(error, Path()) is not error:
                        raise
                    reason = f"it does not open ({error})"
            self._build(reason)
        finally:
            self._lock.unlock()

    def _why_not_usable(self) -> str | None:
        data = self.layout.index / "data.mdb"
        if not data.is_file():
            return "it is missing"
        if self._read_stamp() == _stamp(data):
            return None
        try:
            problems: list[str] = lmdb_verify.verify(str(self.layout.index))  # type: ignore[no-untyped-call]
        except (lmdb_verify.VerifyError, OSError, ValueError, struct.error) as error:
            return f"it is not readable ({error})"
        return f"it is damaged ({problems[0]})" if problems else None

    def _build(self, reason: str) -> None:
        """Make a new index beside the old one and swap. The caller holds the lock exclusively."""
        if self.layout.index.exists() or next(iter(chunkfiles.walk(self.layout.chunks)), None):
            logger.warning("rebuilding the index of %s: %s", self.layout.root, reason)
        fresh = self.layout.tmp / f"index-{secrets.token_hex(8)}"
        fsio.make_directory(fresh, self.modes.directory)
        with fsio.os_errors(fresh), _lmdb_errors(fresh):
            database = _Database(fresh, self.modes.file)
            try:
                self._fill(database)
            finally:
                database.env.close()
        old = self.layout.tmp / f"index-{secrets.token_hex(8)}"
        if self.layout.index.exists():
            fsio.rename(self.layout.index, old)
        fsio.rename(fresh, self.layout.index)
        fsio.sync_path(self.layout.root)
        fsio.remove_tree(old)
        self._database = _Database(self.layout.index, self.modes.file)

    def _fill(self, database: _Database) -> None:
        now = int(self.clock())
        for batch in _batched(chunkfiles.walk(self.layout.chunks), 20_000):
            with database.begin(write=True) as txn:
                transaction = Transaction(txn, database.chunks, database.meta)
                for digest, file in batch:
                    with contextlib.suppress(FileNotFoundError):
                        transaction.put(digest, Entry(file.stat().st_size, now, 0))
                transaction.settle()
        database.env.sync(True)

    # --- stamps ---------------------------------------------------------------------------------

    def _close_environment(self) -> None:
        if self._database is not None:
            self._database.env.close()
            self._database = None

    def _close_database(self) -> None:
        """Close, and if nobody is in a transaction record that the file is sound as it is."""
        if self._database is None:
            return
        identity = self._database.identity
        self._close_environment()
        data = self.layout.index / "data.mdb"
        if not self._lock.try_exclusive():
            return
        try:
            if identity == _identity(self.layout.index):
                text = json.dumps(_stamp(data)).encode()
                temporary = self.layout.index / f"stamp-{secrets.token_hex(4)}"
                fsio.create_file(temporary, text, mode=self.modes.file, sync=False)
                fsio.rename(temporary, self.layout.index / "stamp")
        except OSError as error:  # a hint for the next open; a full disk must not fail a close
            logger.info("no stamp left for %s: %s", self.layout.index, error)
        finally:
            self._lock.unlock()

    def _read_stamp(self) -> object:
        try:
            return json.loads((self.layout.index / "stamp").read_bytes())
        except (OSError, ValueError):
            return None


def _stamp(data: Path) -> list[int]:
    stat = os.stat(data)
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


@contextlib.contextmanager
def _lmdb_errors(path: Path) -> Iterator[None]:
    """LMDB wraps ENOSPC and EACCES in errors of its own; give them back their meaning."""
    try:
        yield
    except lmdb.DiskError as error:
        raise OSError(28, str(error), str(path)) from error
    except lmdb.MapFullError as error:
        raise Refused(f"the index at {path} has reached its largest size") from error
    except lmdb.ReadersFullError as error:
        raise Refused(f"too many processes read {path}; try again when some have ended") from error
    except lmdb.Error as error:
        if "No space left" in str(error):
            raise OSError(28, str(error), str(path)) from error
        raise


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
