"""Files exported under capture are byte for byte those of a stock export."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
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
#: Cases that also run with the default thresholds in the fast set.
FAST_DEFAULT = ("mlp_xnnpack", "named_backend")

#: Everything through the store, and every copied tensor mapped.
EVERYTHING: dict[str, Any] = {"threshold": 1, "map_threshold": 1}


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


def parameters(fast: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else (pytest.mark.slow,)) for name in CASES]


@pytest.mark.parametrize("case", parameters(FAST))
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


@pytest.mark.parametrize("case", parameters(FAST_DEFAULT))
def test_identical_with_default_thresholds(
    case: str, store: cas.Store, stock: Callable[[str], Path], tmp_path: Path
) -> None:
    with capture(store, case) as cap:
        cap.save(CASES[case]().program, tmp_path / "saved")
    assert digests(tmp_path / "saved") == digests(stock(case))


EXTERNAL = ("mlp_two_tags", "mlp_xnnpack_external", "minilm_xnnpack_external")


@pytest.mark.parametrize("case", [name for name in parameters(FAST) if name.values[0] in EXTERNAL])
def test_external_weights_are_outside(case: str, stock: Callable[[str], Path]) -> None:
    """Guards the cases themselves: an export that ignores its tags would prove nothing."""
    files = {path.name: path.stat().st_size for path in stock(case).iterdir()}
    inside = files.pop("model.pte")
    assert sum(files.values()) > 10 * inside


def test_slow_cases_are_real_ones() -> None:
    assert set(CASES) >= SLOW
    assert {*FAST, *FAST_DEFAULT} <= set(CASES) - SLOW


@pytest.mark.parametrize("case", ["mlp_portable_external"])
def test_writes_to_a_stream_that_is_no_file(
    case: str, store: cas.Store, stock: Callable[[str], Path]
) -> None:
    sink = io.BytesIO()
    with capture(store, case, **EVERYTHING):
        CASES[case]().program.write_to_file(sink)
    assert sink.getvalue() == (stock(case) / "model.pte").read_bytes()
