"""Files exported under capture are byte for byte those of a stock export."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest
from export_cases import CASES, SLOW, write_files

import cas
from cas.executorch import capture

#: One case for each path that bytes can take; the others run with `-m slow`.
FAST = (
    "mlp_two_tags",
    "mlp_portable_external",
    "layouts_portable_external",
    "mutable_initialized",
    "attention_portable",
    "mlp_xnnpack",
    "mlp_xnnpack_strict",
    "conv_xnnpack_external",
    "blob_backend_inline",
    "named_backend",
    "mutating_backend_methods",
)
#: Cases that also run with the default thresholds, under which small models mix stored and plain
#: bytes and copy all tensors in memory. The others would take the same paths once more.
DEFAULT = ("mlp_xnnpack", "named_backend", "minilm_portable_external", "minilm_xnnpack")

#: Everything through the store, and every copied tensor mapped.
EVERYTHING: dict[str, Any] = {"threshold": 1, "map_threshold": 1}


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


def parameters(names: Iterable[str], slow: Container[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in names]


#: All that are not in the fast set.
REST = set(CASES) - set(FAST)


@pytest.mark.parametrize("case", parameters(CASES, REST))
def test_identical_with_everything_in_the_store(
    case: str, store: cas.Store, stock: Callable[[str], Path], tmp_path: Path
) -> None:
    with capture(store, case, **EVERYTHING) as cap:
        program = CASES[case]().program
        saved = cap.save(program, tmp_path / "saved")
        write_files(program, tmp_path / "written")
        in_memory = program.buffer
    expected = digests(stock(case))
    assert digests(tmp_path / "saved") == expected
    assert digests(tmp_path / "written") == expected
    assert hashlib.sha256(in_memory).hexdigest() == expected["model.pte"]
    assert {path.name for path in saved.paths} == set(expected)


@pytest.mark.parametrize("case", parameters(DEFAULT, SLOW))
def test_identical_with_default_thresholds(
    case: str, store: cas.Store, stock: Callable[[str], Path], tmp_path: Path
) -> None:
    with capture(store, case) as cap:
        cap.save(CASES[case]().program, tmp_path / "saved")
    assert digests(tmp_path / "saved") == digests(stock(case))


#: Not MiniLM: half of it is an embedding, which XNNPACK does not take.
EXTERNAL = ("mlp_two_tags", "mlp_xnnpack_external")


@pytest.mark.parametrize("case", parameters(EXTERNAL, REST))
def test_external_weights_are_outside(case: str, stock: Callable[[str], Path]) -> None:
    """Guards the cases themselves: an export that ignores its tags would prove nothing."""
    files = {path.name: path.stat().st_size for path in stock(case).iterdir()}
    inside = files.pop("model.pte")
    assert sum(files.values()) > 10 * inside


def test_slow_cases_are_real_ones() -> None:
    assert set(CASES) >= SLOW
    assert set(FAST) <= set(CASES) - SLOW


@pytest.mark.parametrize("case", ["mlp_portable_external"])
def test_writes_to_a_stream_that_is_no_file(
    case: str, store: cas.Store, stock: Callable[[str], Path]
) -> None:
    sink = io.BytesIO()
    with capture(store, case, **EVERYTHING):
        CASES[case]().program.write_to_file(sink)
    assert sink.getvalue() == (stock(case) / "model.pte").read_bytes()
