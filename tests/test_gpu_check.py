"""The check for a GPU gives what it has, whatever a section does; and it runs without a GPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cas.testing.processes import until

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    sys.modules.pop("gpu_check", None)
    return importlib.import_module("gpu_check")


SCRIPTS = {
    "environment": "save({'status': 'ok', 'checks': {}})",
    "copies": "save({'status': 'failed', 'found': 1}); sys.exit('the card is on fire')",
    "throughput": "save({'status': 'failed', 'bytes': 5}); import time; time.sleep(600)",
    "memory": "import os; os.abort()",
    "identity": "save({'status': 'failed', 'error': 'does not hold: x', 'checks': {'x': False}})",
    "run": "save({'status': 'skipped', 'reason': 'no runtime'})",
}
PREAMBLE = "import json, sys\ndef save(found): open(sys.argv[1], 'w').write(json.dumps(found))\n"


def test_one_section_that_fails_or_hangs_leaves_the_others_results(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(SCRIPTS) == list(check.SECTIONS)
    real = check._wait

    def wait(process: Any, seconds: float) -> Any:
        """As long as it takes to save something, on any machine, and no longer."""
        if seconds == check.SECTIONS["throughput"]:
            saved_to = tmp_path / "throughput.json"
            until(lambda: saved_to.exists() and saved_to.read_text().endswith("}"))
            seconds = 0.2
        return real(process, seconds)

    monkeypatch.setattr(check, "_wait", wait)

    def command(name: str, seconds: float) -> Any:
        assert 0 < seconds <= check.SECTIONS[name]
        result = tmp_path / f"{name}.json"
        return check.Command([sys.executable, "-c", PREAMBLE + SCRIPTS[name], str(result)], result)

    saved: list[int] = []
    found = check.run_all(
        list(SCRIPTS), command, tmp_path, save=lambda sections: saved.append(len(sections))
    )
    assert {name: section["status"] for name, section in found.items()} == {
        "environment": "ok",
        "copies": "failed",
        "throughput": "timed out",
        "memory": "failed",
        "identity": "failed",
        "run": "skipped",
    }
    assert found["copies"]["found"] == 1
    assert "on fire" in found["copies"]["error"]
    assert found["throughput"]["bytes"] == 5
    assert found["identity"]["error"] == "does not hold: x"
    assert saved == [1, 2, 3, 4, 5, 6]


def test_nothing_is_begun_that_cannot_end_in_time(check: Any, tmp_path: Path) -> None:
    found = check.run_all(["run"], lambda name, seconds: None, tmp_path, patience=0.001)
    assert found["run"] == {"status": "skipped", "reason": "no time was left"}


def test_all_sections_fit_in_eight_minutes(check: Any) -> None:
    assert check.TOTAL_SECONDS < 480
    assert all(seconds < check.TOTAL_SECONDS for seconds in check.SECTIONS.values())


@pytest.mark.slow
def test_the_copying_sections_run_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [
            sys.executable,
            str(BENCH / "gpu_check.py"),
            *("--stand-in", "--section", "copies", "--section", "throughput"),
            *("--dir", str(tmp_path), "--json", str(tmp_path / "found.json")),
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "found.json").read_text())
    assert json.loads(done.stdout) == document
    assert document["ok"] is True
    assert len(document["sections"]["copies"]["checks"]) > 10
    assert document["sections"]["throughput"]["ratios"]
