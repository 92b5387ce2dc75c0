"""Packages of plain AOTInductor as artifacts: what ``torch._inductor.aot_compile`` and
``aoti_compile_and_package`` give, stored and written again byte for byte.
"""

from __future__ import annotations

import itertools
import os
import struct
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import torch
from torch.export.pt2_archive._package_weights import Weights

from cas.errors import InvalidName, UsageError
from cas.executorch.aoti_layout import BlobLayout, constants_of, put_blob
from cas.executorch.errors import PackageIncomplete
from cas.executorch.labels import dtype_name, shape_of
from cas.executorch.saving import SaveResult, check_destination
from cas.manifest import Recipe, TensorEntry
from cas.progress import SILENT, Progress
from cas.store import Store
from cas.strictjson import Json
from cas.version import __version__
from cas.writer import Writer

FilePath: TypeAlias = "str | os.PathLike[str]"
#: What AOTInductor gives: one path, or a list of paths with or without a `Weights` object.
Outputs: TypeAlias = "FilePath | Sequence[FilePath | Weights]"

#: Says that a package is sources to be built, and has no library yet.
BUILD_FILE: Final = "CMakeLists.txt"

#: Members of a .pt2 archive of fewer bytes are not worth a cut.
MIN_MEMBER: Final = 4096
_LOCAL_HEADER: Final = struct.Struct("<4s5HIIIHH")


def capture_package(
    store: Store,
    outputs: Outputs,
    name: str,
    directory: FilePath | None = None,
    *,
    weights_inside: bool = False,
    provenance: Mapping[str, Json] | None = None,
    progress: Progress = SILENT,
    clock: Callable[[], float] = time.monotonic,
) -> SaveResult:
    """Record AOTInductor's outputs as the next generation of ``name``.

    ``outputs`` is what one of these returned::

        torch._inductor.aot_compile(gm, args, options={"aot_inductor.package": True, ...})
        torch._inductor.aoti_compile_and_package(exported, ...)

    Each file keeps its last path component as its name. A ``Weights`` object, which stands in the
    list with ``package_constants_on_disk_format="pickle_weights"``, becomes the dense weights file
    that ``"binary_blob"`` would have written, without ever being one in memory. With
    ``directory`` the files are written there too.

    Args:
        weights_inside: the weights are inside the library, as they are by default in a package;
            without this a package must have a weights file or a ``Weights`` object.

    Raises:
        PackageIncomplete: a library, a weights file or a file that is named is not there.
        UnsupportedTensor: a weight has no storage of plain bytes.
        InvalidName: the name, or two outputs would be the same file.
        UsageError: ``outputs`` is something else.
    """
    started = clock()
    members = collect(outputs, weights_inside=weights_inside)
    if directory is not None:
        check_destination(Path(directory), members)
    with store.writer(progress=progress) as writer:
        stored = {file: member.put(writer) for file, member in members.items()}
        commit = writer.commit(
            name,
            files={file: recipe for file, (recipe, _) in stored.items()},
            tensors=[entry for _, entries in stored.values() for entry in entries],
            provenance=_provenance(provenance),
            directory=directory,
        )
    return SaveResult(commit, commit.paths, clock() - started)


def _provenance(given: Mapping[str, Json] | None) -> dict[str, Json]:
    versions: dict[str, Json] = {"cas": __version__, "torch": str(torch.__version__)}
    return {"exporter": "aotinductor", "versions": versions, **(given or {})}


# --- what belongs to a package ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileMember:
    """A file of the package."""

    path: Path

    def put(self, writer: Writer) -> tuple[Recipe, list[TensorEntry]]:
        with open(self.path, "rb", buffering=0) as file:
            if self.path.suffix == ".pt2":
                return put_archive(writer, file), []
            return writer.put_stream(file), []


@dataclass(frozen=True, slots=True)
class WeightsMember:
    """The dense weights file of tensors that AOTInductor kept as tensors."""

    file: str
    constants: Mapping[str, torch.Tensor]

    def put(self, writer: Writer) -> tuple[Recipe, list[TensorEntry]]:
        layout, recipe = put_blob(writer, self.constants)
        return recipe, list(self._entries(layout))

    def _entries(self, layout: BlobLayout) -> Iterator[TensorEntry]:
        for slot in layout:
            tensor = self.constants[slot.name]
            yield TensorEntry(
                name=slot.name,
                file=self.file,
                offset=slot.offset,
                nbytes=slot.nbytes,
                dtype=dtype_name(tensor.dtype),
                shape=shape_of(tensor.shape),
            )


Member: TypeAlias = FileMember | WeightsMember


def collect(outputs: Outputs, *, weights_inside: bool = False) -> dict[str, Member]:
    """The members of a package by file name.

    Raises:
        PackageIncomplete, InvalidName, UsageError: see `capture_package`.
    """
    if isinstance(outputs, (str, os.PathLike)):
        return _single(Path(outputs), weights_inside)
    paths, weights = _sorted_out(outputs)
    members: dict[str, Member] = {}
    for path in paths:
        _add(members, path.name, FileMember(path))
    if weights is not None:
        file = _weights_file(members)
        _add(members, file, WeightsMember(file, constants_of(weights)))
    _require_complete(members, weights_inside)
    return members


def _sorted_out(outputs: Sequence[Any]) -> tuple[list[Path], Weights | None]:
    if not isinstance(outputs, Sequence):
        raise UsageError(
            f"cannot store a {type(outputs).__name__}; pass the path or the list of outputs that "
            "AOTInductor returned"
        )
    paths: list[Path] = []
    weights: Weights | None = None
    for item in outputs:
        if isinstance(item, (str, os.PathLike)):
            paths.append(Path(item))
        elif isinstance(item, Weights) and weights is None:
            weights = item
        else:
            raise UsageError(f"outputs of one model hold no second {type(item).__name__}")
    return paths, weights


def _single(path: Path, weights_inside: bool) -> dict[str, Member]:
    members: dict[str, Member] = {path.name: FileMember(path)}
    if path.suffix == ".pt2":
        _require_files(members)
        return members
    # Not in a list, the library alone is named; its weights file lies beside it, if it has one.
    beside = path.with_name(f"{path.stem}_weights.blob")
    if beside.exists():
        members[beside.name] = FileMember(beside)
    _require_complete(members, weights_inside)
    return members


def _add(members: dict[str, Member], file: str, member: Member) -> None:
    if file in members:
        raise InvalidName(file, "two outputs have this name", kind="file name")
    members[file] = member


def _weights_file(members: Mapping[str, Member]) -> str:
    """The name that AOTInductor gives to the dense weights file: it follows the library's."""
    for ending in (".wrapper.so", ".wrapper.cpp"):
        for file in members:
            if file.endswith(ending):
                return f"{Path(file).stem}_weights.blob"
    return "model.wrapper_weights.blob"


def _require_complete(members: Mapping[str, Member], weights_inside: bool) -> None:
    _require_files(members)
    has_library = any(file.endswith(".so") for file in members)
    if not has_library and BUILD_FILE not in members:
        raise PackageIncomplete(".so (nor a CMakeLists.txt to build one with)", members)
    if not weights_inside and not any(file.endswith(".blob") for file in members):
        raise PackageIncomplete(
            ".blob (pass weights_inside=True if the library holds the weights)", members
        )


def _require_files(members: Mapping[str, Member]) -> None:
    found: list[str] = []
    missing: list[str] = []
    for file, member in members.items():
        there = not isinstance(member, FileMember) or member.path.is_file()
        (found if there else missing).append(file)
    if missing:
        raise PackageIncomplete(f"file {missing[0]}", found)


# --- .pt2 archives ------------------------------------------------------------------------------


def put_archive(writer: Writer, file: BinaryIO) -> Recipe:
    """Store a .pt2 (an uncompressed zip archive), cut where its large members begin and end.

    Weights then have the same chunks wherever they lie in an archive, and as a file of their own.
    An archive that is not as expected is stored in one run.
    """
    size = os.fstat(file.fileno()).st_size
    cuts = [0, *archive_cuts(file, size), size]
    return Recipe.concat(
        writer.put_stream(_Range(file.fileno(), begin, end))
        for begin, end in itertools.pairwise(cuts)
        if begin < end
    )


def archive_cuts(file: BinaryIO, size: int) -> list[int]:
    """Where the large members of a zip archive of ``size`` bytes begin and end, rising."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    except (zipfile.BadZipFile, OSError, ValueError):
        return []
    cuts: list[int] = []
    for info in infos:
        begin = _data_offset(file.fileno(), info.header_offset)
        end = begin + info.compress_size
        if info.compress_size < MIN_MEMBER or begin < 0 or end > size:
            continue
        if not cuts or begin >= cuts[-1]:  # members that overlap are not to be believed
            cuts += [begin, end]
    return cuts


def _data_offset(descriptor: int, header: int) -> int:
    """Where the bytes of a member begin; negative if there is no member."""
    data = os.pread(descriptor, _LOCAL_HEADER.size, header) if header >= 0 else b""
    if len(data) < _LOCAL_HEADER.size:
        return -1
    fields = _LOCAL_HEADER.unpack(data)
    if fields[0] != b"PK\x03\x04":
        return -1
    return header + _LOCAL_HEADER.size + int(fields[-2]) + int(fields[-1])


class _Range:
    """A part of a file as a stream."""

    def __init__(self, descriptor: int, begin: int, end: int) -> None:
        self._descriptor = descriptor
        self._position = begin
        self._end = end

    def readinto(self, buffer: memoryview, /) -> int:
        count = min(len(buffer), self._end - self._position)
        if count <= 0:
            return 0
        done = os.preadv(self._descriptor, [buffer[:count]], self._position)
        self._position += done
        return done
