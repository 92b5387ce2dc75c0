"""What kind of filesystem holds a path, and what room it has."""

from __future__ import annotations

import os
from pathlib import Path

# fmt: off
_NETWORK_TYPES = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "ocfs2", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs",
))
# fmt: on
_LOCAL_FUSE = frozenset(("fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.encfs"))


def _unescape_mount(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def type_of(path: Path, mountinfo: str | None = None) -> str:
    """The type of the filesystem that holds ``path``, as proc_pid_mountinfo(5) names it.

    An unknown one is ``"unknown"`` (no /proc, say).
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return "unknown"
    target = os.path.realpath(path)
    best, found = -1, "unknown"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = _unescape_mount(fields[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # a later mount on the same point hides the earlier
            best, found = len(point), after.split(" ")[0]
    return found


def is_network(fstype: str) -> bool:
    """Whether a filesystem may be elsewhere. One in user space is, unless known to be local."""
    if fstype == "fuse" or fstype.startswith("fuse."):
        return fstype not in _LOCAL_FUSE
    return fstype in _NETWORK_TYPES


def free_bytes(path: Path) -> int:
    """What an unprivileged user may still write to the filesystem of ``path``."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def has_files_left(path: Path) -> bool:
    """Whether the filesystem of ``path`` can hold another file, as far as it counts them."""
    stat = os.statvfs(path)
    return stat.f_files == 0 or stat.f_favail > 0
