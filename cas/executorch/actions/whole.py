"""Whole exports: the files of a program that was exported before, without lowering it.

``to_edge_transform_and_lower`` is asked with programs, partitioners and the rest. If the very same
was lowered before, it returns at once, with an edge program that is lowered when somebody looks at
it. If nobody does before ``to_executorch`` is called, and that was done before with the same
configuration, the recorded files stand for the program.

An export that was never done is lowered where the program asks for it, so that its errors come
where they always came.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Final

from cas.digest import Digest
from cas.errors import CasError, Refused
from cas.executorch.actions import dependencies, drift, facts
from cas.executorch.actions.cache import FILE_CLOCK, scratch_directories
from cas.executorch.actions.dependencies import Dependencies
from cas.executorch.actions.errors import Unkeyable, Unrecordable
from cas.executorch.actions.observer import Observed, observing
from cas.executorch.actions.outcomes import STALE, ActionMismatch, ActionOptions, Outcomes
from cas.executorch.actions.weights import StorageDigests
from cas.executorch.actions.whole_keys import Request, WholeKey, lowering_key, weights_digest
from cas.executorch.actions.whole_programs import (
    LazyEdgeManager,
    ProgramContents,
    ReplayedProgram,
    first_bytes,
    freeze_exceptions,
    thaw_exceptions,
)
from cas.executorch.intake import Intake
from cas.executorch.patches import Patches
from cas.executorch.seams import PROGRAM
from cas.journal import Event, Outcome
from cas.manifest import Recipe
from cas.records import ActionRecord
from cas.store import Store
from cas.strictjson import Json
from cas.writer import Writer

logger = logging.getLogger(__name__)

KIND: Final = "whole-export"
#: Says that a lowering was done, and can be put off. Its record holds nothing else.
LOWERING: Final = "lowering"
ENTRY: Final = "to_edge_transform_and_lower"

#: What exports read in this process; see `Dependencies`.
_dependencies: Final = Dependencies()


def install(patches: Patches, exports: WholeExports) -> None:
    """Put `WholeExports.lower` in the function's place, wherever it was imported to."""
    original = getattr(importlib.import_module(PROGRAM), ENTRY)

    @functools.wraps(original)
    def lower(*args: Any, **kwargs: Any) -> Any:
        return exports.lower(original, args, kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(ENTRY) is original:
            patches.set(module, ENTRY, lower)


class InputsChanged(Refused):
    """A lowering was put off, and what it was asked to lower is not the same any more."""

    def __init__(self, label: str) -> None:
        super().__init__(
            f"{label}: its weights, graph or constant methods changed after "
            "to_edge_transform_and_lower, which was put off because its result is known; change "
            "them before, or compute everything (`cas run --no-actions`)"
        )


class WholeExports:
    """The whole exports of one capture."""

    def __init__(
        self,
        store: Store,
        writer: Writer,
        intake: Intake,
        options: ActionOptions,
        outcomes: Outcomes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._store = store
        self._writer = writer
        self._intake = intake
        self._options = options
        self._clock = clock
        self._flying = 0
        self._process = os.getpid()
        self._ended = False
        self.outcomes = outcomes

    def end(self) -> None:
        """What was put off from here on does without the store."""
        self._ended = True

    def is_active(self) -> bool:
        """False at the end of the capture, and in a child that fork() made."""
        return not self._ended and os.getpid() == self._process

    def lower(
        self,
        original: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> Any:
        """``original(*arguments, **keywords)``, or what will become of it when it is looked at."""
        call = functools.partial(original, *arguments, **keywords)
        request = Request.of(arguments, keywords)
        if request is None:
            return call()
        started = self._clock()
        digests = self.digests()
        try:
            key = lowering_key(request, digests)
            weights = weights_digest(request.programs, digests)
        except Exception as error:
            self.tell("uncacheable", request.label, *reasons(error, "making a key failed"))
            return call()
        finally:
            self.outcomes.key_seconds += self._clock() - started
        lowering = Lowering(self, request, key, weights, call)
        if not self._is_put_off(request, key):
            lowering.take_off(key.digest)
            if not self._is_put_off(request, key):
                lowering.lower(late=False)
        return LazyEdgeManager(lowering)

    def _is_put_off(self, request: Request, key: WholeKey) -> bool:
        """Whether a lowering is known to succeed; if so, its only side effect is done here."""
        record = self._writer.find_action(key.digest).record
        try:
            if record is None or dependencies.changed(record.dependencies):
                return False
            exceptions = thaw_exceptions(record)
        except CasError:
            return False
        if request.given_config is not None:
            request.given_config._core_aten_ops_exception_list = exceptions
        return True

    # --- for `Lowering` -------------------------------------------------------------------------

    def digests(self) -> StorageDigests:
        """For the weights as they are now; see `StorageDigests` for how long."""
        return StorageDigests(self._writer.digest)

    def flight(self, key: Digest) -> AbstractContextManager[bool]:
        """Be the only one who does this. Who has one already does not wait for another."""
        return self._store.actions.flight(key, wait=self._flying == 0)

    def flies(self, change: int) -> None:
        self._flying += change

    def find(self, key: WholeKey) -> Found:
        lookup = self._writer.find_action(key.digest)
        if lookup.record is None:
            return Found(None, lookup.reason or "absent")
        try:
            stale = dependencies.changed(lookup.record.dependencies)
            if stale:
                return Found(None, STALE, f"{stale[0]} has changed")
            contents = ProgramContents.thaw(lookup.record)
        except CasError as error:
            return Found(None, "damaged", str(error))
        return Found(contents, seconds=lookup.record.seconds)

    def is_rechecked(self) -> bool:
        return self._options.is_rechecked()

    def replay(self, contents: ProgramContents, make: Callable[[], Any]) -> ReplayedProgram:
        def prefix(recipe: Recipe) -> bytes:
            return first_bytes(self._intake, recipe)

        return ReplayedProgram(contents, self._intake.source, prefix, make)

    def contents(self, program: Any) -> ProgramContents:
        return ProgramContents.of(program, self._intake)

    def observe(self, work: _Work, do: Callable[[], Any]) -> Any:
        """Do a part of an export, and take down what it read, and how long it took."""
        if not self.is_active():
            return do()
        before = facts.ambient_facts()
        events = len(self.outcomes.events)
        relied = len(self.outcomes.relied)
        started = self._clock()
        with observing(time.clock_gettime_ns(FILE_CLOCK)) as observed:
            result = do()
        work.seconds += self._clock() - started
        work.observed.append(observed)
        work.relied += self.outcomes.relied[relied:]
        for event in self.outcomes.events[events:]:
            if event.outcome == "uncacheable":
                work.flaws.append(f"{event.label}: {event.reason}")
        drift.VARIABLES.learn(observed.before, dict(os.environ))
        drift.FACTS.learn(before, facts.ambient_facts())
        return result

    def record(
        self,
        request: Request,
        lowering: WholeKey,
        whole: WholeKey,
        work: _Work,
        made: ProgramContents,
    ) -> None:
        """Keep an export, and that its lowering is known.

        Raises:
            Unrecordable: it cannot be done again from the same inputs alone.
            CasError: the store could not take it.
        """
        if work.flaws:
            raise Unrecordable(work.flaws[0])
        if request.partitioner_digest() != work.partitioner:
            raise Unrecordable("the export changes its partitioner")
        depends = self._depends(work)
        result, recipes = made.freeze()
        created = self._store.context.now()
        microseconds = round(work.seconds * 1e6)
        side_effect = freeze_exceptions(request.given_config)
        self._writer.put_actions(
            [
                ActionRecord(
                    whole.digest, KIND, whole.factors, result, recipes, depends, request.label,
                    microseconds, created,
                ),
                ActionRecord(
                    lowering.digest, LOWERING, lowering.factors, side_effect, (), depends,
                    request.label, microseconds, created,
                ),
            ]
        )  # fmt: skip

    def _depends(self, work: _Work) -> Mapping[str, Json]:
        ignored = (self._store.path, *scratch_directories())
        found: dict[str, dict[str, Json]] = {}
        own = [_dependencies.add(observed, ignored) for observed in work.observed]
        for depends in (*work.relied, *own):
            for section, entries in depends.items():
                if isinstance(entries, dict):
                    found.setdefault(section, {}).update(entries)
        return {section: {**entries} for section, entries in found.items()}

    def tell(
        self,
        outcome: Outcome,
        label: str,
        reason: str = "",
        detail: str = "",
        key: WholeKey | None = None,
        seconds: float = 0.0,
    ) -> None:
        digest = None if key is None else key.digest
        event = Event(outcome, KIND, label, reason, detail, digest, round(seconds * 1e6))
        self.outcomes.events.append(event)


class Lowering:
    """One lowering: done, or put off until somebody looks at it."""

    def __init__(
        self,
        exports: WholeExports,
        request: Request,
        key: WholeKey,
        weights: Digest,
        call: Callable[[], Any],
    ) -> None:
        self._exports = exports
        self._request = request
        self._key = key
        self._weights = weights
        self._call = call
        self._real: Any = None
        self._seen = False
        self._served: list[tuple[Any, _Slot]] = []
        self._work = _Work(request.partitioner_digest())
        self._flights = _Flights(exports)

    def take_off(self, key: Digest) -> None:
        self._flights.enter(key)

    def lower(self, *, late: bool = True) -> Any:
        """The edge program; lowered now, if it was not yet.

        ``to_executorch`` changes the program that it is called on, so one that was spared it has
        it called now.

        Raises:
            InputsChanged: lowering was put off, and would now give another program.
        """
        if self._real is None:
            try:
                if late:
                    self._require_unchanged()
                self._real = self._exports.observe(self._work, self._call)
            except BaseException:
                self._flights.close()
                raise
            for config, slot in self._served:
                slot.program = self._real.to_executorch(config)
        return self._real

    def _require_unchanged(self) -> None:
        digests = self._exports.digests() if self._exports.is_active() else StorageDigests()
        try:
            same = weights_digest(self._request.programs, digests) == self._weights
            same = same and _inputs(lowering_key(self._request, digests)) == _inputs(self._key)
        except Exception as error:  # such as a partitioner that was used and has no key any more
            logger.info("%s cannot be compared with before", self._request.label, exc_info=error)
            return
        if not same:
            raise InputsChanged(self._request.label)

    def look(self) -> Any:
        """The edge program, for somebody who may change it."""
        if not self._seen:
            self._seen = True
            self._flights.close()
            if not self._served and self._exports.is_active():
                self._tell("uncacheable", "the edge program is used before to_executorch")
        return self.lower()

    def to_executorch(self, config: Any) -> Any:
        """What the edge program's own method gives, or what stands for it."""
        if self._seen or not self._exports.is_active():
            return self.lower().to_executorch(config)
        self._seen = True  # the next call finds a program that this one has changed
        try:
            return self._emit(config)
        finally:
            self._flights.close()

    def _emit(self, config: Any) -> Any:
        try:
            key = self._key.with_config(config)
            if weights_digest(self._request.programs, self._exports.digests()) != self._weights:
                raise Unkeyable("weights that changed between lowering and to_executorch")
        except Exception as error:
            self._tell("uncacheable", *reasons(error, "making a key failed"))
            return self.lower().to_executorch(config)
        found = self._exports.find(key)
        if found.contents is None and self._real is None:
            self.take_off(key.digest)
            found = self._exports.find(key)
        if found.contents is not None and self._exports.is_rechecked():
            return self._recheck(config, key, found.contents)
        if found.contents is not None:
            self._tell("hit", key=key, seconds=found.seconds)
            return self._replay(config, found.contents)
        program = self._make(config)
        if self._record(key, program):
            self._tell("miss", found.reason, found.detail, key, self._work.seconds)
        return program

    def _replay(self, config: Any, contents: ProgramContents) -> Any:
        if self._real is not None:  # somebody else recorded it while this was being lowered
            return self._real.to_executorch(config)
        slot = _Slot()
        self._served.append((config, slot))

        def make() -> Any:
            self.lower()
            return slot.program

        return self._exports.replay(contents, make)

    def _make(self, config: Any) -> Any:
        real = self.lower()
        return self._exports.observe(self._work, lambda: real.to_executorch(config))

    def _recheck(self, config: Any, key: WholeKey, recorded: ProgramContents) -> Any:
        program = self._make(config)
        self._exports.outcomes.rechecked += 1
        exact = not self._request.is_compiled_by_aoti()
        found = recorded.differences(self._exports.contents(program), exact=exact)
        if not found:
            self._tell("hit", key=key)
            return program
        warnings.warn(
            f"{self._request.label}: the record {key.digest.hex()[:12]} differs from a fresh "
            f"export in {', '.join(found)}; the fresh one is used and replaces it. Something "
            "decides the result that is neither in the key nor among what the export was seen "
            "to read",
            ActionMismatch,
            stacklevel=2,
        )
        self._tell("mismatch", detail=", ".join(found), key=key, seconds=self._work.seconds)
        self._record(key, program)
        return program

    def _record(self, key: WholeKey, program: Any) -> bool:
        """Keep an export; False if it cannot be kept. It is used all the same."""
        try:
            made = self._exports.contents(program)
            self._exports.record(self._request, self._key, key, self._work, made)
        except Exception as error:
            reason, detail = reasons(error, "the record could not be written")
            self._tell("uncacheable", reason, detail, key, self._work.seconds)
            return False
        return True

    def _tell(
        self,
        outcome: Outcome,
        reason: str = "",
        detail: str = "",
        key: WholeKey | None = None,
        seconds: float = 0.0,
    ) -> None:
        self._exports.tell(outcome, self._request.label, reason, detail, key, seconds)


def _inputs(key: WholeKey) -> tuple[Json, Json]:
    """The programs without their weights, and the constant methods."""
    action, options = key.factors["action"], key.factors["options"]
    assert isinstance(action, dict) and isinstance(options, dict)
    return action["graph digest"], options["constant_methods"]


class _Flights:
    """The flights of one lowering; they end with it, even if nobody ends them."""

    def __init__(self, exports: WholeExports) -> None:
        self._exports = exports
        self._stack = ExitStack()
        weakref.finalize(self, self._stack.close).atexit = False

    def enter(self, key: Digest) -> None:
        self._stack.enter_context(self._exports.flight(key))
        self._exports.flies(1)
        self._stack.callback(self._exports.flies, -1)

    def close(self) -> None:
        self._stack.close()


class _Work:
    """What was done for one export so far.

    ``partitioner`` is what the partitioners were at the start, ``relied`` are the dependencies of
    the delegates in it, recorded or fresh, ``flaws`` why it cannot be done again from a record.
    """

    def __init__(self, partitioner: Digest) -> None:
        self.partitioner = partitioner
        self.seconds = 0.0
        self.observed: list[Observed] = []
        self.relied: list[Mapping[str, Json]] = []
        self.flaws: list[str] = []


@dataclass
class _Slot:
    """Where a program that was spared is found once it is made after all."""

    program: Any = None


@dataclass(frozen=True, slots=True)
class Found:
    """A recorded export, or why there is none."""

    contents: ProgramContents | None
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0


def reasons(error: Exception, what: str) -> tuple[str, str]:
    """Why something is not kept: the reason, and which thing it is about.

    A mistake of ours, on a program like no other, must not end an export that is none of its own.
    """
    if isinstance(error, (Unkeyable, Unrecordable)):
        return error.reason, ""
    if isinstance(error, RecursionError):
        return "objects nested too deeply", ""
    if not isinstance(error, CasError):
        logger.warning("%s", what, exc_info=error)
        what = f"{what} ({type(error).__name__})"
    return what, str(error)
