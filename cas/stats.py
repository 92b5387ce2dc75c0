"""How large a store is, and what its bytes are for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from cas import chunkfiles, gc, leases, refs
from cas.actions import Records
from cas.context import Context
from cas.digest import Digest
from cas.errors import CasError, RefNotFound
from cas.store import Store
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


def stats(store: Store) -> Stats:
    """Measure ``store``. Reads every manifest; walks chunk files only where there is no index."""
    context = store.context
    count, physical = _chunk_totals(context)
    sizes: dict[Digest, int] = {}
    logical = generations = 0
    problems: list[str] = []
    measured: dict[Digest, int] = {}
    names: set[str] = set()
    for ref_id in refs.ids(context.layout):
        generations += 1
        names.add(ref_id.name)
        try:
            digest = refs.read(context.layout, ref_id).manifest
            if digest not in measured:
                manifest = context.load_manifest(digest)
                measured[digest] = manifest.size
                sizes.update(manifest.chunks())
            logical += measured[digest]
        except RefNotFound:
            continue  # removed meanwhile
        except CasError as error:
            problems.append(f"{ref_id}: {error}")
    records = Records(context.layout)
    records.update()
    recorded = _present(context, records.chunks().keys() - sizes.keys())
    sizes.update(recorded)
    leased = leases.read_live(context.layout).chunks
    used = sum(sizes.values()) + sum(
        chunkfiles.size_on_disk(context.layout.chunk(digest)) or 0
        for digest in leased
        if digest not in sizes
    )
    staged, orphaned = _staged(context)
    return Stats(
        store=str(store.path),
        refs=len(names),
        generations=generations,
        manifests=sum(1 for _ in chunkfiles.walk(context.layout.manifests)),
        chunks=count,
        logical_bytes=logical,
        physical_bytes=physical,
        garbage_bytes=max(0, physical - used),
        staged_bytes=staged,
        orphaned_bytes=orphaned,
        quarantined_bytes=quarantined_bytes(context),
        problems=tuple(problems),
        actions=len(records.kept),
        action_bytes=sum(recorded.values()),
    )


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
    for name in os.listdir(context.layout.tmp):
        size = gc.tree_size(context.layout.tmp / name)
        staged += size
        if not leases.is_live(context.layout, name):
            orphaned += size
    return staged, orphaned
