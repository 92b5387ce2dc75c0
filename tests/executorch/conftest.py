"""Stock outputs for comparison, written by a process that never loads cas."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cas

HERE = Path(__file__).resolve().parent

if importlib.util.find_spec("executorch") is None:
    collect_ignore_glob = ["*"]
else:
    # The helper modules (export_*.py) are also what the stock process runs, by plain imports.
    sys.path.insert(0, str(HERE))

#: The smallest chunks a store allows, so that small models have tensors of several chunks.
CHUNK_SIZE = 64 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[cas.Store]:
    with cas.Store.open(tmp_path / "store", chunk_size=CHUNK_SIZE) as opened:
        yield opened


@pytest.fixture(scope="session")
def stock(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Path]]:
    """Gives the directory of a case's stock files.

    One fresh process writes all cases that this session needs, one after the other, while the
    tests run; a directory appears under its name when it is complete.
    """
    names = _wanted(request.session)
    out = tmp_path_factory.mktemp("stock")
    log = out / "log"
    with open(log, "wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "export_cases.py"), str(out), *names],
            cwd=out,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        yield lambda name: _wait(process, out / name, log)
    finally:
        process.kill()
        process.wait()


def _wanted(session: pytest.Session) -> list[str]:
    names: dict[str, None] = {}
    for item in session.items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "case" in callspec.params:
            names[callspec.params["case"]] = None
    return list(names)


def _wait(process: subprocess.Popen[bytes], directory: Path, log: Path) -> Path:
    while not directory.is_dir():
        if process.poll() is not None and not directory.is_dir():
            tail = log.read_text(errors="replace")[-3000:]
            pytest.fail(f"the stock export ended with {process.returncode}:\n{tail}")
        time.sleep(0.05)
    return directory
