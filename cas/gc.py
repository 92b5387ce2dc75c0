"""Garbage collection beside running writers. ``docs/ordering.md`` holds the safety argument.

`plan` marks from the refs and from live leases and lists the rest; `execute` deletes it in small
batches under the store's mutex, looking again in each batch at what became live since.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from cas import actions, chunkfiles, fsio, leases, refs
from cas.context import Context
from cas.digest import Digest
from cas.errors import Busy, CasError, NoSpace, RefNotFound
from cas.index import Transaction
from cas.layout import is_writer_id
from cas.progress import SILENT, Progress
from cas.store import Store

#: Deletions under the mutex at a time. Each batch reads every ref again, so a few thousand refs
#: cost no more than the deletions themselves.
BATCH = 2048

_T = TypeVar("_T")


@dataclass(slots=True)
class Marks:
    """What must stay. ``problems`` are reasons why the marks may be incomplete."""

    chunks: set[Digest] = field(default_factory=set)
    manifests: set[Digest] = field(default_factory=set)
    announced: set[Digest] = field(default_factory=set)
    problems: dict[str, str] = field(default_factory=dict)
    records: actions.Records | None = None

    def add_refs(self, context: Context) -> None:
        """Mark from every ref.

        Each is read again each time: a name that was removed and committed anew has its old
        generation number, and another manifest.
        """
        for name in refs.strangers(context.layout):
            why = "no ref has such a name; rename it to what it was, or move it out of the store"
            self.problems[f"refs/{name}"] = why
        for ref_id in refs.ids(context.layout):
            try:
                digest = refs.read(context.layout, ref_id).manifest
                self._add_manifest(context, digest)
            except RefNotFound:
                continue  # removed meanwhile
            except CasError as error:
                if context.layout.ref(ref_id.name, ref_id.generation).exists():
                    self.problems[str(ref_id)] = str(error)

    def add_actions(self, context: Context) -> None:
        """Mark from the action records that are there now.

        They are weak roots: one that cannot be read marks nothing, and is no problem.
        """
        if self.records is None:
            self.records = actions.Records(context.layout)
        self.records.update()
        self.chunks.update(self.records.chunks())

    def listed(self) -> tuple[str, ...]:
        """The problems, as text."""
        return tuple(f"{what}: {why}" for what, why in self.problems.items())

    def keeps_manifest(self, digest: Digest) -> bool:
        return digest in self.manifests or digest in self.announced

    def add_leases(self, context: Context) -> None:
        """Mark from the leases of live processes."""
        leased = leases.read_live(context.layout)
        self.chunks |= leased.chunks
        for digest in leased.manifests - self.manifests:
            if not context.layout.manifest(digest).exists():
                # About to be written; its chunks are leased singly. Not marked: once it is there,
                # a ref that names it must still bring its chunks in.
                self.announced.add(digest)
                continue
            try:
                self._add_manifest(context, digest)
            except CasError as error:
                self.problems[str(digest)] = f"in use: {error}"

    def _add_manifest(self, context: Context, digest: Digest) -> None:
        if digest not in self.manifests:
            self.chunks.update(context.load_manifest(digest).chunks())
            self.manifests.add(digest)


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file that nothing uses."""

    digest: Digest
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What gc would delete, as found when it was made.

    ``spared`` counts unused chunks within grace; ``stale_entries`` says that the index still
    counts chunks that a killed gc has deleted. ``problems`` forbid deleting any chunk or
    manifest: something that cannot be read might name them.
    """

    chunks: tuple[Garbage, ...]
    manifests: tuple[Garbage, ...]
    dead_writers: tuple[str, ...]
    dead_bytes: int
    staged_bytes: int
    spared: int
    problems: tuple[str, ...]
    marks: Marks
    stale_entries: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What gc did. Bytes are of chunks and of dead writers' staged files."""

    dead_chunks: int
    dead_bytes: int
    freed_bytes: int
    spared: int
    problems: tuple[str, ...]


def plan(store: Store, *, grace: float = 0) -> Plan:
    """Find what nothing uses and what was not put or used for ``grace`` seconds.

    Reads only; writers go on meanwhile.

    Raises:
        ReadOnlyStore
    """
    context = store.context
    context.require_writable("collect garbage")
    marks = Marks()
    marks.add_leases(context)  # before the refs: a writer commits first and then ends its lease
    marks.add_refs(context)
    marks.add_actions(context)
    dead, spared, stale = _unused_chunks(context, marks, grace)
    manifests = _unused_manifests(context, marks, grace)
    writers = tuple(_dead_writers(context))
    if marks.problems:
        dead, manifests = [], []
    return Plan(
        chunks=tuple(dead),
        manifests=tuple(manifests),
        dead_writers=writers,
        dead_bytes=sum(item.size for item in dead),
        staged_bytes=sum(tree_size(context.layout.staging(writer)) for writer in writers),
        spared=spared,
        problems=marks.listed(),
        marks=marks,
        stale_entries=stale,
    )


def execute(store: Store, made: Plan, progress: Progress = SILENT) -> Report:
    """Delete what ``made`` lists and is still unused. One gc at a time.

    Raises:
        Busy: another gc is running.
    """
    context = store.context
    with _only_one(context):
        freed, spared = _remove_dead_writers(context), 0
        progress.start("gc", made.dead_bytes)
        # Manifests first: a reader that still finds its manifest finds its chunks (Store.protect).
        for manifests in _batches(made.manifests):
            _delete_manifests(context, made.marks, manifests)
        for chunks in _batches(made.chunks):
            count, size = _delete_chunks(context, made.marks, chunks)
            spared += len(chunks) - count
            freed += size
            progress.advance(sum(item.size for item in chunks))
        _remove_empty_names(context)
        if made.stale_entries:
            with contextlib.suppress(NoSpace):  # they are harmless; the next gc finds them again
                context.index.reconcile()
        progress.finish()
    return Report(
        len(made.chunks), made.dead_bytes, freed, made.spared + spared, made.marks.listed()
    )


# --- planning -----------------------------------------------------------------------------------


def _unused_chunks(context: Context, marks: Marks, grace: float) -> tuple[list[Garbage], int, bool]:
    """(dead chunks, number of those within grace, whether the index counts more than there are)."""
    dead: list[Garbage] = []
    spared = files = 0
    candidates = []
    for digest, entry in chunkfiles.walk(context.layout.chunks):
        files += 1
        if digest not in marks.chunks:
            candidates.append((digest, entry))
    with context.index.read_if_possible() as txn:
        stale = txn.totals()[0] > files
        for digest, entry in candidates:
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat(follow_symlinks=False)
                known = txn.get(digest)
                seen = max(stat.st_mtime, known.last_seen if known else 0)
                if _within(context, seen, grace):
                    spared += 1
                else:
                    dead.append(Garbage(digest, stat.st_size))
    return dead, spared, stale


def _unused_manifests(context: Context, marks: Marks, grace: float) -> list[Garbage]:
    dead = []
    for digest, entry in chunkfiles.walk(context.layout.manifests):
        with contextlib.suppress(FileNotFoundError):
            stat = entry.stat(follow_symlinks=False)
            if not marks.keeps_manifest(digest) and not _within(context, stat.st_mtime, grace):
                dead.append(Garbage(digest, stat.st_size))
    return dead


def _within(context: Context, seen: float, grace: float) -> bool:
    """Whether ``seen`` is less than ``grace`` ago; a stamp from the future counts as now."""
    return grace > 0 and context.clock() - seen < grace


def _dead_writers(context: Context) -> Iterator[str]:
    names = {*os.listdir(context.layout.tmp), *os.listdir(context.layout.leases)}
    for name in sorted(names):
        # The lease is looked at after the directory was seen, and is older than it: no race.
        if is_writer_id(name) and not leases.is_live(context.layout, name):
            yield name


def tree_size(path: Path) -> int:
    """Bytes of the files directly in ``path`` (0 if it is not there)."""
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return 0
    total = 0
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            total += entry.stat(follow_symlinks=False).st_size
    return total


# --- executing ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _only_one(context: Context) -> Iterator[None]:
    lock = fsio.FileLock.open(context.layout.gc_lock, context.modes.file)
    try:
        if not lock.try_exclusive():
            raise Busy("another gc is running on this store; try again when it has ended")
        yield
    finally:
        lock.close()


def _batches(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


@contextlib.contextmanager
def _batch(context: Context, marks: Marks) -> Iterator[Transaction]:
    """The mutex, with ``marks`` brought up to date under it."""
    with context.index.exclude() as txn:
        marks.add_leases(context)
        marks.add_refs(context)
        marks.add_actions(context)
        yield txn


def _delete_manifests(context: Context, marks: Marks, batch: Sequence[Garbage]) -> None:
    with _batch(context, marks):
        for item in batch:
            if not marks.keeps_manifest(item.digest) and not marks.problems:
                fsio.unlink(context.layout.manifest(item.digest))


def _delete_chunks(context: Context, marks: Marks, batch: Sequence[Garbage]) -> tuple[int, int]:
    """Delete what is still dead of ``batch``; return (chunks, bytes)."""
    gone: list[Garbage] = []
    try:
        with _batch(context, marks) as txn:
            for item in batch:
                if item.digest not in marks.chunks and not marks.problems:
                    txn.delete(item.digest)
                    fsio.unlink(context.layout.chunk(item.digest))
                    gone.append(item)
    except NoSpace:
        # Nothing was free for the index's own pages. The files are gone, so now there is room, or
        # else the entries stay: without files they are harmless, and the next gc removes them.
        with contextlib.suppress(NoSpace), context.index.write() as txn:
            for item in gone:
                if chunkfiles.size_on_disk(context.layout.chunk(item.digest)) is None:
                    txn.delete(item.digest)
    return len(gone), sum(item.size for item in gone)


def _remove_dead_writers(context: Context) -> int:
    """Remove staging and leases of ended processes; return the bytes that were staged."""
    freed = 0
    for writer in _dead_writers(context):
        staging = context.layout.staging(writer)
        size = tree_size(staging)
        if leases.remove_dead(context.layout, writer, partial(fsio.remove_tree, staging)):
            freed += size
    with context.index.exclude():  # no rebuild is under way inside a transaction
        for name in os.listdir(context.layout.tmp):
            if name.startswith(("index-", "header-")):
                left = context.layout.tmp / name
                freed += tree_size(left)
                if left.is_dir():
                    fsio.remove_tree(left)
                else:
                    fsio.unlink(left)
        actions.remove_idle_flights(context.layout)
    return freed


def _remove_empty_names(context: Context) -> None:
    with context.index.exclude():
        for name in refs.names(context.layout):
            if not refs.generations(context.layout, name):
                fsio.remove_directory(context.layout.ref_dir(name))
