"""Bringing back what verify found damaged or missing, from files that may hold the bytes.

A manifest comes back from a copy of its file only: an export gives another one.

What is found is put like any other bytes, by a writer: staged, synced, published. The next export
that produces the bytes does the same without being asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cas import chunkfiles, fsio
from cas.context import Context
from cas.digest import Digest
from cas.errors import CasError, ChunkError
from cas.layout import parse_ref
from cas.manifest import ChunkPart, FileEntry, Manifest
from cas.progress import SILENT, Progress
from cas.refs import RefId
from cas.searching import Search, Source, Take, source_files
from cas.store import Store
from cas.strictjson import MAX_DOCUMENT_BYTES
from cas.verify import Report

#: How a manifest begins: canonical JSON with its keys in order.
_MANIFEST: Final = b'{"files":['


@dataclass(frozen=True, slots=True)
class Need:
    """A chunk that is still missing, and the first place where an artifact needs it."""

    digest: Digest
    ref: str
    file: str
    offset: int
    length: int

    def __str__(self) -> str:
        return (
            f"{self.digest} (bytes {self.offset}..{self.offset + self.length} of {self.file} of "
            f"{self.ref})"
        )


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair did: the chunks brought back, those still missing, and the refs that are
    therefore still affected (with those that are for another reason); the manifests brought back,
    and what still cannot be read."""

    repaired: tuple[Digest, ...]
    missing: tuple[Need, ...]
    affected_refs: tuple[str, ...]
    manifests: tuple[Digest, ...] = ()
    problems: tuple[str, ...] = ()


def repair(
    store: Store,
    report: Report,
    sources: Sequence[Path] = (),
    *,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> Repair:
    """Look for the chunks that ``report`` says are missing, and put what is found.

    Manifests that it says are damaged come first: from a file that is the same byte by byte, in a
    copy of the store, say.

    Args:
        report: what verify found.
        sources: files, and directories with files, in which to look. The quarantine is always
            looked in: reading a chunk may have failed only once.
        dry_run: only tell what would be repaired.

    Raises:
        SourceMissing, UsageError: a source is not there, or is no file.
        ReadOnlyStore, NoSpace
    """
    files = source_files(sources)
    context = store.context
    if not dry_run:
        context.require_writable("repair")
    manifests = _find_manifests(report, files)
    if not dry_run:
        _put_manifests(context, manifests)
    affected = _affected(store, report, manifests)
    wanted = _wanted(context, report, affected, manifests)
    missing = set(wanted)
    found: list[Digest] = []
    if wanted:
        with _taking(store, found, dry_run) as take:
            _from_quarantine(context, wanted, take)
            _from_files(context, wanted, affected, files, take, progress)
    repaired = found if dry_run else _present(context, found)
    return _result(report, affected, manifests, repaired, missing - set(repaired))


def _find_manifests(report: Report, files: Sequence[Path]) -> dict[Digest, bytes]:
    """The damaged manifests that lie among ``files``, whatever those are called."""
    found: dict[Digest, bytes] = {}
    for path in files if report.damaged_manifests else ():
        with Source(path) as source:
            if source.size > MAX_DOCUMENT_BYTES or source.read(0, len(_MANIFEST)) != _MANIFEST:
                continue
            data = source.read(0, source.size)
        digest = Digest.of(data)
        if digest in report.damaged_manifests:
            found[digest] = data
    return found


def _put_manifests(context: Context, manifests: Mapping[Digest, bytes]) -> None:
    if not manifests:
        return
    with context.lease() as lease:
        for digest, data in manifests.items():
            path = context.layout.manifest(digest)
            temporary = context.layout.staging(lease.id) / "manifest"
            with context.index.write(), fsio.os_errors(path):
                fsio.replace_file(path, data, mode=context.modes.data, temporary=temporary)


def _from_files(
    context: Context,
    wanted: dict[Digest, int],
    affected: dict[str, Manifest],
    files: Sequence[Path],
    take: Take,
    progress: Progress,
) -> None:
    entries = [entry for manifest in affected.values() for entry in manifest.files]
    using = [e for e in entries if any(part.digest in wanted for part in e.recipe.chunks())]
    search = Search(wanted, using, context.chunk_size, lambda part: _read(context, part), take)
    progress.start("repair", sum(path.stat().st_size for path in files if path.is_file()))
    for path in files:
        if wanted:
            with Source(path) as source:
                search.look_in(source)
                progress.advance(source.size)
    progress.finish()


def _affected(
    store: Store, report: Report, manifests: Mapping[Digest, bytes]
) -> dict[str, Manifest]:
    """The manifests of the affected refs that can be read, or were found."""
    found: dict[str, Manifest] = {}
    for text in report.affected_refs:
        name, generation = parse_ref(text)
        assert generation is not None
        with contextlib.suppress(CasError):  # verify reported it as a problem; or it was removed
            digest = store.read_ref(RefId(name, generation)).manifest
            if digest in manifests:
                found[text] = Manifest.parse(manifests[digest])
            else:
                found[text] = store.manifest(digest)
    return found


def _wanted(
    context: Context,
    report: Report,
    affected: dict[str, Manifest],
    manifests: Mapping[Digest, bytes],
) -> dict[Digest, int]:
    """The missing chunks and their sizes.

    Verify could not know those that only a manifest names which was damaged.
    """
    known, damaged = set(report.missing), set(report.damaged)
    sizes: dict[Digest, int] = {}
    for manifest in affected.values():
        sizes.update(manifest.chunks())
    return {
        digest: size
        for digest, size in sizes.items()
        if digest in known
        or (manifests and (digest in damaged or not _is_there(context, digest, size)))
    }


def _is_there(context: Context, digest: Digest, size: int) -> bool:
    return chunkfiles.size_on_disk(context.layout.chunk(digest)) == size


@contextlib.contextmanager
def _taking(store: Store, found: list[Digest], dry_run: bool) -> Iterator[Take]:
    """What to do with a chunk: note it, and unless ``dry_run`` put it."""
    if dry_run:
        yield lambda digest, data: found.append(digest)
        return
    with store.writer() as writer:

        def put(digest: Digest, data: bytes) -> None:
            writer.put(data)
            found.append(digest)

        yield put
        writer.barrier()


def _from_quarantine(context: Context, wanted: dict[Digest, int], take: Take) -> None:
    for digest, size in list(wanted.items()):
        path = context.layout.quarantined(digest)
        with contextlib.suppress(CasError):  # not there, or still damaged
            data = bytearray(min(size, context.chunk_size))
            chunkfiles.read_into(path, digest, len(data), memoryview(data))
            del wanted[digest]
            take(digest, bytes(data))


def _read(context: Context, part: ChunkPart) -> bytes | None:
    buffer = memoryview(bytearray(part.size))
    with contextlib.suppress(ChunkError):
        path = context.layout.chunk(part.digest)
        return bytes(chunkfiles.read_into(path, part.digest, part.size, buffer))
    return None


def _present(context: Context, found: list[Digest]) -> list[Digest]:
    """Those of ``found`` that are in their places now."""
    layout = context.layout
    return [d for d in found if chunkfiles.size_on_disk(layout.chunk(d)) is not None]


def _result(
    report: Report,
    affected: dict[str, Manifest],
    manifests: Mapping[Digest, bytes],
    repaired: list[Digest],
    missing: set[Digest],
) -> Repair:
    needs: dict[Digest, Need] = {}
    whole: set[str] = set()
    for ref, manifest in affected.items():
        lost = missing.intersection(manifest.chunks())
        if not lost:
            whole.add(ref)
        for entry in manifest.files:
            for need in _needs(ref, entry, lost - needs.keys()):
                needs.setdefault(need.digest, need)
    told = {f"{report.damaged_manifests[digest][0]}: " for digest in manifests}
    return Repair(
        tuple(sorted(repaired)),
        tuple(needs[digest] for digest in sorted(needs)),
        tuple(ref for ref in report.affected_refs if ref not in whole),
        tuple(sorted(manifests)),
        tuple(text for text in report.problems if not text.startswith(tuple(told))),
    )


def _needs(ref: str, entry: FileEntry, lost: set[Digest]) -> Iterator[Need]:
    position = 0
    for part in entry.recipe.parts:
        if isinstance(part, ChunkPart) and part.digest in lost:
            yield Need(part.digest, ref, entry.name, position, part.length)
        position += part.length
