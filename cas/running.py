"""Run a program under a store: what it exports with ExecuTorch is stored and recorded.

Nothing is hooked, and torch is not imported, before the program makes its first export. Until then
it is alone in its process, and may set the environment variables that torch reads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cas.errors import CasError
from cas.imports import ImportWatch
from cas.scripts import Outcome, Script, execute
from cas.strictjson import Json

if TYPE_CHECKING:
    from cas.executorch.running import Recorded, Recording
    from cas.store import Store

log = logging.getLogger(__name__)

#: Module -> what in it is called by every export, before weights are copied: torch's own export,
#: the usual way of lowering, and the program manager that all ways of lowering make.
FIRST_CALLS: Final = {
    "torch.export._trace": ("_export",),
    "executorch.exir.program._program": (
        "to_edge_transform_and_lower",
        "EdgeProgramManager.__init__",
    ),
}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run.

    ``name`` is the artifact's, by default made from its file's name; ``provenance`` goes to every
    artifact; ``spill`` moves models from memory into the store when they are exported; ``reuse``
    does without computing what was computed before, except for the share ``recheck`` of it.
    """

    name: str | None = None
    provenance: Mapping[str, Json] = field(default_factory=dict)
    spill: bool = False
    reuse: bool = True
    recheck: float = 0.0


@dataclass(frozen=True, slots=True)
class ActionCounts:
    """How many computations came out of the store, were done, and were done and not kept."""

    hits: int = 0
    misses: int = 0
    uncacheable: int = 0
    seconds_saved: float = 0.0

    @property
    def total(self) -> int:
        return self.hits + self.misses + self.uncacheable


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of a run.

    ``in_child`` says that this is a process that the program itself made with fork(): it ends as it
    would have, and reports nothing. ``unwritten`` counts the programs whose bytes were taken with
    ``.buffer``, or written to something that is no plain file, and that no file is known of;
    ``actions`` what happened to the computations.
    """

    outcome: Outcome
    artifacts: tuple[Recorded, ...] = ()
    unwritten: int = 0
    actions: ActionCounts = ActionCounts()
    seconds: float = 0.0
    in_child: bool = False


def run(
    store: Store,
    script: Script,
    options: RunOptions | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> RunResult:
    """Run ``script`` to its end, and record the programs that it wrote if it succeeded.

    What the program raises is in the outcome. The process is the program's afterwards (see
    `cas.scripts`).

    Raises:
        CasError: the program succeeded, and then what it wrote could not be recorded.
    """
    started = clock()
    under_way = _Run(store, options or RunOptions())
    with under_way.armed():
        outcome = execute(script)
    if not under_way.is_here():
        return RunResult(outcome, in_child=True)
    recorded, unwritten = under_way.finish(record=outcome.succeeded)
    return RunResult(outcome, recorded, unwritten, under_way.actions(), clock() - started)


class _Run:
    """Starts recording at the first export, in whichever thread makes it."""

    def __init__(self, store: Store, options: RunOptions) -> None:
        self._store = store
        self._options = options
        self._process = os.getpid()
        self._mutex = threading.RLock()
        self._armed: list[tuple[Any, str, Any]] = []
        self._over = False
        self._recording: Recording | None = None
        self._failure: CasError | None = None

    def is_here(self) -> bool:
        """False in a child that fork() made."""
        return os.getpid() == self._process

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Wait for the first export for the length of the block."""
        watch = ImportWatch(FIRST_CALLS, self._arm)
        watch.begin()
        try:
            yield
        finally:
            self._over = True  # the program may call later what it found armed
            watch.end()
            self._disarm()

    def finish(self, *, record: bool) -> tuple[tuple[Recorded, ...], int]:
        if self._failure is not None and record:
            raise self._failure  # the program went on without us, as if it had been exported
        if self._recording is None:
            return (), 0
        return self._recording.finish(record=record)

    def actions(self) -> ActionCounts:
        if self._recording is None:
            return ActionCounts()
        found = self._recording.outcomes
        misses, uncacheable = sum(found.misses.values()), sum(found.uncacheable.values())
        return ActionCounts(found.hits, misses, uncacheable, found.seconds_saved)

    def _arm(self, module: str) -> None:
        for path in FIRST_CALLS[module]:
            owner: Any = sys.modules[module]
            *parents, attribute = path.split(".")
            for part in parents:
                owner = getattr(owner, part, None)
            original = vars(owner).get(attribute) if owner is not None else None
            if original is None:
                log.debug("there is no %s in %s to wait for", path, module)
            else:
                self._replace(owner, attribute, original)

    def _replace(self, owner: Any, attribute: str, original: Any) -> None:
        @functools.wraps(original)
        def first(*args: Any, **kwargs: Any) -> Any:
            self._start()
            return getattr(owner, attribute)(*args, **kwargs)

        # A module that was imported before the program began has passed the function on.
        holders = [owner]
        holders += [
            module
            for module in list(sys.modules.values())
            if module is not owner and getattr(module, "__dict__", {}).get(attribute) is original
        ]
        with self._mutex:
            for holder in holders:
                self._armed.append((holder, attribute, original))
                setattr(holder, attribute, first)

    def _disarm(self) -> None:
        while self._armed:
            owner, attribute, original = self._armed.pop()
            setattr(owner, attribute, original)

    def _start(self) -> None:
        """Import what takes seconds, and hook it. In a forked child, only stop waiting."""
        if not self.is_here():
            self._disarm()  # without the mutex: its holder may not exist here
            return
        with self._mutex:
            self._disarm()
            if self._over or self._recording is not None or self._failure is not None:
                return
            if importlib.util.find_spec("executorch") is None:
                return
            try:
                self._recording = _begin(self._store, self._options)
            except CasError as error:
                self._failure = error
                raise


def _begin(store: Store, options: RunOptions) -> Recording:
    from cas.executorch.running import Recording

    recording = Recording(
        store,
        options.name,
        options.provenance,
        spill=options.spill,
        reuse=options.reuse,
        recheck=options.recheck,
    )
    recording.begin()
    return recording
