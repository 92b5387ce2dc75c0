"""Garbage collection beside running writers. ``docs/ordering.md`` holds the safety argument.

`plan` chooses what a policy gives up, marks from the other refs, from action records and from live
leases, and lists the rest; `execute` deletes it in small batches under the store's mutex, looking
again in each batch at what became live since.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from cas import chunkfiles, dropping, flights, fsio, leases, refs, usage
from cas.context import Context, HasContext
from cas.digest import Digest
from cas.errors import Busy, NoSpace
from cas.index import Absent, Transaction
from cas.layout import is_writer_id
from cas.locks import FileLock
from cas.marking import Marks
from cas.progress import SILENT, Progress
from cas.retention import Policy, Root

#: Deletions under the mutex at a time. Each batch reads every ref again, so a few thousand refs
#: cost no more than the deletions themselves.
BATCH = 2048
#: Refs and records given up under the mutex at a time: each costs a sync of its directory.
DROPS = 64
#: What does nothing.
KEEP_ALL = Policy()

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file that nothing uses."""

    digest: Digest
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What gc would delete, as found when it was made.

    ``drops`` are the generations and action records that ``policy`` gives up, and ``over_bytes``
    what the chunks of the rest have more than it allows. ``kept_bytes`` is what stays even if all
    live processes end, where a policy of size has something to do. ``spared`` counts unused chunks
    within grace; ``stale_entries`` says that the index counts chunks that a killed gc has deleted.
    ``problems`` forbid deleting or dropping anything: what cannot be read might name any chunk.
    """

    policy: Policy
    drops: tuple[Root, ...]
    over_bytes: int
    kept_bytes: int
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
    """What gc did. Bytes are of chunks and of dead writers' staged files; for ``kept_bytes`` see
    `Plan`."""

    dropped: tuple[Root, ...]
    dead_chunks: int
    dead_bytes: int
    freed_bytes: int
    spared: int
    problems: tuple[str, ...]
    kept_bytes: int


def plan(store: HasContext, *, grace: float = 0, policy: Policy = KEEP_ALL) -> Plan:
    """Find what ``policy`` gives up, and what nothing else uses.

    Reads only; writers go on meanwhile. A read-only store can be planned for too; of its index
    nothing is known, so that ``grace`` goes by the times of files alone.

    Args:
        grace: seconds for which chunks stay after they were put or used last.

    Raises:
        PermissionRefused: somebody else's lease cannot be read.
    """
    context = store.context
    marks = Marks()
    marks.add_leases(context)  # before the refs: a writer commits first and then ends its lease
    found = dropping.find(context, marks, policy)
    drops = found.drops
    marks.add_refs(context, without=drops)
    marks.add_actions(context, without=drops)
    unused = _unused_chunks(context, marks, grace)
    dead = unused.dead
    manifests = _unused_manifests(context, marks, grace)
    writers = tuple(_dead_writers(context))
    if marks.problems:
        drops, dead, manifests = [], [], []
    return Plan(
        policy=policy,
        drops=tuple(drops),
        over_bytes=found.over_bytes,
        kept_bytes=found.kept_bytes + unused.spared_bytes,
        chunks=tuple(dead),
        manifests=tuple(manifests),
        dead_writers=writers,
        dead_bytes=sum(item.size for item in dead),
        staged_bytes=sum(tree_size(context.layout.staging(writer)) for writer in writers),
        spared=unused.spared,
        problems=marks.listed(),
        marks=marks,
        stale_entries=unused.is_stale,
    )


def execute(store: HasContext, made: Plan, progress: Progress = SILENT) -> Report:
    """Drop and delete what ``made`` lists and is still unused. One gc at a time.

    Raises:
        Busy: another gc is running.
        ReadOnlyStore
    """
    context = store.context
    context.require_writable("collect garbage")
    with _only_one(context):
        return _execute(context, made, progress)


def collect(
    store: HasContext,
    *,
    grace: float = 0,
    policy: Policy = KEEP_ALL,
    progress: Progress = SILENT,
) -> Report:
    """`plan` and `execute` in one, for who does not want to look at the plan.

    Raises:
        Busy: another gc is running; nothing was planned.
        ReadOnlyStore
    """
    context = store.context
    context.require_writable("collect garbage")
    with _only_one(context):
        return _execute(context, plan(store, grace=grace, policy=policy), progress)


def _execute(context: Context, made: Plan, progress: Progress) -> Report:
    freed, spared = _remove_dead_writers(context), 0
    progress.start("gc", made.dead_bytes)
    # Names first: from then on, what only they needed is garbage like any other.
    dropped: list[Root] = []
    for roots in _batches(made.drops, DROPS):
        dropped += dropping.drop(context, made.policy, roots)
    usage.forget(context, (item.digest for item in made.manifests))
    # Manifests before chunks: a reader that still finds its manifest finds its chunks
    # (Store.protect).
    for manifests in _batches(made.manifests, BATCH):
        _delete_manifests(context, made.marks, manifests)
    for chunks in _batches(made.chunks, BATCH):
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
        dropped=tuple(dropped),
        dead_chunks=len(made.chunks),
        dead_bytes=made.dead_bytes,
        freed_bytes=freed,
        spared=made.spared + spared,
        problems=made.marks.listed(),
        kept_bytes=made.kept_bytes,
    )


# --- planning -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Unused:
    """Chunks that nothing uses: the dead, and how many are within grace; and whether the index
    counts more chunks than there are."""

    dead: list[Garbage] = field(default_factory=list)
    spared: int = 0
    spared_bytes: int = 0
    is_stale: bool = False


def _unused_chunks(context: Context, marks: Marks, grace: float) -> _Unused:
    found = _Unused()
    directory = str(context.layout.chunks)
    files, candidates = chunkfiles.unmarked(context.layout.chunks, marks.chunks)
    with _entries(context) as txn:
        found.is_stale = txn.totals()[0] > files
        for digest in candidates:
            with contextlib.suppress(FileNotFoundError):
                stat = chunkfiles.stat_in(directory, digest)
                known = txn.get(digest)
                seen = max(stat.st_mtime, known.last_seen if known else 0)
                if _within(context, seen, grace):
                    found.spared += 1
                    found.spared_bytes += stat.st_size
                else:
                    found.dead.append(Garbage(digest, stat.st_size))
    return found


def _entries(context: Context) -> contextlib.AbstractContextManager[Transaction]:
    return (
        contextlib.nullcontext(Absent()) if context.read_only else context.index.read_if_possible()
    )


def _unused_manifests(context: Context, marks: Marks, grace: float) -> list[Garbage]:
    dead = []
    directory = str(context.layout.manifests)
    _, candidates = chunkfiles.unmarked(context.layout.manifests, marks.manifests)
    for digest in candidates:
        with contextlib.suppress(FileNotFoundError):
            stat = chunkfiles.stat_in(directory, digest)
            if not marks.keeps_manifest(digest) and not _within(context, stat.st_mtime, grace):
                dead.append(Garbage(digest, stat.st_size))
    return dead


def _within(context: Context, seen: float, grace: float) -> bool:
    """Whether ``seen`` is less than ``grace`` ago; a stamp from the future counts as now."""
    return grace > 0 and context.clock() - seen < grace


def _dead_writers(context: Context) -> Iterator[str]:
    names: set[str] = set()
    for path in (context.layout.tmp, context.layout.leases):
        with contextlib.suppress(FileNotFoundError):  # a read-only copy without its empty ones
            names.update(os.listdir(path))
    for name in sorted(names):
        # The lease is looked at after the directory was seen, and is older than it: no race.
        if is_writer_id(name) and not leases.is_live(context.layout, name):
            yield name


def tree_size(path: Path) -> int:
    """Bytes of the files directly in ``path`` (0 if it is not there, or not for us to read)."""
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return 0
    total = 0
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            total += entry.stat(follow_symlinks=False).st_size
    return total


# --- executing ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _only_one(context: Context) -> Iterator[None]:
    lock = FileLock.open(context.layout.gc_lock, context.modes.file)
    try:
        if not lock.try_exclusive():
            raise Busy("another gc is running on this store; try again when it has ended")
        yield
    finally:
        lock.close()


def _batches(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


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
        dead = leases.remove_dead(context.layout, writer, partial(fsio.remove_tree, staging))
        if dead and not staging.exists():  # of a user who shares nothing, it stays
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
        flights.remove_idle(context.layout.flights)
    return freed


def _remove_empty_names(context: Context) -> None:
    with context.index.exclude():
        for name in refs.names(context.layout):
            refs.remove_if_empty(context.layout, name)
