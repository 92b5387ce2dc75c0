"""Wall time of whole exports: stock ExecuTorch, `cas` the first time, and `cas` again.

    python bench/export_time.py [--layers 16] [--rounds 3] [--json FILE]

Every export runs in a fresh process; seconds run from the loaded model to the durably written
files. The first export with `cas` writes the weights twice, to the store and to the output, where
stock writes them once but copies and hashes them more often in memory; "again" is the same export
with the weights in the store already. The engines take turns, and the medians' ratios are printed.
Stock's files and those of `cas` are compared byte for byte.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import measure
from steady import settle
from workload import write_checkpoint

WIDTH = 4096
LAYER_BYTES = WIDTH * WIDTH * 4
CASES = [(b, s) for b in ("portable", "xnnpack") for s in ("ram", "safetensors")]


class Failed(Exception):
    pass


def export(work: Path, engine: str, spec: dict[str, Any]) -> dict[str, Any]:
    """One export in a process of its own; its result, the outputs removed."""
    out = work / "out"
    done = measure(
        {**spec, "engine": engine, "out": str(out)},
        log=work / "log",
        # Not before the process starts: what was settled does not stay so while it imports.
        when_idle=lambda: settle(work, 4 * spec["layers"] * LAYER_BYTES),
    )
    if done.result is None:
        raise Failed(f"{engine} ended with {done.returncode}: {(work / 'log').read_text()[-2000:]}")
    shutil.rmtree(out)
    return done.result


def round_of(work: Path, spec: dict[str, Any]) -> dict[str, float]:
    store = work / "store"
    results = {
        name: export(work, engine, {**spec, "store": str(store)})
        for name, engine in (("stock", "stock"), ("first", "cas"), ("again", "cas"))
    }
    shutil.rmtree(store)
    if len({json.dumps(result["sha256"]) for result in results.values()}) != 1:
        raise Failed(f"the files differ: {results}")
    return {name: result["seconds"] for name, result in results.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="of 64 MiB each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    rows = []
    print(f"{options.layers * LAYER_BYTES >> 20} MiB, {options.rounds} rounds, seconds: medians")
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        write_checkpoint(WIDTH, options.layers, work / "model.safetensors")
        for backend, source in CASES:
            spec = {"backend": backend, "source": source, "external": False, "strict": False,
                    "width": WIDTH, "layers": options.layers,
                    "checkpoint": str(work / "model.safetensors")}  # fmt: skip
            rounds = [round_of(work, spec) for _ in range(options.rounds)]
            median = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
            ratio = {name: median[name] / median["stock"] for name in ("first", "again")}
            print(f"  {backend:9}{source:12} stock {median['stock']:6.2f}   "
                  f"first {median['first']:6.2f} = {ratio['first']:.2f} x   "
                  f"again {median['again']:6.2f} = {ratio['again']:.2f} x", flush=True)  # fmt: skip
            rows.append({"backend": backend, "source": source, "rounds": rounds, "ratio": ratio})
    if options.json:
        options.json.write_text(json.dumps(rows) + "\n")
    return 0 if all(ratio <= 1 for row in rows for ratio in row["ratio"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
