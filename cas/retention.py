"""Which artifacts and action records to give up: a pure policy over what there is.

`choose` takes values and returns values; `cas.gc` finds the values and carries the choice out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cas.digest import Digest


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be given up, and for what.

    Never given up: of each name the ``keep_last`` newest generations and, without
    ``include_current``, the current one; and what was used within ``older_than`` seconds. Without
    ``max_bytes``, everything else is given up where ``keep_last`` or ``older_than`` is given (an
    action record only for its age). With ``max_bytes``, only as much as it takes for the chunks of
    what remains to have no more bytes than that: least recently used action records first, then
    least recently used generations.
    """

    keep_last: int | None = None
    older_than: float | None = None
    max_bytes: int | None = None
    include_current: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is ever given up."""
        return self.keep_last is None and self.older_than is None and self.max_bytes is None

    @property
    def newest_kept(self) -> int:
        """How many generations of each name are never given up."""
        return max(self.keep_last or 0, 0 if self.include_current else 1)

    def is_old(self, last_used: float, now: float) -> bool:
        """Whether age permits to give it up; a time in the future counts as now."""
        return not self.older_than or now - last_used >= self.older_than


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of a name, the manifest it holds, and when it was used (seconds, epoch)."""

    name: str
    generation: int
    manifest: Digest
    last_used: float

    @property
    def document(self) -> Digest:
        """What names the chunks that the generation needs."""
        return self.manifest

    def __str__(self) -> str:
        return f"{self.name}@{self.generation}"


@dataclass(frozen=True, slots=True)
class Action:
    """The record of one action."""

    key: Digest
    last_used: float

    @property
    def document(self) -> Digest:
        """The record itself names its chunks."""
        return self.key

    def __str__(self) -> str:
        return str(self.key)


Root: TypeAlias = "Generation | Action"
#: Each distinct chunk that a root needs, and its size in bytes.
Chunks: TypeAlias = "Mapping[bytes, int]"


class Holdings:
    """What some roots hold together: each chunk once, and by how many it is needed.

    Several roots may hold one document (a manifest or a record); its chunks are asked for when the
    first takes hold and when the last lets go.
    """

    def __init__(self, chunks_of: Callable[[Digest], Chunks]) -> None:
        self._chunks_of = chunks_of
        self._documents: dict[Digest, int] = {}
        self._sizes: dict[bytes, int] = {}
        self._shared: dict[bytes, int] = {}  # only those that are needed more than once
        self.bytes = 0

    @property
    def chunks(self) -> Iterable[bytes]:
        return self._sizes.keys()

    def only(self, chunks: Iterable[bytes]) -> int:
        """Bytes of those of ``chunks`` that are held once: by who held them apart from roots."""
        alone = (d for d in chunks if d in self._sizes and d not in self._shared)
        return sum(self._sizes[digest] for digest in alone)

    def has(self, digest: bytes) -> bool:
        """Whether the chunk is held."""
        return digest in self._sizes

    def uses(self) -> Iterator[tuple[bytes, int, int]]:
        """Each chunk, by how many documents it is needed, and its size; in the chunks' order."""
        for digest in sorted(self._sizes):
            yield digest, self._shared.get(digest, 0) + 1, self._sizes[digest]

    @property
    def documents(self) -> Iterable[Digest]:
        return self._documents.keys()

    def hold(self, document: Digest) -> int:
        """Add a root; return by how many bytes the holdings grew."""
        count = self._documents.get(document, 0)
        added = 0 if count else self.hold_chunks(self._chunks_of(document))
        self._documents[document] = count + 1
        return added

    def release(self, document: Digest) -> int:
        """Take a root away that was added; return by how many bytes the holdings shrank."""
        count = self._documents.pop(document)
        if count > 1:
            self._documents[document] = count - 1
            return 0
        freed = 0
        for digest in self._chunks_of(document):
            others = self._shared.pop(digest, 0)
            if others == 0:
                freed += self._sizes.pop(digest)
            elif others > 1:
                self._shared[digest] = others - 1
        self.bytes -= freed
        return freed

    def hold_chunks(self, chunks: Chunks) -> int:
        """Add chunks that stay whatever roots are released."""
        added = 0
        for digest, size in chunks.items():
            if digest in self._sizes:
                self._shared[digest] = self._shared.get(digest, 0) + 1
            else:
                self._sizes[digest] = size
                added += size
        self.bytes += added
        return added


def choose(
    policy: Policy,
    generations: Iterable[Generation],
    actions: Iterable[Action],
    now: float,
    holdings: Holdings | None = None,
) -> list[Root]:
    """What to give up, in the order in which it was chosen.

    Args:
        generations: all of them.
        actions: all records.
        holdings: what generations, actions and processes hold together; needed for
            ``policy.max_bytes``, and left without what is given up.
    """
    if policy.is_empty:
        return []
    records = _oldest_first(action for action in actions if policy.is_old(action.last_used, now))
    old = _oldest_first(unprotected(policy, generations, now))
    if policy.max_bytes is not None:
        assert holdings is not None
        return _shrink([*records, *old], holdings, policy.max_bytes)
    return [*records, *old] if policy.older_than is not None else list(old)


def unprotected(
    policy: Policy, generations: Iterable[Generation], now: float
) -> Iterable[Generation]:
    """The generations that ``policy`` does not protect."""
    by_name: defaultdict[str, list[Generation]] = defaultdict(list)
    for item in generations:
        by_name[item.name].append(item)
    for items in by_name.values():
        items.sort(key=lambda item: -item.generation)
        for item in items[policy.newest_kept :]:
            if policy.is_old(item.last_used, now):
                yield item


def _oldest_first(roots: Iterable[Root]) -> list[Root]:
    return sorted(roots, key=lambda root: (root.last_used, str(root)))


def _shrink(candidates: list[Root], holdings: Holdings, limit: int) -> list[Root]:
    """Release candidates in order until the limit is kept; then take back what costs nothing.

    Two roots may share what they hold, so that giving up the first frees nothing unless the second
    goes too. When enough has gone, each is looked at again, the most recently used first: what
    still fits, stays.
    """
    given_up: list[Root] = []
    for root in candidates:
        if holdings.bytes <= limit:
            break
        holdings.release(root.document)
        given_up.append(root)
    chosen: list[Root] = []
    for root in reversed(given_up):
        added = holdings.hold(root.document)
        if added and holdings.bytes > limit:
            holdings.release(root.document)
            chosen.append(root)
    return chosen[::-1]
