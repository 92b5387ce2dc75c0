"""CudaBackend's exports, and plain AOTInductor's packages, are byte for byte those of stock.

The real backend, partitioner and compiler, with the CPU in place of the GPU; see `export_cuda.py`,
which one process runs for all of these tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cas

pytestmark = pytest.mark.slow

CASES = ("mlp_two_methods", "convnet", "kv_cache", "odd")
MODES = ("OFF", "ON")

#: Where the backend puts weights, with the stand-in's name in place of "cuda".
WEIGHTS = "aoti_cpu_blob.ptd"


@pytest.fixture
def report(cuda_exports: Path) -> Any:
    return json.loads((cuda_exports / "report.json").read_text())


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def tensors(cuda_exports: Path, name: str) -> dict[str, cas.TensorEntry]:
    with cas.Store.open(cuda_exports / "captured" / "store") as store:
        return {entry.name: entry for entry in store.manifest(name).tensors}


@pytest.mark.parametrize("mode", MODES, ids=["default", "low memory"])
@pytest.mark.parametrize("case", CASES)
def test_the_files_are_those_of_stock(case: str, mode: str, cuda_exports: Path) -> None:
    name = f"{case}-{mode}"
    expected = contents(cuda_exports / "stock" / name)
    assert set(expected) == {"model.pte", WEIGHTS}
    assert contents(cuda_exports / "captured" / name) == expected


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("mlp_two_methods", {"second.weight": 320 * 320 * 4}),
        ("kv_cache", {"kv_cache.keys": 16 * 96 * 4, "kv_cache.values": 16 * 96 * 4}),
        ("odd", {"empty": 0, "low.weight": 90 * 96 * 2, "int8": 96 * 96}),
    ],
)
def test_the_cases_hold_what_they_are_to_prove(
    case: str, sizes: dict[str, int], cuda_exports: Path
) -> None:
    for mode in MODES:
        found = {
            name: entry.nbytes
            for name, entry in tensors(cuda_exports, f"{case}-{mode}").items()
            if entry.file == WEIGHTS
        }
        assert {name: found[name] for name in sizes} == sizes
        assert len([name for name in found if name.startswith(("one.", "two."))]) <= 1  # tied


def test_the_manifest_knows_the_weights(cuda_exports: Path) -> None:
    for mode in MODES:
        found = tensors(cuda_exports, f"odd-{mode}")
        assert (found["low.weight"].dtype, found["low.weight"].shape) == ("bfloat16", (90, 96))
        assert (found["empty"].dtype, found["empty"].shape) == ("float32", (0, 96))


def test_both_methods_share_one_copy(cuda_exports: Path) -> None:
    for mode in MODES:
        weights = (cuda_exports / "captured" / f"mlp_two_methods-{mode}" / WEIGHTS).stat().st_size
        assert 4 * 320 * (320 + 64) < weights < 1.1 * 4 * 320 * (320 + 64 + 8)


def test_the_backend_leaves_no_temporary_file(report: Any) -> None:
    assert [report[f"{case}-{mode}"]["left"] for case in CASES for mode in MODES] == [[]] * 8


def test_the_command_writes_the_same_files(report: Any, cuda_exports: Path) -> None:
    done = report["command"]
    assert done["code"] == 0, done["stderr"]
    document = json.loads(done["stdout"])
    assert document["ref"] == "model/two_methods@1"
    expected = contents(cuda_exports / "stock" / "mlp_two_methods-ON")
    assert contents(cuda_exports / "captured" / "command") == expected
    with cas.Store.open(cuda_exports / "captured" / "store") as store:
        options: Any = store.manifest("model/two_methods").provenance["options"]
    assert options["backend"] == "cuda"
    assert options["specs"]["low_memory_mode"] == "ON"


def test_a_compile_without_a_library_says_what_there_was(report: Any) -> None:
    message = report["without library"]
    assert message.startswith("PackageIncomplete: there is no .wrapper.so")
    assert message.endswith("there was: c.wrapper.cpp, Weights")


# --- plain AOTInductor --------------------------------------------------------------------------


def ending(directory: Path, suffix: str) -> bytes:
    (path,) = directory.glob(f"*{suffix}")
    return path.read_bytes()


def test_a_package_comes_out_as_it_was(cuda_exports: Path) -> None:
    found = contents(cuda_exports / "captured" / "aoti")
    assert found == contents(cuda_exports / "captured" / "aoti_files")
    assert len(found) >= 5


@pytest.mark.parametrize("suffix", [".wrapper.so", "_weights.blob"])
def test_what_was_compiled_under_capture_is_what_stock_compiles(
    suffix: str, cuda_exports: Path
) -> None:
    captured = ending(cuda_exports / "captured" / "aoti", suffix)
    assert captured == ending(cuda_exports / "stock" / "aoti", suffix)
    assert len(captured) > 90_000


def test_weights_kept_as_tensors_become_the_same_file(cuda_exports: Path) -> None:
    expected = ending(cuda_exports / "stock" / "aoti", "_weights.blob")
    assert ending(cuda_exports / "captured" / "aoti_tensors", "_weights.blob") == expected
    found = tensors(cuda_exports, "tensors")
    assert found["view"].shape == (33, 96)
    assert sum(-(-entry.nbytes // 64) * 64 for entry in found.values()) == len(expected)


def test_an_archive_comes_out_as_it_was(cuda_exports: Path) -> None:
    expected = (cuda_exports / "captured" / "model.pt2").read_bytes()
    assert contents(cuda_exports / "captured" / "aoti_archive") == {"model.pt2": expected}
