"""The stamp of a clean close: it tells a file that was written to from one whose bits rotted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cas import stamps
from cas.stamps import Stamp


@pytest.fixture
def index(tmp_path: Path) -> Path:
    (tmp_path / "data.mdb").write_bytes(b"0123456789")
    return tmp_path


def test_what_is_as_it_was_left_fits(index: Path) -> None:
    assert Stamp(index).fits() is None, "there is no stamp"
    Stamp(index).leave(0o640)
    assert Stamp(index).fits() is True
    assert (index / "stamp").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in index.iterdir()) == ["data.mdb", "stamp"]


def test_what_was_written_to_is_not_judged(index: Path) -> None:
    Stamp(index).leave(0o600)
    with open(index / "data.mdb", "ab") as data:
        data.write(b"more")
    assert Stamp(index).fits() is None


def test_bits_that_rot_under_the_same_times_do_not_fit(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stamp(index).leave(0o600)
    known = stamps.state(index / "data.mdb")
    (index / "data.mdb").write_bytes(b"0123456788")
    monkeypatch.setattr(stamps, "state", lambda data: known)
    assert Stamp(index).fits() is False


@pytest.mark.parametrize("found", [b"", b"{}", b"[]", b"[1]", b"\xff", b"[" * 10_000, b"7"])
def test_what_is_no_stamp_says_nothing(index: Path, found: bytes) -> None:
    (index / "stamp").write_bytes(found)
    assert Stamp(index).fits() is None


def test_a_stamp_that_was_taken_is_gone_and_comes_back_unless_the_file_changed(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Stamp(index).leave(0o600)
    before = (index / "stamp").read_bytes()
    stamp = Stamp(index)
    stamp.take()
    assert not (index / "stamp").exists()
    with monkeypatch.context() as patch:
        patch.setattr(stamps, "checksum", lambda data: pytest.fail("it was read again"))
        stamp.leave(0o600)
    assert (index / "stamp").read_bytes() == before
    stamp.take()
    with open(index / "data.mdb", "r+b") as data:
        data.write(b"X")
    os.utime(index / "data.mdb", ns=(1, 1))
    stamp.leave(0o600)
    assert (index / "stamp").read_bytes() != before
    assert Stamp(index).fits() is True


def test_forgetting_what_is_not_there_is_no_error(index: Path) -> None:
    Stamp(index).forget()
    Stamp(index / "gone").forget()
