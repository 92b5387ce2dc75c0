"""Ingest and assemble against `cp` + `sync` and against plain BLAKE3, in one run.

    python bench/throughput.py [--mib 2048] [--rounds 5] [--dir DIR] [--json FILE]

Each round does every step once, so that all see the same disk; the medians' ratios are printed.
All writes are durable: `cp` is followed by an fsync of its file. The source is in the page cache.
Also: 20,000 tensors of 8 KiB, the weak case of one file per chunk, against one file.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from blake3 import blake3
from steady import settle

import cas
from cas.context import DEFAULT_WORKERS

CHUNK = 4 << 20
TINY, TINY_BYTES = 20_000, 8192
BUDGETS = {"ingest new": 1.1, "ingest known": 1.15, "assemble": 1.1}


def timed_in(directory: Path, nbytes: int, work: Callable[[], object]) -> float:
    settle(directory, nbytes)
    return elapsed(work)


def elapsed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy_durably(source: Path, target: Path) -> None:
    subprocess.run(["cp", str(source), str(target)], check=True)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def hash_on_all_cores(view: memoryview) -> None:
    """The fastest of BLAKE3's own threads and of a pool that hashes chunk by chunk."""
    with ThreadPoolExecutor(DEFAULT_WORKERS) as pool:
        list(pool.map(lambda o: blake3(view[o : o + CHUNK]).digest(), range(0, len(view), CHUNK)))


class Round:
    """One pass over all steps, in a directory of its own."""

    def __init__(self, work: Path, source: Path) -> None:
        self.work = work
        self.source = source

    def run(self) -> dict[str, float]:
        store_path = self.work / "store"
        with (
            open(self.source, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
            cas.Store.open(store_path) as store,
        ):
            view = memoryview(mapped)
            timed = partial(timed_in, self.work, len(view) + (256 << 20))
            seconds = {
                "cp": timed(lambda: copy_durably(self.source, self.work / "copy")),
                "ingest new": timed(lambda: self.ingest(store, view)),
            }
            # In memory: of a mapped file the store can know that it did not change.
            with mmap.mmap(-1, len(view), flags=mmap.MAP_PRIVATE) as memory:
                memory[:] = view
                with memoryview(memory) as held:
                    seconds |= {
                        "blake3 threads": elapsed(
                            lambda: blake3(held, max_threads=blake3.AUTO).digest()
                        ),
                        "blake3 pool": elapsed(lambda: hash_on_all_cores(held)),
                        "ingest known": elapsed(lambda: self.ingest(store, held)),
                    }
            with store.writer() as writer:
                writer.commit("bench", files={"file": writer.put(view)})
            seconds["assemble"] = timed(lambda: store.assemble("bench", self.work / "out"))
            view.release()
        for path in (store_path, self.work / "out"):
            shutil.rmtree(path)
        (self.work / "copy").unlink()
        return seconds

    @staticmethod
    def ingest(store: cas.Store, view: memoryview) -> None:
        with store.writer() as writer:
            writer.put(view)
            writer.barrier()


def tiny(work: Path) -> dict[str, float]:
    """20,000 distinct tensors of 8 KiB, as chunks and as one file."""
    data = os.urandom(TINY * TINY_BYTES)
    views = [memoryview(data)[i * TINY_BYTES : (i + 1) * TINY_BYTES] for i in range(TINY)]

    def one_file() -> None:
        with open(work / "one", "wb") as file:
            for view in views:
                file.write(view)
            file.flush()
            os.fsync(file.fileno())

    timed = partial(timed_in, work, 2 * len(data))
    with cas.Store.open(work / "tiny") as store:

        def chunks() -> None:
            with store.writer() as writer:
                for view in views:
                    writer.put(view)
                writer.barrier()

        return {"tiny: one file": timed(one_file), "tiny: new": timed(chunks),
                "tiny: known": timed(chunks)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary directory)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        work = Path(directory)
        with open(work / "source", "wb") as file:
            for _ in range(options.mib // 64):
                file.write(os.urandom(64 << 20))
        rounds = [Round(work, work / "source").run() for _ in range(options.rounds)]
        small = tiny(work)
    median = {step: statistics.median(r[step] for r in rounds) for step in rounds[0]}
    spread = {step: (min(r[step] for r in rounds), max(r[step] for r in rounds)) for step in median}
    hashing = min(median["blake3 threads"], median["blake3 pool"])
    ratios = {
        "ingest new": median["ingest new"] / median["cp"],
        "ingest known": median["ingest known"] / hashing,
        "assemble": median["assemble"] / median["cp"],
    }
    print(f"{options.mib} MiB, {options.rounds} rounds, seconds: median (fastest-slowest)")
    for step, value in median.items():
        low, high = spread[step]
        note = ""
        if step in ratios:
            against = "hashing" if step == "ingest known" else "cp + sync"
            note = f"   {ratios[step]:.2f} x {against} (budget {BUDGETS[step]})"
        print(f"  {step:16}{value:7.2f} ({low:.2f}-{high:.2f}){note}")
    print(f"{TINY} tensors of {TINY_BYTES} bytes: " +
          ", ".join(f"{name[6:]} {value:.2f} s" for name, value in small.items()))  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak RSS of this process, mapped source included: {peak >> 10} MiB")
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "ratios": ratios, **small}) + "\n")
    return 0 if all(ratios[step] <= BUDGETS[step] for step in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
