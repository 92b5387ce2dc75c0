"""Action records on disk: finding, publishing, forgetting them, and computing each only once.

A record is a *weak* root: it keeps chunks while gc's policy lets it, and losing it costs time, not
data. So a record that is damaged, or names a chunk that is gone, is a miss like any other, and the
computation that follows it puts everything back. ``docs/ordering.md`` holds the argument.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cas import chunkfiles, flights, fsio, journal
from cas.context import Context
from cas.digest import Digest
from cas.errors import (
    ActionDamaged,
    ActionNotFound,
    CasError,
    PermissionRefused,
    UsageError,
)
from cas.index import is_known
from cas.journal import Event, Tally
from cas.layout import Layout
from cas.leases import Lease
from cas.manifest import chunk_sizes
from cas.progress import SILENT, Progress
from cas.records import MAX_RECORD_BYTES, TRAILER_BYTES, ActionRecord, scan_chunks

logger = logging.getLogger(__name__)

#: From this many records on, one syncfs is cheaper than as many syncs.
_SYNCFS_FILES = 16

#: Why a look-up gave no record: there is none, it cannot be read, a chunk of it is gone.
Miss = Literal["absent", "damaged", "incomplete"]


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer to "was this computed before?": a record, or why not."""

    record: ActionRecord | None
    reason: Miss | None = None


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One record file: ``size`` bytes, last used at ``last_used`` seconds since the epoch."""

    key: Digest
    size: int
    last_used: float


class Actions:
    """The action records of one store; `Store.actions`. Thread safe."""

    def __init__(self, context: Context) -> None:
        self._context = context

    # --- looking --------------------------------------------------------------------------------

    def find(self, key: Digest) -> Lookup:
        """The record of ``key`` if it can be used now, and a note that it was.

        Nothing keeps gc from its chunks afterwards: who is going to read them asks
        `cas.Writer.find_action`.
        """
        layout = self._context.layout
        found = _read_usable(layout, key)
        record = found.record
        if record is None:
            return found
        if not all(
            chunkfiles.size_on_disk(layout.chunk(digest)) == size
            for digest, size in record.chunks().items()
        ):
            return Lookup(None, "incomplete")
        touch(self._context, key)
        return found

    def get(self, key: Digest) -> ActionRecord | None:
        """`find`, without the reason."""
        return self.find(key).record

    def read(self, key: Digest) -> ActionRecord:
        """The record as it is, whether its chunks are there or not.

        Raises:
            ActionNotFound, ActionDamaged, PermissionRefused
        """
        return read(self._context.layout, key)

    def resolve(self, text: str) -> Digest:
        """The key that ``text`` begins: at least four hexadecimal digits, ``blake3:`` before them.

        Raises:
            ActionNotFound, UsageError: no such key, several of them, or no digits.
        """
        digits = text.removeprefix("blake3:")
        if not 4 <= len(digits) <= 64 or set(digits) - set("0123456789abcdef"):
            raise UsageError(f"{text!r} is not an action's key, nor its first digits")
        fitting = [entry.key for entry in self.entries(digits[:2])]
        fitting = [key for key in fitting if key.hex().startswith(digits)]
        if not fitting:
            raise ActionNotFound(text)
        if len(fitting) > 1:
            raise UsageError(f"{text!r} begins the keys of {len(fitting)} actions; give more of it")
        return fitting[0]

    def entries(self, prefix: str = "") -> Iterator[RecordFile]:
        """Every record file, unread, in the order of their keys."""
        return entries(self._context.layout, prefix)

    def list(self) -> Iterator[ActionRecord]:
        """Every record that can be read."""
        for entry in self.entries():
            with contextlib.suppress(ActionNotFound, ActionDamaged):
                yield self.read(entry.key)

    def tally(self) -> Tally:
        """Hits, misses and time saved, as far as they were noted."""
        return journal.tally(self._context.layout)

    def events(self) -> Sequence[Event]:
        """The last look-ups, oldest first."""
        return journal.events(self._context.layout)

    # --- changing -------------------------------------------------------------------------------

    def note(self, happened: Sequence[Event]) -> None:
        """Count look-ups, and keep them for `cas explain`. One call for many costs like one.

        In a read-only store, or on a full disk, nothing is noted.
        """
        if not self._context.read_only:
            context = self._context
            journal.note(context.layout, context.modes, happened, context.now())

    def drop(self, key: Digest) -> bool:
        """Forget one action; its chunks stay until gc. False if there was no record.

        Raises:
            ReadOnlyStore
        """
        self._context.require_writable("forget an action")
        layout = self._context.layout
        with self._context.index.exclude():
            removed = fsio.unlink(layout.action(key))
            if removed:
                fsio.sync_path(layout.action(key).parent)
        return removed

    @contextlib.contextmanager
    def flight(
        self, key: Digest, *, wait: bool = True, progress: Progress = SILENT
    ) -> Iterator[bool]:
        """Be the only one who computes ``key``, for the length of the block.

        Yields whether the caller is. With ``wait`` it waits for the other one, in this process or
        another, to end; after that, look again before computing. Without, it yields False at once
        if somebody else is computing. A computation without a flight is wasteful and never wrong:
        where there can be no lock (a read-only store, a full disk), this yields True.

        Holding two flights while waiting for one can make two processes wait for each other:
        publish and release what you hold before you wait.
        """
        if self._context.read_only:
            yield True
            return
        path, mode = self._context.layout.flight(key), self._context.modes.file
        what = f"action {key.hex()[:12]}"
        with flights.flight(path, mode, what, wait=wait, progress=progress) as mine:
            yield mine


# --- files --------------------------------------------------------------------------------------


def entries(layout: Layout, prefix: str = "") -> Iterator[RecordFile]:
    """Every record file whose key begins with the two digits ``prefix``, or with any."""
    for key, file in chunkfiles.walk(layout.actions, prefix):
        with contextlib.suppress(FileNotFoundError):
            stat = file.stat(follow_symlinks=False)
            yield RecordFile(key, stat.st_size, stat.st_mtime)


def read(layout: Layout, key: Digest) -> ActionRecord:
    """Read and check one record.

    Raises:
        ActionNotFound, ActionDamaged, PermissionRefused
    """
    return ActionRecord.parse(_read_file(layout, key), key)


def _read_file(layout: Layout, key: Digest) -> bytes:
    path = layout.action(key)
    try:
        with fsio.os_errors(path, "read"), open(path, "rb") as file:
            return file.read(MAX_RECORD_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ActionNotFound(key.hex()) from None
    except OSError as error:
        raise ActionDamaged(str(key), f"cannot be read ({error.strerror})") from error


def _read_usable(layout: Layout, key: Digest) -> Lookup:
    try:
        return Lookup(read(layout, key))
    except ActionNotFound:
        return Lookup(None, "absent")
    except (ActionDamaged, PermissionRefused) as error:
        logger.info("%s", error)
        return Lookup(None, "damaged")


def touch(context: Context, key: Digest) -> None:
    """Note that a record was used now, for gc's choice of what to evict."""
    if not context.read_only:
        fsio.touch(context.layout.action(key), context.clock())


def find_leased(context: Context, lease: Lease, key: Digest) -> Lookup:
    """`Actions.find`, with the record's chunks under ``lease`` from now on."""
    found = _read_usable(context.layout, key)
    if found.record is None:
        return found
    chunks = found.record.chunks()
    lease.add_chunks(chunks)  # before the question, as a put does
    with context.index.write() as txn:
        complete = all(is_known(context.layout, txn, *item) for item in chunks.items())
    if not complete:
        return Lookup(None, "incomplete")
    touch(context, key)
    return found


def publish(context: Context, lease: Lease, records: Iterable[ActionRecord]) -> None:
    """Write records whose chunks are published; when this returns, they are durable.

    Raises:
        ChunkMissing, ChunkDamaged: a chunk was removed behind the store's back.
        UsageError: a record holds what it cannot.
        NoSpace, PermissionRefused
    """
    layout = context.layout
    wanted = {record.key: record for record in records}
    chunks = chunk_sizes(recipe for record in wanted.values() for recipe in record.recipes)
    staging = layout.staging(lease.id)
    staged = {key: staging / f"action-{secrets.token_hex(8)}" for key in wanted}
    lease.add_chunks(chunks)
    try:
        with fsio.os_errors(layout.actions):
            _stage(context, [(staged[key], record) for key, record in wanted.items()])
            # No change to the index in this transaction: records are published by their rename.
            with context.index.write():
                chunkfiles.require(layout, chunks)
                _move(context, staged)
    except BaseException:
        for path in staged.values():
            fsio.unlink(path)
        raise


def _stage(context: Context, files: list[tuple[Path, ActionRecord]]) -> None:
    """Write records under temporary names, durably."""
    many = len(files) >= _SYNCFS_FILES
    for path, record in files:
        fsio.create_file(path, record.encode(), mode=context.modes.file, sync=not many)
    if many:
        fsio.sync_filesystem(context.layout.tmp)


def _move(context: Context, staged: dict[Digest, Path]) -> None:
    layout = context.layout
    directories = {layout.action(key).parent for key in staged}
    made = [path for path in sorted(directories) if not path.is_dir()]
    for path in made:
        fsio.make_directory(path, context.modes.directory)
    if made:
        fsio.sync_path(layout.actions)
    for key, path in staged.items():
        fsio.rename(path, layout.action(key))
    fsio.sync_directories(directories)


# --- for gc, stats and verify -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """One record and the chunks that it keeps; none, if it cannot be read."""

    entry: RecordFile
    chunks: Mapping[Digest, int]
    problem: str | None = None


class Records:
    """What the records of a store keep. Looking again reads only records that are new."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: dict[tuple[Digest, bytes], tuple[Mapping[Digest, int], str | None]] = {}
        self.kept: dict[Digest, Kept] = {}

    def update(self) -> None:
        """Look at every record file: `kept` says what there is now.

        A record is known by its last line, the digest of the rest. One whose rest has rotted
        since is a miss for everybody, so what it kept matters to nobody.
        """
        kept = {}
        for entry in entries(self._layout):
            trailer = _read_trailer(self._layout.action(entry.key))
            if trailer is None:
                continue  # evicted, dropped or replaced in this moment
            known = self._seen.get((entry.key, trailer))
            if known is None:
                known = self._seen[entry.key, trailer] = self._examine(entry.key)
            kept[entry.key] = Kept(entry, *known)
        self.kept = kept

    def _examine(self, key: Digest) -> tuple[Mapping[Digest, int], str | None]:
        try:
            return scan_chunks(_read_file(self._layout, key), key), None
        except CasError as error:
            return {}, str(error)

    def chunks(self) -> dict[Digest, int]:
        """Every chunk that some record keeps, and its size in bytes."""
        return {digest: size for kept in self.kept.values() for digest, size in kept.chunks.items()}


def _read_trailer(path: Path) -> bytes | None:
    """The last line of a record file, however damaged; None if the file is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError:
        return b""
    try:
        return os.pread(fd, TRAILER_BYTES, max(0, os.fstat(fd).st_size - TRAILER_BYTES))
    except OSError:
        return b""
    finally:
        os.close(fd)


def evict(layout: Layout, entry: RecordFile) -> bool:
    """Forget a record that was not used since ``entry`` was read. The caller holds the mutex."""
    path = layout.action(entry.key)
    try:
        if os.stat(path).st_mtime != entry.last_used:
            return False
    except FileNotFoundError:
        return False
    return fsio.unlink(path)


def set_aside_damaged(context: Context, *, report_only: bool = False) -> tuple[int, list[Digest]]:
    """Move records that cannot be read to quarantine; (records looked at, those moved).

    A record that names a chunk which is not there is only a miss, and stays. With ``report_only``
    all of them stay.
    """
    layout = context.layout
    checked, damaged = 0, []
    for entry in entries(layout):
        checked += 1
        if _is_damaged(layout, entry.key) and (report_only or _set_aside(context, entry.key)):
            damaged.append(entry.key)
    return checked, damaged


def _is_damaged(layout: Layout, key: Digest) -> bool:
    try:
        read(layout, key)
    except ActionNotFound:
        return False
    except ActionDamaged:
        return True
    return False


def _set_aside(context: Context, key: Digest) -> bool:
    layout = context.layout
    with context.index.write():
        if not _is_damaged(layout, key):  # recorded afresh, or forgotten, meanwhile
            return False
        path = layout.action(key)
        fsio.rename(path, layout.quarantined_action(key))
        fsio.sync_directories([path.parent, layout.quarantine])
    return True
