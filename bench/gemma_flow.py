"""ExecuTorch's own Gemma 4 31B export for CUDA, in small: peak host memory, stock against `cas`.

    python bench/gemma_flow.py [--quick] [--json FILE] [--dir DIR]

The model and the steps are ExecuTorch's (see `gemma_workload.py`), with the CPU standing in for the
GPU and about 1 GiB of int4 and int8 weights, quantized from a bfloat16 checkpoint on disk. Memory
is RssAnon over the idle process, sampled every 10 ms, divided by the bytes of the quantized
weights. Four processes write the same files:

    stock    the checkpoint quantized in memory, then exported
    cas      the same under capture
    spill    the same, with the model moved into the store when it is loaded
    stream   each weight quantized by itself and kept in the store from then on
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import Measured, measure

WORKLOAD = Path(__file__).with_name("gemma_workload.py")

#: Numbers of the model, and nothing of its structure.
FULL = {"hidden": 2560, "intermediate": 32768, "vocabulary": 16384}
QUICK = {"hidden": 512, "intermediate": 8192, "vocabulary": 2048}

#: Engine -> (the phase after which its peak counts, budget in multiples of the weights).
BUDGETS = {"cas": ("load", 1.2), "spill": ("spill", 0.25), "stream": ("", 0.5)}


def run_engine(engine: str, size: dict[str, int], work: Path) -> tuple[Measured, dict[str, Any]]:
    spec = {
        **size,
        "engine": engine,
        "checkpoint": str(work / "checkpoint"),
        "inductor": str(work / "inductor"),
        "out": str(work / f"out-{engine}"),
        "store": str(work / f"store-{engine}"),
    }
    measured = measure(spec, workload=WORKLOAD, log=work / f"{engine}.log")
    for name in ("out", "store"):
        for path in work.glob(f"{name}-{engine}*"):
            shutil.rmtree(path)
    if measured.result is None:
        tail = (work / f"{engine}.log").read_text(errors="replace")[-3000:]
        sys.exit(f"{engine} ended with {measured.returncode}:\n{tail}")
    return measured, measured.result


def summary(engine: str, measured: Measured, result: dict[str, Any]) -> dict[str, Any]:
    weights = result["weights"]
    phase, budget = BUDGETS.get(engine, ("load", None))
    return {
        "engine": engine,
        "whole": round(measured.ratio(weights), 3),
        "loaded": round(measured.ratio_after("load", weights), 3),
        "counted": round(measured.ratio_after(phase, weights), 3),
        "budget": budget,
        "seconds": result["seconds"],
        "phases": {
            name: round((peak.anon - measured.base_anon) / weights, 3)
            for name, peak in measured.peaks.items()
            if name
        },
        "base_mib": measured.base_anon >> 20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="50 MiB of weights, without budgets")
    parser.add_argument("--engines", default="stock,cas,spill,stream", help="which, in this order")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary directory)")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    rows, hashes, weights = [], [], 0
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        work = Path(directory)
        _, written = run_engine("checkpoint", size, work)
        print(f"checkpoint of {written['bytes'] / 2**20:.0f} MiB", flush=True)
        for engine in options.engines.split(","):
            measured, result = run_engine(engine, size, work)
            weights = result["weights"]
            rows.append(summary(engine, measured, result))
            hashes.append(result["sha256"])
            print(json.dumps(rows[-1]), flush=True)
    outcome = {
        "size": size,
        "weights": weights,
        "rows": rows,
        "identical": all(found == hashes[0] for found in hashes),
        "sha256": hashes[0],
        "within_budget": all(row["counted"] <= (row["budget"] or 99) for row in rows),
    }
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps({key: outcome[key] for key in ("weights", "identical", "within_budget")}))
    return 0 if outcome["identical"] and (options.quick or outcome["within_budget"]) else 1


if __name__ == "__main__":
    sys.exit(main())
