"""One LMDB environment with the index's tables in it: opening it safely, and its transactions."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
from lmdb import verify as lmdb_verify

from cas import filesystems
from cas.digest import Digest
from cas.errors import Refused
from cas.locks import FileLock

SCHEMA = b"2"
#: Address space, not memory or disk. A process with a smaller limit falls back to less.
_MAP_SIZES = (64 << 30, 4 << 30, 512 << 20)
#: What one transaction may add to the file, at most: a batch of entries, each on a page of its own.
HEADROOM = 64 << 20
#: LMDB's, at most: the size of a page of memory.
_PAGE = os.sysconf("SC_PAGESIZE")
_MAX_READERS = 1024
#: At least what LMDB wants for its lock file: a page of mutexes, then a cache line a reader.
_LOCK_FILE_BYTES = 4096 + 64 * _MAX_READERS
#: What LMDB reports, while in use, of a file whose pages do not hang together.
DAMAGE = (
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.CursorFullError,
)
#: A commit is smaller than this, and would not have run out of room with more.
_ALMOST_FULL = 1 << 20
_VALUE = struct.Struct("<QQQ")
_COUNTER = struct.Struct("<QQ")
_USE = struct.Struct("<II")
_BYTES = struct.Struct("<Q")
_STUCK = struct.Struct("<QQQQ")


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index knows of a chunk; times are whole seconds since the epoch."""

    size: int
    last_seen: int
    last_verified: int


@dataclass(frozen=True, slots=True)
class Use:
    """How many documents (manifests, records) name a chunk, and the size they give it."""

    count: int
    size: int


class Stuck(NamedTuple):
    """What is remembered of a gc that could not make the store small enough.

    ``policy`` stands for what it went by; the next one waits until the chunks have more than
    ``enough`` bytes, or ``until`` (seconds since the epoch), or until ``changes``, which counts
    what may have given gc something to drop, is another.
    """

    changes: int = 0
    policy: int = 0
    enough: int = 0
    until: int = 0


class Tables(NamedTuple):
    """LMDB's handles."""

    chunks: Any
    meta: Any
    uses: Any
    counted: Any


class Transaction:
    """Reads, and in a write transaction changes, entries. Valid inside its ``with`` only."""

    def __init__(self, txn: lmdb.Transaction, tables: Tables) -> None:
        self._txn = txn
        self._chunks, self._meta, self._uses, self._counted = tables
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
        if value is None or len(value) != _COUNTER.size:
            value = bytes(_COUNTER.size)
        count, size = _COUNTER.unpack(value)
        return (count + self._delta[0], size + self._delta[1])

    def settle(self) -> None:
        """Write the totals that this transaction's changes make."""
        if any(self._delta):
            count, size = self.totals()
            value = _COUNTER.pack(max(count, 0), max(size, 0))
            self._txn.put(b"totals", value, db=self._meta)
            self._delta = [0, 0]

    def stuck(self) -> Stuck:
        """See `Stuck`; all zeros if nothing is remembered."""
        value = self._txn.get(b"stuck", db=self._meta)
        if value is None or len(value) != _STUCK.size:
            return Stuck()
        return Stuck(*_STUCK.unpack(value))

    def put_stuck(self, stuck: Stuck) -> None:
        self._txn.put(b"stuck", _STUCK.pack(*stuck), db=self._meta)

    # --- what is needed: only statistics believe it ---------------------------------------------

    def counted(self) -> dict[Digest, int]:
        """The documents whose chunks are counted, and the bytes of the files they describe."""
        return {
            Digest(bytes(key)): _BYTES.unpack(value)[0]
            for key, value in self._txn.cursor(db=self._counted)
            if len(key) == 32 and len(value) == _BYTES.size
        }

    def use(self, digest: bytes) -> Use:
        """By how many of the counted documents a chunk is needed."""
        value = self._txn.get(digest, db=self._uses)
        if value is None or len(value) != _USE.size:
            return Use(0, 0)
        return Use(*_USE.unpack(value))

    def used_bytes(self) -> int:
        """The bytes of all chunks that a counted document needs, each chunk once."""
        value = self._txn.get(b"used", db=self._meta)
        if value is None or len(value) != _BYTES.size:
            return 0
        size: int = _BYTES.unpack(value)[0]
        return size

    def count(self, document: Digest, size: int, chunks: Mapping[bytes, int]) -> None:
        """Count a document that is not counted yet; its files have ``size`` bytes."""
        self._txn.put(document, _BYTES.pack(size), db=self._counted)
        added = 0
        for digest, length in chunks.items():
            old = self.use(digest)
            if not old.count:
                old = Use(0, length)
                added += length
            self._txn.put(digest, _USE.pack(old.count + 1, old.size), db=self._uses)
        self._put_used(self.used_bytes() + added)

    def uncount(self, document: Digest, chunks: Mapping[bytes, int]) -> None:
        """Take a counted document out. If the counts turn out to be wrong, all are forgotten."""
        freed = 0
        for digest in chunks:
            old = self.use(digest)
            if not old.count:
                self.recount({}, ())
                return
            if old.count == 1:
                freed += old.size
                self._txn.delete(digest, db=self._uses)
            else:
                self._txn.put(digest, _USE.pack(old.count - 1, old.size), db=self._uses)
        self._txn.delete(document, db=self._counted)
        self._put_used(max(0, self.used_bytes() - freed))

    def recount(
        self, documents: Mapping[Digest, int], uses: Iterable[tuple[bytes, int, int]]
    ) -> None:
        """Replace all counts. ``uses`` are chunk, count and size, in the order of the chunks."""
        total = 0

        def packed() -> Iterator[tuple[bytes, bytes]]:
            nonlocal total
            for digest, count, size in uses:
                total += size
                yield digest, _USE.pack(count, size)

        for table in (self._uses, self._counted):
            self._txn.drop(table, delete=False)
        self._txn.cursor(db=self._uses).putmulti(packed(), append=True)
        for document, size in documents.items():
            self._txn.put(document, _BYTES.pack(size), db=self._counted)
        self._put_used(total)

    def _put_used(self, size: int) -> None:
        self._txn.put(b"used", _BYTES.pack(size), db=self._meta)


class Absent(Transaction):
    """What a transaction shows of an index that is not there: nothing, and changes are lost.

    That is always safe, since the chunk files are the truth.
    """

    def __init__(self) -> None:
        pass  # there is nothing to hold

    def get(self, digest: Digest) -> Entry | None:
        return None

    def put(self, digest: Digest, entry: Entry) -> None:
        return None

    def items(self) -> Iterator[tuple[Digest, Entry]]:
        return iter(())

    def totals(self) -> tuple[int, int]:
        return (0, 0)

    def stuck(self) -> Stuck:
        return Stuck()

    def put_stuck(self, stuck: Stuck) -> None:
        return None

    def counted(self) -> dict[Digest, int]:
        return {}

    def settle(self) -> None:
        return None


class Database:
    """One open LMDB environment and the identity of its files.

    Without ``create`` it must hold the tables of this library's schema already.
    """

    def __init__(self, path: Path, mode: int, *, create: bool = False) -> None:
        self._use: FileLock | None = None
        self.env = _open_environment(path, mode)
        try:
            self.env.reader_check()  # or killed readers could leave no room for the first one
            names = (name.encode() for name in Tables._fields)
            self.tables = Tables(*(self.env.open_db(name, create=create) for name in names))
            self.identity = identity(path)
            self._use = _own_lock(path)
            self._use.shared()  # seen by `is_in_use`
            if create:
                _set_mode(path, mode)
            with self.env.begin(write=create) as txn:
                if create:
                    txn.put(b"schema", SCHEMA, db=self.tables.meta)
                if txn.get(b"schema", db=self.tables.meta) != SCHEMA:
                    raise lmdb.VersionMismatchError("another schema of this library")
                counted, _ = Transaction(txn, self.tables).totals()
                if counted != txn.stat(self.tables.chunks)["entries"]:
                    raise lmdb.CorruptedError("its count of chunks is wrong")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.env.close()
        if self._use is not None:
            self._use.close()

    def begin(self, write: bool) -> lmdb.Transaction:
        """Begin a transaction; this process has no other one."""
        if write:
            self._make_room()
        try:
            return self.env.begin(write=write)
        except lmdb.MapResizedError:  # another process wrote past the end of this one's map
            self._make_room()
        except lmdb.ReadersFullError:  # of processes that were killed since this one began, perhaps
            self.env.reader_check()
        return self.env.begin(write=write)

    def _make_room(self) -> None:
        """Map more of the file where the next transaction could reach the end of the map.

        Only a process that is short of address space began with a map that can become too small.
        """
        info = self.env.info()
        needed = (info["last_pgno"] + 1) * _PAGE + HEADROOM
        if needed > info["map_size"]:
            # Without address space for more, LMDB says so when it has reached the end.
            with contextlib.suppress(lmdb.MemoryError):
                self.env.set_mapsize(2 * needed)


def _own_lock(path: Path) -> FileLock:
    """An flock on the data file itself, which LMDB leaves free (its own locks are in lock.mdb)."""
    data = path / "data.mdb"
    return FileLock(data, os.open(data, os.O_RDONLY | os.O_CLOEXEC))


def is_in_use(path: Path) -> bool:
    """Whether another process has the database at ``path`` open."""
    lock = _own_lock(path)
    try:
        return not lock.try_exclusive()
    finally:
        lock.close()


def _open_environment(path: Path, mode: int) -> lmdb.Environment:
    _reserve_lock_file(path, mode)
    for size in _MAP_SIZES:
        with contextlib.suppress(lmdb.MemoryError):
            # Never writemap: a full disk would then be a SIGBUS instead of an error.
            return lmdb.open(
                str(path),
                map_size=size,
                max_dbs=8,
                mode=mode,
                max_readers=_MAX_READERS,
                readahead=False,
            )
    raise Refused(f"{path} cannot be mapped: raise the address space limit (ulimit -v)")


def _reserve_lock_file(path: Path, mode: int) -> None:
    """Give LMDB's lock file its blocks now.

    LMDB writes to it through a mapping: with a hole in it, a full disk is a SIGBUS there.
    """
    lock = FileLock.open(path / "lock.mdb", mode)
    try:
        os.posix_fallocate(lock.fd, 0, _LOCK_FILE_BYTES)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    finally:
        lock.close()


def _set_mode(path: Path, mode: int) -> None:
    """LMDB creates its file under the process's umask; a shared store has its own."""
    os.chmod(path / "data.mdb", mode)


def identity(path: Path) -> tuple[int, ...] | None:
    """Of both files: who deletes only ``lock.mdb`` takes the mutex away from who has it open."""
    try:
        data, lock = os.stat(f"{path}/data.mdb"), os.stat(f"{path}/lock.mdb")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (data.st_dev, data.st_ino, lock.st_dev, lock.st_ino)


def find_damage(path: Path) -> str | None:
    """What is wrong with a database that nobody has a transaction in; None if it may be opened.

    LMDB trusts its pages: one that is damaged can crash the process, so it is not asked.
    """
    try:
        problems: list[str] = lmdb_verify.verify(str(path))  # type: ignore[no-untyped-call]
    except (lmdb_verify.VerifyError, OSError, ValueError, struct.error) as error:
        return f"it is not readable ({error})"
    return f"it is damaged ({problems[0]})" if problems else None


@contextlib.contextmanager
def lmdb_errors(path: Path) -> Iterator[None]:
    """LMDB wraps ENOSPC and EACCES in errors of its own; give them back their meaning."""
    try:
        yield
    except lmdb.DiskError as error:
        raise OSError(errno.ENOSPC, str(error), str(path)) from error
    except lmdb.MapFullError as error:
        raise Refused(f"the index at {path} has reached its largest size") from error
    except lmdb.ReadersFullError as error:
        raise Refused(f"too many processes read {path}; try again when some have ended") from error
    except lmdb.Error as error:
        if "No space left" in str(error) or _is_short_write(error, path):
            raise OSError(errno.ENOSPC, str(error), str(path)) from error
        raise


def _is_short_write(error: lmdb.Error, path: Path) -> bool:
    """Whether a commit found room for a part of its pages: LMDB calls that an I/O error."""
    with contextlib.suppress(OSError):
        return "Input/output error" in str(error) and filesystems.free_bytes(path) < _ALMOST_FULL
    return False
