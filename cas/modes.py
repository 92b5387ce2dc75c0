"""The permission bits that files and directories are made with."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Modes:
    """Permission bits of what a store creates, under its umask."""

    umask: int

    @property
    def data(self) -> int:
        """Chunks and manifests: nobody edits them in place."""
        return 0o444 & ~self.umask

    @property
    def file(self) -> int:
        """What is written to again, or whose time of use is set: refs, leases, locks, the index."""
        return 0o666 & ~self.umask

    @property
    def directory(self) -> int:
        """With setgid where the group may write: what each member makes is the group's then."""
        shared = 0 if self.umask & 0o020 else 0o2000
        return 0o777 & ~self.umask | shared


def process_umask() -> int:
    """This process's umask, read without changing it (os.umask would, for every thread)."""
    try:
        fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0o022
    try:
        head = os.read(fd, 256)  # the second line: asked for each directory that is made
    finally:
        os.close(fd)
    found = re.search(rb"^Umask:\s*([0-7]+)$", head, re.MULTILINE)
    return int(found[1], 8) if found else 0o022
