"""A store for the users of a group: what is in it already gets the permissions of a new umask.

What a store creates has its modes from the start (`cas.modes.Modes`); this is for the moment in
which its owner changes the policy.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from cas import fsio
from cas.layout import Layout
from cas.modes import Modes


@dataclass(frozen=True, slots=True)
class Adjusted:
    """How many files and directories got other permissions, and how many are somebody else's."""

    changed: int
    foreign: int


def adjust(layout: Layout, modes: Modes) -> Adjusted:
    """Give everything in the store the permissions that ``modes`` gives to what is new.

    What its owner may do, group and others may do as well, less the umask; directories get setgid
    where the group may write. Writers may go on meanwhile; those that began earlier keep creating
    with the old modes until they end.
    """
    changed = foreign = 0
    for path, before in _entries(str(layout.root)):
        wanted = _mode(before, modes)
        if wanted == stat.S_IMODE(before):
            continue
        with contextlib.suppress(FileNotFoundError):  # a gc, or the end of a writer
            if fsio.set_mode(path, wanted):
                changed += 1
            else:
                foreign += 1
    return Adjusted(changed, foreign)


def _mode(before: int, modes: Modes) -> int:
    everybody = (before >> 6 & 0o7) * 0o111
    if stat.S_ISDIR(before):
        # Setgid that is there stays: somebody wants the group of the directory above.
        return everybody & modes.directory | (modes.directory | before) & 0o2000
    return everybody & ~modes.umask


def _entries(root: str) -> Iterator[tuple[str, int]]:
    """(path, st_mode) of ``root`` and all below it, directories before what is in them.

    Links are not followed, and nothing but files and directories is named.
    """
    waiting = [root]
    yield root, os.stat(root).st_mode
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # removed meanwhile; or it was reported as somebody else's
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    waiting.append(entry.path)
                    yield entry.path, mode
                elif stat.S_ISREG(mode):
                    yield entry.path, mode
