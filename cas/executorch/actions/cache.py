"""Delegates out of the store: find the record of a compile, or compile and record it."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from executorch.exir.backend.backend_details import BackendDetails

from cas.digest import Digest
from cas.errors import CasError
from cas.executorch.actions import backends, dependencies, drift, facts
from cas.executorch.actions.backends import Profile
from cas.executorch.actions.compare import differences
from cas.executorch.actions.context import ActionContext
from cas.executorch.actions.dependencies import Dependencies
from cas.executorch.actions.errors import Unkeyable, Unrecordable
from cas.executorch.actions.keys import ActionKey, Programs, Specs, action_key
from cas.executorch.actions.names import Constants
from cas.executorch.actions.observer import Observed, observing
from cas.executorch.actions.outcomes import STALE, ActionMismatch
from cas.executorch.actions.relocation import check_relocatable, relocate
from cas.executorch.actions.replay import Freezer, Thawer
from cas.executorch.actions.weights import StorageDigests
from cas.journal import Event, Outcome
from cas.records import ActionRecord
from cas.store import Store
from cas.strictjson import Json
from cas.writer import Writer

logger = logging.getLogger(__name__)

KIND: Final = "delegate"
#: Records are published together; a process that is killed loses at most these.
_BATCH: Final = 32
_BATCH_SECONDS: Final = 20.0

_CHANGES: Final = "the backend changes what its code refers to"

#: CLOCK_REALTIME_COARSE of Linux, with which the kernel stamps files.
FILE_CLOCK: Final = 5

#: What the compiles of each backend read in this process.
_dependencies: dict[str, Dependencies] = {}


@dataclass
class _Unit:
    """One action: some programs of some methods, and how to compile them."""

    backend: type
    profile: Profile
    programs: Programs
    specs: Specs
    compile: Callable[[], Mapping[str, list[Any]]]
    key: ActionKey | None = None

    @property
    def label(self) -> str:
        return f"{self.backend.__name__} of {', '.join(self.programs) or 'a program'}"

    def constants(self, key: ActionKey) -> Constants:
        """The names of weights, if a record may be that of a program with other names."""
        return None if self.profile.policy.names else key.constants

    def shaped(self, results: list[Any]) -> dict[str, list[Any]]:
        """Flat results by method, as the backend would have returned them."""
        rest = iter(results)
        return {method: [next(rest) for _ in parts] for method, parts in self.programs.items()}

    def flat(self, results: Mapping[str, list[Any]]) -> list[Any]:
        return [result for method in self.programs for result in results[method]]


class DelegateActions:
    """The delegate actions of one capture."""

    def __init__(self, context: ActionContext) -> None:
        self._store = context.store
        self._writer = context.writer
        self._intake = context.intake
        self._options = context.options
        self._clock = context.clock
        self._fixed: dict[type, dict[str, str]] = {}
        #: Backends of which a compile has changed what their code refers to.
        self._changed: set[type] = set()
        self._batch = _Batch(context.store, context.writer, context.clock)
        self.outcomes = context.outcomes

    # --- what ExecuTorch calls ------------------------------------------------------------------

    def multimethod(self, backend: Any, programs: Programs, specs: Specs) -> dict[str, list[Any]]:
        """``backend.preprocess_multimethod``, of programs that were not copied yet."""
        units = [self._unit(backend, *part) for part in _parts(backend, programs, specs)]
        self._compute_keys(units)
        self._changed.discard(backend)
        results: dict[str, list[Any]] = {method: [] for method in programs}
        with self._batch.open():
            for unit in units:
                for method, values in unit.shaped(self._obtain(unit)).items():
                    results[method] += values
        return results

    def single(self, backend: Any, program: Any, specs: Any) -> Any:
        """``backend.preprocess``, of a program that its caller has copied already."""
        unit = _Unit(
            backend,
            backends.profile_of(backend),
            {"": [program]},
            {"": [specs]},
            lambda: {"": [backend.preprocess(program, specs)]},
        )
        self._compute_keys([unit])
        self._changed.discard(backend)
        with self._batch.open():
            return self._obtain(unit)[0]

    # --- keys -----------------------------------------------------------------------------------

    def _unit(self, backend: Any, programs: Programs, specs: Specs) -> _Unit:
        def compile_copies() -> Mapping[str, list[Any]]:
            copies = {
                method: [
                    backend.copy_exported_program_for_preprocess(program, spec)
                    for program, spec in zip(parts, specs[method], strict=True)
                ]
                for method, parts in programs.items()
            }
            result: Mapping[str, list[Any]] = backend.preprocess_multimethod(copies, specs)
            return result

        return _Unit(backend, backends.profile_of(backend), programs, specs, compile_copies)

    def _compute_keys(self, units: list[_Unit]) -> None:
        """All before the first compile, so that no compile can have changed what is hashed."""
        started = self._clock()
        digests = StorageDigests(self._writer.digest)
        for unit in units:
            try:
                unit.key = self._key(unit, digests)
            except Unkeyable as error:
                self._tell("uncacheable", unit, error.reason)
            except Exception as error:
                self._tell_failure(unit, "making a key failed", error)
        self.outcomes.key_seconds += self._clock() - started

    def _key(self, unit: _Unit, digests: StorageDigests) -> ActionKey:
        for parts in unit.specs.values():
            for specs in parts:
                backends.check_options(specs)
        found = drift.FACTS.rebase({**self._fixed_facts(unit), **_ambient(unit)})
        name = unit.backend.__name__
        return action_key(name, unit.programs, unit.specs, found, unit.profile.policy, digests)

    def _fixed_facts(self, unit: _Unit) -> dict[str, str]:
        known = self._fixed.get(unit.backend)
        if known is None:
            known = {**facts.fixed_facts(), **backends.fixed_facts(unit.backend)}
            self._fixed[unit.backend] = known
        return known

    # --- hit or miss ----------------------------------------------------------------------------

    def _obtain(self, unit: _Unit) -> list[Any]:
        if unit.key is not None and unit.backend in self._changed:
            self._tell("uncacheable", unit, _CHANGES)  # since its key was made
            unit.key = None
        if unit.key is None:
            return unit.flat(unit.compile())
        found = self._look(unit, unit.key)
        if found.results is None:
            self._batch.take_off(unit.key.digest)
            found = self._look(unit, unit.key)  # somebody may have done it meanwhile
        if found.results is None:
            return self._compile_and_record(unit, unit.key, found)
        if self._options.is_rechecked():
            return self._recheck(unit, unit.key, found.results)
        self._tell("hit", unit, seconds=found.seconds)
        return found.results

    def _look(self, unit: _Unit, key: ActionKey) -> _Found:
        """The recorded results, or why they are of no use."""
        record = self._batch.pending.get(key.digest)
        if record is None:
            lookup = self._writer.find_action(key.digest)
            record = lookup.record
            if record is None:
                return _Found(None, lookup.reason or "absent")
        try:
            stale = dependencies.changed(record.dependencies)
            if stale:
                return _Found(None, STALE, f"{stale[0]} has changed")
            results = self._thaw(unit, key, record)
        except CasError as error:
            return _Found(None, "damaged", str(error))
        self.outcomes.relied.append(record.dependencies)
        return _Found(results, seconds=record.seconds)

    def _thaw(self, unit: _Unit, key: ActionKey, record: ActionRecord) -> list[Any]:
        thawer = Thawer(self._intake, record, unit.constants(key))
        results = thawer.thaw()
        if len(results) != sum(map(len, unit.programs.values())):
            raise Unrecordable("it has another number of results")
        relocate(unit.profile, results, thawer.handles(), key.handles)
        return results

    def _recheck(self, unit: _Unit, key: ActionKey, recorded: list[Any]) -> list[Any]:
        results, seconds, depends = self._compile(unit)
        self.outcomes.rechecked += 1
        specs = [spec for parts in unit.specs.values() for one in parts for spec in one]
        exact = not (unit.profile.aoti and backends.measures_kernels(unit.backend, specs))
        found = differences(recorded, results, exact=exact)
        if not found:
            self._tell("hit", unit)
            return results
        warnings.warn(
            f"{unit.label}: the record {key.digest.hex()[:12]} differs from a fresh compile in "
            f"{', '.join(found)}; the fresh one is used and replaces it. Something decides the "
            "result that is neither in the key nor among what the compile was seen to read",
            ActionMismatch,
            stacklevel=2,
        )
        self._tell("mismatch", unit, detail=", ".join(found), seconds=seconds)
        self._record(unit, key, results, seconds, depends)
        return results

    # --- compiling ------------------------------------------------------------------------------

    def _compile_and_record(self, unit: _Unit, key: ActionKey, found: _Found) -> list[Any]:
        results, seconds, depends = self._compile(unit)
        if self._record(unit, key, results, seconds, depends):
            self._tell("miss", unit, found.reason, found.detail, seconds)
        return results

    def _compile(self, unit: _Unit) -> tuple[list[Any], float, Mapping[str, Json] | Unrecordable]:
        """The results, the seconds it took, and what was read: or why that cannot be recorded."""
        before = _ambient_or_why_not(unit)
        started = self._clock()
        with observing(time.clock_gettime_ns(FILE_CLOCK)) as observed:
            results = unit.flat(unit.compile())
        seconds = self._clock() - started
        self.outcomes.compile_seconds += seconds
        depends = self._depends(unit, observed)
        if not isinstance(depends, Unrecordable):
            self.outcomes.relied.append(depends)
        drift.VARIABLES.learn(observed.before, dict(os.environ))
        return results, seconds, self._learn(unit, before) or depends

    def _learn(self, unit: _Unit, before: dict[str, str] | Unrecordable) -> Unrecordable | None:
        """Take in what a compile has changed; gives why its results cannot be kept for that."""
        after = _ambient_or_why_not(unit)
        for found in (before, after):
            if isinstance(found, Unrecordable):
                self._changed.add(unit.backend)
                return found
        assert isinstance(before, dict) and isinstance(after, dict)
        if before[backends.CODE] != after[backends.CODE]:
            # The next compile may make something else, after this one, than it would without it.
            self._changed.add(unit.backend)
            return Unrecordable(_CHANGES)
        drift.FACTS.learn(before, after)
        return None

    def _depends(self, unit: _Unit, observed: Observed) -> Mapping[str, Json] | Unrecordable:
        known = _dependencies.setdefault(unit.backend.__name__, Dependencies())
        try:
            return known.add(observed, (self._store.path, *scratch_directories()))
        except Unrecordable as error:
            return error

    def _record(
        self,
        unit: _Unit,
        key: ActionKey,
        results: list[Any],
        seconds: float,
        depends: Mapping[str, Json] | Unrecordable,
    ) -> bool:
        """Keep a result; False if it cannot be kept. It is used all the same."""
        try:
            if isinstance(depends, Unrecordable):
                raise depends
            check_relocatable(unit.profile, results, key.handles)
            freezer = Freezer(self._intake, unit.constants(key))
            result = freezer.freeze(results, key.handles)
            record = ActionRecord(
                key=key.digest,
                kind=KIND,
                factors=key.factors,
                result=result,
                recipes=tuple(freezer.recipes),
                dependencies=depends,
                label=unit.label,
                microseconds=round(seconds * 1e6),
                created=self._store.context.now(),
            )
            self._batch.add(record)
        except Unrecordable as error:
            self._tell("uncacheable", unit, error.reason, seconds=seconds)
            return False
        except CasError as error:
            reason = "the record could not be written"
            self._tell("uncacheable", unit, reason, str(error), seconds)
            return False
        except Exception as error:
            self._tell_failure(unit, "recording failed", error, seconds)
            return False
        return True

    # --- telling --------------------------------------------------------------------------------

    def _tell_failure(
        self, unit: _Unit, reason: str, error: Exception, seconds: float = 0.0
    ) -> None:
        """A mistake of ours, on a program like no other, must not end an export without us."""
        logger.warning("%s of %s", reason, unit.label, exc_info=error)
        self._tell("uncacheable", unit, f"{reason} ({type(error).__name__})", str(error), seconds)

    def _tell(
        self, outcome: Outcome, unit: _Unit, reason: str = "", detail: str = "", seconds: float = 0
    ) -> None:
        event = Event(
            outcome,
            KIND,
            unit.label,
            reason,
            detail,
            None if unit.key is None else unit.key.digest,
            round(seconds * 1e6),
        )
        self.outcomes.events.append(event)


@dataclass(frozen=True, slots=True)
class _Found:
    """Results of a record, or why there are none."""

    results: list[Any] | None
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0


class _Batch:
    """Records that are finished and not published yet, and the flights of their actions."""

    def __init__(self, store: Store, writer: Writer, clock: Callable[[], float]) -> None:
        self._store = store
        self._writer = writer
        self._clock = clock
        self._flights = ExitStack()
        self._since = 0.0
        self.pending: dict[Digest, ActionRecord] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Publish everything at the end of the block, also where something failed."""
        try:
            yield
        except Exception:
            # What was compiled before the failure is not to be compiled again.
            try:
                self.flush()
            except CasError as error:
                logger.info("records could not be written: %s", error)
            raise
        else:
            self.flush()
        finally:
            self.pending.clear()
            self._flights.close()

    def take_off(self, key: Digest) -> None:
        """Be the only one who computes ``key``; wait for somebody who does it already."""
        if self._flights.enter_context(self._store.actions.flight(key, wait=False)):
            return
        self.flush()  # or two processes could wait for each other
        self._flights.enter_context(self._store.actions.flight(key))

    def add(self, record: ActionRecord) -> None:
        if not self.pending:
            self._since = self._clock()
        self.pending[record.key] = record
        if len(self.pending) >= _BATCH or self._clock() - self._since > _BATCH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Publish what is finished, and let others look for it."""
        records, self.pending = list(self.pending.values()), {}
        try:
            if records:
                self._writer.put_actions(records)
        finally:
            self._flights.close()


def _parts(backend: Any, programs: Programs, specs: Specs) -> Iterator[tuple[Programs, Specs]]:
    """The actions of one call: one for each partition, or the whole where results interact."""
    stock: Any = BackendDetails.preprocess_multimethod
    own: Any = backend.preprocess_multimethod
    if getattr(own, "__func__", own) is not stock.__func__:
        yield programs, specs
        return
    for method, parts in programs.items():
        for program, spec in zip(parts, specs[method], strict=True):
            yield {method: [program]}, {method: [spec]}


def _ambient(unit: _Unit) -> dict[str, str]:
    return backends.ambient_facts(unit.backend)


def _ambient_or_why_not(unit: _Unit) -> dict[str, str] | Unrecordable:
    try:
        return _ambient(unit)
    except Unkeyable as error:
        return Unrecordable(f"the backend has got {error.reason}")


def scratch_directories() -> Iterator[Path]:
    """Where torch's compilers keep what they made before."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    yield Path(os.path.realpath(cache_dir()))
    yield Path(os.path.realpath(default_cache_dir()))  # of headers, always
