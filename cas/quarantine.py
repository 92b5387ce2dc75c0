"""What verify set aside, and when it may go.

Plan, then execute, as for everything that deletes. A damaged chunk is of no use to the store, but
while an artifact lacks it and no good copy is back, it is the nearest thing to the lost bytes that
there is: so it stays until then, unless its owner insists.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cas import damage, fsio, leases, refs
from cas.context import Context
from cas.digest import Digest
from cas.errors import CasError, RefNotFound
from cas.layout import parse_digest_name
from cas.store import Store

_RECORD = "action-"


@dataclass(frozen=True, slots=True)
class Item:
    """One file in quarantine, its bytes, and why it goes or stays."""

    path: Path
    size: int
    reason: str

    @property
    def name(self) -> str:
        return self.path.name


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be deleted, and what stays."""

    drop: tuple[Item, ...]
    keep: tuple[Item, ...]

    @property
    def dropped_bytes(self) -> int:
        return sum(item.size for item in self.drop)


def plan(store: Store, *, force: bool = False) -> Plan:
    """Decide about each file in quarantine. Reads only, the good copies of the chunks among it.

    A chunk goes when a good copy is in its place again, or when no artifact and no live process
    needs it; damaged action records go, since whoever misses one computes again. With ``force``
    everything goes. Files with other names are nobody's business here.
    """
    context = store.context
    needs = _Needs(context)
    drop: list[Item] = []
    keep: list[Item] = []
    for path, size in _files(context):
        digest = parse_digest_name(path.name)
        if digest is None:
            drop.append(Item(path, size, "an action record is computed again"))
            continue
        reason = _why_not_needed(context, digest, needs)
        if reason is None and not force:
            keep.append(Item(path, size, needs.why(digest)))
        else:
            drop.append(Item(path, size, reason or "asked for by force"))
    return Plan(tuple(drop), tuple(keep))


def execute(store: Store, made: Plan) -> None:
    """Delete what ``made`` drops.

    Raises:
        ReadOnlyStore
    """
    context = store.context
    context.require_writable("empty the quarantine")
    if made.drop:
        with context.index.exclude():  # nobody sets aside, or makes the same plan true, meanwhile
            for item in made.drop:
                fsio.unlink(item.path)
            fsio.sync_path(context.layout.quarantine)


def _files(context: Context) -> Iterator[tuple[Path, int]]:
    try:
        names = sorted(os.listdir(context.layout.quarantine))
    except FileNotFoundError:  # a copy of a store that left out what was empty
        return
    for name in names:
        path = context.layout.quarantine / name
        if parse_digest_name(name) or parse_digest_name(name.removeprefix(_RECORD)):
            with contextlib.suppress(FileNotFoundError):
                yield path, path.lstat().st_size


def _why_not_needed(context: Context, digest: Digest, needs: _Needs) -> str | None:
    if damage.is_good(context, digest):
        return "a good copy is back"
    return None if needs.why(digest) else "nothing needs it"


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
