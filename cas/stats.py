"""How large a store is, and what its bytes are for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from cas import chunkfiles, gc, leases, refs
from cas.actions import Records
from cas.context import Context, HasContext
from cas.digest import Digest
from cas.errors import CasError, ManifestDamaged, RefNotFound
from cas.refs import Ref, RefId
from cas.usage import measure
from cas.verify import quarantined_bytes


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts and bytes of one store.

    ``refs`` names, ``generations`` of them; ``logical_bytes`` is what all generations' files hold,
    ``physical_bytes`` what the chunks hold (as the index counts them, of a store that can be
    written), ``garbage_bytes`` the part of those that no ref
    and no live process uses, ``staged_bytes`` chunks not yet published (``orphaned_bytes`` of them
    by processes that have ended), ``quarantined_bytes`` damaged chunks set aside, ``actions``
    records of computations, ``action_bytes`` what chunks hold that only those need. ``problems``
    are refs and manifests that cannot be read, whose chunks therefore count as garbage here.
    """

    store: str
    refs: int
    generations: int
    manifests: int
    chunks: int
    logical_bytes: int
    physical_bytes: int
    garbage_bytes: int
    staged_bytes: int
    orphaned_bytes: int
    quarantined_bytes: int
    problems: tuple[str, ...]
    actions: int
    action_bytes: int


def stats(store: HasContext) -> Stats:
    """Measure a store.

    Where there is an index that can be written, it keeps what was found out: only manifests that
    are new since the last time are read. Without, every manifest is, and chunk files are walked.
    """
    context = store.context
    count, physical = _chunk_totals(context)
    found = _look_at_refs(context)
    records = Records(context.layout)
    records.update()
    recorded = records.chunks().keys()
    leased = leases.read_live(context.layout).chunks
    usage = measure(context, found.manifests.keys(), recorded | leased)
    for digest, why in usage.unreadable.items():
        found.problems += _damaged(context, digest, found.manifests[digest], why)
    action_bytes = sum(_present(context, recorded & usage.unnamed).values())
    leased_bytes = sum(_present(context, (leased & usage.unnamed) - recorded).values())
    staged, orphaned = _staged(context)
    return Stats(
        store=str(context.layout.root),
        refs=len(found.names),
        generations=found.generations,
        manifests=found.files,
        chunks=count,
        logical_bytes=sum(
            usage.sizes[digest] * len(named)
            for digest, named in found.manifests.items()
            if digest in usage.sizes
        ),
        physical_bytes=physical,
        garbage_bytes=max(0, physical - usage.chunk_bytes - action_bytes - leased_bytes),
        staged_bytes=staged,
        orphaned_bytes=orphaned,
        quarantined_bytes=quarantined_bytes(context),
        problems=tuple(sorted(found.problems)),
        actions=len(records.kept),
        action_bytes=action_bytes,
    )


@dataclass(slots=True)
class _Refs:
    """What the refs are: ``manifests`` by which of them each is named, ``files`` of manifests."""

    files: int
    generations: int = 0
    names: set[str] = field(default_factory=set)
    manifests: dict[Digest, list[RefId]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _look_at_refs(context: Context) -> _Refs:
    named: dict[Digest, list[RefId]] = {}
    # Before the refs: the manifest of a ref that is committed meanwhile is looked for singly.
    files = set(chunkfiles.unmarked(context.layout.manifests, ())[1])
    found = _Refs(len(files))
    for ref_id in refs.ids(context.layout):
        found.generations += 1
        found.names.add(ref_id.name)
        try:
            named.setdefault(refs.read(context.layout, ref_id).manifest, []).append(ref_id)
        except RefNotFound:
            continue  # removed meanwhile
        except CasError as error:
            found.problems.append(f"{ref_id}: {error}")
    for digest, ref_ids in named.items():
        if digest in files or context.layout.manifest(digest).exists():
            found.manifests[digest] = ref_ids
        else:
            why = ManifestDamaged(str(digest), "is missing")
            found.problems += _damaged(context, digest, ref_ids, why)
    return found


def _damaged(
    context: Context, manifest: Digest, ref_ids: Iterable[RefId], why: object
) -> list[str]:
    """A line for each ref that still holds ``manifest``: gc may have taken what others held."""
    held = (Ref(ref_id.name, ref_id.generation, manifest) for ref_id in ref_ids)
    return [f"{ref}: {why}" for ref in held if refs.is_still(context.layout, ref)]


def _present(context: Context, digests: Iterable[Digest]) -> dict[Digest, int]:
    """The chunks that are there, and their sizes: a record may name some that are not."""
    sizes = {digest: chunkfiles.size_on_disk(context.layout.chunk(digest)) for digest in digests}
    return {digest: size for digest, size in sizes.items() if size is not None}


def _chunk_totals(context: Context) -> tuple[int, int]:
    if context.read_only:
        return chunkfiles.total_size(context.layout)
    with context.index.read() as txn:
        return txn.totals()


def _staged(context: Context) -> tuple[int, int]:
    """(bytes in all staging directories, those of them whose writer is gone)."""
    staged = orphaned = 0
    try:
        names = os.listdir(context.layout.tmp)
    except FileNotFoundError:  # a read-only copy without its empty directories
        names = []
    for name in names:
        size = gc.tree_size(context.layout.tmp / name)
        staged += size
        if not leases.is_live(context.layout, name):
            orphaned += size
    return staged, orphaned
