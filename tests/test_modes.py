"""Permission bits, and the umask that they come from."""

from __future__ import annotations

import os

from cas.modes import Modes, process_umask
from cas.testing import forked


def test_modes_follow_the_umask() -> None:
    modes = Modes(0o027)
    assert (modes.data, modes.file, modes.directory) == (0o440, 0o640, 0o750)
    shared = Modes(0o007)  # setgid, so that what is made in a directory is the group's
    assert (shared.data, shared.file, shared.directory) == (0o440, 0o660, 0o2770)


def test_the_process_umask_is_read_without_being_changed() -> None:
    def look() -> tuple[int, int]:
        os.umask(0o026)
        return process_umask(), os.umask(0)

    assert forked(look) == (0o026, 0o026)
