"""A progress display on stderr: only on a terminal, and only once work took over a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from cas_cli.render import size

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

#: What takes less time than this shows nothing.
DELAY = 1.0


class TerminalProgress:
    """Implements `cas.progress.Progress`: one line per step, gone when the command ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._display: RichProgress | None = None
        self._task: TaskID | None = None
        self._label = ""
        self._total: int | None = None
        self._done = 0
        self._timer: threading.Timer | None = None

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._cancel_timer()
            if self._display is not None:
                self._display.stop()
                self._display = None

    def start(self, label: str, total: int | None) -> None:
        self.finish()  # a step inside a step takes its place
        with self._lock:
            self._label, self._total, self._done = label, total, 0
            if self._display is not None:
                self._add_task()
            elif self._timer is None:
                # A step such as lowering calls nothing back, so the display opens by itself.
                wait = max(0.0, DELAY - (self._clock() - self._began))
                self._timer = threading.Timer(wait, self._open)
                self._timer.daemon = True
                self._timer.start()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._display is not None and self._task is not None:
                self._display.update(self._task, completed=self._done, bytes=self._bytes())

    def finish(self) -> None:
        with self._lock:
            if self._display is not None and self._task is not None:
                # Equal numbers are what rich takes for "finished": the spinner goes.
                self._display.update(self._task, total=1, completed=1, bytes=self._bytes())
                self._display.stop_task(self._task)
            self._task = None
            self._label = ""

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._timer is None:  # closed in the meantime
                return
            self._timer = None
            self._display = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                TextColumn("{task.fields[bytes]}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._display.start()
            if self._label:
                self._add_task()

    def _add_task(self) -> None:
        assert self._display is not None
        self._task = self._display.add_task(
            self._label, total=self._total, completed=self._done, bytes=self._bytes()
        )

    def _bytes(self) -> str:
        """How far the step is; a step that moves no bytes shows its time alone."""
        if self._total:
            return f"{size(self._done)} of {size(self._total)}"
        return size(self._done) if self._done else ""

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def wanted(no_progress: bool) -> bool:
    """Whether a display would be seen by a person who did not turn it off."""
    return not no_progress and sys.stderr.isatty()
