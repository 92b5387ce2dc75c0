"""Looking for damage: re-hash chunks, check every manifest's closure, set aside what is broken."""

from __future__ import annotations

import contextlib
import os
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from cas import actions, chunkfiles, damage, fsio, refs
from cas.context import Context
from cas.digest import Digest
from cas.errors import CasError, ChunkError, ChunkMissing, ManifestDamaged, RefNotFound
from cas.index import Entry
from cas.progress import SILENT, Progress
from cas.refs import Ref, RefId
from cas.store import Store

_STAMP_EVERY = 1024


@dataclass(frozen=True, slots=True)
class Report:
    """What verify found.

    ``damaged`` chunks were moved to quarantine, unless ``report_only``; ``missing`` chunks are
    named by a manifest but not there (a damaged one is both, from now on). ``problems`` are refs
    and manifests that cannot be read; of the manifests, ``damaged_manifests`` has each with all
    refs that need it. ``complete`` is False if the time ran out before every chunk was hashed.
    Action records are all checked; ``damaged_records``, by key, were moved to quarantine. One that
    names a chunk which is gone is no damage: whoever looks for it computes again.
    """

    checked_chunks: int
    checked_bytes: int
    damaged: tuple[Digest, ...]
    missing: tuple[Digest, ...]
    affected_refs: tuple[str, ...]
    problems: tuple[str, ...]
    complete: bool
    checked_records: int = 0
    damaged_records: tuple[Digest, ...] = ()
    report_only: bool = False
    damaged_manifests: Mapping[Digest, tuple[str, ...]] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        found = (self.damaged, self.missing, self.affected_refs, self.problems)
        return not any((*found, self.damaged_records))


@dataclass(slots=True)
class _Found:
    checked: int = 0
    size: int = 0
    damaged: list[Digest] = field(default_factory=list)
    complete: bool = True


def verify(
    store: Store,
    *,
    max_duration: float | None = None,
    report_only: bool = False,
    progress: Progress = SILENT,
) -> Report:
    """Check chunks (least recently verified first), then manifests and refs.

    Args:
        max_duration: seconds after which no further chunk is hashed; the next run goes on there.
        report_only: change nothing. A store that is read-only here is always checked so: what was
            verified when is not known then, and a bounded run checks a random part.
    """
    context = store.context
    report_only = report_only or context.read_only
    if report_only:
        todo = _all_chunks(context, in_any_order=max_duration is not None)
    else:
        todo = _oldest_first(context)
    found = _check_chunks(context, todo, max_duration, report_only, progress)
    if not report_only:
        context.index.reconcile()
    state = _RefCheck(context, set(found.damaged) if report_only else ())
    records, damaged_records = actions.set_aside_damaged(context, report_only=report_only)
    return Report(
        found.checked,
        found.size,
        tuple(found.damaged),
        tuple(sorted(state.missing)),
        tuple(state.affected),
        tuple(state.problems),
        found.complete,
        records,
        tuple(damaged_records),
        report_only,
        {digest: tuple(needed) for digest, needed in state.manifests.items()},
    )


# --- chunks -------------------------------------------------------------------------------------


def _check_chunks(
    context: Context,
    todo: list[tuple[Digest, int]],
    max_duration: float | None,
    report_only: bool,
    progress: Progress,
) -> _Found:
    progress.start("verify", sum(size for _, size in todo))
    deadline = None if max_duration is None else context.clock() + max_duration
    confirm, stamp = (damage.is_damaged, _no_stamp) if report_only else (damage.set_aside, _stamp)
    found = _Found()
    good: dict[Digest, int] = {}
    seen = 0
    for digest, size, error in _hash_all(context, todo, lambda: _over(context, deadline)):
        seen += 1
        if isinstance(error, ChunkMissing):
            continue  # removed by a gc since the list was made; manifests are checked below
        found.checked += 1
        found.size += size
        progress.advance(size)
        if error is None:
            good[digest] = size
        elif confirm(context, digest):
            found.damaged.append(digest)
        if len(good) >= _STAMP_EVERY:
            stamp(context, good)
            good = {}
    stamp(context, good)
    progress.finish()
    found.complete = seen == len(todo)
    return found


def _over(context: Context, deadline: float | None) -> bool:
    return deadline is not None and context.clock() >= deadline


def _all_chunks(context: Context, *, in_any_order: bool) -> list[tuple[Digest, int]]:
    """Without the index. In a new order each time, many bounded runs come to see every chunk."""
    listed = sorted(_sizes(context).items())
    if in_any_order:
        random.shuffle(listed)
    return listed


def _oldest_first(context: Context) -> list[tuple[Digest, int]]:
    listed: list[tuple[int, Digest, int]] = []
    with context.index.read() as txn:
        for digest, file in chunkfiles.walk(context.layout.chunks):
            entry = txn.get(digest)
            with contextlib.suppress(FileNotFoundError):
                # The file's own size: the entry may be what is damaged.
                size = file.stat(follow_symlinks=False).st_size
                listed.append((entry.last_verified if entry else 0, digest, size))
    listed.sort()
    return [(digest, size) for _, digest, size in listed]


def _hash_all(
    context: Context, todo: list[tuple[Digest, int]], stop: Callable[[], bool]
) -> Iterator[tuple[Digest, int, ChunkError | None]]:
    window: deque[tuple[Digest, int, Future[ChunkError | None]]] = deque()
    with ThreadPoolExecutor(context.workers, thread_name_prefix="cas-verify") as pool:
        try:
            for digest, size in todo:
                if stop():
                    break
                if len(window) >= 2 * context.workers:
                    yield _result(*window.popleft())
                window.append((digest, size, pool.submit(damage.find, context, digest, size)))
            while window:
                yield _result(*window.popleft())
        finally:
            for _, _, future in window:
                future.cancel()


def _result(
    digest: Digest, size: int, future: Future[ChunkError | None]
) -> tuple[Digest, int, ChunkError | None]:
    return digest, size, future.result()


def _stamp(context: Context, good: dict[Digest, int]) -> None:
    now = context.now()
    with context.index.write() as txn:
        new = [context.layout.chunk(digest).parent for digest in good if txn.get(digest) is None]
        fsio.sync_directories(new)  # an entry says that the name is durable
        for digest, size in good.items():
            if chunkfiles.size_on_disk(context.layout.chunk(digest)) == size:
                old = txn.get(digest)
                txn.put(digest, Entry(size, old.last_seen if old else now, now))


def _no_stamp(context: Context, good: dict[Digest, int]) -> None:
    """What only reports changes no stamp."""


# --- manifests and refs -------------------------------------------------------------------------


class _RefCheck:
    """Which refs cannot be assembled, and why.

    ``missing`` chunks, ``affected`` refs, ``problems`` for what cannot be read, and ``manifests``
    among that, each with all refs that need it. ``damaged`` chunks lie in their places, and count
    as missing.
    """

    def __init__(self, context: Context, damaged: Collection[Digest] = ()) -> None:
        self._context = context
        self._damaged = damaged
        self._present = _sizes(context)
        self._verdicts: dict[Digest, bool] = {}
        self.missing: set[Digest] = set()
        self.affected: list[str] = []
        self.problems: list[str] = []
        self.manifests: dict[Digest, list[str]] = {}
        for ref_id in refs.ids(context.layout):
            self._look_at(ref_id)

    def _look_at(self, ref_id: RefId) -> None:
        try:
            whole = self._is_whole(ref_id)
        except RefNotFound:
            return
        except CasError as error:
            if not self._context.layout.ref(ref_id.name, ref_id.generation).exists():
                return
            self.problems.append(f"{ref_id}: {error}")
            whole = False
        if not whole:
            self.affected.append(str(ref_id))

    def _is_whole(self, ref_id: RefId) -> bool:
        ref = refs.read(self._context.layout, ref_id)
        digest = ref.manifest
        if digest in self.manifests:
            self.manifests[digest].append(str(ref_id))
            return False
        if digest not in self._verdicts:
            lost = self._lost(ref)
            # A gc may rightly have taken what was named by a ref that is gone by now.
            if lost and not refs.is_still(self._context.layout, ref):
                raise RefNotFound(ref.name, ref.generation)  # another may still need it
            self.missing |= lost
            self._verdicts[digest] = not lost
        return self._verdicts[digest]

    def _lost(self, ref: Ref) -> set[Digest]:
        try:
            wanted = self._context.load_manifest(ref.manifest).chunks()
        except ManifestDamaged:
            if not refs.is_still(self._context.layout, ref):
                raise RefNotFound(ref.name, ref.generation) from None
            self.manifests[ref.manifest] = [str(ref)]
            raise
        return {
            digest
            for digest, size in wanted.items()
            if digest in self._damaged or not _is_there(self._context, self._present, digest, size)
        }


def _sizes(context: Context) -> dict[Digest, int]:
    sizes: dict[Digest, int] = {}
    for digest, file in chunkfiles.walk(context.layout.chunks):
        with contextlib.suppress(FileNotFoundError):
            sizes[digest] = file.stat().st_size
    return sizes


def _is_there(context: Context, present: dict[Digest, int], digest: Digest, size: int) -> bool:
    if present.get(digest) == size:
        return True
    # Not in the list: written since it was made?
    return chunkfiles.size_on_disk(context.layout.chunk(digest)) == size


def quarantined_bytes(context: Context) -> int:
    """Bytes of the chunks that were set aside."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(context.layout.quarantine):
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat().st_size
    return total
