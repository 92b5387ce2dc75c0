"""What a program under `cas run` exports: captured, passed on to its files, recorded at the end."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cas.errors import InvalidName
from cas.executorch import hooks_writing
from cas.executorch.actions.outcomes import ActionOptions, Outcomes
from cas.executorch.capture import Capture, capture
from cas.executorch.patches import Patches
from cas.executorch.saving import describe_provenance
from cas.executorch.written import WriteRecorder, WrittenProgram, artifact_files
from cas.layout import check_ref_name
from cas.strictjson import Json
from cas.writer import Commit

if TYPE_CHECKING:
    from cas.store import Store

log = logging.getLogger(__name__)

#: The artifact's name where neither the user nor a file's name gives one.
UNNAMED: Final = "program"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One program that was written: its commit, and where each of its files lies.

    ``new_bytes`` and ``new_chunks`` are what the store grew by between the previous program's last
    file and this one's.
    """

    commit: Commit
    paths: Mapping[str, Path]
    new_bytes: int
    new_chunks: int


class Recording:
    """A capture whose programs are recorded once the code that made them has ended.

    ``name`` is the first program's; see `ArtifactNames`. ``provenance`` goes to every artifact.
    """

    def __init__(
        self,
        store: Store,
        name: str | None,
        provenance: Mapping[str, Json],
        *,
        spill: bool = False,
        reuse: bool = True,
        recheck: float = 0.0,
    ) -> None:
        self._name = name
        self._provenance = provenance
        actions = ActionOptions(reuse, whole=True, recheck=recheck)
        self._capture: Capture = capture(store, spill=spill, actions=actions)
        self._stack = ExitStack()
        self._recorder: WriteRecorder | None = None

    def begin(self) -> None:
        """Hook ExecuTorch. The hooks for weights act in this thread, those for files in all.

        Raises:
            CaptureActive, UnsupportedVersion, SeamMismatch, and what the store raises
        """
        with ExitStack() as stack:
            stack.callback(self._outlive)
            stack.enter_context(self._capture)
            writer, intake = self._capture.parts()
            self._recorder = WriteRecorder(
                intake, lambda: writer.counters, self._capture.action_provenance
            )
            patches = Patches(any_thread=True)
            stack.callback(patches.undo)
            hooks_writing.install(patches, self._recorder)
            self._stack = stack.pop_all()

    @property
    def outcomes(self) -> Outcomes:
        """What was computed, and what had been computed before."""
        return self._capture.outcomes

    def finish(self, *, record: bool) -> tuple[tuple[Recorded, ...], int]:
        """Commit what was written, if it is to be recorded, and unhook ExecuTorch.

        Returns the artifacts, and how many programs were only taken in memory.
        """
        assert self._recorder is not None, "begin() comes first"
        with self._stack:
            writer, _ = self._capture.parts()
            writer.barrier()  # for `_outlive`: a script that failed may still write something
            if not record:
                return (), 0
            return tuple(self._commit_all(self._recorder)), self._recorder.unwritten

    def _outlive(self) -> None:
        """Keep readable what handlers left in `atexit`, or other threads, are still to write."""
        if self._recorder is not None:
            self._recorder.source.outlive()

    def _commit_all(self, recorder: WriteRecorder) -> list[Recorded]:
        names = ArtifactNames(self._name)
        recorded = []
        new_bytes = new_chunks = 0
        for program in recorder.written:
            now = program.counters
            grown = now.new_bytes - new_bytes, now.new_chunks - new_chunks
            new_bytes, new_chunks = now.new_bytes, now.new_chunks
            try:
                recorded.append(self._commit(program, names, *grown))
            except InvalidName as error:  # its files are what the script wanted all the same
                log.warning("a program is not recorded: %s", error)
        return recorded

    def _commit(
        self, program: WrittenProgram, names: ArtifactNames, new_bytes: int, new_chunks: int
    ) -> Recorded:
        files = artifact_files(program)
        writer, _ = self._capture.parts()
        commit = writer.commit(
            names.next(files.stem),
            files.recipes,
            files.tensors,
            {
                **describe_provenance(program.methods),
                **self._capture.action_provenance(),
                **self._provenance,
            },
            checksums=files.checksums,
        )
        return Recorded(commit, files.paths, new_bytes, new_chunks)


class ArtifactNames:
    """Names for the programs of one run, in order.

    With a name given, the first program has it, and the others ``NAME-2``, ``NAME-3``. Without,
    each is called after its file, and a name that is taken gets a number in the same way.
    """

    def __init__(self, given: str | None) -> None:
        self._given = given
        self._used: set[str] = set()

    def next(self, stem: str) -> str:
        """The next program's name; ``stem`` is its file's, without the extension.

        Raises:
            InvalidName: the number does not fit any more.
        """
        base = self._given if self._given is not None else name_of_stem(stem)
        name, number = base, 1
        while name in self._used:
            number += 1
            name = f"{base}-{number}"
        self._used.add(check_ref_name(name))
        return name


def name_of_stem(stem: str) -> str:
    """A ref name from a file's name: what is not allowed in one becomes ``-``."""
    return re.sub(r"[^A-Za-z0-9._+=,-]+", "-", stem).strip(".-") or UNNAMED
