"""Runs `workload.py` in a fresh process and watches its memory from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

WORKLOAD = Path(__file__).with_name("workload.py")
SAMPLE_SECONDS = 0.01


@dataclass(frozen=True)
class Measured:
    """``peak_anon`` and ``base_anon`` are bytes of RssAnon; ``returncode`` is negative for a
    signal, and ``result`` is None then."""

    returncode: int
    base_anon: int
    peak_anon: int
    result: dict[str, Any] | None

    def ratio(self, weights: int) -> float:
        """Peak anonymous memory over the idle process, as a multiple of the weights."""
        return (self.peak_anon - self.base_anon) / weights


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process, from /proc (see proc_pid_status(5)); 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0


def measure(spec: dict[str, Any], *, prefix: list[str] | None = None) -> Measured:
    """Run one workload; ``prefix`` is a command to run it under."""
    command = [*(prefix or []), sys.executable, str(WORKLOAD), json.dumps(spec)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin and process.stdout
    with process:
        if not _expect(process.stdout, "idle"):
            return Measured(process.wait(), 0, 0, None)
        base = anonymous_bytes(process.pid)
        watcher = _Watcher(process.pid, base)
        watcher.start()
        _say(process.stdin)
        finished = _expect(process.stdout, "done")
        watcher.stop()
        result = None
        if finished:
            _say(process.stdin)
            result = json.loads(process.stdout.readline())
        return Measured(process.wait(), base, watcher.peak, result)


def _say(stream: IO[str]) -> None:
    stream.write("\n")
    stream.flush()


def _expect(stream: IO[str], word: str) -> bool:
    return any(line.strip() == word for line in stream)


class _Watcher(threading.Thread):
    def __init__(self, pid: int, base: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak = base
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            self.peak = max(self.peak, anonymous_bytes(self.pid))
            time.sleep(SAMPLE_SECONDS)

    def stop(self) -> None:
        self._ended.set()
        self.join()
