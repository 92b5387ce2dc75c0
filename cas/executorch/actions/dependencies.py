"""What a recorded compile read, and whether it would read the same again."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from cas.digest import Digest
from cas.errors import UsageError
from cas.executorch.actions import facts, facts_installed, places
from cas.executorch.actions.drift import VARIABLES
from cas.executorch.actions.errors import Unrecordable
from cas.executorch.actions.observer import Observed
from cas.executorch.actions.observer_places import FileStamp, kind_at, listing_at
from cas.executorch.actions.sources import file_digest
from cas.strictjson import Json

_SYSTEM: Final = ("/dev/", "/proc/", "/sys/")
#: What they are is a fact of every action; the last two are parts of this package.
_SETTLED: Final = (
    "{stdlib}/",
    "{site}/executorch/backends/transforms/",
    "{site}/executorch/exir/",
    "{site}/sympy/",
    "{site}/torch/",
    "{site}/torchgen/",
    "{site}/blake3/",
    "{site}/lmdb/",
)
#: This package's own files.
_OWN: Final = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_ABSENT: Final = "not set"
#: Before a path that is relative to the directory of the process.
_HERE: Final = f"{{cwd}}{os.sep}"
#: Before a path that is relative to where modules are looked for.
_IMPORTED: Final = f"{{path}}{os.sep}"
#: Stands for the names of all environment variables.
_ALL: Final = "*"


class Dependencies:
    """What the compiles of one backend in this process were seen to read.

    A file that one compile reads and keeps in memory is an input of the later ones too, so each
    record lists what was read up to it.
    """

    def __init__(self) -> None:
        self._sections: dict[str, dict[str, str]] = {
            "files": {},
            "found": {},
            "programs": {},
            "variables": {},
        }

    def add(self, observed: Observed, ignored: Iterable[Path]) -> Mapping[str, Json]:
        """Take in what a compile read; gives what is to be recorded with its result.

        Args:
            ignored: directories whose files are no inputs: caches and stores.

        Raises:
            Unrecordable: it read something that cannot be checked later.
        """
        if observed.network:
            raise Unrecordable("the compile talked to another machine")
        if observed.replaced:
            raise Unrecordable("os.environ is replaced, so nobody sees what is read of it")
        places_read = _Places(observed, tuple(f"{path}{os.sep}" for path in ignored))
        now = {
            "files": dict(places_read.files()),
            "found": dict(places_read.found()),
            "programs": dict(_programs(observed.programs)),
            "variables": dict(_variables(observed)),
        }
        for section, entries in now.items():
            known = self._sections[section]
            # What was read just now counts as it is now; the rest as it was when it was read.
            known.update(entries)
        return {section: {**entries} for section, entries in self._sections.items()}


class _Places:
    """The files and directories that a compile read or looked for, and did not make itself."""

    def __init__(self, observed: Observed, ignored: tuple[str, ...]) -> None:
        self._observed = observed
        self._ignored = (_OWN, *_SYSTEM, *ignored)

    def files(self) -> Iterator[tuple[str, str]]:
        """
        Raises:
            Unrecordable: a file was read, and then written.
        """
        observed = self._observed
        paths = {path: stamp for path, stamp in observed.files.items() if stamp is not None}
        for path in observed.modules - paths.keys():
            stamp = FileStamp.of(path)
            if stamp is not None:
                paths[path] = stamp
        for path, stamp in sorted(paths.items()):
            names = self._names(path)
            if path in observed.modules:
                names = self._names_of_module(path, names)
            if names and self._is_input(path, stamp):
                digest = file_digest(os.path.realpath(path))
                if digest is not None:
                    yield from ((name, digest.hex()) for name in names)

    def found(self) -> Iterator[tuple[str, str]]:
        """
        Raises:
            Unrecordable: a directory was listed, and then changed.
        """
        observed = self._observed
        opened = {path: "absent" for path, stamp in observed.files.items() if stamp is None}
        for path, kind in sorted({**observed.found, **opened}.items()):
            names = self._names(path)
            # What has come or gone meanwhile is the compile's own: it cleans up after itself.
            if names and kind_at(path) == kind and not self._is_in_made(path):
                yield from ((name, kind) for name in names)
        for path, listing in sorted(observed.listed.items()):
            names = self._names(path)
            if not names or self._is_in_made(path):
                continue
            if listing_at(path) != listing:
                raise Unrecordable(f"{names[0]} was listed, and changed while it was compiled")
            yield from ((f"{name}{os.sep}", listing) for name in names)

    def _names(self, path: str) -> list[str]:
        """How a record calls a place; nothing for one that is no input.

        Where the path is part of the directory of the process, nobody can tell whether the compile
        has asked for that: then it depends on what is in this place here, and in the same one of
        another directory.
        """
        real = os.path.realpath(path)
        if f"{real}{os.sep}".startswith(self._ignored) or "__pycache__" in real:
            return []
        name = places.portable(real)
        if name.startswith("{"):
            settled = f"{name}{os.sep}".startswith(_SETTLED)
            return [] if settled and not facts_installed.is_edited(name, real) else [name]
        observed = self._observed
        relative = observed.relative.get(path)
        if relative is not None and path not in observed.direct:
            return [f"{_HERE}{relative or os.curdir}"]
        here = f"{observed.directory.rstrip(os.sep)}{os.sep}"
        inside = len(here) > 1 and f"{path}{os.sep}".startswith(here)
        # By the path, not by what a link in it leads to now.
        return [path, f"{_HERE}{path[len(here) :] or os.curdir}"] if inside else [path]

    def _names_of_module(self, path: str, names: list[str]) -> list[str]:
        """By the name that it is imported by, whose file is another one in another checkout."""
        if path in names:
            for place in self._observed.search:
                start = f"{os.path.abspath(place).rstrip(os.sep)}{os.sep}"
                if path.startswith(start):
                    return [f"{_IMPORTED}{path[len(start) :]}"]
        return names

    def _is_input(self, path: str, stamp: FileStamp) -> bool:
        observed = self._observed
        now = FileStamp.of(path)
        made = stamp.is_since(observed.started) and (path in observed.written or observed.programs)
        if made or (now is None and stamp.is_since(observed.started)):
            return False
        if now != stamp:
            raise Unrecordable(
                f"{places.portable(path)} was read, and changed while it was compiled"
            )
        return True

    def _is_in_made(self, path: str) -> bool:
        within = f"{path}{os.sep}"
        return any(within.startswith(f"{made}{os.sep}") for made in self._observed.made)


def _programs(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in sorted(names):
        digest = _program_digest(name)
        # By the name it was asked for, where that is no path: it is looked up again.
        if os.sep not in name:
            yield name, digest or "absent"
        elif digest is not None:
            yield places.portable(name), digest


def _program_digest(name: str) -> str | None:
    found = shutil.which(places.local(name))
    digest = None if found is None else file_digest(os.path.realpath(found))
    return None if digest is None else digest.hex()


def _variables(observed: Observed) -> Iterator[tuple[str, str]]:
    values = dict(observed.variables)
    if observed.whole_environment:
        values.update(observed.before)
        yield _ALL, _names_digest(VARIABLES.rebase(observed.before))
    for name, value in sorted(values.items()):
        # Those that are declared are in the key.
        if facts.is_declared(name):
            continue
        by_user = name in observed.by_user or (observed.whole_environment and _is_in_all(name))
        if by_user or not facts.is_irrelevant(name):
            yield name, _variable_text(VARIABLES.value(name, value))


def _is_in_all(name: str) -> bool:
    return not facts.is_of_a_session(name)


def _names_digest(variables: Iterable[str]) -> str:
    names = sorted(name for name in variables if _is_in_all(name))
    return Digest.of("\0".join(names).encode("utf-8", "surrogateescape")).hex()


def _variable_text(value: str | None) -> str:
    """As a digest, for a variable may hold a secret."""
    if value is None:
        return _ABSENT
    return Digest.of(places.scrub(value).encode("utf-8", "surrogateescape")).hex()


def changed(recorded: Mapping[str, Json]) -> list[str]:
    """What a recorded compile read that is different now, in words; empty if a hit is right.

    Raises:
        UsageError: the record does not hold dependencies.
    """
    try:
        return _changes(recorded)
    except ValueError:  # a zero, or half of a surrogate pair
        raise UsageError("the dependencies have names that nothing can have") from None


def _changes(recorded: Mapping[str, Json]) -> list[str]:
    found = []
    for path, digest in _section(recorded, "files"):
        now = file_digest(_local(path))
        if now is None or now.hex() != digest:
            found.append(f"the file {path}")
    found += [f"what is at {path}" for path, was in _section(recorded, "found") if _at(path) != was]
    for name, digest in _section(recorded, "programs"):
        if (_program_digest(name) or "absent") != digest:
            found.append(f"the program {name}")
    for name, text in _section(recorded, "variables"):
        if _variable_now(name) != text:
            found.append(f"the environment variable {name}" if name != _ALL else _ANY_VARIABLE)
    return found


_ANY_VARIABLE: Final = "which environment variables there are"


def _at(path: str) -> str:
    """What `found` of `_Places` said of it, now."""
    place = _local(path)
    return listing_at(place) if path.endswith(os.sep) else kind_at(place)


def _local(path: str) -> str:
    if path.startswith(_HERE):
        return path[len(_HERE) :]
    if path.startswith(_IMPORTED):
        found = (os.path.join(place, path[len(_IMPORTED) :]) for place in sys.path)
        return next(filter(os.path.lexists, found), path)
    return places.local(path)


def _variable_now(name: str) -> str:
    if name == _ALL:
        return _names_digest(VARIABLES.rebase(dict(os.environ)))
    return _variable_text(VARIABLES.value(name, os.environ.get(name)))


def _section(recorded: Mapping[str, Json], name: str) -> list[tuple[str, str]]:
    entries = recorded.get(name, {})
    if not isinstance(entries, dict):
        raise UsageError(f"the dependencies' {name} are no object")
    pairs = [(key, value) for key, value in entries.items() if isinstance(value, str)]
    if len(pairs) != len(entries):
        raise UsageError(f"the dependencies' {name} hold more than text")
    return pairs
