"""Peak anonymous memory and wall time of exports, stock against `cas`.

    python bench/memory.py [--layers 16] [--quick] [--json FILE]

Every case runs in two fresh processes. Memory is RssAnon over the idle process (imports and a tiny
export done), sampled every 10 ms, divided by the bytes of the weights. Seconds run from the loaded
model to the durably written files. A first export writes the weights twice, to the store and to the
output; "again" is the same export with the weights in the store already.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import Measured, measure
from workload import write_checkpoint

WIDTH = 4096
BUDGET = {"ram": 1.05, "safetensors": 0.05}


def cases(quick: bool) -> list[dict[str, Any]]:
    product = itertools.product(
        ("portable", "xnnpack"), (False, True), (False, True), ("ram", "safetensors")
    )
    listed = [
        {"backend": backend, "external": external, "strict": strict, "source": source}
        for backend, external, strict, source in product
    ]
    return [case for case in listed if not (quick and case["external"])]


def run_case(case: dict[str, Any], layers: int, work: Path) -> dict[str, Any]:
    """Stock; `cas` into a new store; and, for a quarter of the cases, `cas` once more."""
    weights = layers * (WIDTH * WIDTH + WIDTH) * 4
    row: dict[str, Any] = {**case, "weights": weights}
    hashes = []
    again = not case["external"] and not case["strict"]
    for label in ("stock", "cas", *(["again"] if again else [])):
        spec = {
            **case,
            "engine": "stock" if label == "stock" else "cas",
            "width": WIDTH,
            "layers": layers,
            "out": str(work / label),
            "store": str(work / "store"),
            "checkpoint": str(work / "weights.safetensors"),
        }
        measured = measure(spec)
        row[label] = _summary(measured, weights)
        hashes.append(measured.result and measured.result["sha256"])
        for path in work.glob(f"{label}*"):
            shutil.rmtree(path)
    for path in work.glob("store*"):
        shutil.rmtree(path)
    row["identical"] = hashes[0] is not None and hashes.count(hashes[0]) == len(hashes)
    row["within_budget"] = row["cas"]["ratio"] <= BUDGET[case["source"]]
    return row


def _summary(measured: Measured, weights: int) -> dict[str, Any]:
    if measured.result is None:
        return {"ratio": float("inf"), "seconds": float("inf"), "exit": measured.returncode}
    return {
        "ratio": round(measured.ratio(weights), 3),
        "seconds": round(measured.result["seconds"], 2),
        "base_mib": measured.base_anon >> 20,
        "peak_mib": measured.peak_anon >> 20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="of 64 MiB each (16: 1 GiB)")
    parser.add_argument("--quick", action="store_true", help="without the external variants")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary directory)")
    options = parser.parse_args()
    rows = []
    heads = (
        "backend    weights   strict  source       stock x   cas x  | stock s  cas s  again s  same"
    )
    print(heads, flush=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        work = Path(directory)
        write_checkpoint(WIDTH, options.layers, work / "weights.safetensors")
        for case in cases(options.quick):
            row = run_case(case, options.layers, work)
            rows.append(row)
            print(
                f"{row['backend']:10} {'external' if row['external'] else 'inside':9} "
                f"{row['strict']!s:7} {row['source']:12} {row['stock']['ratio']:7.2f} "
                f"{row['cas']['ratio']:7.3f}  | {row['stock']['seconds']:7.1f} "
                f"{row['cas']['seconds']:6.1f}  {row.get('again', {}).get('seconds', ''):>7}  "
                f"{row['identical']!s:5}"
                f"{'' if row['within_budget'] else '  OVER BUDGET'}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for label in ("cas", "again"):
        ratios = [r[label]["seconds"] / r["stock"]["seconds"] for r in rows if label in r]
        print(f"time, {label} / stock, median of {len(ratios)}: {statistics.median(ratios):.2f}")
    good = all(row["identical"] and row["within_budget"] for row in rows)
    print("all byte-identical and within budget" if good else "NOT all within budget")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
