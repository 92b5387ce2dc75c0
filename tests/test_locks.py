"""Locks: made with their mode, held by one, and gone with the process that held them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cas import locks
from cas.locks import FileLock
from cas.testing import Child, forked
from cas.testing.processes import children, until


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_lock_has_exactly_the_mode_asked_for(tmp_path: Path, umask: int) -> None:
    def create() -> None:
        os.umask(umask)
        FileLock.open(tmp_path / "lock", 0o660).close()

    forked(create)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o660


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
        FileLock.open(tmp_path / "lock", 0o664).close()
        FileLock.open(tmp_path / "lock", 0o600).close()  # it has its mode already

    forked(work)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664


def cannot_link(fd: int, path: Path) -> bool:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("filesystem", ["usual", "no unnamed files", "no links to them"])
def test_of_two_who_make_a_lock_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filesystem: str
) -> None:
    if filesystem == "no unnamed files":
        monkeypatch.setattr(locks, "_open_unnamed", lambda directory: None)
    elif filesystem == "no links to them":
        monkeypatch.setattr(locks, "_link_unnamed", cannot_link)
    first = FileLock.create(tmp_path / "lock", 0o664, locked=True)
    assert first is not None and first.is_current()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664
    assert FileLock.create(tmp_path / "lock", 0o664) is None
    second = FileLock.open(tmp_path / "lock", 0o664)
    assert not second.try_exclusive()
    first.close()
    assert second.try_exclusive()
    second.close()


def test_a_lock_excludes_another_process_and_ends_with_it(tmp_path: Path) -> None:
    def hold(child: Child) -> None:
        lock = FileLock.open(tmp_path / "lock", 0o666)
        assert lock.try_exclusive()
        child.tell("held")
        child.wait_for("never")

    with children(hold) as (holder,):
        holder.wait_for("held")
        mine = FileLock.open(tmp_path / "lock", 0o666)
        assert not mine.try_exclusive()
        holder.kill()
        until(mine.try_exclusive)
        mine.close()
        mine.close()  # closing twice is harmless


def test_a_lock_whose_file_was_replaced_is_not_current(tmp_path: Path) -> None:
    lock = FileLock.open(tmp_path / "lock", 0o666)
    assert lock.is_current()
    (tmp_path / "lock").unlink()
    assert not lock.is_current()
    (tmp_path / "lock").write_bytes(b"")
    assert not lock.is_current()
    lock.close()
