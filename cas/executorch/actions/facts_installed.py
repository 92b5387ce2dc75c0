"""Installed packages that somebody has edited: what their version numbers do not tell."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cas.executorch.actions.sources import file_digest, tree_digest
from cas.executorch.actions.stream import Stream

#: Packages that are known by their versions, by the name that they are imported by, and the
#: distribution that they are of.
DISTRIBUTIONS: Final[Mapping[str, str]] = {
    "coremltools": "coremltools",
    "executorch": "executorch",
    "flatbuffers": "flatbuffers",
    "functorch": "torch",
    "mpmath": "mpmath",
    "numpy": "numpy",
    "sympy": "sympy",
    "torch": "torch",
    "torchao": "torchao",
    "torchgen": "torch",
    "triton": "triton",
}


@dataclass
class Installation:
    """One distribution as it was installed.

    Its files are older than the list of them, ``RECORD``, which is written last. One that is
    younger may have been edited, or copied: it is compared with its digest in that list.

    Attributes:
        record: the list; None where there is none, as some package managers have it.
    """

    record: Path | None
    _places: tuple[str, ...] | None = field(default=None, repr=False)
    _recorded: float | None = field(default=None, repr=False)
    _digests: dict[str, str] | None = field(default=None, repr=False)
    _edited: dict[str, bool] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, distribution: str) -> Installation:
        try:
            found = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            return cls(None)
        directory = getattr(found, "_path", None)
        record = None if directory is None else Path(directory) / "RECORD"
        return cls(record if record is not None and record.is_file() else None)

    def holds(self, file: str) -> bool:
        """Whether a file lies where it was installed, and is not of a checkout, say."""
        if self._places is None:
            base = [] if self.record is None else [str(self.record.parents[1])]
            self._places = tuple(
                f"{path}{os.sep}" for path in (*base, *map(os.path.realpath, base))
            )
        return file.startswith(self._places)

    def is_edited(self, file: str) -> bool:
        """Whether a file that it holds is another one than was installed, when first asked."""
        known = self._edited.get(file)
        if known is None:
            known = self._edited[file] = self._is_younger(file) and not self._is_recorded(file)
        return known

    def _is_younger(self, file: str) -> bool:
        try:
            if self._recorded is None:
                assert self.record is not None
                self._recorded = os.stat(self.record).st_mtime
            return os.stat(file).st_mtime > self._recorded
        except OSError:
            return False  # not a file, whatever the module says

    def _is_recorded(self, file: str) -> bool:
        assert self.record is not None
        if self._digests is None:
            with open(self.record, newline="", encoding="utf-8") as lines:
                self._digests = {row[0]: row[1] for row in csv.reader(lines) if len(row) > 1}
        assert self._places is not None
        base = next(place for place in self._places if file.startswith(place))
        name = file[len(base) :].replace(os.sep, "/")
        digest = hashlib.sha256(Path(file).read_bytes()).digest()
        text = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        return self._digests.get(name) == f"sha256={text}"


_installations: Final[dict[str, Installation]] = {}


def installation_of(package: str) -> Installation:
    name = DISTRIBUTIONS[package]
    if name not in _installations:
        _installations[name] = Installation.of(name)
    return _installations[name]


#: Modules of this process that are as they were installed, or of other packages. What is edited
#: after it was imported is not what runs.
_plain: Final[set[str]] = set()


def edited_facts() -> dict[str, str]:
    """The contents of what was edited, by package; nothing as a rule.

    Takes a hundredth of a second the first time, for the times of some thousand files.
    """
    files: dict[str, list[tuple[str, str]]] = {}
    for name in sys.modules.keys() - _plain:
        package = name.partition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if package in DISTRIBUTIONS and isinstance(file, str) and os.path.isabs(file):
            installation = installation_of(package)
            if not installation.holds(file) or installation.is_edited(file):
                files.setdefault(package, []).append((name, file))
                continue
        _plain.add(name)
    states = {package: _state(package, found) for package, found in files.items()}
    return {f"sources: {package}": state for package, state in states.items() if state is not None}


def _state(package: str, files: Iterable[tuple[str, str]]) -> str | None:
    """What a package is, by the names and files of modules that are not as they were installed."""
    installation = installation_of(package)
    outside = sorted((name, file) for name, file in files if not installation.holds(file))
    if outside and package != "executorch":
        return tree_digest(_root(*outside[0]), (".py",)).hex()
    edited = sorted(item for item in files if item not in outside or _is_loose(item[0]))
    stream = Stream()
    for name, file in edited:
        stream.put_text(b"mn", name)
        stream.put(b"md", file_digest(file) or b"")
    return stream.digest().hex() if edited else None


def _root(module: str, file: str) -> Path:
    """The directory of the package that a module is in."""
    depth = module.count(".") + (Path(file).stem == "__init__")
    return Path(file).parents[max(depth - 1, 0)]


def _is_loose(module: str) -> bool:
    """Whether the sources of a module of ExecuTorch are no fact of their own."""
    return not module.startswith(("executorch.exir", "executorch.backends"))


def is_edited(name: str, file: str) -> bool:
    """Whether a file is another one than was installed; ``name`` is its path from ``{site}`` on."""
    package = name.split("/")[1] if name.startswith("{site}/") else ""
    if package not in DISTRIBUTIONS:
        return False
    installation = installation_of(package)
    return installation.holds(file) and installation.is_edited(file)
