"""Ctrl-C in the middle of the long work: exit 130, one line, and a store that verifies.

And SIGKILL, which nobody can answer to: nothing is in the way of whoever comes next.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import cas

from .conftest import Run, environment

MODEL = """
import torch

def make():
    layers = [torch.nn.Linear(2048, 2048) for _ in range({layers})]
    return torch.nn.Sequential(*layers).eval(), (torch.zeros(1, 2048),)
"""


#: The command, which stops itself in the middle of something, however slow or fast the machine is:
#: before the so many-th call of a function of `cas.fsio`.
STOPPING = """
import itertools, os, signal, sys
from cas import fsio
from cas_cli.main import main

name, number = sys.argv[1], int(sys.argv[2])
real, numbers = getattr(fsio, name), itertools.count(1)

def stop(*arguments, **options):
    if next(numbers) == number:
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(*arguments, **options)

setattr(fsio, name, stop)
sys.argv = ["cas", *sys.argv[3:]]
main()
"""


def stopped(name: str, number: int, *arguments: object, cwd: Path) -> subprocess.Popen[str]:
    """The command, run with these arguments, when it has stopped there."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPING, name, str(number), *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job that a shell started in the background inherits that Ctrl-C is ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    seen = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert seen is not None
    assert seen.si_code == os.CLD_STOPPED, process.communicate()
    return process


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Press Ctrl-C, and let the process go on to its end."""
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=500)
    return process.returncode, out, err


#: A step of the ingest at which some chunks are staged, whatever the number of workers (at most 8).
WHILE_STAGING = ("create_begun", 20)


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
    command = ("--store", store_dir, "assemble", "big", "-o", output)
    process = stopped("write_all", 30, *command, cwd=tmp_path)
    assert [path.stat().st_size > 0 for path in output.glob(".big.bin.*")] == [True]
    check(*interrupt(process))
    assert list(output.iterdir()) == []
    assert run("verify").code == 0
    assert run("assemble", "big", "-o", output).code == 0


def test_ctrl_c_while_the_weights_go_to_the_store(
    run: Run, store_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("executorch")
    (tmp_path / "model.py").write_text(MODEL.format(layers=16))
    command = ("--store", store_dir, "export", "model.py:make", "-o", "out")
    process = stopped(*WHILE_STAGING, *command, cwd=tmp_path)
    assert any(path.is_file() and path.stat().st_size for path in store_dir.glob("tmp/*/*"))
    check(*interrupt(process))
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

    command = ("--store", store_dir, "export", "model.py:make", "-o", "out")
    process = stopped(*WHILE_STAGING, *command, cwd=tmp_path)
    assert staged() > 0 and len(list(leases.iterdir())) == 1
    process.kill()
    process.communicate(timeout=500)
    assert process.returncode == -signal.SIGKILL
    assert run("stats", "--json").json["orphaned_bytes"] > 0
    with cas.Store.open(store_dir) as store, store.writer() as writer:
        writer.commit("next", files={"f": writer.put(b"somebody else's")})
    assert run("gc", "--json").code == 0
    assert [*staging.iterdir(), *leases.iterdir()] == []
    assert run("stats", "--json").json["staged_bytes"] == 0
    assert run("verify").code == 0
