"""What gc must keep: marks from leases, refs and action records. See ``docs/ordering.md``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from cas import leases, refs
from cas.actions import Records
from cas.context import Context
from cas.digest import Digest
from cas.errors import CasError, RefNotFound
from cas.retention import Action, Generation, Root


@dataclass(slots=True)
class Marks:
    """What must stay. ``problems`` are reasons why the marks may be incomplete.

    ``announced`` are manifests that a live process is about to write, ``records`` what is known of
    the action records.
    """

    chunks: set[bytes] = field(default_factory=set)
    manifests: set[Digest] = field(default_factory=set)
    announced: set[Digest] = field(default_factory=set)
    records: Records | None = None
    problems: dict[str, str] = field(default_factory=dict)

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

    def add_refs(self, context: Context, without: Collection[Root] = ()) -> None:
        """Mark from every ref but those in ``without``.

        Each is read again each time: a name that was removed and committed anew has its old
        generation number, and another manifest.
        """
        for name in refs.strangers(context.layout):
            why = "no ref has such a name; rename it to what it was, or move it out of the store"
            self.problems[f"refs/{name}"] = why
        left_out = {(str(root), root.manifest) for root in without if isinstance(root, Generation)}
        for ref in _readable_refs(context, self.problems):
            if (str(ref), ref.manifest) not in left_out:
                with _noting(context, ref, self.problems):
                    self._add_manifest(context, ref.manifest)

    def add_actions(self, context: Context, without: Collection[Root] = ()) -> None:
        """Mark from every action record but those in ``without``.

        A record is a weak root: one that cannot be read is as good as none, and forbids nothing.
        """
        left_out = {root.key for root in without if isinstance(root, Action)}
        for key, kept in self.look_at_records(context).kept.items():
            if key not in left_out:
                self.chunks.update(kept.chunks)

    def look_at_records(self, context: Context) -> Records:
        """What the action records keep now."""
        if self.records is None:
            self.records = Records(context.layout)
        self.records.update()
        return self.records

    def _add_manifest(self, context: Context, digest: Digest) -> None:
        if digest not in self.manifests:
            self.chunks.update(context.load_closure(digest).chunks)
            self.manifests.add(digest)


def generations(context: Context, problems: dict[str, str]) -> list[Generation]:
    """Every generation of every name, and when it was used last; what is unreadable, a problem."""
    found = []
    for ref in _readable_refs(context, problems):
        with contextlib.suppress(FileNotFoundError):
            used = os.stat(context.layout.ref(ref.name, ref.generation)).st_mtime
            found.append(Generation(ref.name, ref.generation, ref.manifest, used))
    return found


def _readable_refs(context: Context, problems: dict[str, str]) -> Iterator[refs.Ref]:
    for ref_id in refs.ids(context.layout):
        ref = None
        with _noting(context, ref_id, problems):
            ref = refs.read(context.layout, ref_id)
        if ref is not None:
            yield ref


@contextlib.contextmanager
def _noting(
    context: Context, ref: refs.Ref | refs.RefId, problems: dict[str, str]
) -> Iterator[None]:
    """Note what cannot be read as a problem, unless its ref was removed meanwhile."""
    try:
        yield
    except RefNotFound:
        return
    except CasError as error:
        if isinstance(ref, refs.Ref):
            there = refs.is_still(context.layout, ref)
        else:
            there = context.layout.ref(ref.name, ref.generation).exists()
        if there:
            problems[str(ref)] = str(error)
