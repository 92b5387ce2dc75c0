"""A lowering that is put off: an edge program that is made when somebody looks at it."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from executorch.exir import EdgeProgramManager

from cas.digest import Digest
from cas.errors import Refused
from cas.executorch.actions.errors import Unkeyable, reasons
from cas.executorch.actions.lowered import backends_of
from cas.executorch.actions.observer import Observed
from cas.executorch.actions.outcomes import ActionMismatch
from cas.executorch.actions.weights import StorageDigests
from cas.executorch.actions.whole_keys import Request, WholeKey, inputs_digest, weights_digest
from cas.executorch.actions.whole_programs import ProgramContents
from cas.journal import Outcome
from cas.strictjson import Json

if TYPE_CHECKING:
    from cas.executorch.actions.whole import WholeExports

logger = logging.getLogger(__name__)

#: What a lazy manager answers itself; everything else is a look at the lowered program.
_OWN: Final = frozenset({"__class__", "_cas_lowering", "to_executorch"})


class InputsChanged(Refused):
    """A lowering was put off, and what it was asked to lower is not the same any more."""

    def __init__(self, label: str) -> None:
        super().__init__(
            f"{label}: its weights, graph, symbolic sizes or constant methods changed after "
            "to_edge_transform_and_lower, which was put off because its result is known; change "
            "them before, or compute everything (`cas run --no-actions`). Lowering the same "
            "programs in another way meanwhile may have changed their symbolic sizes"
        )


class LazyEdgeManager(EdgeProgramManager):  # type: ignore[misc]
    """An edge program that is there as soon as somebody looks at it.

    With ``to_executorch`` and nothing else, nobody does.
    """

    def __init__(self, lowering: Lowering) -> None:
        object.__setattr__(self, "_cas_lowering", lowering)

    def to_executorch(self, config: Any = None) -> Any:
        lowering: Lowering = object.__getattribute__(self, "_cas_lowering")
        return lowering.to_executorch(config)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        lowering: Lowering = object.__getattribute__(self, "_cas_lowering")
        return getattr(lowering.look(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cas_lowering.look(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._cas_lowering.look(), name)


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
        self._work = Work(request.workers_digest(request.trees), key.inputs)
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
            programs = map(self._real.exported_program, self._real.methods)
            self._work.backends = backends_of(programs)
            for config, slot in self._served:
                slot.program = self._real.to_executorch(config)
        return self._real

    def _require_unchanged(self) -> None:
        digests = self._exports.digests() if self._exports.is_active() else StorageDigests()
        try:
            same = inputs_digest(self._request) == self._key.inputs
            same = same and weights_digest(self._request.programs, digests) == self._weights
        except Exception as error:  # such as a program that has got something without a key
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


class Work:
    """What was done for one export so far.

    ``workers`` and ``inputs`` are what the partitioners and passes, and the programs without their
    weights, were at the start, ``backends`` those that got a part of it, ``relied`` are the
    dependencies of the delegates in it, recorded or fresh, ``flaws`` why it cannot be done again
    from a record.
    """

    def __init__(self, workers: Digest, inputs: Digest) -> None:
        self.workers = workers
        self.inputs = inputs
        self.seconds = 0.0
        self.backends: set[str] = set()
        self.observed: list[Observed] = []
        self.relied: list[Mapping[str, Json]] = []
        self.flaws: list[str] = []


@dataclass
class _Slot:
    """Where a program that was spared is found once it is made after all."""

    program: Any = None
