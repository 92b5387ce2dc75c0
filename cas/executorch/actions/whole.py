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
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from cas.digest import Digest
from cas.errors import CasError
from cas.executorch.actions import dependencies, drift, facts
from cas.executorch.actions.cache import FILE_CLOCK, scratch_directories
from cas.executorch.actions.context import ActionContext
from cas.executorch.actions.dependencies import Dependencies
from cas.executorch.actions.errors import Unrecordable, reasons
from cas.executorch.actions.observer import observing
from cas.executorch.actions.outcomes import STALE
from cas.executorch.actions.putoff import LazyEdgeManager, Lowering, Work
from cas.executorch.actions.weights import StorageDigests
from cas.executorch.actions.whole_keys import (
    Request,
    WholeKey,
    inputs_digest,
    lowering_key,
    weights_digest,
)
from cas.executorch.actions.whole_programs import (
    ProgramContents,
    ReplayedProgram,
    first_bytes,
    freeze_exceptions,
    thaw_exceptions,
)
from cas.executorch.patches import Patches
from cas.executorch.seams import PROGRAM
from cas.journal import Event, Outcome
from cas.manifest import Recipe
from cas.records import ActionRecord
from cas.strictjson import Json

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


class WholeExports:
    """The whole exports of one capture."""

    def __init__(self, context: ActionContext) -> None:
        self._context = context
        self._flying = 0
        self._process = os.getpid()
        self._ended = False
        self.outcomes = context.outcomes

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
        started = self._context.clock()
        digests = self.digests()
        try:
            key = lowering_key(request, digests)
            weights = weights_digest(request.programs, digests)
        except Exception as error:
            self.tell("uncacheable", request.label, *reasons(error, "making a key failed"))
            return call()
        finally:
            self.outcomes.key_seconds += self._context.clock() - started
        lowering = Lowering(self, request, key, weights, call)
        if not self._is_put_off(request, key):
            lowering.take_off(key.digest)
            if not self._is_put_off(request, key):
                lowering.lower(late=False)
        return LazyEdgeManager(lowering)

    def _is_put_off(self, request: Request, key: WholeKey) -> bool:
        """Whether a lowering is known to succeed; if so, its only side effect is done here."""
        record = self._context.writer.find_action(key.digest).record
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
        return StorageDigests(self._context.writer.digest)

    def flight(self, key: Digest) -> AbstractContextManager[bool]:
        """Be the only one who does this. Who has one already does not wait for another."""
        return self._context.store.actions.flight(key, wait=self._flying == 0)

    def flies(self, change: int) -> None:
        self._flying += change

    def find(self, key: WholeKey) -> Found:
        lookup = self._context.writer.find_action(key.digest)
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
        return self._context.options.is_rechecked()

    def replay(self, contents: ProgramContents, make: Callable[[], Any]) -> ReplayedProgram:
        def prefix(recipe: Recipe) -> bytes:
            return first_bytes(self._context.intake, recipe)

        return ReplayedProgram(contents, self._context.intake.source, prefix, make)

    def contents(self, program: Any) -> ProgramContents:
        return ProgramContents.of(program, self._context.intake)

    def observe(self, work: Work, do: Callable[[], Any]) -> Any:
        """Do a part of an export, and take down what it read, and how long it took."""
        if not self.is_active():
            return do()
        before = facts.ambient_facts()
        events = len(self.outcomes.events)
        relied = len(self.outcomes.relied)
        started = self._context.clock()
        with observing(time.clock_gettime_ns(FILE_CLOCK)) as observed:
            result = do()
        work.seconds += self._context.clock() - started
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
        work: Work,
        made: ProgramContents,
    ) -> None:
        """Keep an export, and that its lowering is known.

        Raises:
            Unrecordable: it cannot be done again from the same inputs alone.
            CasError: the store could not take it.
        """
        if work.flaws:
            raise Unrecordable(work.flaws[0])
        for backend in sorted(work.backends):
            if not lowering.knows(backend):
                raise Unrecordable(f"delegates of {backend}, which no partitioner names")
        if request.workers_digest() != work.workers:
            raise Unrecordable("the export changes its partitioners or passes")
        if inputs_digest(request) != work.inputs:
            # As code does that asks whether a symbolic size is a certain number: what is lowered
            # next finds another program, and would not if this were put off.
            raise Unrecordable("the export changes its programs, or their symbolic sizes")
        depends = self._depends(work)
        result, recipes = made.freeze()
        created = self._context.store.context.now()
        microseconds = round(work.seconds * 1e6)
        side_effect = freeze_exceptions(request.given_config)
        self._context.writer.put_actions(
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

    def _depends(self, work: Work) -> Mapping[str, Json]:
        ignored = (self._context.store.path, *scratch_directories())
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


@dataclass(frozen=True, slots=True)
class Found:
    """A recorded export, or why there is none."""

    contents: ProgramContents | None
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0
