"""How many bytes the artifacts need: counted once for each manifest, and kept in the index.

The index keeps which manifests were counted and how many of them name each chunk, so that only what
came or went since the last look has to be read. The counts are derived: which manifests there are,
the refs say, and counts that cannot be brought up to date are made anew. Only statistics rely on
them; gc reads the manifests themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from cas.closures import Closure
from cas.context import Context
from cas.digest import Digest
from cas.errors import CasError, NoSpace, Refused
from cas.retention import Chunks, Holdings

#: Chunks that are counted in one transaction, unless a single manifest has more.
CHUNKS_AT_ONCE = 4096
#: So many changes, or up to a quarter of all manifests, are counted one by one; for more it is
#: faster to count anew.
FEW_MANIFESTS = 16


@dataclass(frozen=True, slots=True)
class Usage:
    """What some manifests need together.

    ``chunk_bytes`` is what all the chunks hold that they name, each counted once; ``sizes`` the
    bytes of the files that each describes. ``unreadable`` manifests are left out, with the reason.
    ``unnamed`` are those of the other chunks that were asked for which no manifest names.
    """

    chunk_bytes: int
    sizes: Mapping[Digest, int]
    unreadable: Mapping[Digest, str]
    unnamed: frozenset[Digest]


def measure(
    context: Context, manifests: Collection[Digest], others: Collection[Digest] = ()
) -> Usage:
    """What ``manifests`` need together, and which of the chunks ``others`` they do not.

    Where there is an index that can be written, only those manifests are read that were not counted
    before.
    """
    if not context.read_only:
        with contextlib.suppress(NoSpace, Refused):  # then without its help
            usage = _from_index(context, frozenset(manifests), others)
            if usage is not None:
                return usage
    holdings, sizes, unreadable = _weigh(context, manifests)
    unnamed = frozenset(digest for digest in others if not holdings.has(digest))
    return Usage(holdings.bytes, sizes, unreadable, unnamed)


def forget(context: Context, manifests: Iterable[Digest]) -> None:
    """Take manifests that are about to be deleted out of the counts, as far as there is room.

    One that is not taken out here makes the next `measure` count anew.
    """
    with contextlib.suppress(NoSpace, Refused):
        with context.index.read_if_possible() as txn:
            counted = txn.counted()
        gone = counted.keys() & set(manifests)
        if len(gone) <= _few(counted):
            _apply(context, _load(context, gone)[0], counting=False)
        else:
            with context.index.write() as txn:
                txn.recount({}, ())


def _from_index(
    context: Context, manifests: frozenset[Digest], others: Collection[Digest]
) -> Usage | None:
    """`measure` by the counts of the index; None if others keep counting other manifests."""
    unreadable: dict[Digest, str] = {}
    for _ in range(3):
        with context.index.read() as txn:
            counted = txn.counted()
            if counted.keys() == manifests - unreadable.keys():
                unnamed = frozenset(digest for digest in others if not txn.use(digest).count)
                return Usage(txn.used_bytes(), counted, unreadable, unnamed)
        _update(context, manifests, counted, unreadable)
    return None


def _update(
    context: Context,
    manifests: frozenset[Digest],
    counted: Mapping[Digest, int],
    unreadable: dict[Digest, str],
) -> None:
    """Count what is not counted, and take out what is not there any more."""
    new = manifests - counted.keys() - unreadable.keys()
    gone = counted.keys() - manifests
    if len(new) + len(gone) <= _few(manifests):
        old, lost = _load(context, gone)
        if not lost:  # or it is not known any more what they named
            added, failed = _load(context, new)
            unreadable.update(failed)
            _apply(context, old, counting=False)
            _apply(context, added, counting=True)
            return
    holdings, sizes, failed = _weigh(context, manifests)
    unreadable.update(failed)
    with context.index.write() as txn:
        txn.recount(sizes, holdings.uses())


def _few(manifests: Collection[Digest]) -> int:
    return max(FEW_MANIFESTS, len(manifests) // 4)


def _load(
    context: Context, manifests: Iterable[Digest]
) -> tuple[dict[Digest, Closure], dict[Digest, str]]:
    """(what was read, why the others were not)."""
    found: dict[Digest, Closure] = {}
    failed: dict[Digest, str] = {}
    for digest in manifests:
        try:
            found[digest] = context.load_closure(digest)
        except CasError as error:
            failed[digest] = str(error)
    return found, failed


def _apply(context: Context, manifests: Mapping[Digest, Closure], *, counting: bool) -> None:
    """Count manifests, or take them out, unless somebody else has done it."""
    left = dict(manifests)
    while left:
        with context.index.write() as txn:
            counted = txn.counted()
            chunks = 0
            while left and chunks < CHUNKS_AT_ONCE:
                digest, closure = left.popitem()
                if counting and digest not in counted:
                    txn.count(digest, closure.size, closure.chunks)
                elif not counting and digest in counted:
                    txn.uncount(digest, closure.chunks)
                chunks += len(closure.chunks)


def _weigh(
    context: Context, manifests: Iterable[Digest]
) -> tuple[Holdings, dict[Digest, int], dict[Digest, str]]:
    """Count in memory: (what they hold, bytes of their files, why some could not be read)."""
    sizes: dict[Digest, int] = {}
    failed: dict[Digest, str] = {}

    def chunks_of(digest: Digest) -> Chunks:
        closure = context.load_closure(digest)
        sizes[digest] = closure.size
        return closure.chunks

    holdings = Holdings(chunks_of)
    for digest in manifests:
        try:
            holdings.hold(digest)
        except CasError as error:
            failed[digest] = str(error)
    return holdings, sizes, failed
