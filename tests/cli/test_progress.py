"""The progress display: for a person, late, and gone at the end."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cas
import cas_cli.progress
from cas.progress import Progress
from cas_cli.progress import TerminalProgress, wanted
from cas_cli.render import ratio, size

from .conftest import Filled, command_line, environment


def terminal(*arguments: object) -> tuple[int, str]:
    """Run a command with stderr on a terminal; return its code and what the terminal saw."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        list(map(str, arguments)),
        env=environment(TERM="xterm", COLUMNS="100"),
        stdout=subprocess.PIPE,
        stderr=child,
    )
    os.close(child)
    seen = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # how a pty says that the other end is closed
            break
        if not piece:
            break
        seen += piece
    os.close(parent)
    process.communicate()
    return process.returncode, seen.decode()


def test_quick_work_shows_nothing_on_a_terminal(filled: Filled) -> None:
    assert cas_cli.progress.DELAY >= 1
    patient = (  # on a busy machine, nothing is quick
        "import sys, cas_cli.progress; from cas_cli.main import main\n"
        "cas_cli.progress.DELAY = 600; sys.argv[0] = 'cas'; main()"
    )
    command = [sys.executable, "-c", patient, "--store", filled.path, "verify"]
    assert terminal(*command) == (0, "")


@pytest.mark.parametrize("option", [[], ["--no-progress"]], ids=["shown", "turned off"])
def test_slow_work_shows_its_steps(tmp_path: Path, option: list[str]) -> None:
    pytest.importorskip("executorch")
    (tmp_path / "net.py").write_text(
        "import time, torch\n"
        "def make():\n"
        "    time.sleep(2)\n"
        "    return torch.nn.Linear(4, 4).eval(), (torch.zeros(1, 4),)\n"
    )
    source = f"{tmp_path / 'net.py'}:make"
    code, seen = terminal(
        *command_line("--store", tmp_path / "store", *option, "export", source),
        *("-o", tmp_path / "out"),
    )
    assert code == 0
    if option:
        assert seen == ""
    else:
        assert re.search(r"load.*0:00:0[1-9]", seen)


def test_a_pipe_gets_no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    assert not wanted(no_progress=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert wanted(no_progress=False)
    assert not wanted(no_progress=True)


def test_steps_may_nest_and_end_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cas_cli.progress.DELAY", 0.0)
    with TerminalProgress() as display:
        progress: Progress = display
        progress.start("outer", None)
        time.sleep(0.05)  # the display opens
        progress.start("inner", 100)
        progress.advance(40)
        progress.advance(60)
        progress.finish()
        progress.finish()
        progress.advance(1)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024 - 1, "10.0 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (1024**3 - 1, "1.00 GiB"),
        (123 * 1024**3, "123 GiB"),
        (5000 * 1024**5, "5000 PiB"),
    ],
)
def test_sizes_have_iec_units_and_three_digits(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_shares_of_nothing_are_nothing() -> None:
    assert (ratio(0, 0), ratio(1, 4), ratio(1, 3)) == ("0 %", "25 %", "33.3 %")


def test_the_library_s_own_progress_has_the_same_shape() -> None:
    methods = {name for name in vars(cas.Progress) if not name.startswith("_")}
    assert methods == {"start", "advance", "finish"}
    assert all(callable(getattr(TerminalProgress, name)) for name in methods)
