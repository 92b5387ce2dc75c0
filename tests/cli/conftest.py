"""Running the command, in this process or in one of its own, and stores to run it on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cas
from cas.testing.damage import mounted_read_only, mounted_tmpfs
from cas.testing.stores import CHUNK, contents, open_store, scratch

ROOT = Path(__file__).resolve().parents[2]
#: A file of models to export.
NET = Path(__file__).with_name("net.py").read_text("utf-8")


@dataclass(frozen=True)
class Outcome:
    """What one run of the command gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def store_dir() -> Iterator[Path]:
    """Where a store may come to be; in memory, since a store is hundreds of directories."""
    with scratch() as directory:
        yield directory / "store"


@pytest.fixture
def run(store_dir: Path) -> Run:
    """Run ``cas --store STORE ARGUMENTS`` in this process."""
    from cas_cli.main import cli

    def call(*arguments: object, env: dict[str, str] | None = None) -> Outcome:
        args = ["--store", str(store_dir), *map(str, arguments)]
        result = CliRunner().invoke(cli, args, prog_name="cas", env=env)
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return call


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "cas_cli", *map(str, arguments)]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}", **extra}


@pytest.fixture
def spawn(store_dir: Path) -> Run:
    """Run the command in a process of its own."""

    def call(*arguments: object, cwd: Path | None = None, **extra: str) -> Outcome:
        done = subprocess.run(
            command_line("--store", store_dir, *arguments),
            env=environment(**extra),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=500,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


@dataclass(frozen=True)
class Filled:
    """A store with two names, one of them with two generations."""

    path: Path
    old: bytes
    new: bytes
    other: bytes

    def chunk_files(self) -> list[Path]:
        return sorted(path for path in (self.path / "chunks").rglob("*") if path.is_file())

    def chunk_of(self, data: bytes) -> Path:
        text = cas.Digest.of(data[:CHUNK]).hex()
        return next(path for path in self.chunk_files() if path.name == text)


@pytest.fixture(scope="session")
def template() -> Iterator[Filled]:
    """The store that `filled` copies: making one durably takes longer than most tests."""
    old, new, other = (contents(seed, 3 * CHUNK + 17) for seed in range(3))
    with scratch() as directory:
        path = directory / "store"
        with open_store(path) as store:
            commit(store, "models/one", old)
            commit(store, "models/one", new)
            commit(store, "other", other)
        yield Filled(path, old, new, other)


@pytest.fixture
def filled(template: Filled, store_dir: Path) -> Filled:
    shutil.copytree(template.path, store_dir, symlinks=True)
    return replace(template, path=store_dir)


def commit(store: cas.Store, name: str, data: bytes) -> cas.Commit:
    with store.writer() as writer:
        recipe = writer.put(data)
        tensor = cas.TensorEntry(
            name="weight",
            dtype="uint8",
            shape=(len(data),),
            file="weights.bin",
            offset=0,
            nbytes=len(data),
        )
        return writer.commit(
            name,
            files={"weights.bin": recipe},
            tensors=[tensor],
            provenance={"source": "a test", "versions": {"cas": "1"}},
        )


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which holds ``net.py``."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def export(run: Run, net: Path) -> Run:
    """Run ``cas export net.py:ATTR -o out OPTIONS`` in this process."""

    def call(attr: str, *options: object) -> Outcome:
        return run("export", f"net.py:{attr}", "-o", "out", *options)

    return call


@contextlib.contextmanager
def _skip_where_mounting_is_forbidden() -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a filesystem of 2 MiB."""
    with contextlib.ExitStack() as stack:
        with _skip_where_mounting_is_forbidden():
            stack.enter_context(mounted_tmpfs(tmp_path / "small", 2 << 20))
        yield tmp_path / "small"


@pytest.fixture
def frozen() -> Iterator[Callable[[Path], None]]:
    """A function that makes a directory unwritable, for root too."""
    with contextlib.ExitStack() as stack:

        def freeze(path: Path) -> None:
            if os.geteuid() == 0:
                with _skip_where_mounting_is_forbidden():
                    stack.enter_context(mounted_read_only(path))
            else:
                path.chmod(0o555)
                stack.callback(path.chmod, 0o755)

        yield freeze
