"""Which programs were written to which files, and the recipes of those files.

A program's code opens files where and as it likes. What is kept of each is what an artifact needs:
its name, its recipe and its checksum. The program itself, which holds a model, is not kept.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cas.digest import Digest, long_hasher
from cas.errors import InvalidName
from cas.executorch.blob import ViewSink, takes_views
from cas.executorch.intake import Intake
from cas.executorch.recipes import MAIN, build_recipes, data_file_name, pieces_of
from cas.executorch.tensors import tensor_entries
from cas.ingest import Counters
from cas.layout import check_file_name
from cas.manifest import Recipe, TensorEntry
from cas.strictjson import Json


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file as it was written. ``identity`` is its device and inode, None if it has none."""

    path: Path
    recipe: Recipe
    digest: Digest
    identity: tuple[int, int] | None


@dataclass(slots=True)
class WrittenProgram:
    """One program's files, by the names that ExecuTorch itself would give them.

    A file that is written twice is the later one. ``main`` is the recipe of the program's own file,
    whether it was written or not, and ``taken`` says that its bytes went where they are not seen
    any more. ``counters`` are the writer's at the last write, ``actions`` the provenance of what
    was computed for it.
    """

    methods: tuple[str, ...]
    main: Recipe
    tensors: tuple[TensorEntry, ...]
    counters: Counters
    actions: Mapping[str, Json]
    taken: bool = False
    files: dict[str, WrittenFile] = field(default_factory=dict)


class WriteRecorder:
    """Passes on what programs write, and keeps what is needed to record it. Thread safe."""

    def __init__(
        self,
        intake: Intake,
        counters: Callable[[], Counters],
        actions: Callable[[], Mapping[str, Json]],
    ) -> None:
        self._actions = actions
        self.source = intake.source
        self._intake = intake
        self._counters = counters
        self._mutex = threading.Lock()
        self._by_program: weakref.WeakKeyDictionary[Any, WrittenProgram] = (
            weakref.WeakKeyDictionary()
        )
        self._taken: weakref.WeakSet[Any] = weakref.WeakSet()
        self._takes = 0
        self._written: list[WrittenProgram] = []

    @property
    def written(self) -> tuple[WrittenProgram, ...]:
        """In the order of each program's first file."""
        with self._mutex:
            return tuple(program for program in self._written if program.files)

    @property
    def unwritten(self) -> int:
        """Programs whose bytes were taken, and of which no plain file was written."""
        with self._mutex:
            written = sum(1 for program in self._written if program.taken and program.files)
            return self._takes - written

    def take(self, program: Any) -> None:
        """The program's bytes go to memory, or to something that is no plain file."""
        with self._mutex:
            if program in self._taken:
                return
            self._taken.add(program)
            self._takes += 1
            if program in self._by_program:
                self._by_program[program].taken = True

    def write(self, program: Any, cord: Any, outfile: Any, write: Callable[[Any], None]) -> None:
        path = path_of(outfile)
        name = self._name_of(program, cord)
        if path is None or name is None:
            self.take(program)
            write(outfile)
            return
        known = self._program(program)
        recipe = known.main if name == MAIN else self._recipe(name, cord)
        known.files.pop(name, None)  # what follows may fail, and leave half a file
        sink = _HashingSink(outfile)
        write(sink)
        file = WrittenFile(path, recipe, Digest(sink.hasher.digest()), _identity(outfile))
        with self._mutex:
            known.files[name] = file
            known.counters = self._counters()

    def _program(self, program: Any) -> WrittenProgram:
        with self._mutex:
            known = self._by_program.get(program)
        if known is None:
            known = self._describe(program)
            with self._mutex:
                known.taken = program in self._taken
                self._by_program[program] = known
                self._written.append(known)
        return known

    def _describe(self, program: Any) -> WrittenProgram:
        cords = dict(_cords(program))
        pieces = {name: pieces_of(cord) for name, cord in cords.items()}
        return WrittenProgram(
            methods=tuple(sorted(str(name) for name in getattr(program, "methods", ()))),
            main=build_recipes({MAIN: pieces[MAIN]}, self._intake)[MAIN],
            tensors=tuple(tensor_entries(program, pieces, MAIN, self._intake.labels)),
            counters=self._counters(),
            actions=self._actions(),
        )

    def _recipe(self, name: str, cord: Any) -> Recipe:
        return build_recipes({name: pieces_of(cord)}, self._intake)[name]

    def _name_of(self, program: Any, cord: Any) -> str | None:
        return next((name for name, known in _cords(program) if known is cord), None)


def _cords(program: Any) -> Iterator[tuple[str, Any]]:
    """The program's cords by the names that ExecuTorch gives them; a program may rename tags."""
    yield MAIN, program._pte_data
    for tag, cord in (program._tensor_data or {}).items():
        yield data_file_name(tag), cord


class _HashingSink(ViewSink):
    """Writes to a file, and hashes what it writes."""

    def __init__(self, outfile: Any) -> None:
        self._outfile = outfile
        self._views = takes_views(outfile)
        self.hasher = long_hasher()

    def write(self, data: Any) -> Any:
        self.hasher.update(data)
        return self._outfile.write(data if self._views else bytes(data))


# --- which file that is -------------------------------------------------------------------------


def path_of(outfile: Any) -> Path | None:
    """Where the bytes written to an open file lie as they are.

    None for a file in memory, a pipe, an archive, or anything else that is no plain file on disk.
    """
    if isinstance(outfile, tempfile._TemporaryFileWrapper):
        outfile = outfile.file
    raw = outfile if isinstance(outfile, io.FileIO) else getattr(outfile, "raw", None)
    if not isinstance(raw, io.FileIO):
        return None
    # Not by the name that it was opened with: the script may be in another directory by now.
    try:
        path = Path(os.readlink(f"/proc/self/fd/{raw.fileno()}"))
    except (OSError, ValueError):
        return None
    return path if path.is_absolute() and path.is_file() else None


def _identity(outfile: Any) -> tuple[int, int] | None:
    try:
        stat = os.fstat(outfile.fileno())
    except (AttributeError, OSError, ValueError):
        return None
    return stat.st_dev, stat.st_ino


def settled_path(file: WrittenFile) -> Path:
    """Where the file is now: one that was written under another name first was renamed since."""
    if file.identity is None or _is_at(file.path, file.identity):
        return file.path
    try:
        found = [
            Path(e.path) for e in os.scandir(file.path.parent) if e.inode() == file.identity[1]
        ]
    except OSError:
        return file.path
    return next((path for path in found if _is_at(path, file.identity)), file.path)


def _is_at(path: Path, identity: tuple[int, int]) -> bool:
    try:
        stat = os.stat(path)
    except OSError:
        return False
    return (stat.st_dev, stat.st_ino) == identity


# --- the files of an artifact -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArtifactFiles:
    """What `Writer.commit` needs, and where each file lies."""

    recipes: Mapping[str, Recipe]
    checksums: Mapping[str, Digest]
    tensors: tuple[TensorEntry, ...]
    paths: Mapping[str, Path]

    @property
    def stem(self) -> str:
        """The name of the program's own file, or else of the first data file, without its end."""
        return Path(min(self.recipes, key=lambda name: (name.endswith(".ptd"), name))).stem


def artifact_files(program: WrittenProgram) -> ArtifactFiles:
    """The files of a program under the names that they have on disk.

    A program of which only data files were written, because its own bytes were taken, is completed:
    the data are of no use without it.

    Raises:
        InvalidName: two files have the same name, or one has a name that no artifact can hold.
    """
    names: dict[str, str] = {}
    paths: dict[str, Path] = {}
    for name, file in program.files.items():
        path = settled_path(file)
        names[name] = _free_name(path.name, paths)
        paths[names[name]] = path
    recipes = {names[name]: file.recipe for name, file in program.files.items()}
    if MAIN not in names and program.taken:
        names[MAIN] = _free_name(MAIN, paths)
        recipes[names[MAIN]] = program.main
    return ArtifactFiles(
        recipes,
        {names[name]: file.digest for name, file in program.files.items()},
        tuple(replace(t, file=names[t.file]) for t in program.tensors if t.file in names),
        paths,
    )


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    check_file_name(name)
    if name.casefold() in {other.casefold() for other in taken}:
        raise InvalidName(name, "two files of one program have this name", kind="file name")
    return name
