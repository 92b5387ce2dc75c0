"""Refs: mutable names, each a directory with one small immutable file per generation.

A generation's file holds the digest of its manifest and a newline. Creating it is the commit point
of everything the library writes, so it appears whole (linked from a durable temporary) or not.
While a name has generations, no number of its is used twice (``docs/adr/0010``).
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cas import fsio
from cas.digest import Digest
from cas.errors import CasError, InvalidName, RefDamaged, RefNotFound, Refused, UsageError
from cas.layout import (
    Layout,
    check_ref_name,
    parse_buried,
    parse_generation,
    parse_ref,
    unescape_ref_name,
)
from cas.modes import Modes

#: The largest that `parse_generation` reads.
MAX_GENERATION = 10**18 - 1


@dataclass(frozen=True, slots=True, order=True)
class RefId:
    """The name of one generation."""

    name: str
    generation: int

    def __str__(self) -> str:
        return f"{self.name}@{self.generation}"


@dataclass(frozen=True, slots=True)
class Ref:
    """One generation of a name, and the manifest it points to."""

    name: str
    generation: int
    manifest: Digest

    @property
    def id(self) -> RefId:
        return RefId(self.name, self.generation)

    def __str__(self) -> str:
        return f"{self.name}@{self.generation}"


def names(layout: Layout) -> list[str]:
    """All names, sorted. What is no directory with a valid name is not ours and is left out."""
    found = []
    with fsio.os_errors(layout.refs, "read"), os.scandir(layout.refs) as entries:
        for entry in entries:
            with contextlib.suppress(InvalidName):
                name = unescape_ref_name(entry.name)
                if entry.is_dir():
                    found.append(name)
    return sorted(found)


def strangers(layout: Layout) -> list[str]:
    """Directories that no ref name explains: somebody renamed one, or its name rotted."""
    found = []
    with fsio.os_errors(layout.refs, "read"), os.scandir(layout.refs) as entries:
        for entry in entries:
            try:
                unescape_ref_name(entry.name)
            except InvalidName:
                if entry.is_dir():
                    found.append(entry.name)
    return sorted(found)


def generations(layout: Layout, name: str) -> list[int]:
    """The generations of ``name``, rising; empty if there is no such name."""
    return _generations(_entries(layout, name))


def _generations(entries: Iterable[str]) -> list[int]:
    return sorted(g for g in map(parse_generation, entries) if g is not None)


def _buried(entries: Iterable[str]) -> list[int]:
    """Generations that were removed and whose numbers are kept."""
    return sorted(g for g in map(parse_buried, entries) if g is not None)


def _entries(layout: Layout, name: str) -> list[str]:
    path = layout.ref_dir(name)
    try:
        with fsio.os_errors(path, "read"):
            return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def ids(layout: Layout) -> Iterator[RefId]:
    """Every generation of every name, in order."""
    for name in names(layout):
        for generation in generations(layout, name):
            yield RefId(name, generation)


def read(layout: Layout, ref: RefId) -> Ref:
    """Read one generation.

    Raises:
        RefNotFound: it does not exist.
        RefDamaged: its file does not hold a digest, or cannot be read.
        PermissionRefused
    """
    path = layout.ref(ref.name, ref.generation)
    try:
        with fsio.os_errors(path, "read"), open(path, "rb") as file:
            data = file.read(128)
    except (FileNotFoundError, NotADirectoryError):
        raise RefNotFound(ref.name, ref.generation) from None
    except OSError as error:
        raise RefDamaged(path, f"cannot be read ({error.strerror})", str(ref)) from error
    try:
        text = data.decode("ascii")
        if not text.endswith("\n"):
            raise UsageError("the last newline is missing")
        return Ref(ref.name, ref.generation, Digest.parse(text[:-1]))
    except (UnicodeDecodeError, UsageError):
        raise RefDamaged(path, "does not hold a manifest's digest", str(ref)) from None


def is_still(layout: Layout, ref: Ref) -> bool:
    """Whether a generation still holds its manifest, as far as that can be read.

    A name that was removed and committed anew has its old number, and another manifest.
    """
    try:
        return read(layout, ref.id).manifest == ref.manifest
    except RefNotFound:
        return False
    except CasError:
        return True


def resolve(layout: Layout, text: str) -> Ref:
    """Read ``NAME`` (its highest generation) or ``NAME@GENERATION``.

    Raises:
        InvalidName, RefNotFound, RefDamaged
    """
    name, generation = parse_ref(text)
    known = generations(layout, name)
    if not known:
        raise RefNotFound(name, generation, _similar(layout, name))
    if generation is None:
        generation = known[-1]
    if generation not in known:
        raise RefNotFound(name, generation, [f"{name}@{g}" for g in reversed(known)])
    return read(layout, RefId(name, generation))


def _similar(layout: Layout, name: str) -> list[str]:
    """Names that begin alike, or else those that a slip of the finger would explain."""
    stem = name.split("/")[0].casefold()
    known = names(layout)
    alike = [other for other in known if other.casefold().startswith(stem[:4])]
    return alike or difflib.get_close_matches(name, known, n=5)


def check_collision(layout: Layout, name: str) -> None:
    """Refuse a new name that differs from an existing one only by case.

    On filesystems and object stores that fold case, the two would be one.

    Raises:
        InvalidName
    """
    check_ref_name(name)
    for other in names(layout):
        same = other != name and other.casefold() == name.casefold()
        if same and generations(layout, other):  # without any, it is what a failed commit left
            raise InvalidName(name, f"it differs from the existing {other!r} only by case")


def create(layout: Layout, name: str, manifest: Digest, *, temporary: Path, modes: Modes) -> Ref:
    """Write the next generation of ``name``, durably. The caller holds the index's write lock.

    Raises:
        InvalidName: the name is malformed or collides.
    """
    check_collision(layout, name)
    directory = layout.ref_dir(name)
    # Not as a chunk, which nobody can write: who uses a generation sets its file's time of use.
    fsio.create_file(temporary, f"{manifest}\n".encode(), mode=modes.file, sync=True)
    try:
        fsio.make_directory(directory, modes.directory)
        fsio.sync_path(layout.refs)
        entries = _entries(layout, name)
        generation = max([*_generations(entries), *_buried(entries)], default=0) + 1
        if generation > MAX_GENERATION:
            raise Refused(f"{name} has no generation left; remove its highest one")
        while not fsio.link_exclusive(temporary, layout.ref(name, generation)):
            generation += 1
        fsio.sync_path(directory)
    finally:
        fsio.unlink(temporary)  # also after a failure, so that the writer can try again
    return Ref(name, generation, manifest)


def remove(layout: Layout, ref: RefId) -> bool:
    """Unlink one generation, and the name with its last one. The caller holds the write lock.

    The highest one is renamed instead while there are others, so that its number is not used
    again: ``NAME@3`` never means two things while there is a ``NAME``.
    """
    path = layout.ref(ref.name, ref.generation)
    target = layout.buried(ref.name, ref.generation)
    entries = _entries(layout, ref.name)  # read once: a name can have many
    known, numbers = _generations(entries), _buried(entries)
    others = [generation for generation in known if generation != ref.generation]
    # After the largest that there can be comes none, so that one is free again.
    keep = ref.generation == max([*known, *numbers], default=0) < MAX_GENERATION
    stale: list[int] = []
    if keep and others and path.is_file() and _bury(path, target):
        removed = True
        stale = [number for number in numbers if number < ref.generation]
    else:
        removed = fsio.unlink(path)
    if path.parent.is_dir():
        fsio.sync_path(path.parent)
        for number in stale:
            fsio.unlink(layout.buried(ref.name, number))
        if not others:
            _forget(layout, ref.name, numbers)
    return removed


def _bury(path: Path, target: Path) -> bool:
    """Rename ``path``; False where a longer name finds no room, or if it is gone."""
    try:
        fsio.rename(path, target)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def remove_if_empty(layout: Layout, name: str) -> None:
    """Remove a name that has no generations. The caller holds the write lock."""
    entries = _entries(layout, name)
    if not _generations(entries):
        _forget(layout, name, _buried(entries))


def _forget(layout: Layout, name: str, numbers: Iterable[int]) -> None:
    """Remove a name without generations, and those of its numbers that are kept."""
    for number in numbers:
        fsio.unlink(layout.buried(name, number))
    fsio.remove_directory(layout.ref_dir(name))
    fsio.sync_path(layout.refs)
