"""AOTInductor's outputs become one artifact, and come out of it byte for byte."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export.pt2_archive._package_weights import TensorProperties, Weights

import cas
from cas.errors import InvalidName, UsageError
from cas.executorch.aoti import archive_cuts, capture_package
from cas.executorch.errors import PackageIncomplete

from .test_aoti_layout import OnCuda


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def outputs(tmp_path: Path) -> list[str]:
    """Files of the kinds that AOTInductor lists, and in the order in which it lists them."""
    files = {
        "ck.wrapper_metadata.json": b'{"AOTI_DEVICE_KEY": "cpu"}',
        "ck.kernel.cpp": noise(1, 9000),
        "ck.wrapper.cpp": noise(2, 70_000),
        "ck.wrapper_weights.blob": noise(3, 300_001),
        "ck.wrapper.so": noise(4, 150_000),
    }
    (tmp_path / "inductor").mkdir()
    for name, data in files.items():
        (tmp_path / "inductor" / name).write_bytes(data)
    return [str(tmp_path / "inductor" / name) for name in files]


def without(outputs: list[str], ending: str) -> list[str]:
    return [path for path in outputs if not path.endswith(ending)]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def pairs(**tensors: torch.Tensor) -> Weights:
    return Weights({name: (tensor, TensorProperties(tensor)) for name, tensor in tensors.items()})


def test_a_package_comes_out_byte_for_byte(
    outputs: list[str], store: cas.Store, tmp_path: Path
) -> None:
    saved = capture_package(store, outputs, "aoti/model", tmp_path / "out", provenance={"run": 7})
    assert str(saved.commit.ref) == "aoti/model@1"
    assert contents(tmp_path / "out") == contents(tmp_path / "inductor")
    assert {path.name for path in saved.paths} == set(contents(tmp_path / "inductor"))
    found = store.manifest(saved.commit.ref).provenance
    assert (found["exporter"], found["run"]) == ("aotinductor", 7)
    capture_package(store, [Path(path) for path in outputs], "aoti/again")
    store.assemble("aoti/again", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "inductor")


def test_the_library_alone_brings_the_weights_beside_it(
    outputs: list[str], store: cas.Store, tmp_path: Path
) -> None:
    capture_package(store, outputs[-1], "n", tmp_path / "out")
    assert set(contents(tmp_path / "out")) == {"ck.wrapper.so", "ck.wrapper_weights.blob"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_that_are_tensors_become_the_file_that_they_would_have_been(
    device: str, outputs: list[str], store: cas.Store, tmp_path: Path
) -> None:
    first, second = torch.arange(1000.0), torch.arange(7, dtype=torch.int8)
    if device == "cuda":
        first, second = first.as_subclass(OnCuda), second.as_subclass(OnCuda)
    weights = pairs(first=first, empty=torch.zeros(0).as_subclass(type(first)), second=second)
    saved = capture_package(store, [*without(outputs, ".blob"), weights], "n", tmp_path / "out")
    plain = bytes(range(7)) if device == "cuda" else bytes(range(7)) + bytes(57)
    gap = b"" if device == "cuda" else bytes(32)
    data = (tmp_path / "out" / "ck.wrapper_weights.blob").read_bytes()
    assert data == torch.arange(1000.0).numpy().tobytes() + gap + plain
    found = store.manifest(saved.commit.ref).tensors
    assert [(t.name, t.dtype, t.shape, t.offset, t.nbytes) for t in found] == [
        ("first", "float32", (1000,), 0, 4000),
        ("empty", "float32", (0,), 4000 + len(gap), 0),
        ("second", "int8", (7,), 4000 + len(gap), 7),
    ]


# --- what is missing ----------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".so", ".blob"])
def test_a_missing_output_is_named_with_what_there_was(
    ending: str, outputs: list[str], store: cas.Store
) -> None:
    left = without(outputs, ending)
    with pytest.raises(PackageIncomplete) as caught:
        capture_package(store, left, "n")
    assert f"there is no {ending}" in str(caught.value)
    for path in left:
        assert Path(path).name in str(caught.value)
    assert caught.value.exit_code == 3
    assert list(store.refs()) == []


def test_weights_inside_the_library_are_no_missing_file(
    outputs: list[str], store: cas.Store, tmp_path: Path
) -> None:
    inside = without(outputs, ".blob")
    capture_package(store, inside, "n", tmp_path / "out", weights_inside=True)
    assert set(contents(tmp_path / "out")) == {Path(path).name for path in inside}


def test_sources_to_be_built_need_no_library(outputs: list[str], store: cas.Store) -> None:
    build = Path(outputs[0]).with_name("CMakeLists.txt")
    build.write_text("project(x)")
    capture_package(store, [*without(outputs, ".so"), build], "n")


def test_an_output_that_is_gone_is_named(outputs: list[str], store: cas.Store) -> None:
    Path(outputs[-1]).unlink()
    with pytest.raises(PackageIncomplete, match=r"no file ck.wrapper.so .*ck.wrapper_weights"):
        capture_package(store, outputs, "n")
    with pytest.raises(PackageIncomplete, match=r"no file model.pt2 .*there was: nothing"):
        capture_package(store, "model.pt2", "n")


def test_two_outputs_of_one_name_are_refused(
    outputs: list[str], store: cas.Store, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ck.wrapper.so").write_bytes(b"x")
    with pytest.raises(InvalidName, match="two outputs"):
        capture_package(store, [*outputs, tmp_path / "other" / "ck.wrapper.so"], "n")


@pytest.mark.parametrize(
    "wrong", [3, {"model": ["a.so"]}, [3], [pairs(), pairs(), "a.so"]], ids=repr
)
def test_something_else_is_refused(wrong: Any, store: cas.Store) -> None:
    with pytest.raises(UsageError):
        capture_package(store, wrong, "n")


# --- .pt2 ---------------------------------------------------------------------------------------


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as target:
        for name, data in members.items():
            target.writestr(name, data)
    return path


def test_weights_of_two_archives_are_stored_once(store: cas.Store, tmp_path: Path) -> None:
    weights = noise(5, 500_000)
    first = archive(tmp_path / "a.pt2", {"m/x.so": noise(6, 90_000), "m/w.blob": weights})
    second = archive(tmp_path / "b.pt2", {"m/x.so": noise(7, 90_123), "m/w.blob": weights})
    capture_package(store, str(first), "a", tmp_path / "out")
    saved = capture_package(store, second, "b", tmp_path / "out")
    assert saved.commit.new_bytes < 100_000
    for path in (first, second):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def _cut_off(data: bytes) -> bytes:
    return data[:-30]


def _no_local_header(data: bytes) -> bytes:
    return b"XXXX" + data[4:]


def _beyond_the_end(data: bytes) -> bytes:
    """The first member's entry in the central directory claims 1 GiB."""
    entry = data.index(b"PK\x01\x02")
    return data[: entry + 20] + (1 << 30).to_bytes(4, "little") + data[entry + 24 :]


@pytest.mark.parametrize(
    "damage", [_cut_off, _no_local_header, _beyond_the_end, lambda data: b"no archive", bytes]
)
def test_an_archive_that_is_damaged_is_stored_as_it_is(
    damage: Callable[[bytes], bytes], store: cas.Store, tmp_path: Path
) -> None:
    whole = archive(tmp_path / "whole.pt2", {"m/x.so": noise(8, 90_000), "m/b": noise(9, 70_000)})
    path = tmp_path / "m.pt2"
    path.write_bytes(damage(whole.read_bytes()))
    capture_package(store, path, "n", tmp_path / "out")
    assert (tmp_path / "out" / "m.pt2").read_bytes() == path.read_bytes()


def test_cuts_are_those_of_the_large_members(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "m.pt2", {"a": noise(1, 5000), "small": b"x" * 99, "b": noise(2, 6000)}
    )
    data = path.read_bytes()
    with open(path, "rb") as file:
        cuts = archive_cuts(file, len(data))
    assert [data[cuts[0] : cuts[1]], data[cuts[2] : cuts[3]]] == [noise(1, 5000), noise(2, 6000)]
    assert len(cuts) == 4


def test_members_that_overlap_are_not_believed(tmp_path: Path) -> None:
    whole = archive(tmp_path / "m.pt2", {"a": noise(1, 5000), "b": noise(2, 6000)}).read_bytes()
    second = whole.rindex(b"PK\x01\x02")
    damaged = whole[: second + 42] + (0).to_bytes(4, "little") + whole[second + 46 :]
    cuts = archive_cuts(_Raw(damaged, tmp_path), len(damaged))  # type: ignore[arg-type]
    assert cuts == sorted(cuts)
    assert len(cuts) == 2


class _Raw(io.FileIO):
    def __init__(self, data: bytes, directory: Path) -> None:
        path = directory / "raw"
        path.write_bytes(data)
        super().__init__(path)
