"""SIGKILL at every step of every operation: nothing is lost and nothing needs a hand.

By default every sixth step; all of them, and torn files besides, in the slow set.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STRIDE = 6
HALVES = [
    ("ingest", "record", "record-anew"),
    (
        *("create", "assemble", "remove", "gc", "gc-by-policy", "stats", "verify", "repair"),
        *("rebuild", "rebuild-index", "configure"),
    ),
]


def run(repository: Path, root: Path, *options: str) -> list[dict[str, int]]:
    """The matrix in two small processes at once, since it forks so often."""
    script = [sys.executable, str(repository / "tests" / "kill_matrix.py")]
    started = [
        subprocess.Popen(
            [*script, str(root / half[0]), *half, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=repository,
            env={"PYTHONPATH": str(repository), "PATH": "/usr/bin:/bin"},
        )
        for half in HALVES
    ]
    found = []
    for process in started:
        output, errors = process.communicate()
        assert process.returncode == 0, output + errors
        found += [json.loads(line) for line in output.splitlines()]
    assert len(found) == sum(map(len, HALVES))
    for line in found:
        print(line)
    return found


def test_a_kill_at_a_sample_of_steps_loses_nothing(repository: Path, root: Path) -> None:
    found = run(repository, root, "--stride", str(STRIDE), "--first", "2")
    assert all(line["kill_points"] for line in found), "an operation has too few steps"


@pytest.mark.slow
def test_a_kill_at_every_step_loses_nothing(repository: Path, root: Path) -> None:
    found = run(repository, root)
    total = sum(line["kill_points"] + line["torn_points"] for line in found)
    print(f"{total} kill points")
    assert total > 150
