"""A store of a million chunks and 2,000 manifests: open, stats, gc against their budgets.

    python bench/million.py [--dir DIR] [--chunks N] [--manifests N] [--profile] [--only TEXT]

The chunks are real, if tiny: 16 bytes under their digests. Making them takes a minute or two; with
``--dir`` they stay, and what is there already is not made again. One in a hundred is garbage. Each
measurement runs in a process of its own, with warm caches; the peak of its memory is printed too.
The ratios are of what was measured to the budget of the design, 1 being all of it. The seconds of
CPU are about what is left of the seconds on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cas
from cas import Digest, FileEntry, Manifest, Recipe, gc
from cas.index import Entry
from cas.layout import Layout
from cas.manifest import ChunkPart
from cas.retention import Policy
from cas.stats import stats

SIZE = 16
DEAD = 100  # one chunk in so many
#: (seconds, MiB), from the design; None: no budget.
BUDGETS: dict[str, tuple[float | None, float | None]] = {
    "open": (0.05, None),
    "open, and the index": (None, None),
    "the same, not closed cleanly": (None, None),
    "stats, nothing counted yet": (None, None),
    "stats": (0.2, None),
    "stats after a commit": (0.2, None),
    "stats, read-only": (None, None),
    "gc plan": (None, 500),
    "gc plan, half the size": (None, 500),
    "gc plan and execute": (10, 500),
}


# --- building -----------------------------------------------------------------------------------


def digests_of(count: int) -> list[Digest]:
    return [Digest.of(number.to_bytes(SIZE, "big")) for number in range(count)]


def build(root: Path, chunks: int, manifests: int) -> None:
    """Make what is missing: files directly, then the index from them."""
    with cas.Store.open(root) as store:
        layout = store.context.layout
        digests = digests_of(chunks)
        made = make_chunks(layout, digests)
        make_manifests(layout, [d for n, d in enumerate(digests) if n % DEAD], manifests)
        with store.context.index.read() as txn:
            known = txn.totals()[0]
        if known + len(made) == chunks and len(made) <= chunks // DEAD:
            with store.context.index.write() as txn:  # a gc of an earlier run took these
                for digest in made:
                    txn.put(digest, Entry(SIZE, 0, 0))
        elif known != chunks:
            began = time.perf_counter()
            store.context.index.rebuild()
            print(f"index rebuilt in {time.perf_counter() - began:.1f} s", flush=True)


def make_chunks(layout: Layout, digests: list[Digest]) -> list[Digest]:
    """Create the chunk files that are not there, and return their digests."""
    have = {name for path in layout.chunks.iterdir() for name in os.listdir(path)}
    missing = [(n, digest) for n, digest in enumerate(digests) if digest.hex() not in have]
    if missing:
        print(f"making {len(missing)} chunks", flush=True)
    for number, digest in sorted(missing, key=lambda pair: pair[1]):
        write(layout.chunk(digest), number.to_bytes(SIZE, "big"))
    return [digest for _, digest in missing]


def make_manifests(layout: Layout, live: list[Digest], count: int) -> None:
    """Share ``live`` out among ``count`` artifacts, two generations to a name."""
    share = len(live) // count
    for number in range(count):
        ref = layout.ref(f"model/{number // 2}", number % 2 + 1)
        if ref.exists():
            continue
        end = len(live) if number == count - 1 else (number + 1) * share
        parts = tuple(ChunkPart.whole(d, SIZE) for d in live[number * share : end])
        entry = FileEntry("weights.bin", Digest.of(b"not looked at"), Recipe(parts))
        data = Manifest((entry,), (), {"number": number}).encode()
        digest = Digest.of(data)
        write(layout.manifest(digest), data)
        ref.parent.mkdir(exist_ok=True)
        write(ref, f"{digest}\n".encode())


def write(path: Path, data: bytes) -> None:
    with contextlib.suppress(FileExistsError), open(path, "xb", buffering=0) as file:
        file.write(data)


# --- measuring ----------------------------------------------------------------------------------


def open_it(root: Path) -> object:
    with cas.Store.open(root, create=False) as store:
        return store.chunk_size


def open_index(root: Path) -> object:
    with cas.Store.open(root, create=False) as store, store.context.index.read() as txn:
        return txn.totals()[0]


def open_unclean(root: Path) -> object:
    (root / "index" / "stamp").unlink()
    return open_index(root)


def stats_of(root: Path) -> object:
    with cas.Store.open(root, create=False) as store:
        return stats(store).chunks


def stats_read_only(root: Path) -> object:
    with cas.Store.open(root, create=False, read_only=True) as store:
        return stats(store).chunks


def gc_plan(root: Path) -> object:
    with cas.Store.open(root, create=False) as store:
        return len(gc.plan(store).chunks)


def gc_plan_of_half(root: Path) -> object:
    with cas.Store.open(root, create=False) as store:
        with store.context.index.read() as txn:
            size = txn.totals()[1]
        return len(gc.plan(store, policy=Policy(max_bytes=size // 2)).drops)


def gc_all(root: Path) -> object:
    with cas.Store.open(root, create=False) as store:
        return gc.execute(store, gc.plan(store)).freed_bytes // SIZE


WORK: dict[str, Callable[[Path], object]] = {
    "open": open_it,
    "open, and the index": open_index,
    "the same, not closed cleanly": open_unclean,
    "stats, nothing counted yet": stats_of,
    "stats": stats_of,
    "stats after a commit": stats_of,
    "stats, read-only": stats_read_only,
    "gc plan": gc_plan,
    "gc plan, half the size": gc_plan_of_half,
    "gc plan and execute": gc_all,
}


def forget_counts(root: Path) -> None:
    with cas.Store.open(root, create=False) as store, store.context.index.write() as txn:
        txn.recount({}, ())


def commit_one(root: Path) -> None:
    """An artifact of 500 chunks that are there already."""
    with cas.Store.open(root, create=False) as store:
        (file,) = store.manifest(next(iter(store.refs())).name).files
        with store.writer() as writer:
            when = time.time_ns()
            writer.commit("extra", {"weights.bin": file.recipe}, provenance={"when": when})


#: What is done before a measurement, outside its time and in another process.
BEFORE: dict[str, Callable[[Path], object]] = {
    "stats, nothing counted yet": forget_counts,
    "stats after a commit": commit_one,
    "gc plan": lambda root: cas.Store.open(root).remove("extra"),
}


def measure(what: str, root: Path, profile: bool) -> None:
    """Run in a process of its own: print what it took as JSON."""
    profiler = cProfile.Profile()
    began, used = time.perf_counter(), time.process_time()
    with profiler if profile else contextlib.nullcontext():
        result = WORK[what](root)
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    peak = peak_kib()
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(14)
    found = {"result": result, "seconds": seconds, "cpu": cpu, "peak_mib": peak / 1024}
    print(json.dumps(found))


def peak_kib() -> int:
    """Of this program alone: getrusage would count what the parent held when it forked."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0])


def measured(what: str, root: Path, profile: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--dir", str(root), "--measure", what]
    if what in BEFORE:
        subprocess.run([sys.executable, __file__, "--dir", str(root), "--before", what], check=True)
    done = subprocess.run(
        [*command, "--profile"] if profile else command, check=True, stdout=subprocess.PIPE
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def report(root: Path, profile: bool, only: str) -> bool:
    """Print the table; True if every budget is kept."""
    kept = True
    columns = ("seconds", "budget", "ratio", "CPU s", "peak MiB", "budget", "ratio", "result")
    print("".join([f"{'operation':30}", *(f"{column:>9}" for column in columns)]))
    for what, (seconds, mib) in BUDGETS.items():
        if only not in what:
            continue
        found = measured(what, root, False)
        kept &= seconds is None or found["seconds"] <= seconds
        kept &= mib is None or found["peak_mib"] <= mib
        print(
            f"{what:30}{found['seconds']:9.3f}{seconds or '':>9}{_ratio(found['seconds'], seconds)}"
            f"{found['cpu']:9.3f}"
            f"{found['peak_mib']:9.0f}{mib or '':>9}{_ratio(found['peak_mib'], mib)}"
            f"{found['result']:>9}",
            flush=True,
        )
        if profile and not what.endswith("execute"):
            measured(what, root, True)
    return kept


def _ratio(found: float, budget: float | None) -> str:
    return f"{found / budget:9.2f}" if budget else " " * 9


@contextlib.contextmanager
def store_directory(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    path = Path(tempfile.mkdtemp(prefix="cas-million-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="where the store is kept for the next run")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--manifests", type=int, default=2_000)
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    parser.add_argument("--only", default="", metavar="TEXT", help="only what has it in its name")
    parser.add_argument("--measure", choices=list(WORK), help=argparse.SUPPRESS)
    parser.add_argument("--before", choices=list(BEFORE), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.before:
        BEFORE[arguments.before](arguments.dir)
        return 0
    if arguments.measure:
        measure(arguments.measure, arguments.dir, arguments.profile)
        return 0
    with store_directory(arguments.dir) as root:
        began = time.perf_counter()
        build(root, arguments.chunks, arguments.manifests)
        print(f"{arguments.chunks} chunks are there after {time.perf_counter() - began:.0f} s")
        return 0 if report(root, arguments.profile, arguments.only) else 1


if __name__ == "__main__":
    sys.exit(main())
