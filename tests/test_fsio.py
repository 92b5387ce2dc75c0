"""The module that touches the disk: locks, modes, mounts, and files that are whole or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cas import fsio
from cas.errors import NoSpace, PermissionRefused
from cas.testing import Child, forked
from cas.testing.processes import children, until

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
    assert fsio.filesystem_type(Path(path), MOUNTS) == expected


def test_no_mounts_means_unknown() -> None:
    assert fsio.filesystem_type(Path("/x"), "") == "unknown"
    assert not fsio.is_network_filesystem("unknown")


def test_a_symbolic_link_does_not_hide_a_network_filesystem(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/home/ann/nfs")
    assert fsio.filesystem_type(tmp_path / "link" / "store", MOUNTS) == "nfs4"


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs"]
)
def test_network_filesystems_are_known(kind: str) -> None:
    assert fsio.is_network_filesystem(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs"])
def test_local_filesystems_are_not_refused(kind: str) -> None:
    assert not fsio.is_network_filesystem(kind)


def test_this_machine_has_a_filesystem(tmp_path: Path) -> None:
    assert fsio.filesystem_type(tmp_path) != "unknown"
    assert fsio.free_bytes(tmp_path) > 0


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_file_has_exactly_the_mode_asked_for(tmp_path: Path, umask: int) -> None:
    def create() -> None:
        os.umask(umask)
        fsio.create_file(tmp_path / "f", b"x", mode=0o664, sync=True)
        fsio.make_directory(tmp_path / "d", 0o775)
        fsio.FileLock.open(tmp_path / "l", 0o660).close()

    forked(create)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o664
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o775
    assert (tmp_path / "l").stat().st_mode & 0o777 == 0o660


def test_a_directory_keeps_its_parents_group_bit(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    fsio.make_directory(tmp_path / "d", 0o775)
    assert (tmp_path / "d").stat().st_mode & 0o2000


def test_a_directory_is_never_there_with_fewer_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a moment: who is killed then would lock out the other users of a shared store."""

    def work() -> None:
        os.umask(0o077)
        real = os.chmod

        def look(path: Path, mode: int) -> None:
            assert not (tmp_path / "d").exists()
            real(path, mode)

        monkeypatch.setattr(os, "chmod", look)
        fsio.make_directory(tmp_path / "d", 0o775)

    forked(work)
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o775
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_directory_that_another_makes_meanwhile_is_kept_with_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        os.umask(0o077)
        real = os.rename

        def late(source: Path, target: Path) -> None:
            target.mkdir()
            (target / "file").write_bytes(b"theirs")
            real(source, target)

        monkeypatch.setattr(os, "rename", late)
        fsio.make_directory(tmp_path / "d", 0o775)

    forked(work)
    assert (tmp_path / "d" / "file").read_bytes() == b"theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_file_in_the_place_of_a_directory_is_left_for_what_comes_next_to_fail_on(
    tmp_path: Path, umask: int
) -> None:
    (tmp_path / "d").write_bytes(b"a file")

    def work() -> None:
        os.umask(umask)
        fsio.make_directory(tmp_path / "d", 0o775)

    forked(work)
    assert (tmp_path / "d").read_bytes() == b"a file"
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_lock_is_never_there_with_fewer_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        os.umask(0o077)
        real = os.fchmod

        def look(fd: int, mode: int) -> None:
            assert not (tmp_path / "lock").exists()
            real(fd, mode)

        monkeypatch.setattr(os, "fchmod", look)
        fsio.FileLock.open(tmp_path / "lock", 0o664).close()
        fsio.FileLock.open(tmp_path / "lock", 0o600).close()  # it has its mode already

    forked(work)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664


def cannot_link(fd: int, path: Path) -> bool:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("filesystem", ["usual", "no unnamed files", "no links to them"])
def test_of_two_who_make_a_lock_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filesystem: str
) -> None:
    if filesystem == "no unnamed files":
        monkeypatch.setattr(fsio, "_open_unnamed", lambda directory: None)
    elif filesystem == "no links to them":
        monkeypatch.setattr(fsio, "_link_unnamed", cannot_link)
    first = fsio.FileLock.create(tmp_path / "lock", 0o664, locked=True)
    assert first is not None and first.is_current()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664
    assert fsio.FileLock.create(tmp_path / "lock", 0o664) is None
    second = fsio.FileLock.open(tmp_path / "lock", 0o664)
    assert not second.try_exclusive()
    first.close()
    assert second.try_exclusive()
    second.close()


def test_modes_follow_the_umask() -> None:
    modes = fsio.Modes(0o027)
    assert (modes.data, modes.file, modes.directory) == (0o440, 0o640, 0o750)
    shared = fsio.Modes(0o007)  # setgid, so that what is made in a directory is the group's
    assert (shared.data, shared.file, shared.directory) == (0o440, 0o660, 0o2770)


def test_the_process_umask_is_read_without_being_changed() -> None:
    def look() -> tuple[int, int]:
        os.umask(0o026)
        return fsio.process_umask(), os.umask(0)

    assert forked(look) == (0o026, 0o026)


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        fsio.create_file(tmp_path / "f", b"new", mode=0o644, sync=False)
    assert (tmp_path / "f").read_bytes() == b"old"
    fsio.create_file(tmp_path / "g", b"new", mode=0o644, sync=False)
    assert not fsio.link_exclusive(tmp_path / "g", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"old"


def test_a_file_that_could_not_be_written_whole_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            fsio.create_file(tmp_path / "f", b"data", mode=0o644, sync=False)
        with pytest.raises(OSError, match="No space"):
            fsio.replace_file(tmp_path / "g", b"data", mode=0o644, temporary=tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
    fsio.create_file(tmp_path / "f", b"data", mode=0o644, sync=False)  # so it can be tried again


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:2], at))
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    fsio.write_all(fd, b"0123456789")
    fsio.write_all(fd, b"abcde", 5)
    os.close(fd)
    assert (tmp_path / "f").read_bytes() == b"01234abcde"


def test_replacing_shows_the_old_file_or_the_new(tmp_path: Path) -> None:
    fsio.replace_file(tmp_path / "f", b"1", mode=0o644, temporary=tmp_path / "t")
    fsio.replace_file(tmp_path / "f", b"2", mode=0o644, temporary=tmp_path / "t")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("f", b"2")]


def test_removing_what_is_gone_is_no_error(tmp_path: Path) -> None:
    assert not fsio.unlink(tmp_path / "none")
    fsio.remove_directory(tmp_path / "none")
    fsio.remove_tree(tmp_path / "none")
    (tmp_path / "d" / "e").mkdir(parents=True)
    fsio.remove_directory(tmp_path / "d")
    assert (tmp_path / "d").is_dir()
    fsio.remove_tree(tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EACCES, PermissionRefused),
        (errno.EPERM, PermissionRefused),
        (errno.EROFS, PermissionRefused),
        (errno.EIO, OSError),
        (errno.ENOENT, FileNotFoundError),
    ],
)
def test_errors_of_the_system_get_the_name_that_says_what_to_do(
    tmp_path: Path, number: int, expected: type[Exception]
) -> None:
    with pytest.raises(expected), fsio.os_errors(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path / "x"))


# --- locks --------------------------------------------------------------------------------------


def test_a_lock_excludes_another_process_and_ends_with_it(tmp_path: Path) -> None:
    def hold(child: Child) -> None:
        lock = fsio.FileLock.open(tmp_path / "lock", 0o666)
        assert lock.try_exclusive()
        child.tell("held")
        child.wait_for("never")

    with children(hold) as (holder,):
        holder.wait_for("held")
        mine = fsio.FileLock.open(tmp_path / "lock", 0o666)
        assert not mine.try_exclusive()
        holder.kill()
        until(mine.try_exclusive)
        mine.close()
        mine.close()  # closing twice is harmless


def test_a_lock_whose_file_was_replaced_is_not_current(tmp_path: Path) -> None:
    lock = fsio.FileLock.open(tmp_path / "lock", 0o666)
    assert lock.is_current()
    (tmp_path / "lock").unlink()
    assert not lock.is_current()
    (tmp_path / "lock").write_bytes(b"")
    assert not lock.is_current()
    lock.close()
