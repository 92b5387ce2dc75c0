"""Runs `workload.py` in a fresh process and watches its memory from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

WORKLOAD = Path(__file__).with_name("workload.py")
SAMPLE_SECONDS = 0.01


@dataclass(frozen=True)
class Memory:
    """Bytes of a process in memory: RssAnon, and VmRSS, which counts mapped files too."""

    anon: int = 0
    total: int = 0

    def at_least(self, other: Memory) -> Memory:
        return Memory(max(self.anon, other.anon), max(self.total, other.total))


@dataclass(frozen=True)
class Measured:
    """What the process held when idle, and at most (each figure by itself): of all that came after,
    and by phase, for a workload that names its phases with `enter` ("" is before the first).
    ``returncode`` is negative for a signal, and ``result`` is None then."""

    returncode: int
    base: Memory
    peak: Memory
    result: dict[str, Any] | None
    peaks: Mapping[str, Memory] = field(default_factory=dict)

    @property
    def base_anon(self) -> int:
        return self.base.anon

    @property
    def peak_anon(self) -> int:
        return self.peak.anon

    def ratio(self, weights: int) -> float:
        """Peak anonymous memory over the idle process, as a multiple of the weights."""
        return (self.peak_anon - self.base_anon) / weights

    def ratio_after(self, phase: str, weights: int) -> float:
        """The same of the phases that came after one; 0 if there were none."""
        names = list(self.peaks)
        later = names[names.index(phase) + 1 :] if phase in names else []
        peak = max((self.peaks[name].anon for name in later), default=self.base_anon)
        return (peak - self.base_anon) / weights


def enter(phase: str) -> None:
    """For workloads: count what comes from here on under this name."""
    print(f"phase {phase}", flush=True)


def memory_of(pid: int) -> Memory:
    """From /proc (see proc_pid_status(5)); nothing when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return Memory()
    fields = dict(line.split(":", 1) for line in lines)
    anon, total = (int(fields.get(name, "0").split()[0]) << 10 for name in ("RssAnon", "VmRSS"))
    return Memory(anon, total)


def measure(
    spec: dict[str, Any],
    *,
    prefix: list[str] | None = None,
    log: Path = Path(os.devnull),
    workload: Path = WORKLOAD,
    when_idle: Callable[[], None] = lambda: None,
) -> Measured:
    """Run one workload; ``prefix`` is a command to run it under, ``log`` gets what it says, and
    ``when_idle`` is called when it is about to begin."""
    command = [*(prefix or []), sys.executable, str(workload), json.dumps(spec)]
    with open(log, "ab") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdin and process.stdout
    with process:
        if not _expect(process.stdout, "idle"):
            return Measured(process.wait(), Memory(), Memory(), None)
        when_idle()
        base = memory_of(process.pid)
        watcher = _Watcher(process.pid, base)
        watcher.start()
        _say(process.stdin)
        finished = _expect(process.stdout, "done", watcher)
        watcher.stop()
        result = None
        if finished:
            _say(process.stdin)
            result = json.loads(process.stdout.readline())
        return Measured(process.wait(), base, watcher.peak, result, watcher.peaks)


def _say(stream: IO[str]) -> None:
    stream.write("\n")
    stream.flush()


def _expect(stream: IO[str], word: str, watcher: _Watcher | None = None) -> bool:
    for line in stream:
        said = line.strip()
        if watcher is not None and said.startswith("phase "):
            watcher.enter(said.removeprefix("phase "))
        if said == word:
            return True
    return False


class _Watcher(threading.Thread):
    def __init__(self, pid: int, base: Memory) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peaks = {"": base}
        self._phase = ""
        self._ended = threading.Event()

    @property
    def peak(self) -> Memory:
        peak = Memory()
        for other in self.peaks.values():
            peak = peak.at_least(other)
        return peak

    def enter(self, phase: str) -> None:
        self.peaks.setdefault(phase, Memory())
        self._phase = phase

    def run(self) -> None:
        while not self._ended.is_set():
            phase = self._phase
            self.peaks[phase] = self.peaks[phase].at_least(memory_of(self.pid))
            time.sleep(SAMPLE_SECONDS)

    def stop(self) -> None:
        self._ended.set()
        self.join()
