"""Bringing back what verify found damaged or missing, from files that may hold the bytes.

What is found is put like any other bytes, by a writer: staged, synced, published. The next export
that produces the bytes does the same without being asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cas import chunkfiles
from cas.context import Context
from cas.digest import Digest
from cas.errors import CasError, ChunkError
from cas.layout import parse_ref
from cas.manifest import ChunkPart, FileEntry, Manifest
from cas.progress import SILENT, Progress
from cas.refs import RefId
from cas.searching import Search, Source, Take, source_files
from cas.store import Store
from cas.verify import Report


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
    therefore still affected (with those that are for another reason)."""

    repaired: tuple[Digest, ...]
    missing: tuple[Need, ...]
    affected_refs: tuple[str, ...]


def repair(
    store: Store,
    report: Report,
    sources: Sequence[Path] = (),
    *,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> Repair:
    """Look for the chunks that ``report`` says are missing, and put what is found.

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
    affected = _affected(store, report)
    wanted = _wanted(report, affected)
    found: list[Digest] = []
    if wanted:
        with _taking(store, found, dry_run) as take:
            _from_quarantine(context, wanted, take)
            _from_files(context, wanted, affected, files, take, progress)
    return _result(context, report, affected, found if dry_run else _present(context, found))


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


def _affected(store: Store, report: Report) -> dict[str, Manifest]:
    """The manifests of the affected refs that can be read."""
    found: dict[str, Manifest] = {}
    for text in report.affected_refs:
        name, generation = parse_ref(text)
        assert generation is not None
        with contextlib.suppress(CasError):  # verify reported it as a problem; or it was removed
            found[text] = store.manifest(store.read_ref(RefId(name, generation)))
    return found


def _wanted(report: Report, affected: dict[str, Manifest]) -> dict[Digest, int]:
    missing = set(report.missing)
    return {
        digest: size
        for manifest in affected.values()
        for digest, size in manifest.chunks().items()
        if digest in missing
    }


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
    context: Context, report: Report, affected: dict[str, Manifest], repaired: list[Digest]
) -> Repair:
    missing = set(report.missing) - set(repaired)
    needs: dict[Digest, Need] = {}
    whole: set[str] = set()
    for ref, manifest in affected.items():
        lost = missing.intersection(manifest.chunks())
        if not lost:
            whole.add(ref)
        for entry in manifest.files:
            for need in _needs(ref, entry, lost - needs.keys()):
                needs.setdefault(need.digest, need)
    return Repair(
        tuple(sorted(repaired)),
        tuple(needs[digest] for digest in sorted(needs)),
        tuple(ref for ref in report.affected_refs if ref not in whole),
    )


def _needs(ref: str, entry: FileEntry, lost: set[Digest]) -> Iterator[Need]:
    position = 0
    for part in entry.recipe.parts:
        if isinstance(part, ChunkPart) and part.digest in lost:
            yield Need(part.digest, ref, entry.name, position, part.length)
        position += part.length
