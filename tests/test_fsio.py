"""The module that touches the disk: files that are whole or absent, and modes as asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cas import filesystems, fsio
from cas.errors import NoSpace, PermissionRefused
from cas.testing import forked


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_file_has_exactly_the_mode_asked_for(tmp_path: Path, umask: int) -> None:
    def create() -> None:
        os.umask(umask)
        fsio.create_file(tmp_path / "f", b"x", mode=0o664, sync=True)
        fsio.make_directory(tmp_path / "d", 0o775)

    forked(create)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o664
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o775


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_with_what_did_not_fit_and_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", full)
    path = tmp_path / "x"
    with pytest.raises(NoSpace) as caught, fsio.os_errors(path):
        fsio.create_file(path, bytes(12_345), mode=0o600, sync=False)
    assert (caught.value.path, caught.value.needed) == (path, 12_345)
    assert caught.value.free is not None and caught.value.free > 0
    what = {errno.ENOSPC: "space", errno.EDQUOT: "quota"}[number]
    assert f"no {what} left" in str(caught.value) and "12345 bytes needed" in str(caught.value)


def test_a_disk_with_room_for_bytes_but_for_no_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystems, "has_files_left", lambda path: False)
    with pytest.raises(NoSpace, match="no inode left"), fsio.os_errors(tmp_path / "no" / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
