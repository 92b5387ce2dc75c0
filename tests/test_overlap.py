"""The benchmark of overlapping stages measures what it says; its times are for people to read."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    sys.modules.pop("overlap", None)
    return importlib.import_module("overlap")


@pytest.mark.slow
def test_every_stage_is_timed_and_the_ring_is_never_exceeded(overlap: Any, tmp_path: Path) -> None:
    rows = overlap.Round(tmp_path, 8 << 20).run()
    assert [row["device"] for row in rows] == list(overlap.PACES)
    for row in rows:
        assert all(row[stage] > 0 for stage in overlap.STAGES)
        assert 1 <= row["peak_buffers"] <= row["buffers"]
    assert rows[0]["copy"] >= 2 * rows[0]["ingest"], "the slow device takes its time"
    assert overlap.summary(rows[:1])["ring / slowest stage"] > 0
