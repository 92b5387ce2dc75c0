"""A hard memory ceiling: does an export complete where memory *and* page cache are limited?

    python bench/ceiling.py [--layers 16] [--limit-mib 512] [--stock-limit-mib 1500]

Runs the 1 GiB XNNPACK export from a mapped checkpoint inside a memory cgroup (v1 or v2): stock
under its limit, `cas` under a third of it. Needs the right to make a cgroup (root, usually).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workload import write_checkpoint

WORKLOAD = Path(__file__).with_name("workload.py")
WIDTH = 4096
MIB = 1 << 20


class CgroupUnavailable(Exception):
    """This process may not limit memory; the text says why."""


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup of our own. ``limit`` in bytes counts page cache too."""

    directory: Path
    version: int

    @classmethod
    def create(cls, name: str) -> Cgroup:
        for root, version in ((Path("/sys/fs/cgroup/memory"), 1), (Path("/sys/fs/cgroup"), 2)):
            limit_file = "memory.limit_in_bytes" if version == 1 else "memory.max"
            directory = root / name
            try:
                directory.mkdir()
            except OSError:
                continue
            if (directory / limit_file).exists():
                return cls(directory, version)
            directory.rmdir()
        raise CgroupUnavailable("no writable memory cgroup below /sys/fs/cgroup")

    def set_limit(self, limit: int) -> None:
        if self.version == 1:
            (self.directory / "memory.limit_in_bytes").write_text(str(limit))
        else:
            (self.directory / "memory.max").write_text(str(limit))
            with contextlib.suppress(OSError):
                (self.directory / "memory.swap.max").write_text("0")

    def enter(self) -> None:
        """Move this process in; meant for a child between fork and exec."""
        (self.directory / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.directory.rmdir()


@contextlib.contextmanager
def limited(limit: int) -> Iterator[Cgroup]:
    """A cgroup with ``limit`` bytes for the length of the block.

    Raises:
        CgroupUnavailable
    """
    group = Cgroup.create(f"cas-ceiling-{os.getpid()}")
    try:
        group.set_limit(limit)
        yield group
    finally:
        group.remove()


def run_under(limit: int, spec: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """(exit code, the workload's result); killed by the kernel is -9."""
    with limited(limit) as group:
        process = subprocess.run(
            [sys.executable, str(WORKLOAD), json.dumps(spec)],
            input="\n\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=group.enter,
            check=False,
        )
    if process.returncode:
        return process.returncode, None
    return 0, json.loads(process.stdout.splitlines()[-1])


def spec_for(engine: str, layers: int, work: Path) -> dict[str, Any]:
    return {
        "engine": engine,
        "backend": "xnnpack",
        "external": False,
        "strict": False,
        "source": "safetensors",
        "width": WIDTH,
        "layers": layers,
        "out": str(work / engine),
        "store": str(work / "store"),
        "checkpoint": str(work / "weights.safetensors"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="of 64 MiB each (16: 1 GiB)")
    parser.add_argument("--limit-mib", type=int, default=512, help="for cas")
    parser.add_argument("--stock-limit-mib", type=int, default=1500, help="for stock ExecuTorch")
    parser.add_argument("--dir", type=Path, help="where to work; not a tmpfs, which counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        work = Path(directory)
        write_checkpoint(WIDTH, options.layers, work / "weights.safetensors")
        runs = (
            ("stock", options.stock_limit_mib),
            ("cas", options.limit_mib),
            ("stock", 16 * options.stock_limit_mib),
        )
        try:
            results = [
                run_under(limit * MIB, spec_for(engine, options.layers, work))
                for engine, limit in runs
            ]
        except CgroupUnavailable as error:
            print(f"cannot run: {error}")
            return 77
    for (engine, limit), (code, result) in zip(runs, results, strict=True):
        outcome = f"{result['seconds']:.1f} s" if result else f"killed ({code})"
        print(f"{engine:6} within {limit:6} MiB: {outcome}")
    (stock_code, _), (_, ours), (_, reference) = results
    same = bool(ours and reference and ours["sha256"] == reference["sha256"])
    print("same bytes as stock without a limit" if same else "NOT the same bytes as stock")
    return 0 if same and stock_code else 1


if __name__ == "__main__":
    sys.exit(main())
