"""The files of an ExecuTorch program as recipes, without reading a stored byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from executorch.exir._serialize._cord import FileBackedData

from cas.errors import InvalidName, UsageError
from cas.executorch.blob import StoredBytes
from cas.executorch.errors import ForeignBytes
from cas.executorch.intake import Intake
from cas.layout import check_file_name
from cas.manifest import Recipe, ZeroPart

#: What a program's own file is called where it has no name yet.
MAIN: Final = "model.pte"

#: Longer plain bytes become chunks, shorter ones stay in the recipe.
MAX_LITERAL: Final = 4096

#: Short pieces that follow each other are stored together, up to this many bytes.
RUN: Final = 4 << 20

#: Shorter padding is not worth a part of its own.
MIN_ZEROS: Final = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """One item of a cord, and where it lies in the file."""

    offset: int
    data: Any

    def __len__(self) -> int:
        return len(self.data)


def program_cords(program: Any, basename: str) -> dict[str, Any]:
    """The cords of a program by the names of the files they become.

    The names are those that ``write_tensor_data_to_file`` uses. A tag becomes a file name, and it
    may come from a model's metadata, so each is checked.

    Raises:
        UsageError: this is not what ``to_executorch()`` returns.
        InvalidName: a name could leave the directory, or two files would have the same one.
    """
    try:
        main, data = program._pte_data, program._tensor_data
    except AttributeError:
        raise UsageError(
            f"cannot save a {type(program).__name__}; pass what `to_executorch()` returned"
        ) from None
    cords = {check_file_name(f"{basename}.pte"): main}
    for tag, cord in (data or {}).items():
        name = check_file_name(data_file_name(tag))
        if name.casefold() in {known.casefold() for known in cords}:
            raise InvalidName(name, "two external tags give this file name", kind="file name")
        cords[name] = cord
    return cords


def data_file_name(tag: str) -> str:
    """The file that ExecuTorch writes for an external tag."""
    return tag if tag.endswith(".ptd") else f"{tag}.ptd"


def pieces_of(cord: Any) -> tuple[Piece, ...]:
    return tuple(_pieces(cord))


def _pieces(cord: Any) -> Iterator[Piece]:
    offset = 0
    for item in cord._buffers:
        yield Piece(offset, item)
        offset += len(item)


def build_recipes(files: Mapping[str, tuple[Piece, ...]], intake: Intake) -> dict[str, Recipe]:
    """One recipe per file; plain bytes that are too long for a recipe go to the store now.

    Raises:
        ForeignBytes: a file holds bytes of another capture.
    """
    return {name: _build(name, pieces, intake) for name, pieces in files.items()}


def _build(name: str, pieces: tuple[Piece, ...], intake: Intake) -> Recipe:
    builder = _Builder(intake)
    for piece in pieces:
        data = piece.data
        if isinstance(data, StoredBytes) and data.source is not intake.source:
            raise ForeignBytes(name)
        builder.add(data)
    return builder.finish()


class _Builder:
    """Gathers short pieces into runs, and hands the rest to the store."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._recipes: list[Recipe] = []
        self._run = bytearray()

    def add(self, data: Any) -> None:
        if isinstance(data, StoredBytes):
            self._append(data.recipe)
        elif isinstance(data, FileBackedData):
            with open(data._path, "rb", buffering=0) as file:
                self._append(self._intake.writer.put_stream(file))
        elif len(data) >= MIN_ZEROS and not any(data):
            self._append(Recipe((ZeroPart(len(data)),)))
        elif len(data) > MAX_LITERAL:
            self._append(self._intake.writer.put(data))
        else:
            self._run += data
            if len(self._run) >= RUN:
                self._flush()

    def finish(self) -> Recipe:
        self._flush()
        return Recipe.concat(self._recipes)

    def _append(self, recipe: Recipe) -> None:
        self._flush()
        self._recipes.append(recipe)

    def _flush(self) -> None:
        run = bytes(self._run)
        self._run.clear()
        if len(run) > MAX_LITERAL:
            self._recipes.append(self._intake.writer.put(run))
        elif run:
            self._recipes.append(Recipe.literal(run))
