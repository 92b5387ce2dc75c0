"""The stamp of a clean close, which says that an index is as its last user left it.

It holds what changes whenever the data file is written to, and a checksum for what changes without
that: bits rot. ``docs/format.md`` specifies it. It is a hint: without one the index is checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path

from cas import fsio
from cas.digest import long_hasher

#: A stamp is five numbers; what is longer is none.
_MAX_STAMP = 4096


def state(data: Path) -> list[int]:
    """What changes whenever the data file does."""
    now = os.stat(data)
    return [now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]


def checksum(data: Path) -> str:
    """What changes even when only bits rot, in a second pass over the bytes."""
    hasher = long_hasher()
    hasher.update_mmap(data)
    return hasher.hexdigest()


class Stamp:
    """The stamp in an index's directory, there while no process has the index open."""

    def __init__(self, index: Path) -> None:
        self._path = index / "stamp"
        self._data = index / "data.mdb"
        self._taken: list[object] = []

    def fits(self) -> bool | None:
        """Whether the data file is what was stamped; None if it was written to since, or might be.

        Raises:
            OSError: the data file cannot be read.
        """
        stamped = self._read()
        if stamped[:-1] != state(self._data):
            return None
        return stamped[-1] == checksum(self._data)

    def take(self) -> None:
        """Remove it, and keep in mind what it said: a process that dies leaves none."""
        self._taken = self._read()
        self.forget()

    def forget(self) -> None:
        with contextlib.suppress(OSError):  # what cannot be removed is checked by its checksum
            fsio.unlink(self._path)

    def leave(self, mode: int) -> None:
        """Stamp the data file as it is. The caller knows that nobody has it open.

        Raises:
            OSError: the disk is full, say.
        """
        now: list[object] = [*state(self._data)]
        same = self._taken[:-1] == now
        text = json.dumps(self._taken if same else [*now, checksum(self._data)]).encode()
        temporary = self._path.with_name(f"stamp-{secrets.token_hex(4)}")
        fsio.create_file(temporary, text, mode=mode, sync=False)
        fsio.rename(temporary, self._path)

    def _read(self) -> list[object]:
        """What `leave` wrote, or nothing of use."""
        try:
            with open(self._path, "rb") as file:
                found = json.loads(file.read(_MAX_STAMP))
        except (OSError, ValueError, RecursionError):
            return []
        return found if isinstance(found, list) else []
