"""From a finished program to a committed artifact and its assembled files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cas.assemble import check_directory
from cas.errors import Refused
from cas.executorch.seams import executorch_version
from cas.strictjson import Json
from cas.version import __version__
from cas.writer import Commit


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What one `Capture.save` did. ``paths`` are the assembled files."""

    commit: Commit
    paths: tuple[Path, ...]
    seconds: float


def check_destination(directory: Path, names: Iterable[str]) -> None:
    """Make ``directory`` and see that the files can be written: before anything is committed.

    Raises:
        Refused: a file is in the way of the directory, or a directory in the way of a file.
        PermissionRefused: it cannot be made, or not be written to.
    """
    check_directory(directory)
    for name in names:
        if (directory / name).is_dir():
            raise Refused(f"cannot write {directory / name}: it is a directory; choose another")


def build_provenance(
    program: Any,
    given: Mapping[str, Json] | None,
    command: Sequence[str] | None,
    created: str | None,
) -> dict[str, Json]:
    """How the artifact came to be. What the caller gives wins over what is found here."""
    found = describe_provenance(str(name) for name in getattr(program, "methods", ()))
    if command is not None:
        found["command"] = [str(word) for word in command]
    if created is not None:
        found["created"] = created
    return {**found, **(given or {})}


def describe_provenance(methods: Iterable[str]) -> dict[str, Json]:
    """What a program with these methods was made by."""
    return {
        "exporter": "executorch",
        "methods": [*sorted(methods)],
        "versions": {
            "cas": __version__,
            "executorch": executorch_version(),
            "torch": str(torch.__version__),
        },
    }
