"""Everything that only a GPU can show, in one unattended run of less than eight minutes.

    python bench/gpu_check.py [--json FILE] [--dir DIR] [--gib 3] [--section NAME ...]
    python bench/gpu_check.py --stand-in        # the same code, with the CPU for a GPU

Needs torch with CUDA, ExecuTorch 1.5.1 and its `triton`, a C++ compiler, one card with four times
`--gib` of free memory, and as much again on disk. Each section runs in a process of its own: one
that fails or hangs leaves the others' results. The JSON, written after each section and printed at
the end, has for each of them a status (ok, failed, skipped, timed out), what it measured, and its
checks; the exit status is 0 if none failed.

    copies       the copier's contract on every card; order of streams; no memory taken on the card
    throughput   device -> host -> BLAKE3 -> disk, against each alone and one after the other
    memory       host and device memory of an export of some GiB, stock against cas
    identity     exports by CudaBackend, with and without cas, byte for byte
    run          a model of two layers executed, if the ExecuTorch runtime here has CUDA
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SECTIONS_FILE = Path(__file__).with_name("gpu_sections.py")

#: Name -> the most seconds that it may take. What is left of the total bounds it too.
SECTIONS = {
    "environment": 60,
    "copies": 60,
    "throughput": 120,
    "memory": 200,
    "identity": 200,
    "run": 90,
}
TOTAL_SECONDS = 460.0
#: With less time left, a section is not begun.
WORTH_BEGINNING = 15.0


class Command(NamedTuple):
    """What to run for a section, and where it leaves its result."""

    arguments: list[str]
    result: Path


def section_command(name: str, settings: dict[str, Any], work: Path) -> Command:
    """The process that runs one section of ``gpu_sections.py``."""
    result = work / f"{name}.json"
    return Command(
        [sys.executable, str(SECTIONS_FILE), name, json.dumps(settings), str(result)], result
    )


def run_section(command: Command, seconds: float, log: Path) -> dict[str, Any]:
    """Run one section to its end or to ``seconds``; what it found, even if it did not end well."""
    began = time.monotonic()
    with open(log, "ab") as sink:
        process = subprocess.Popen(
            command.arguments, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
            start_new_session=True,
        )  # fmt: skip
    status = _wait(process, seconds)
    found = _read(command.result)
    if status is not None:
        found["status"] = status
    if found["status"] in ("failed", "timed out"):
        found.setdefault("error", _tail(log))
    found["seconds"] = round(time.monotonic() - began, 1)
    return found


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """How it ended, if not by saying so itself."""
    try:
        return None if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:  # also the processes that it started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return {"status": "failed"}
    return found


def _tail(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-2000:]


def run_all(
    names: list[str],
    command: Callable[[str, float], Command],
    work: Path,
    *,
    patience: float = 1.0,
    save: Callable[[dict[str, Any]], None] = lambda sections: None,
) -> dict[str, Any]:
    """Run sections one after the other; ``save`` gets all results after each of them.

    ``patience`` stretches all times that are allowed.
    """
    began = time.monotonic()
    sections: dict[str, Any] = {}
    for name in names:
        left = patience * TOTAL_SECONDS - (time.monotonic() - began)
        if left < WORTH_BEGINNING:
            sections[name] = {"status": "skipped", "reason": "no time was left"}
        else:
            log = work / f"{name}.log"
            seconds = min(patience * SECTIONS[name], left)
            sections[name] = run_section(command(name, seconds), seconds, log)
        print(f"{name}: {sections[name]['status']}", file=sys.stderr, flush=True)
        save(sections)
    return sections


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the results go, besides stdout")
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary directory)")
    parser.add_argument("--gib", type=float, default=3.0, help="weights of the model in `memory`")
    parser.add_argument(
        "--section", action="append", choices=list(SECTIONS), help="only these; may be repeated"
    )
    parser.add_argument(
        "--stand-in", "--dry-run", action="store_true",
        help="prove this script without a GPU: small sizes, the CPU stands in, no figure counts",
    )  # fmt: skip
    options = parser.parse_args()
    began = time.monotonic()
    names = options.section or list(SECTIONS)
    document: dict[str, Any] = {"stand_in": options.stand_in, "sections": {}}

    def save(sections: dict[str, Any]) -> None:
        document["sections"] = sections
        document["seconds"] = round(time.monotonic() - began, 1)
        document["ok"] = all(found["status"] in ("ok", "skipped") for found in sections.values())
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")

    with tempfile.TemporaryDirectory(dir=options.dir, prefix="gpu-check-") as directory:
        work = Path(directory)
        # Shared, so that both sides of a comparison have the same compiled kernels.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor")
        os.environ["TRITON_CACHE_DIR"] = str(work / "triton")
        settings = {"stand_in": options.stand_in, "gib": options.gib, "work": str(work)}
        run_all(
            names,
            lambda name, seconds: section_command(name, {**settings, "seconds": seconds}, work),
            work,
            # A small machine that proves the script may be slow, and nobody rents it by the minute.
            patience=4.0 if options.stand_in else 1.0,
            save=save,
        )
    print(json.dumps(document, indent=1))
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
