"""Looking for chunks in files: what a file says is not believed, and no place is passed over."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas import searching
from cas.errors import PermissionRefused
from cas.searching import Source, source_files, tensor_ranges
from cas.testing.stores import contents, scratch
from cas.testing.strategies import no_deadlines

no_deadlines()

offsets = st.integers(-5, 2**70) | st.integers(0, 60) | st.booleans() | st.none() | st.text()
entries = st.dictionaries(
    st.text(max_size=3),
    st.fixed_dictionaries({"data_offsets": st.lists(offsets, max_size=3)})
    | st.fixed_dictionaries({"data_offsets": st.tuples(st.integers(0, 50), st.integers(0, 60))})
    | offsets,
    max_size=4,
)


def ranges_of(data: bytes) -> list[tuple[int, int]]:
    with scratch() as directory:
        path = directory / "file"
        path.write_bytes(data)
        with Source(path) as source:
            found = tensor_ranges(source)
            assert all(at >= 0 and size >= 0 and at + size <= len(data) for at, size in found)
            return found


@given(entries, st.binary(max_size=50), st.integers(-9, 9))
def test_tensors_of_a_safetensors_file_lie_inside_it_or_are_left_out(
    header: dict[str, object], data: bytes, slip: int
) -> None:
    text = json.dumps(header).encode()
    ranges_of(struct.pack("<Q", max(0, len(text) + slip)) + text + data)


@given(st.binary(max_size=200), st.integers(0, 250), st.integers(0, 255))
def test_members_of_a_damaged_archive_lie_inside_it_or_are_left_out(
    data: bytes, at: int, value: int
) -> None:
    with scratch() as directory:
        with zipfile.ZipFile(directory / "zip", "w") as archive:
            archive.writestr("member", data)
        whole = bytearray((directory / "zip").read_bytes())
    whole[at % len(whole)] = value
    ranges_of(bytes(whole))
    ranges_of(b"PK" + data)


def test_only_members_that_are_stored_as_they_are_count(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z", "w") as archive:
        archive.writestr("stored", b"a" * 500)
        archive.writestr("deflated", b"b" * 500, zipfile.ZIP_DEFLATED)
        archive.writestr("empty", b"")
    with Source(tmp_path / "z") as source:
        ((at, size),) = tensor_ranges(source)
        assert source.read(at, size) == b"a" * 500


@given(st.binary(max_size=60), st.binary(min_size=1, max_size=5))
def test_every_place_is_found_across_the_blocks_that_are_read(data: bytes, needle: bytes) -> None:
    with scratch() as directory:
        (directory / "file").write_bytes(data + needle + data)
        whole = data + needle + data
        expected = [i for i in range(len(whole)) if whole.startswith(needle, i)]
        block, searching._BLOCK = searching._BLOCK, 7  # type: ignore[misc]
        try:
            with Source(directory / "file") as source:
                assert list(source.places(needle)) == expected
        finally:
            searching._BLOCK = block  # type: ignore[misc]


def test_reading_is_short_at_the_end_and_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    with Source(tmp_path / "f") as source:
        assert source.read(7, 9) == b"789"
        assert source.read(10, 1) == source.read(99, 1) == source.read(-1, 5) == b""
        os.truncate(tmp_path / "f", 3)
        assert source.read(2, 9) == b"2" and source.read(5, 1) == b""


def test_files_are_listed_once_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    for name in ("d/2", "d/1", "d/e/3", "f"):
        (tmp_path / name).write_bytes(b"")
    os.mkfifo(tmp_path / "d" / "pipe")
    found = source_files([tmp_path / "f", tmp_path / "d", tmp_path / "d" / "1"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["f", "d/1", "d/2", "d/e/3"]


def test_padding_and_runs_mark_no_place() -> None:
    noise = contents(1, 64)
    assert searching._telling(bytes(1000) + b"ab" * 100, from_end=False) is None
    assert searching._telling(bytes(128) + noise + bytes(64), from_end=False) == 128
    assert searching._telling(noise + bytes(128) + noise, from_end=True) == 192
    assert searching._telling(noise[:63], from_end=True) is None


def test_a_file_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "f").chmod(0)
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    with pytest.raises(PermissionRefused), Source(tmp_path / "f"):
        pass
