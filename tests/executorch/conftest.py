"""Stock outputs for comparison, written by a process that never loads cas."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cas
from cas.writer import Writer

if TYPE_CHECKING:
    from cas.executorch.intake import Intake

HERE = Path(__file__).resolve().parent

if importlib.util.find_spec("executorch") is None:
    collect_ignore_glob = ["*"]
else:
    # The helper modules (export_*.py) are also what the stock process runs, by plain imports.
    sys.path.insert(0, str(HERE))

#: What compiling for CUDA needs on the way: a gigabyte, most of it precompiled headers.
SCRATCH = ("objects", "tmp", "inductor")

#: The smallest chunks a store allows, so that small models have tensors of several chunks.
CHUNK_SIZE = 64 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[cas.Store]:
    with cas.Store.open(tmp_path / "store", chunk_size=CHUNK_SIZE) as opened:
        yield opened


@pytest.fixture
def intake(writer: Writer) -> Intake:
    """Puts into ``store``, and never commits."""
    from cas.executorch.intake import Intake

    return Intake(writer)


@pytest.fixture(scope="session")
def stock(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Path]]:
    """Gives the directory of a case's stock files.

    One fresh process writes all cases that this run needs, one after the other, while the tests
    run; a directory appears under its name when it is complete. The workers of pytest-xdist share
    that process: the first of them starts it.
    """
    out = _shared_directory(tmp_path_factory, "stock")
    writer = _start_once(out, _wanted(request.session))
    try:
        yield lambda name: _wait(out / name, out)
    finally:
        # Another worker may still be waiting for a case, so under xdist it runs to its end.
        if writer is not None and "PYTEST_XDIST_WORKER" not in os.environ:
            writer.kill()
            writer.wait()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have the first worker start that process at once: it takes longer than most tests together.

    Begun by the first test that needs it, it would go on alone after all others have ended.
    """
    if os.environ.get("PYTEST_XDIST_WORKER") != "gw0" or session.config.option.collectonly:
        return
    if any(
        item.path.is_relative_to(HERE) and "stock" in item.fixturenames
        for item in _functions(session)
    ):
        names = _wanted(session)
        if names:
            _start_once(_shared_directory(session.config._tmp_path_factory, "stock"), names)


def _functions(session: pytest.Session) -> list[pytest.Function]:
    return [item for item in session.items if isinstance(item, pytest.Function)]


def _shared_directory(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return tmp_path_factory.mktemp(name)
    # Each worker has a directory of its own below that of the run.
    directory = tmp_path_factory.getbasetemp().parent / name
    directory.mkdir(exist_ok=True)
    return directory


def _start_once(out: Path, names: list[str]) -> subprocess.Popen[bytes] | None:
    """Start the process that writes the cases, unless another worker has; None if so."""
    with open(out / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (out / "pid").exists():
            return None
        with open(out / "log", "wb") as sink:
            writer = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(HERE / "export_cases.py"), str(out), *names],
                cwd=out,
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        (out / "pid").write_text(str(writer.pid))
        return writer


def _wanted(session: pytest.Session) -> list[str]:
    from export_cases import CASES  # not before a test needs it: it imports ExecuTorch

    names: dict[str, None] = {}
    for item in session.items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.params.get("case") in CASES:
            names[callspec.params["case"]] = None
    return list(names)


def _is_running(process: str) -> bool:
    try:
        status = Path("/proc", process, "stat").read_text()
    except FileNotFoundError:
        return False
    # A child that ended, and that the worker which started it has not waited for, is a zombie.
    return status.rpartition(")")[2].split()[0] != "Z"


def _wait(directory: Path, out: Path) -> Path:
    while not directory.is_dir():
        if not _is_running((out / "pid").read_text()) and not directory.is_dir():
            tail = (out / "log").read_text(errors="replace")[-3000:]
            pytest.fail(f"the stock export ended without {directory.name}:\n{tail}")
        time.sleep(0.05)
    return directory


@pytest.fixture(scope="session")
def cuda_exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with what `export_cuda.py` writes; the first worker that asks runs it."""
    pytest.importorskip("triton")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("AOTInductor needs g++")
    out = _shared_directory(tmp_path_factory, "cuda")
    with open(out / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "log").exists():
            _export_for_cuda(out, compiler)
    if not (out / "report.json").exists():
        pytest.fail(f"export_cuda.py failed:\n{(out / 'log').read_text(errors='replace')[-3000:]}")
    return out


def _export_for_cuda(out: Path, compiler: str) -> None:
    remembering = out / "g++"  # by its name torch knows what kind of compiler it is
    cache = HERE / "cxx_cache.py"
    for scratch in SCRATCH:
        (out / scratch).mkdir()
    remembering.write_text(
        f'#!/bin/sh\nexec {sys.executable} -S -E {cache} {out / "objects"} {compiler} "$@"\n'
    )
    remembering.chmod(0o755)
    settings = {
        "CXX": str(remembering),
        "TMPDIR": str(out / "tmp"),  # for Inductor's precompiled headers
        "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE.parents[1] / 'cli'}",
    }
    with open(out / "log", "wb") as sink:
        subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / "export_cuda.py"), str(out)],
            env={**os.environ, **settings},
            stdout=sink,
            stderr=subprocess.STDOUT,
            check=False,
        )
    for scratch in SCRATCH:
        shutil.rmtree(out / scratch)
