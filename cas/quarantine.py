"""What verify set aside, and when it may go.

Plan, then execute, as for everything that deletes. A damaged chunk is of no use to the store, but
while an artifact lacks it and no good copy is back, it is the nearest thing to the lost bytes that
there is: so it stays until then, unless its owner insists.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from cas import damage, fsio, leases, refs
from cas.context import Context
from cas.digest import Digest
from cas.errors import CasError, RefNotFound
from cas.layout import parse_digest_name
from cas.store import Store

_RECORD = "action-"
_COPY: Final = "a good copy is back"
_NEEDLESS: Final = "nothing needs it"
_RECOMPUTED: Final = "an action record is computed again"
#: Reasons to go.
_GOES: Final = (_COPY, _NEEDLESS, _RECOMPUTED)

#: What tells a file from another that has its name later: device, inode, size, time of change.
Identity: TypeAlias = "tuple[int, int, int, int]"


@dataclass(frozen=True, slots=True)
class Item:
    """One file in quarantine, its bytes, and why it goes or stays.

    ``identity`` is the file's when it was looked at, ``copy`` that of the good copy in its place.
    """

    path: Path
    size: int
    reason: str
    identity: Identity
    copy: Identity | None = None

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be deleted, or was, and what stays."""

    drop: tuple[Item, ...]
    keep: tuple[Item, ...]
    forced: bool = False

    @property
    def dropped_bytes(self) -> int:
        return sum(item.size for item in self.drop)


def plan(store: Store, *, force: bool = False) -> Plan:
    """Decide about each file in quarantine. Reads only, the good copies of the chunks among it.

    A chunk goes when a good copy is in its place again, or when no artifact and no live process
    needs it; damaged action records go, since whoever misses one computes again. With ``force``
    everything goes. Files with other names, and what is no file, are nobody's business here.
    """
    context = store.context
    needs = _Needs(context)
    drop: list[Item] = []
    keep: list[Item] = []
    for path, identity in _files(context):
        item = _judge(context, needs, path, identity)
        if item.reason in _GOES:
            drop.append(item)
        elif force:
            drop.append(replace(item, reason="asked for by force"))
        else:
            keep.append(item)
    return Plan(tuple(drop), tuple(keep), force)


def execute(store: Store, made: Plan) -> Plan:
    """Delete what ``made`` drops, and return what became of it.

    Each is looked at again under the store's mutex. What is not the file any more that was
    planned for, or is needed by now, or whose good copy changed since, stays and says so; what is
    gone is in neither list.

    Raises:
        ReadOnlyStore
    """
    context = store.context
    context.require_writable("empty the quarantine")
    dropped: list[Item] = []
    kept = list(made.keep)
    if made.drop:
        needs = _Needs(context)
        with context.index.exclude():  # nobody sets aside, commits or deletes meanwhile
            for item in made.drop:
                # By its name, below this store: a plan says what to delete and not where.
                path = context.layout.quarantine / item.name
                if not _is_there(path):
                    continue
                why = _why_not_now(context, path, item, needs, forced=made.forced)
                if why:
                    kept.append(replace(item, reason=why))
                elif fsio.unlink(path):
                    dropped.append(item)
            fsio.sync_path(context.layout.quarantine)
    return Plan(tuple(dropped), tuple(kept), made.forced)


def _why_not_now(
    context: Context, path: Path, item: Item, needs: _Needs, *, forced: bool
) -> str | None:
    """Why a file must not be deleted although that was planned."""
    if not _is_ours(item.name) or _identity(path) != item.identity:
        return "it is not the file any more that was to be deleted; look again"
    digest = parse_digest_name(item.name)
    if forced or digest is None:
        return None
    if item.reason == _COPY:
        same = _identity(context.layout.chunk(digest)) == item.copy
        return None if same else "its good copy changed meanwhile; look again"
    return needs.why(digest) or None


def _files(context: Context) -> Iterator[tuple[Path, Identity]]:
    try:
        names = sorted(os.listdir(context.layout.quarantine))
    except FileNotFoundError:  # a copy of a store that left out what was empty
        return
    for name in filter(_is_ours, names):
        path = context.layout.quarantine / name
        identity = _identity(path)
        if identity is not None:
            yield path, identity


def _is_ours(name: str) -> bool:
    return parse_digest_name(name.removeprefix(_RECORD)) is not None


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _identity(path: Path) -> Identity | None:
    """None if there is no regular file."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _judge(context: Context, needs: _Needs, path: Path, identity: Identity) -> Item:
    digest, size = parse_digest_name(path.name), identity[2]
    if digest is None:
        return Item(path, size, _RECOMPUTED, identity)
    copy = _identity(context.layout.chunk(digest))  # before it is read
    if damage.is_good(context, digest):
        return Item(path, size, _COPY, identity, copy)
    return Item(path, size, needs.why(digest) or _NEEDLESS, identity)


class _Needs:
    """Which artifacts need a chunk; found out at the first question."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._chunks: dict[Digest, str] | None = None
        self._problem = ""

    def why(self, digest: Digest) -> str:
        """Why a chunk is needed; empty if it is not."""
        if self._chunks is None:
            self._chunks = self._find()
        return self._chunks.get(digest, self._problem)

    def _find(self) -> dict[Digest, str]:
        for name in refs.strangers(self._context.layout):
            self._problem = f"refs/{name} is no name of an artifact, and might need it"
        found = dict.fromkeys(leases.read_live(self._context.layout).chunks, "a process uses it")
        for ref_id in refs.ids(self._context.layout):
            try:
                manifest = self._context.load_manifest(
                    refs.read(self._context.layout, ref_id).manifest
                )
            except RefNotFound:
                continue  # removed meanwhile
            except CasError:
                self._problem = f"{ref_id} cannot be read, and might need it"
                continue
            for digest in manifest.chunks():
                found.setdefault(digest, f"{ref_id} needs it")
        return found
