"""The store: opening it, and what can be done with it as a whole."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from cas import fsio, header, limits, refs, sharing
from cas.actions import Actions
from cas.assemble import assembling
from cas.chunking import DEFAULT_CHUNK_SIZE
from cas.config import Config
from cas.context import DEFAULT_BUFFER_BYTES, DEFAULT_WORKERS, Context
from cas.digest import Digest
from cas.errors import ManifestDamaged, NoSpace, RefDamaged, StoreNotFound
from cas.layout import Layout, parse_ref
from cas.locks import FileLock
from cas.manifest import Manifest
from cas.modes import Modes, process_umask
from cas.progress import SILENT, Progress
from cas.refs import Ref, RefId
from cas.writer import Writer, open_writer

logger = logging.getLogger(__name__)


class Store:
    """A content-addressed store on a local disk. Use `Store.open`; any number of processes may.

    Thread safe. Close it, or use it as a context manager; a process that just ends loses nothing.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.actions = Actions(context)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        read_only: bool = False,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        umask: int | None = None,
        clock: Callable[[], float] = time.time,
        workers: int = DEFAULT_WORKERS,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        settings: Mapping[str, str] | None = None,
    ) -> Store:
        """Open the store at ``path``, creating it at first use.

        Args:
            path: a directory on a local filesystem; ``~`` is expanded.
            create: make the store if there is none.
            read_only: never write, even where it would be possible. A store that cannot be written
                is opened so by itself.
            chunk_size: bytes, a power of two; used only when the store is created.
            umask: permission bits to withhold, instead of what the store's config says.
            clock: seconds since the epoch, for stamps and grace periods.
            workers: threads that hash and write.
            buffer_bytes: memory that reading a stream may take.
            settings: values that beat those in the store's config, in the same words, such as
                ``{"max_size": "200G"}``, for what is done through this object.

        Raises:
            UsageError: ``settings`` cannot be understood.
            StoreNotFound, NotAStore, UnknownFormat, NetworkFilesystem, PermissionRefused, NoSpace
        """
        layout = Layout(Path(os.path.abspath(os.path.expanduser(path))))
        header.check_filesystem(layout.root)
        own = Modes(process_umask() if umask is None else umask)
        try:
            found = header.read(layout)
        except StoreNotFound:
            if not create or read_only:
                raise
            found = header.create(layout, chunk_size, own)
        overrides = dict(settings or {})
        config = Config.load(layout).overridden(overrides)
        if umask is None and config.umask is not None:
            own = Modes(config.umask)
        if not read_only:
            header.restore_directories(layout, own)
        return cls(
            Context(
                layout=layout,
                header=found,
                config=config,
                modes=own,
                read_only=read_only or not header.is_writable(layout),
                clock=clock,
                workers=workers,
                buffer_bytes=buffer_bytes,
                overrides=overrides,
            )
        )

    @property
    def path(self) -> Path:
        return self.context.layout.root

    @property
    def chunk_size(self) -> int:
        return self.context.chunk_size

    @property
    def read_only(self) -> bool:
        return self.context.read_only

    def close(self) -> None:
        self.context.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- writing --------------------------------------------------------------------------------

    def writer(self, progress: Progress = SILENT) -> contextlib.AbstractContextManager[Writer]:
        """A writer for the length of a ``with`` block.

        Raises:
            ReadOnlyStore
        """
        return open_writer(self.context, progress)

    def remove(self, name: str) -> list[Ref | RefId]:
        """Remove ``NAME@GENERATION``, or every generation of ``NAME``; chunks stay until gc.

        Returns what was removed; a generation whose file is damaged as a bare `RefId`.

        Raises:
            RefNotFound, InvalidName, ReadOnlyStore
        """
        self.context.require_writable("remove an artifact")
        with self.context.index.exclude():
            targets = self.select(name)
            removed = [self._read_or_id(target) for target in targets]
            for target in targets:
                refs.remove(self.context.layout, target)
        if self.context.config.max_size is not None:
            limits.reconsider(self.context)
        return removed

    def select(self, name: str) -> list[RefId]:
        """The generations that ``NAME`` or ``NAME@GENERATION`` stands for, rising.

        Raises:
            RefNotFound, InvalidName
        """
        wanted, generation = parse_ref(name)
        known = refs.generations(self.context.layout, wanted)
        if generation is None and known:
            return [RefId(wanted, g) for g in known]
        if generation in known:
            return [RefId(wanted, generation)]
        # Raises the error that lists what there is, unless a commit has just made it.
        return [refs.resolve(self.context.layout, name).id]

    def _read_or_id(self, target: RefId) -> Ref | RefId:
        with contextlib.suppress(RefDamaged):
            return refs.read(self.context.layout, target)
        return target

    def set_config(self, key: str, value: str | None) -> Config:
        """Change one setting of the store, None: to its default; return the new configuration.

        A new ``umask`` is applied to what is in the store already; a warning says how many files
        belong to other users, who have to change theirs. A umask that is taken back changes no
        permissions of what is there.

        Raises:
            UsageError, ReadOnlyStore
        """
        self.context.require_writable("change its configuration")
        layout = self.context.layout
        with self.context.lease() as lease, self.context.index.write():
            config = Config.load(layout)  # others may have changed it
            config = config.without(key) if value is None else config.with_value(key, value)
            config.save(layout, layout.staging(lease.id) / "config", self.context.modes)
        self.context.config = config
        if key == "umask" and config.umask is not None:
            self.context.modes = self.context.index.modes = Modes(config.umask)
            foreign = sharing.adjust(layout, self.context.modes).foreign
            if foreign:
                logger.warning(
                    "%d files in %s belong to other users and keep their permissions; let their "
                    "owners, or root, set the umask again",
                    foreign,
                    layout.root,
                )
        return config

    # --- reading --------------------------------------------------------------------------------

    def resolve(self, name: str) -> Ref:
        """``NAME`` (its current generation) or ``NAME@GENERATION``.

        Raises:
            RefNotFound, RefDamaged, InvalidName
        """
        return refs.resolve(self.context.layout, name)

    def refs(self) -> Iterator[RefId]:
        """Every generation of every name, in order."""
        return refs.ids(self.context.layout)

    def read_ref(self, ref: RefId) -> Ref:
        """Raises: RefNotFound, RefDamaged"""
        return refs.read(self.context.layout, ref)

    def manifest(self, ref: Ref | Digest | str) -> Manifest:
        """The manifest of a ref, of a name, or with a digest.

        Raises:
            RefNotFound, RefDamaged, ManifestDamaged
        """
        if isinstance(ref, str):
            ref = self.resolve(ref)
        return self.context.load_manifest(ref.manifest if isinstance(ref, Ref) else ref)

    def assemble(
        self,
        ref: Ref | str,
        directory: str | os.PathLike[str],
        *,
        verify: bool = True,
        progress: Progress = SILENT,
    ) -> list[Path]:
        """Write an artifact's files into ``directory``, byte for byte as they were recorded.

        Args:
            ref: ``NAME``, ``NAME@GENERATION`` or a `Ref`.
            directory: made if it does not exist; files of the same names are replaced, at the end.
            verify: check every chunk while it passes. Without, the kernel copies the blocks.

        Returns the paths, in the manifest's order.

        Raises:
            RefNotFound, ManifestDamaged, ChunkMissing, ChunkDamaged, NoSpace, Refused
        """
        found = self.resolve(ref) if isinstance(ref, str) else ref
        with self.protect(found.manifest):
            if not self.context.read_only:  # for gc, which gives up what was not used for longest
                path = self.context.layout.ref(found.name, found.generation)
                fsio.touch(path, self.context.clock())
            recipes = {entry.name: entry.recipe for entry in self.manifest(found).files}
            with assembling(self.context, recipes, Path(directory), progress) as assembly:
                for name, recipe in recipes.items():
                    assembly.write(name, recipe, verify=verify)
                return assembly.publish()

    @contextlib.contextmanager
    def protect(self, manifest: Digest) -> Iterator[None]:
        """Keep gc from a manifest and its chunks for the length of the block.

        A reader of a read-only store cannot take a lease: what vanishes under it, it reports.

        Raises:
            ManifestDamaged: it is not there (any more).
        """
        if self.context.read_only:
            yield
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._leased(manifest))
            except NoSpace:
                stack.enter_context(self._no_gc())
            if not self.context.layout.manifest(manifest).exists():
                raise ManifestDamaged(str(manifest), "is missing")
            yield

    @contextlib.contextmanager
    def _leased(self, manifest: Digest) -> Iterator[None]:
        with self.context.lease() as lease:
            lease.add_manifest(manifest)
            # From the end of this empty transaction on, every batch of gc sees the lease. gc
            # removes manifests before chunks, so if the manifest is there afterwards, so is all
            # that it names.
            with self.context.index.write():
                pass
            yield

    @contextlib.contextmanager
    def _no_gc(self) -> Iterator[None]:
        """Keep gc from starting: how to read from a disk so full that a lease does not fit."""
        lock = FileLock.open(self.context.layout.gc_lock, self.context.modes.file)
        try:
            lock.shared()
            yield
        finally:
            lock.close()
