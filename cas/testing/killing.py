"""Kill an operation at step 1, 2, 3 ... until it survives, and check after each kill.

Every attempt starts from a fresh copy of a template directory, in a child forked from a parent
that has never opened a store; the check runs in a second child, as the next user would come.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cas.testing.processes import Child, ChildFailed, forked
from cas.testing.steps import KillAt, recorded_steps, step_hook


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of the matrix did: at how many steps it killed, how many files were torn."""

    operation: str
    kill_points: int
    torn_points: int


class KillMatrix:
    """One operation, killed everywhere.

    Args:
        name: for messages.
        prepare: makes the template in the directory it is given.
        operate: the operation, on a copy of the template.
        check: what must hold of the copy after the kill, including that the operation, run
            again, succeeds. Raises if it does not.
        scratch: an empty directory for the template and the copies.
        counts: says of a step (operation, path) whether to kill there; to thin out hundreds of
            steps that are all alike.
    """

    def __init__(
        self,
        name: str,
        *,
        prepare: Callable[[Path], None],
        operate: Callable[[Path], None],
        check: Callable[[Path], None],
        scratch: Path,
        counts: Callable[[str, str], bool] = lambda operation, path: True,
    ) -> None:
        self.name = name
        self.operate = operate
        self.check = check
        self.scratch = scratch
        self.counts = counts
        self.template = scratch / "template"
        self.template.mkdir()
        forked(lambda: prepare(self.template))

    def run(self, *, torn: bool = True, first: int = 1, stride: int = 1) -> Outcome:
        """Kill at steps ``first``, ``first + stride``, ... until the operation survives."""
        creating = self._creating_steps() if torn else set()
        points = torn_points = 0
        number = first
        while True:
            died = self._attempt(number, torn=False)
            if not died:
                return Outcome(self.name, points, torn_points)
            points += 1
            if number in creating:
                self._attempt(number, torn=True)
                torn_points += 1
            number += stride

    def _attempt(self, number: int, *, torn: bool) -> bool:
        copy = self.scratch / f"copy-{number}-{torn:d}"
        shutil.copytree(self.template, copy, symlinks=True)

        def operate(_: Child) -> None:
            with step_hook(KillAt(number, torn=torn, counts=self.counts)):
                self.operate(copy)

        died = self._died(Child(operate))
        try:
            forked(lambda: self.check(copy))
        except AssertionError as error:
            kind = "torn" if torn else "killed"
            raise AssertionError(f"{self.name}, {kind} at step {number}: {error}") from None
        shutil.rmtree(copy)
        return died

    def _died(self, child: Child) -> bool:
        """True if the child was killed, False if the operation came to its end."""
        try:
            child.result()
        except ChildFailed as error:
            if child.wait() != -signal.SIGKILL:
                raise AssertionError(f"{self.name} failed by itself: {error}") from None
            return True
        return False

    def _creating_steps(self) -> set[int]:
        """The numbers of the steps that create a file; threads may shuffle them a little."""
        copy = self.scratch / "recorded"
        shutil.copytree(self.template, copy, symlinks=True)

        def operate() -> list[str]:
            with recorded_steps() as steps:
                self.operate(copy)
            return [operation for operation, path in steps if self.counts(operation, path)]

        operations = forked(operate)
        shutil.rmtree(copy)
        return {number for number, name in enumerate(operations, 1) if name == "create"}


#: A container may give a memory filesystem of 64 MiB, which a few stores fill.
_ROOMY = 1 << 30


def scratch_in_memory() -> Path | None:
    """A directory on a memory filesystem, where thousands of fsyncs cost nothing; None without."""
    shared = Path("/dev/shm")
    usable = shared.is_dir() and os.access(shared, os.W_OK)
    return shared if usable and shutil.disk_usage(shared).free >= _ROOMY else None
