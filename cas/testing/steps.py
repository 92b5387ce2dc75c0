"""Hooks on the steps that `cas.fsio` announces: to kill there, to record, to cut in there."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from cas import fsio


@contextlib.contextmanager
def step_hook(hook: fsio.StepHook) -> Iterator[None]:
    """Install ``hook`` for the length of the block."""
    fsio.set_step_hook(hook)
    try:
        yield
    finally:
        fsio.set_step_hook(None)


@contextlib.contextmanager
def recorded_steps() -> Iterator[list[tuple[str, str]]]:
    """The (operation, path) of every step of the block, in a list that grows."""
    steps: list[tuple[str, str]] = []
    with step_hook(lambda operation, path: steps.append((operation, str(path)))):
        yield steps


class KillAt:
    """A hook that ends the process with SIGKILL before step ``number`` (the first is 1).

    With ``torn``, a file that the step would create is left half written, as a power cut or a
    kill between open and write leaves it; other steps are not different. Steps that ``counts``
    rejects are passed over.
    """

    def __init__(
        self,
        number: int,
        *,
        torn: bool = False,
        counts: Callable[[str, str], bool] = lambda operation, path: True,
    ) -> None:
        self.number = number
        self.torn = torn
        self.counts = counts
        self._seen = 0
        self._mutex = threading.Lock()

    def __call__(self, operation: str, path: Path | str) -> None:
        if not self.counts(operation, str(path)):
            return
        with self._mutex:
            self._seen += 1
            if self._seen != self.number:
                return
            if self.torn and operation == "create":
                with contextlib.suppress(OSError):
                    Path(path).write_bytes(b"torn")
            os.kill(os.getpid(), signal.SIGKILL)


class Interleaving:
    """Runs ``action`` once, just before the first step that ``when`` accepts.

    This is how a test forces an order: the action happens exactly between two steps of what the
    block does, on the same thread, so nothing is left to chance.
    """

    def __init__(
        self, when: Callable[[str, str], bool], action: Callable[[], object], *, nth: int = 1
    ) -> None:
        self.when = when
        self.action = action
        self.left = nth
        self.happened = False
        self._inside = False

    def __call__(self, operation: str, path: Path | str) -> None:
        if self.happened or self._inside or not self.when(operation, str(path)):
            return
        self.left -= 1
        if self.left:
            return
        self._inside = True
        try:
            self.action()
        finally:
            self._inside = False
            self.happened = True
