"""One process's write in progress: it leases, puts, and commits or vanishes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cas import actions, chunkfiles, damage, fsio, refs
from cas.actions import Lookup
from cas.assemble import assembling
from cas.context import Context
from cas.digest import Digest
from cas.errors import CasError, ChunkDamaged, NoSpace, UsageError
from cas.filestat import Known, MappedSources, Sources
from cas.index import Entry
from cas.ingest import BARRIER_CHUNKS, Counters, Ingest, Piece, Readable, as_bytes
from cas.layout import check_file_name
from cas.leases import Lease
from cas.limits import SizeLimit
from cas.manifest import FileEntry, Manifest, Recipe, TensorEntry, check_files
from cas.progress import SILENT, Progress
from cas.reading import PlainReader
from cas.records import ActionRecord
from cas.refs import Ref
from cas.strictjson import Json

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Commit:
    """What one commit recorded.

    ``logical_bytes`` is what the files hold; ``new_bytes`` and ``new_chunks`` what the store's
    chunks grew by since the writer began; ``chunks`` the distinct chunks of the files; ``paths``
    the files written along with the commit, if that was asked for.
    """

    ref: Ref
    files: tuple[FileEntry, ...]
    logical_bytes: int
    new_bytes: int
    chunks: int
    new_chunks: int
    paths: tuple[Path, ...] = ()


class Writer:
    """Puts bytes and commits them under a name. Made by `Store.writer`; thread safe.

    What was put is protected from gc for the writer's life. Leaving without `commit` leaves only
    chunks that nothing refers to, which the next gc removes.
    """

    def __init__(self, context: Context, lease: Lease, progress: Progress = SILENT) -> None:
        self._context = context
        self._lease = lease
        self._progress = progress
        self._limit = SizeLimit(context)
        self._ingest = Ingest(context, lease, progress, self._limit.keep)
        sources = Sources(context.layout, context.modes, now=lambda: int(context.clock() * 1e9))
        self._mapped = MappedSources(sources, context.layout.root)
        self._closed = False

    @property
    def chunk_size(self) -> int:
        """Bytes at which longer data is cut."""
        return self._context.chunk_size

    @property
    def counters(self) -> Counters:
        return self._ingest.counters

    def put(self, data: Buffer) -> Recipe:
        """Take in any C-contiguous buffer, without copying it.

        When this returns, the bytes are in files that this writer can read, and the caller may
        change or free its memory. They are durable after `barrier` or `commit`. Memory that maps a
        file which has not changed since it was put is not read; see `cas.filestat`.

        Raises:
            UsageError: the buffer is not contiguous, or the writer is closed.
            NoSpace: the disk is full.
        """
        self._require_open()
        view = as_bytes(data)
        source = self._mapped.find(view)
        if source is not None:
            known = self._mapped.recall(source).recipe
            if known is not None and self._ingest.recall(known):
                return known
            source = self._mapped.watch(source)
        recipe = self._ingest.put(view)
        if source is not None:
            self._mapped.learn(source, Known(recipe=recipe))
        return recipe

    def digest(self, data: Buffer) -> Digest:
        """The BLAKE3 of a C-contiguous buffer, which is not put.

        Memory that maps a file is not read if its digest was asked for before and the file has
        not changed since; see `cas.filestat`.

        Raises:
            UsageError: the buffer is not contiguous, or the writer is closed.
        """
        self._require_open()
        view = as_bytes(data)
        source = self._mapped.find(view)
        if source is not None:
            known = self._mapped.recall(source).digest
            if known is not None:
                return known
            source = self._mapped.watch(source)
        digest = Digest.of_stream((view,))
        if source is not None:
            self._mapped.learn(source, Known(digest=digest))
        return digest

    def put_stream(self, stream: Readable) -> Recipe:
        """Take in all that a binary stream gives; memory held is the store's ring of buffers."""
        self._require_open()
        return self._ingest.put_stream(stream)

    def put_pieces(self, pieces: Iterable[Piece]) -> Recipe:
        """Take in what a producer makes ready in buffers of its own, each piece as one chunk.

        All pieces but the last should have `chunk_size` bytes, so that equal data gives equal
        chunks however it was put. A piece is waited for, hashed, written and released in a worker
        thread; ``pieces`` bounds how many there are at a time. Every piece that it gave is
        released when this returns or raises.

        Raises:
            UsageError: a piece is empty or larger than a chunk, or the writer is closed.
            NoSpace: the disk is full.
        """
        self._require_open()
        return self._ingest.put_pieces(pieces)

    def open_chunk(self, digest: Digest) -> int:
        """A read-only file descriptor of one chunk, which the caller closes.

        Raises:
            ChunkMissing
        """
        self._require_open()
        return self._ingest.open_chunk(digest)

    def stream(self, recipe: Recipe) -> Iterator[memoryview]:
        """The recipe's bytes in order, in pieces; each is valid until the next is asked for.

        A damaged chunk is set aside as `cas verify` does, so that it is written again when its
        bytes are put next, by this writer or another.

        Raises:
            ChunkMissing, ChunkDamaged
        """
        self._require_open()
        return self._stream(recipe)

    def read(self, recipe: Recipe, offset: int = 0, length: int | None = None) -> bytes:
        """``length`` bytes from ``offset`` on (to the end without ``length``), in memory.

        Raises:
            UsageError: the range is not inside the recipe.
            ChunkMissing, ChunkDamaged
        """
        count = recipe.size - offset if length is None else length
        return b"".join(bytes(piece) for piece in self.stream(recipe.slice(offset, count)))

    def plain_reader(self) -> PlainReader:
        """A reader that needs neither this writer's threads nor its locks: see `PlainReader`."""
        return PlainReader(self._context.layout, self._lease.id)

    def barrier(self) -> None:
        """Make everything put so far durable and known to other writers."""
        self._require_open()
        self._ingest.publish()

    def commit(
        self,
        name: str,
        files: Mapping[str, Recipe],
        tensors: Iterable[TensorEntry] = (),
        provenance: Mapping[str, Json] | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        checksums: Mapping[str, Digest] | None = None,
    ) -> Commit:
        """Record ``files`` as the next generation of ``name``. When this returns, it is durable.

        With ``directory`` the files are also assembled there, in the pass over the bytes that
        computes their checksums anyway. They get their names after the artifact is recorded: in
        the rare case that only this last step fails, the artifact is there to `assemble`.

        Args:
            name: see `cas.layout.check_ref_name`.
            files: file name -> recipe made by this writer.
            tensors: where tensors lie in those files.
            provenance: anything that JSON holds without floats.
            directory: where to assemble the files, made if it does not exist.
            checksums: the digests of whole files, by name, as far as the caller has computed them
                while `stream` gave their bytes. The others are computed here.

        Raises:
            InvalidName: the name, or a file's name.
            ChunkMissing: a chunk was removed behind the store's back.
            NoSpace, Refused, PermissionRefused: also for ``directory``.
        """
        self._require_open()
        refs.check_collision(self._context.layout, name)
        for file in files:
            check_file_name(file)
        self.barrier()
        recipes = dict(sorted(files.items()))
        if directory is None:
            known = checksums or {}
            unknown = {name: recipe for name, recipe in recipes.items() if name not in known}
            digests = {**known, **self._checksums(unknown)}
            commit = self._record(name, recipes, digests, tensors, provenance)
        else:
            with (
                self._setting_aside(),
                assembling(self._context, recipes, Path(directory), self._progress) as assembly,
            ):
                digests = {
                    file: assembly.write_hashed(file, recipe) for file, recipe in recipes.items()
                }
                commit = self._record(name, recipes, digests, tensors, provenance)
                commit = replace(commit, paths=tuple(assembly.publish()))
        self._limit.keep(replaced=commit.ref.generation > 1)
        return commit

    # --- actions --------------------------------------------------------------------------------

    def find_action(self, key: Digest) -> Lookup:
        """The record of a computation that was done before, or why there is none to use.

        Its chunks are protected for this writer's life: its recipes can be read, committed, and
        recorded again like those that this writer made.
        """
        self._require_open()
        return actions.find_leased(self._context, self._lease, key)

    def put_action(
        self,
        key: Digest,
        *,
        kind: str,
        factors: Mapping[str, Json],
        result: Json,
        recipes: Sequence[Recipe] = (),
        seconds: float,
        dependencies: Mapping[str, Json] | None = None,
        label: str = "",
    ) -> ActionRecord:
        """Record what a computation gave. When this returns, it is durable.

        An older record of the same key is replaced. See `cas.records.ActionRecord` for the
        arguments; ``recipes`` are this writer's, and ``seconds`` is what the computation took.

        Raises:
            UsageError: something in it is no JSON without floats, or it is too large.
            ChunkMissing: a chunk was removed behind the store's back.
            NoSpace, PermissionRefused
        """
        record = ActionRecord(
            key=key,
            kind=kind,
            factors=factors,
            result=result,
            recipes=tuple(recipes),
            dependencies=dependencies or {},
            label=label,
            microseconds=max(0, round(seconds * 1e6)),
            created=self._context.now(),
        )
        self.put_actions([record])
        return record

    def put_actions(self, records: Sequence[ActionRecord]) -> None:
        """`put_action` for several at once, which costs hardly more than one.

        Raises: as `put_action`.
        """
        self.barrier()
        actions.publish(self._context, self._lease, records)

    # --- inside ---------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this writer is closed; use it inside its `with` block")

    def _stream(self, recipe: Recipe) -> Iterator[memoryview]:
        with self._setting_aside():
            yield from self._ingest.stream(recipe)

    @contextlib.contextmanager
    def _setting_aside(self) -> Iterator[None]:
        """Set the chunk of a `ChunkDamaged` aside: of the right size, it would count as known."""
        try:
            yield
        except ChunkDamaged as error:
            digest = Digest.parse(error.digest)
            try:
                if damage.set_aside(self._context, digest):
                    self._ingest.forget(digest)
            except (CasError, OSError) as failed:
                logger.warning("chunk %s could not be set aside: %s", digest, failed)
            raise

    def _checksums(self, recipes: Mapping[str, Recipe]) -> dict[str, Digest]:
        self._progress.start("checksum", sum(recipe.size for recipe in recipes.values()))
        digests = {name: Digest.of_stream(self._told(recipe)) for name, recipe in recipes.items()}
        self._progress.finish()
        return digests

    def _told(self, recipe: Recipe) -> Iterator[memoryview]:
        for piece in self.stream(recipe):
            yield piece
            self._progress.advance(len(piece))

    def _record(
        self,
        name: str,
        recipes: Mapping[str, Recipe],
        digests: Mapping[str, Digest],
        tensors: Iterable[TensorEntry],
        provenance: Mapping[str, Json] | None,
    ) -> Commit:
        entries = [FileEntry(file, digests[file], recipe) for file, recipe in recipes.items()]
        manifest = Manifest(check_files(entries), tuple(tensors), provenance or {})
        digest = self._write_manifest(manifest)
        self._stamp_chunks(manifest)
        # No change to the index in this transaction: once the ref is linked, the artifact is
        # committed, and a full disk must not make its caller believe otherwise.
        with self._context.index.write():
            chunkfiles.require(self._context.layout, manifest.chunks())
            ref = refs.create(
                self._context.layout,
                name,
                digest,
                temporary=self._context.layout.staging(self._lease.id) / "ref",
                modes=self._context.modes,
            )
        counters = self.counters
        return Commit(
            ref,
            manifest.files,
            manifest.size,
            counters.new_bytes,
            len(manifest.chunks()),
            counters.new_chunks,
        )

    def _write_manifest(self, manifest: Manifest) -> Digest:
        layout, modes = self._context.layout, self._context.modes
        data = manifest.encode()
        Manifest.parse(data)  # never write what a later reader would refuse
        digest = Digest.of(data)
        self._lease.add_manifest(digest)
        path = layout.manifest(digest)
        with self._context.index.write(), fsio.os_errors(path):
            if not _holds(path, data):
                temporary = layout.staging(self._lease.id) / "manifest"
                fsio.replace_file(path, data, mode=modes.data, temporary=temporary)
        return digest

    def _stamp_chunks(self, manifest: Manifest) -> None:
        """Note in the index that the chunks are in use now (for grace)."""
        now = self._context.now()
        chunks = list(manifest.chunks().items())
        for start in range(0, len(chunks), BARRIER_CHUNKS):
            with self._context.index.write() as txn:
                for digest, size in chunks[start : start + BARRIER_CHUNKS]:
                    old = txn.get(digest)
                    verified = old.last_verified if old and old.size == size else 0
                    txn.put(digest, Entry(size, now, verified))

    def explain(self, error: NoSpace) -> None:
        """Add to the error of a full disk what stays of what was written."""
        published = self._ingest.published_bytes
        if published:
            error.kept += (
                f", and {published} bytes are in the store already: repeat this before `cas gc` "
                "removes them, and they are not written again"
            )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                if self._lease.is_mine:
                    self._mapped.save(self._context.layout.staging(self._lease.id))
            finally:
                self._ingest.close()


def _holds(path: Path, data: bytes) -> bool:
    """Whether the file has exactly this content: a damaged one is replaced, not relied on."""
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def open_writer(context: Context, progress: Progress = SILENT) -> Iterator[Writer]:
    """A writer for the length of the block."""
    context.require_writable("write")
    with context.lease() as lease:
        writer = Writer(context, lease, progress)
        try:
            yield writer
        except NoSpace as error:
            writer.explain(error)
            raise
        finally:
            writer.close()
