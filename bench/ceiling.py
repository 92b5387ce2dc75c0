"""A hard memory ceiling: does an export complete where memory *and* page cache are limited?

    python bench/ceiling.py [--layers 16] [--limit-mib 512] [--stock-limit-mib 1500]

Exports 1 GiB of linear layers to XNNPACK from a mapped checkpoint inside a memory cgroup (v1 or
v2), whose pages are dropped from the cache first, so that the cgroup pays for reading them: stock
under its limit, `cas export` under a third of it. Needs the right to make a cgroup (root, usually).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workload import sha256, write_checkpoint

WORKLOAD = Path(__file__).with_name("workload.py")
CHECKPOINT = "weights.safetensors"
WIDTH = 4096
MIB = 1 << 20
SOURCE = """
import sys
from pathlib import Path

import torch

sys.path.insert(0, {bench!r})
from workload import mapped_stack


def make():
    return mapped_stack({width}, {layers}, Path({checkpoint!r})), (torch.randn(1, {width}),)
"""


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
            with contextlib.suppress(OSError):
                (self.directory / "memory.swappiness").write_text("0")
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


def drop_from_cache(path: Path) -> None:
    """Have the file's pages charged to whoever reads it next."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_stock(limit: int, layers: int, work: Path) -> tuple[int, dict[str, str]]:
    """The stock script under a limit; see `run_cas`."""
    spec = {
        "engine": "stock",
        "backend": "xnnpack",
        "external": False,
        "strict": False,
        "source": "safetensors",
        "width": WIDTH,
        "layers": layers,
        "out": str(work / "stock"),
        "store": str(work / "none"),
        "checkpoint": str(work / CHECKPOINT),
    }
    return _run(limit, [str(WORKLOAD), json.dumps(spec)], work / "stock", work)


def run_cas(limit: int, layers: int, work: Path) -> tuple[int, dict[str, str]]:
    """``cas export`` under a limit of ``limit`` bytes: (exit code, file name -> SHA-256).

    An exit code of -9 is the kernel's kill for want of memory.
    """
    source = work / "ceiling_model.py"
    source.write_text(SOURCE.format(bench=str(WORKLOAD.parent), width=WIDTH, layers=layers,
                                    checkpoint=str(work / CHECKPOINT)))  # fmt: skip
    arguments = ["-m", "cas_cli", "--store", str(work / "store"), "export", f"{source}:make",
                 "--backend", "xnnpack", "-o", str(work / "cas")]  # fmt: skip
    return _run(limit, arguments, work / "cas", work)


def _run(limit: int, arguments: list[str], out: Path, work: Path) -> tuple[int, dict[str, str]]:
    drop_from_cache(work / CHECKPOINT)
    with limited(limit) as group:
        process = subprocess.run(
            [sys.executable, *arguments],
            input="\n\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=group.enter,
            check=False,
        )
    if process.returncode:
        return process.returncode, {}
    hashes = {path.name: sha256(path) for path in sorted(out.iterdir())}
    shutil.rmtree(out)
    return 0, hashes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="of 64 MiB each (16: 1 GiB)")
    parser.add_argument("--limit-mib", type=int, default=512, help="for cas")
    parser.add_argument("--stock-limit-mib", type=int, default=1500, help="for stock ExecuTorch")
    parser.add_argument("--dir", type=Path, help="where to work; not a tmpfs, which counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        work = Path(directory)
        write_checkpoint(WIDTH, options.layers, work / CHECKPOINT)
        try:
            killed, _ = run_stock(options.stock_limit_mib * MIB, options.layers, work)
            code, ours = run_cas(options.limit_mib * MIB, options.layers, work)
            _, reference = run_stock(16 * 1024 * MIB, options.layers, work)
        except CgroupUnavailable as error:
            print(f"cannot run: {error}")
            return 77
    print(f"stock within {options.stock_limit_mib} MiB: exit {killed} (-9: killed)")
    print(f"cas export within {options.limit_mib} MiB: exit {code}")
    same = bool(ours) and ours == reference
    print("same bytes as stock without a limit" if same else "NOT the same bytes as stock")
    return 0 if same and killed == -9 else 1


if __name__ == "__main__":
    sys.exit(main())
