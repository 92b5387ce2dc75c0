"""Carrying out a retention policy: finding what it gives up, and removing the names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from cas import chunkfiles, fsio, refs
from cas.actions import RecordFile, Records, evict
from cas.context import Context
from cas.digest import Digest
from cas.errors import CasError, RefDamaged, RefNotFound
from cas.marking import Marks, generations
from cas.refs import RefId
from cas.retention import Action, Chunks, Generation, Holdings, Policy, Root, choose


@dataclass(frozen=True, slots=True)
class Found:
    """What a policy gives up, and by how many bytes the rest has more than it allows.

    ``kept_bytes`` is what the rest has without what only live processes use: what remains however
    they end. It is known if the policy has a size that is exceeded, and 0 otherwise.
    """

    drops: list[Root] = field(default_factory=list)
    over_bytes: int = 0
    kept_bytes: int = 0


def find(context: Context, marks: Marks, policy: Policy) -> Found:
    """What ``policy`` gives up.

    ``marks`` has the live leases, and gets what is found out on the way: what cannot be read is a
    problem, and then nothing is given up.
    """
    if policy.is_empty or _fits(context, policy):
        return Found()
    found = generations(context, marks.problems)
    records = marks.look_at_records(context)
    actions = [Action(key, kept.entry.last_used) for key, kept in records.kept.items()]
    leased, holdings = list(marks.chunks), None
    if policy.max_bytes is not None:
        holdings = _weigh(context, marks, [*found, *actions], records)
    if marks.problems:
        return Found()
    try:
        drops = choose(policy, found, actions, context.clock(), holdings)
    except CasError as error:  # removed by hand, or by another gc, since it was weighed
        marks.problems["policy"] = f"what is there changed meanwhile: {error}"
        return Found()
    if holdings is None or policy.max_bytes is None:
        return Found(drops)
    marks.chunks.update(holdings.chunks)
    marks.manifests.update(d for d in holdings.documents if d not in records.kept)
    over = max(0, holdings.bytes - policy.max_bytes)
    return Found(drops, over, holdings.bytes - holdings.only(leased))


def drop(context: Context, policy: Policy, roots: Iterable[Root]) -> list[Root]:
    """Remove those names and records that ``policy`` still gives up; return them.

    Not removed is what was used since the plan was made, what means something else by now, and
    what has become one of the newest of its name because newer ones were removed.
    """
    layout = context.layout
    dropped: list[Root] = []
    changed = []
    with context.index.exclude():
        for root in roots:
            if isinstance(root, Action):
                if evict(layout, RecordFile(root.key, 0, root.last_used)):
                    changed.append(layout.action(root.key).parent)
                    dropped.append(root)
            elif _is_unwanted(context, policy, root):
                refs.remove(layout, RefId(root.name, root.generation))
                dropped.append(root)
        fsio.sync_directories(changed)
    return dropped


def _is_unwanted(context: Context, policy: Policy, root: Generation) -> bool:
    layout = context.layout
    try:
        ref = refs.read(layout, RefId(root.name, root.generation))
    except (RefNotFound, RefDamaged):
        return False
    newer = [g for g in refs.generations(layout, root.name) if g > root.generation]
    used = _last_used(layout.ref(root.name, root.generation))
    return (
        ref.manifest == root.manifest
        and used == root.last_used
        and len(newer) >= policy.newest_kept
    )


def _last_used(path: os.PathLike[str]) -> float | None:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path).st_mtime
    return None


def _fits(context: Context, policy: Policy) -> bool:
    """Whether a policy of size has nothing to do, which the index knows at once."""
    if policy.max_bytes is None or context.read_only:
        return False
    with context.index.read_if_possible() as txn:
        count, size = txn.totals()
    return count > 0 and size <= policy.max_bytes


def _weigh(context: Context, marks: Marks, roots: list[Root], records: Records) -> Holdings:
    """What leases and ``roots`` hold together."""
    # What records name is remembered, for they may be replaced; a manifest never changes. They may
    # name what is gone, and artifacts must not make room for that.
    recorded: dict[Digest, Chunks] = {
        key: {
            digest: size
            for digest, size in kept.chunks.items()
            if chunkfiles.size_on_disk(context.layout.chunk(digest)) == size
        }
        for key, kept in records.kept.items()
    }

    def chunks_of(document: Digest) -> Chunks:
        if document in recorded:
            return recorded[document]
        return context.load_closure(document).chunks

    holdings = Holdings(chunks_of)
    leased = ((d, chunkfiles.size_on_disk(context.layout.chunk(Digest(d)))) for d in marks.chunks)
    holdings.hold_chunks({digest: size for digest, size in leased if size is not None})
    for root in roots:
        try:
            holdings.hold(root.document)
        except CasError as error:
            if not isinstance(root, Generation) or _is_there(context, root):
                marks.problems[str(root)] = str(error)
    return holdings


def _is_there(context: Context, root: Generation) -> bool:
    ref = refs.Ref(root.name, root.generation, root.manifest)
    return refs.is_still(context.layout, ref)
