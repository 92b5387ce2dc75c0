"""The demo: one real model, two backends, two sequence lengths, one of them twice; one store.

Exports all-MiniLM-L6-v2 with and without `cas`, each in a process of its own; compares the files;
assembles them somewhere else; runs them with ExecuTorch's runtime; compares with PyTorch; and
prints what each export cost. ``make demo`` runs it.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EXPORTS = (("xnnpack", 128), ("xnnpack", 64), ("portable", 128), ("portable", 64))
MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """``peak`` is the largest anonymous memory of the process, in bytes (RssAnon)."""

    seconds: float
    peak: int
    output: str


def run(command: list[str]) -> Cost:
    """Run a command to its end and watch its memory."""
    began = time.monotonic()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    peak = 0

    def watch() -> None:
        nonlocal peak
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            try:
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            except (OSError, ValueError):
                break
            peak = max(peak, int(fields.get("RssAnon", "0 kB").split()[0]) * 1024)
            time.sleep(0.02)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    output, errors = process.communicate()
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed with {process.returncode}:\n{errors[-4000:]}")
    return Cost(time.monotonic() - began, peak, output)


def cas(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cas_cli", *arguments]


def export_all(work: Path, store: str) -> list[dict[str, Any]]:
    rows = []
    for backend, length in EXPORTS:
        label = f"{backend}-{length}"
        print(f"exporting {label} ...", file=sys.stderr, flush=True)
        stock_dir, cas_dir = work / "stock" / label, work / "cas" / label
        stock = run([sys.executable, str(HERE / "minilm_stock.py"), str(length), backend,
                     str(stock_dir)])  # fmt: skip
        export = cas("--store", store, "export", f"{HERE / 'minilm_model.py'}:length_{length}",
                     "-o", str(cas_dir), "--backend", backend, "--name", f"minilm/{label}",
                     "--json")  # fmt: skip
        first = run(export)
        again = run(export) if not rows else None
        names = sorted(path.name for path in stock_dir.iterdir())
        assert names == sorted(path.name for path in cas_dir.iterdir()), "other files than stock"
        for name in names:
            assert filecmp.cmp(stock_dir / name, cas_dir / name, shallow=False), "other bytes"
        rows.append(
            {
                "label": label,
                "stock": stock,
                "cas": first,
                "first": json.loads(first.output),
                "again": again and json.loads(again.output),
            }
        )
    return rows


def check_numerics(work: Path, store: str) -> dict[str, float]:
    """Assemble elsewhere, run there under ExecuTorch: largest difference from PyTorch, each."""
    labels = [f"{backend}-{length}" for backend, length in EXPORTS]
    print("assembling elsewhere and running ...", file=sys.stderr, flush=True)
    for label in labels:
        run(cas("--store", store, "assemble", f"minilm/{label}", "-o", str(work / label)))
    check = [sys.executable, str(HERE / "minilm_check.py")]
    errors: dict[str, float] = json.loads(run([*check, *(str(work / x) for x in labels)]).output)
    assert set(errors) == set(labels) and max(errors.values()) < 1e-4, errors
    return errors


def show(rows: list[dict[str, Any]], errors: dict[str, float], stats: dict[str, Any]) -> None:
    head = f"{'':14}{'file':>9}  {'new in the store':>17}  {'peak memory':>19}  {'time':>15}"
    print(f"\n{head}\n{'':14}{'MiB':>9}  {'MiB':>17}  "
          f"{'stock / cas, MiB':>19}  {'stock / cas, s':>15}")  # fmt: skip
    for row in rows:
        first, again, stock, measured = row["first"], row["again"], row["stock"], row["cas"]
        new = f"{first['new_bytes'] / MIB:.1f}"
        if again:
            new += f", then {again['new_bytes'] / MIB:.1f}"
        memory = f"{stock.peak / MIB:.0f} / {measured.peak / MIB:.0f}"
        seconds = f"{stock.seconds:.1f} / {measured.seconds:.1f}"
        size = first["logical_bytes"] / MIB
        print(f"{row['label']:14}{size:9.1f}  {new:>17}  {memory:>19}  {seconds:>15}")
    logical, physical = stats["logical_bytes"] / MIB, stats["physical_bytes"] / MIB
    print(f"\nThe store holds {stats['generations']} exports: {logical:.0f} MiB of files in "
          f"{physical:.0f} MiB of chunks.")  # fmt: skip
    print("Every file is byte for byte what stock ExecuTorch wrote.")
    print("Run by ExecuTorch after assembling them elsewhere; largest difference from PyTorch:")
    for label, error in errors.items():
        print(f"  {label:14}{error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="cas-demo-") as directory:
        work = Path(directory)
        store = str(work / "store")
        rows = export_all(work, store)
        errors = check_numerics(work, store)
        stats = json.loads(run(cas("--store", store, "stats", "--json")).output)
        show(rows, errors, stats)


if __name__ == "__main__":
    main()
