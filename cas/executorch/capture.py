"""`capture`: for the length of a ``with`` block, ExecuTorch's weights go to a store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from cas.errors import UsageError
from cas.executorch import (
    hooks_aoti,
    hooks_copies,
    hooks_cuda,
    hooks_delegates,
    hooks_dynamo,
    hooks_emitter,
    hooks_named_data,
    hooks_provenance,
    hooks_serde,
    hooks_spill,
    hooks_xnnpack,
    seams,
)
from cas.executorch.actions import seam as action_seam
from cas.executorch.actions import whole
from cas.executorch.actions.cache import DelegateActions
from cas.executorch.actions.context import ActionContext
from cas.executorch.actions.outcomes import ActionOptions, Outcomes
from cas.executorch.actions.whole import WholeExports
from cas.executorch.copies import PrivateCopies
from cas.executorch.errors import CaptureActive, CaptureEnded
from cas.executorch.intake import THRESHOLD, Intake
from cas.executorch.patches import Patches
from cas.executorch.recipes import build_recipes, pieces_of, program_cords
from cas.executorch.saving import SaveResult, build_provenance, check_destination
from cas.executorch.tensors import tensor_entries
from cas.ingest import Counters
from cas.layout import check_ref_name
from cas.progress import SILENT, Progress
from cas.store import Store
from cas.strictjson import Json
from cas.torch.mapping import MIN_MAPPED, Mapper
from cas.torch.spill import Spilled
from cas.writer import Writer

log = logging.getLogger(__name__)

#: Held by the one capture that is active. Patches are process-wide, so the lock is too.
_ACTIVE: Final = threading.Lock()


class Capture:
    """An active capture; `capture` makes one.

    It hooks ExecuTorch on entry and unhooks it on exit, whatever happens in between. The hooks
    act in the thread that entered it; what other threads export meanwhile is stock, in memory.
    """

    _mapper: Mapper

    def __init__(
        self,
        store: Store,
        name: str | None,
        *,
        threshold: int,
        map_threshold: int,
        spill: bool,
        actions: ActionOptions,
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.name = name
        self._threshold = threshold
        self._map_threshold = map_threshold
        self._spill = spill
        self._actions = actions
        #: How often a delegate had been compiled before, and why not.
        self.outcomes = Outcomes()
        self._progress = progress
        self._clock = clock
        self._stack = ExitStack()
        self._active: tuple[Writer, Intake] | None = None

    def __enter__(self) -> Capture:
        if not _ACTIVE.acquire(blocking=False):
            raise CaptureActive
        with ExitStack() as stack:
            stack.callback(_ACTIVE.release)
            seams.check_version()
            seams.check_seams()
            writer = stack.enter_context(self.store.writer(progress=self._progress))
            intake = Intake(writer, self._threshold)
            stack.callback(intake.source.end)
            patches = Patches()
            stack.callback(patches.undo)
            self._install(patches, intake)
            if self._actions.reuse:
                self._install_actions(patches, writer, intake, stack)
                stack.callback(self._note_outcomes)
            self._active = (writer, intake)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._active = None
        self._stack.__exit__(kind, error, trace)

    def _install(self, patches: Patches, intake: Intake) -> None:
        mapper = self._mapper = Mapper(intake.writer, min_size=self._map_threshold)
        copies = PrivateCopies(intake.writer, mapper)
        hooks_named_data.install(patches, intake)
        hooks_emitter.install(patches, intake, copies)
        hooks_delegates.install(patches, intake)
        hooks_copies.install(patches, copies)
        hooks_dynamo.install(patches, copies)
        hooks_aoti.install(patches, intake, copies, self.store.context.layout.tmp)
        hooks_cuda.install(patches, intake)
        hooks_xnnpack.install(patches)
        hooks_serde.install(patches)
        hooks_provenance.install(patches)
        if self._spill:  # after the hook of the same function that it has to come before
            hooks_spill.install(patches, intake.writer, mapper)

    def _install_actions(
        self, patches: Patches, writer: Writer, intake: Intake, stack: ExitStack
    ) -> None:
        context = ActionContext(self.store, writer, intake, self._actions, self.outcomes)
        action_seam.install(patches, DelegateActions(context))
        if self._actions.whole:
            exports = WholeExports(context)
            whole.install(patches, exports)
            stack.callback(exports.end)

    def _note_outcomes(self) -> None:
        """Let `cas stats` count what happened, and `cas explain` tell why."""
        for sentence in self.outcomes.notes():
            log.info("%s", sentence)
        self.store.actions.note(self.outcomes.events)

    @property
    def counters(self) -> Counters:
        """What the writer took in so far (logical and new bytes, chunks and new chunks).

        Raises:
            CaptureEnded: the ``with`` block was left.
        """
        writer, _ = self._require_active("the counters of a capture are read")
        return writer.counters

    def action_provenance(self) -> dict[str, Json]:
        """The actions so far, by which `cas explain` compares two artifacts."""
        keys: list[Json] = [*self.outcomes.keys()]
        return {"actions": keys} if keys else {}

    def parts(self) -> tuple[Writer, Intake]:
        """The writer and what feeds it, for who records programs in another way than `save`.

        Raises:
            CaptureEnded: the ``with`` block was left.
        """
        return self._require_active("a capture is used")

    def spill(self, target: Any) -> Spilled:
        """Move the weights of a model from memory into the store, without waiting for its export.

        ``target`` is a module, an exported program, or tensors; see `cas.torch.spill`.

        Raises:
            CaptureEnded: the ``with`` block was left.
        """
        writer, _ = self._require_active("a model is spilled")
        return hooks_spill.spill_target(target, writer, self._mapper)

    def save(
        self,
        program: Any,
        directory: str | Path,
        *,
        name: str | None = None,
        basename: str = "model",
        provenance: Mapping[str, Json] | None = None,
        command: Sequence[str] | None = None,
        created: str | None = None,
    ) -> SaveResult:
        """Commit a program as one artifact and write its files into ``directory``.

        ``program`` is what ``to_executorch()`` returned. The files have the bytes that
        ``write_to_file`` and ``write_tensor_data_to_file`` would write: ``<basename>.pte`` and a
        ``.ptd`` per external tag. ``created`` and ``command`` go to the provenance as given.

        Raises:
            UsageError: no name was given here or to `capture`, or ``program`` is something else.
            InvalidName: an external tag cannot be a file name.
            Refused, PermissionRefused: the directory cannot be used; nothing is committed then.
        """
        started = self._clock()
        writer, intake = self._require_active("a program is saved")
        target = Path(directory)
        ref = self._ref_name(name)
        cords = program_cords(program, basename)
        check_destination(target, cords)
        files = {file: pieces_of(cord) for file, cord in cords.items()}
        commit = writer.commit(
            ref,
            files=build_recipes(files, intake),
            tensors=tensor_entries(program, files, next(iter(files)), intake.labels),
            provenance=build_provenance(
                program, {**self.action_provenance(), **(provenance or {})}, command, created
            ),
            directory=target,
        )
        return SaveResult(commit, commit.paths, self._clock() - started)

    def _ref_name(self, name: str | None) -> str:
        chosen = name if name is not None else self.name
        if chosen is None:
            raise UsageError(
                "the artifact has no name; pass one to `capture(store, name)` or to `save`"
            )
        return check_ref_name(chosen)

    def _require_active(self, what: str) -> tuple[Writer, Intake]:
        if self._active is None:
            raise CaptureEnded(what)
        return self._active


def capture(
    store: Store,
    name: str | None = None,
    *,
    threshold: int = THRESHOLD,
    map_threshold: int = MIN_MAPPED,
    spill: bool = False,
    actions: bool | ActionOptions = True,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Capture:
    """A context manager under which an ExecuTorch export keeps its weights in ``store``.

    The export's code stays as it is; its files come out byte for byte the same::

        with capture(store, "mobilenet") as cap:
            program = to_edge_transform_and_lower(exported, partitioner=[...]).to_executorch()
            cap.save(program, "out")

    Args:
        store: where chunks and the artifact go.
        name: the artifact's name; can be given to `Capture.save` instead.
        threshold: data of fewer bytes stays in memory as it is.
        map_threshold: tensors of fewer bytes are copied in memory where ExecuTorch copies them.
        spill: move each module that `torch.export.export` is given from memory into the store
            first, so that it takes none while it is exported. Its tensors stay the objects they
            are; see `cas.torch.spill` for what changes about them.
        actions: give back what a backend made of the same partition before, instead of compiling
            it again, and record what is compiled; False for neither.
        progress: told about long steps.
        clock: gives seconds, for the durations that are reported.

    Raises:
        CaptureActive: on entry, if a capture is active in this process.
        UnsupportedVersion: on entry, if the installed ExecuTorch is not a known one.
        SeamMismatch: on entry, if ExecuTorch or torch is not as that version should be.
    """
    if name is not None:
        check_ref_name(name)
    if threshold < 0 or map_threshold < 0:
        raise UsageError("a threshold cannot be negative")
    return Capture(
        store,
        name,
        threshold=threshold,
        map_threshold=map_threshold,
        spill=spill,
        actions=actions if isinstance(actions, ActionOptions) else ActionOptions(reuse=actions),
        progress=progress if progress is not None else SILENT,
        clock=clock,
    )
