"""Ctrl-C in the middle of the long work: exit 130, one line, and a store that verifies.

And SIGKILL, which nobody can answer to: nothing is in the way of whoever comes next.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import cas

from .conftest import Run, command_line, environment

MODEL = """
import torch

def make():
    layers = [torch.nn.Linear(2048, 2048) for _ in range({layers})]
    return torch.nn.Sequential(*layers).eval(), (torch.zeros(1, 2048),)
"""


def interrupt(process: subprocess.Popen[str], reached: Callable[[], bool]) -> tuple[int, str, str]:
    """Stop the process once it has got that far, press Ctrl-C, and let it go on to its end."""
    wait_until(process, reached)
    process.send_signal(signal.SIGSTOP)
    assert reached(), "it was over before it could be stopped"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never got that far"
        time.sleep(0.0005)


def start(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command_line(*arguments),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job that a shell started in the background inherits that Ctrl-C is ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def check(code: int, out: str, err: str) -> None:
    assert (code, out) == (130, ""), err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("cas: interrupted")


def test_ctrl_c_while_assembling(run: Run, store_dir: Path, tmp_path: Path) -> None:
    block = os.urandom(4 << 20)
    with cas.Store.open(store_dir) as store, store.writer() as writer:
        recipes = [writer.put(i.to_bytes(4, "big") + block[4:]) for i in range(64)]
        writer.commit("big", files={"big.bin": cas.Recipe.concat(recipes)})
    output = tmp_path / "out"

    def reached() -> bool:
        return output.is_dir() and any(
            path.stat().st_size > 0 for path in output.glob(".big.bin.*")
        )

    process = start("--store", store_dir, "assemble", "big", "-o", output, cwd=tmp_path)
    check(*interrupt(process, reached))
    assert list(output.iterdir()) == []
    assert run("verify").code == 0
    assert run("assemble", "big", "-o", output).code == 0


def test_ctrl_c_while_the_weights_go_to_the_store(
    run: Run, store_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("executorch")
    (tmp_path / "model.py").write_text(MODEL.format(layers=16))
    staging = store_dir / "tmp"

    def reached() -> bool:
        return any(path.is_file() and path.stat().st_size for path in staging.glob("*/*"))

    process = start("--store", store_dir, "export", "model.py:make", "-o", "out", cwd=tmp_path)
    check(*interrupt(process, reached))
    assert not (tmp_path / "out" / "model.pte").exists()
    assert run("ls", "--json").json["refs"] == []
    assert run("verify").code == 0
    assert run("gc", "--json").code == 0
    found = run("stats", "--json").json
    assert (found["physical_bytes"], found["staged_bytes"]) == (0, 0)


@pytest.mark.slow
def test_sigkill_while_the_weights_go_to_the_store(
    run: Run, store_dir: Path, tmp_path: Path
) -> None:
    """No lock needs a hand: others write and collect at once, and what it staged is gone then."""
    pytest.importorskip("executorch")
    (tmp_path / "model.py").write_text(MODEL.format(layers=16))
    staging, leases = store_dir / "tmp", store_dir / "leases"

    def staged() -> int:
        return sum(path.stat().st_size for path in staging.glob("*/*"))

    process = start("--store", store_dir, "export", "model.py:make", "-o", "out", cwd=tmp_path)
    wait_until(process, lambda: staging.is_dir() and staged() > 0)
    process.send_signal(signal.SIGSTOP)  # so that what is staged is not published meanwhile
    assert staged() > 0 and len(list(leases.iterdir())) == 1
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert run("stats", "--json").json["orphaned_bytes"] > 0
    with cas.Store.open(store_dir) as store, store.writer() as writer:
        writer.commit("next", files={"f": writer.put(b"somebody else's")})
    assert run("gc", "--json").code == 0
    assert [*staging.iterdir(), *leases.iterdir()] == []
    assert run("stats", "--json").json["staged_bytes"] == 0
    assert run("verify").code == 0
