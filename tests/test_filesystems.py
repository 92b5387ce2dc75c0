"""Mounts: which filesystem holds a path, and whether it may be elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas import filesystems

MOUNTS = r"""
21 1 0:20 / / rw,relatime - ext4 /dev/sda1 rw
22 21 0:21 / /proc rw - proc proc rw
30 21 0:30 / /home rw shared:1 - ext4 /dev/sdb1 rw
31 30 0:31 / /home/ann/nfs rw shared:2 master:3 - nfs4 server:/export rw,vers=4.2
32 21 0:32 / /with\040space rw - cifs //server/share rw
33 21 0:33 / /tab\011and\134slash rw - fuse.sshfs host: rw
34 21 0:34 / /over rw - nfs server:/x rw
35 34 0:35 / /over rw - tmpfs tmpfs rw
36 21 0:36 / /homer rw - xfs /dev/sdc1 rw
this line is damaged
37 21 0:37
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "ext4"),
        ("/etc/x", "ext4"),
        ("/proc/self", "proc"),
        ("/home", "ext4"),
        ("/home/ann/nfs", "nfs4"),
        ("/home/ann/nfs/store", "nfs4"),
        ("/home/ann/nfsx", "ext4"),
        ("/homer/store", "xfs"),
        ("/with space/store", "cifs"),
        ("/tab\tand\\slash/store", "fuse.sshfs"),
        ("/over/store", "tmpfs"),
    ],
)
def test_the_mount_that_holds_a_path_is_found(path: str, expected: str) -> None:
    assert filesystems.type_of(Path(path), MOUNTS) == expected


def test_no_mounts_means_unknown() -> None:
    assert filesystems.type_of(Path("/x"), "") == "unknown"
    assert not filesystems.is_network("unknown")


def test_a_symbolic_link_does_not_hide_a_network_filesystem(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/home/ann/nfs")
    assert filesystems.type_of(tmp_path / "link" / "store", MOUNTS) == "nfs4"


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs"]
)
def test_network_filesystems_are_known(kind: str) -> None:
    assert filesystems.is_network(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs"])
def test_local_filesystems_are_not_refused(kind: str) -> None:
    assert not filesystems.is_network(kind)


def test_this_machine_has_a_filesystem(tmp_path: Path) -> None:
    assert filesystems.type_of(tmp_path) != "unknown"
    assert filesystems.free_bytes(tmp_path) > 0
