"""What a recorded compile read, and whether it would read the same again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from cas.digest import Digest
from cas.errors import UsageError
from cas.executorch.actions import facts, places
from cas.executorch.actions.drift import VARIABLES
from cas.executorch.actions.errors import Unrecordable
from cas.executorch.actions.observer import Observed
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


class Dependencies:
    """What the compiles of one backend in this process were seen to read.

    A file that one compile reads and keeps in memory is an input of the later ones too, so each
    record lists what was read up to it.
    """

    def __init__(self) -> None:
        self._sections: dict[str, dict[str, str]] = {"files": {}, "programs": {}, "variables": {}}

    def add(self, observed: Observed, ignored: Iterable[Path]) -> Mapping[str, Json]:
        """Take in what a compile read; gives what is to be recorded with its result.

        Args:
            ignored: directories whose files are no inputs: caches and stores.

        Raises:
            Unrecordable: it read something that cannot be checked later.
        """
        if observed.network:
            raise Unrecordable("the compile talked to another machine")
        now = {
            "files": dict(_files(observed, tuple(f"{path}{os.sep}" for path in ignored))),
            "programs": dict(_programs(observed.programs)),
            "variables": dict(_variables(observed.variables)),
        }
        for section, entries in now.items():
            known = self._sections[section]
            # What was read just now counts as it is now; the rest as it was when it was read.
            known.update(entries)
        return {section: {**entries} for section, entries in self._sections.items()}


def _files(observed: Observed, ignored: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    paths = {os.path.realpath(path) for path in observed.files | observed.modules}
    for path in sorted(paths):
        if path.startswith((_OWN, *_SYSTEM, *ignored)) or "__pycache__" in path:
            continue
        name = places.portable(path)
        if name.startswith(_SETTLED) or _made_meanwhile(path, observed.started):
            continue
        digest = file_digest(path)
        if digest is not None:
            yield name, digest.hex()


def _made_meanwhile(path: str, started: int) -> bool:
    """Whether the compile wrote the file itself."""
    try:
        stat = os.stat(path)
    except OSError:
        return True
    # Anybody can set the first to what they like, the future too.
    return min(stat.st_mtime_ns, stat.st_ctime_ns) >= started


def _programs(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in sorted(names):
        digest = _program_digest(name)
        if digest is not None:
            # By the name it was asked for, where that is no path: it is looked up again.
            yield (places.portable(name) if os.sep in name else name), digest


def _program_digest(name: str) -> str | None:
    found = shutil.which(places.local(name))
    digest = None if found is None else file_digest(os.path.realpath(found))
    return None if digest is None else digest.hex()


def _variables(values: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(values.items()):
        # Those that are declared are in the key.
        if not facts.is_irrelevant(name) and not facts.is_declared(name):
            yield name, _variable_text(VARIABLES.value(name, value))


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
    found = []
    for path, digest in _section(recorded, "files"):
        now = file_digest(places.local(path))
        if now is None or now.hex() != digest:
            found.append(f"the file {path}")
    for name, digest in _section(recorded, "programs"):
        if _program_digest(name) != digest:
            found.append(f"the program {name}")
    for name, text in _section(recorded, "variables"):
        if _variable_text(VARIABLES.value(name, os.environ.get(name))) != text:
            found.append(f"the environment variable {name}")
    return found


def _section(recorded: Mapping[str, Json], name: str) -> list[tuple[str, str]]:
    entries = recorded.get(name, {})
    if not isinstance(entries, dict):
        raise UsageError(f"the dependencies' {name} are no object")
    pairs = [(key, value) for key, value in entries.items() if isinstance(value, str)]
    if len(pairs) != len(entries):
        raise UsageError(f"the dependencies' {name} hold more than text")
    return pairs
