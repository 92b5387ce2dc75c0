"""Peak anonymous memory and wall time of exports, stock against `cas`.

    python bench/memory.py [--layers 16] [--quick] [--json FILE]
    python bench/memory.py --aoti [--layers 16] [--json FILE]

Every case runs in fresh processes. Memory is RssAnon over the idle process (imports and a tiny
export done), sampled every 10 ms, divided by the bytes of the weights. Seconds run from the loaded
model to the durably written files. A first export writes the weights twice, to the store and to the
output; "again" is the same export with the weights in the store already.

With ``--aoti`` the backend is ExecuTorch's CudaBackend with the CPU standing in for the GPU (it
needs the ``triton`` package and a C++ compiler), without and with its low-memory mode, and "spill"
is an export whose model is moved from memory into the store first, counted from then on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
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
SPILLED_BUDGET = 0.10

#: Values of a case, in the order of the table's columns.
Case = dict[str, Any]


def cases(quick: bool) -> list[Case]:
    product = itertools.product(
        ("portable", "xnnpack"), (False, True), (False, True), ("ram", "safetensors")
    )
    listed = [
        {"backend": backend, "external": external, "strict": strict, "source": source}
        for backend, external, strict, source in product
    ]
    return [case for case in listed if not (quick and case["external"])]


def aoti_cases() -> list[Case]:
    product = itertools.product((False, True), (False, True), ("ram", "safetensors"))
    fixed = {"backend": "cuda", "stand_in": True, "strict": False, "external": True}
    return [
        {**fixed, "low_memory": low_memory, "buffers": buffers, "source": source}
        for low_memory, buffers, source in product
    ]


def engines_of(case: Case) -> list[str]:
    """Stock; `cas` into a new store; and then `cas` once more for a quarter of the cases, or with
    the model spilled."""
    if case["backend"] == "cuda":
        return ["stock", "cas", *(["spill"] if case["source"] == "ram" else [])]
    return ["stock", "cas", *(["again"] if not case["external"] and not case["strict"] else [])]


def run_case(case: Case, layers: int, work: Path) -> dict[str, Any]:
    weights = layers * (WIDTH * WIDTH + WIDTH) * 4
    row: dict[str, Any] = {**case, "weights": weights}
    hashes = []
    for label in engines_of(case):
        if label == "spill":  # measured like a first export
            _remove(work, "store")
        spec = {
            **case,
            "engine": "cas" if label == "again" else label,
            "width": WIDTH,
            "layers": layers,
            "out": str(work / label),
            "store": str(work / "store"),
            "checkpoint": str(work / "weights.safetensors"),
        }
        measured = measure(spec, log=work / "log")
        if measured.result is None:
            said = (work / "log").read_text(errors="replace")[-2000:]
            print(f"{label} ended with {measured.returncode}: {said}", file=sys.stderr)
        row[label] = _summary(measured, weights)
        hashes.append(measured.result and measured.result["sha256"])
        _remove(work, label)
    _remove(work, "store")
    row["identical"] = hashes[0] is not None and hashes.count(hashes[0]) == len(hashes)
    spilled = row.get("spill", {}).get("after_spill", 0)
    row["within_budget"] = (
        row["cas"]["ratio"] <= BUDGET[case["source"]] and spilled <= SPILLED_BUDGET
    )
    return row


def _remove(work: Path, name: str) -> None:
    for path in work.glob(f"{name}*"):
        shutil.rmtree(path)


def _summary(measured: Measured, weights: int) -> dict[str, Any]:
    if measured.result is None:
        infinite = dict.fromkeys(("ratio", "seconds", "after_spill"), float("inf"))
        return {**infinite, "exit": measured.returncode}
    return {
        "ratio": round(measured.ratio(weights), 3),
        "after_spill": round(measured.ratio_after("spill", weights), 3),
        "seconds": round(measured.result["seconds"], 2),
        "base_mib": measured.base_anon >> 20,
        "peak_mib": measured.peak_anon >> 20,
    }


def _line(row: dict[str, Any]) -> str:
    what = (
        f"{row['backend']:9} {'external' if row['external'] else 'inside':9} {row['strict']!s:7}"
        if row["backend"] != "cuda"
        else f"{'low-memory' if row['low_memory'] else 'cuda':10} "
        f"{'buffers' if row['buffers'] else 'parameters':16}"
    )
    third = "spill" if "spill" in row else "again"
    after = row.get("spill", {}).get("after_spill", "")
    return (
        f"{what} {row['source']:12} {row['stock']['ratio']:7.2f} {row['cas']['ratio']:7.3f} "
        f"{after:>7} | {row['stock']['seconds']:7.1f} {row['cas']['seconds']:6.1f} "
        f"{row.get(third, {}).get('seconds', ''):>7}  {row['identical']!s:5}"
        f"{'' if row['within_budget'] else '  OVER BUDGET'}"
    )


def _head(aoti: bool) -> str:
    what = "backend    weights          " if aoti else "backend   weights   strict "
    third = "spill" if aoti else "again"
    return f"{what} source       stock x   cas x spill x | stock s  cas s {third} s  same"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="of 64 MiB each (16: 1 GiB)")
    parser.add_argument("--quick", action="store_true", help="without the external variants")
    parser.add_argument("--aoti", action="store_true", help="CudaBackend instead, on the CPU")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary directory)")
    options = parser.parse_args()
    rows = []
    print(_head(options.aoti), flush=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        work = Path(directory)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor")
        write_checkpoint(WIDTH, options.layers, work / "weights.safetensors")
        for case in aoti_cases() if options.aoti else cases(options.quick):
            row = run_case(case, options.layers, work)
            rows.append(row)
            print(_line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for label in ("cas", "again", "spill"):
        ratios = [r[label]["seconds"] / r["stock"]["seconds"] for r in rows if label in r]
        if ratios:
            median = statistics.median(ratios)
            print(f"time, {label} / stock, median of {len(ratios)}: {median:.2f}")
    good = all(row["identical"] and row["within_budget"] for row in rows)
    print("all byte-identical and within budget" if good else "NOT all within budget")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
