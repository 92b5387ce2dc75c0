"""Where each tensor lies in the files of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from executorch.exir.schema import Tensor, TensorDataLocation
from executorch.exir.tensor import get_scalar_type

from cas.executorch.blob import StoredBytes
from cas.executorch.labels import Label, Labels, dtype_name, named_labels, shape_of
from cas.executorch.recipes import MAIN, Piece, data_file_name
from cas.manifest import TensorEntry
from cas.strictjson import MAX_NAME_CHARS


def tensor_entries(
    program: Any, files: Mapping[str, tuple[Piece, ...]], main: str, labels: Labels
) -> list[TensorEntry]:
    """Every tensor and named blob of the program, in file order.

    Constants inside the .pte are known by the labels that the emitter's hook left; named data by
    those that came with it, or else, as external tensors are, by the program's own tables. Bytes
    that several names share are listed once per name, except for identical constants inside the
    .pte, of which the first is listed.

    A program that came out of a record brings its own list.
    """
    recorded = vars(program).get("recorded_tensors")
    if recorded is not None:
        moved = (replace(t, file=main) if t.file == MAIN else t for t in recorded)
        return [entry for entry in moved if entry.file in files]
    places = {name: _Places(pieces) for name, pieces in files.items()}
    found = [
        *_labelled(main, files[main], labels),
        *_named(program, places, main),
        *_external(program, places),
    ]
    unique = {(entry.file, entry.offset, entry.name): entry for entry in found}
    return [unique[key] for key in sorted(unique) if len(key[2]) <= MAX_NAME_CHARS]


class _Places:
    """Finds a buffer among the pieces of one file."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        self._by_id = {id(piece.data): piece for piece in pieces if len(piece) > 1}
        self._by_content = {
            piece.data: piece for piece in pieces if isinstance(piece.data, StoredBytes)
        }

    def find(self, data: Any) -> Piece | None:
        # By identity first: equal bytes may lie in a file twice, for two alignments.
        piece = self._by_id.get(id(data))
        if piece is None and isinstance(data, StoredBytes):
            piece = self._by_content.get(data)
        return piece


def _labelled(file: str, pieces: tuple[Piece, ...], labels: Labels) -> Iterator[TensorEntry]:
    for piece in pieces:
        label = labels.get(piece.data)
        if label is not None:
            yield _entry(label, file, piece)


def _named(program: Any, places: Mapping[str, _Places], main: str) -> Iterator[TensorEntry]:
    data = getattr(program, "_named_data", None)
    if data is None:
        return
    tables = {main: data.pte_data}
    known = named_labels(data)
    tables.update((data_file_name(tag), table) for tag, table in data.external_data.items())
    for file, table in tables.items():
        for key, entry in table.items():
            piece = places[file].find(data.buffers[entry.buffer_index]) if file in places else None
            if piece is not None:
                for label in known.get(key) or (_label(key, entry.tensor_layout),):
                    yield _entry(label, file, piece)


def _external(program: Any, places: Mapping[str, _Places]) -> Iterator[TensorEntry]:
    emitted = getattr(program, "_emitter_output", None)
    tables = getattr(emitted, "external_constant_map", None) or {}
    layouts = _external_layouts(emitted) if tables else {}
    for tag, table in tables.items():
        file = data_file_name(tag)
        for name, index in table.items():
            data = emitted.external_constant_buffer[index]  # type: ignore[union-attr]
            piece = places[file].find(data) if file in places else None
            if piece is not None:
                yield _entry(_label(name, layouts.get(name)), file, piece)


def _external_layouts(emitted: Any) -> dict[str, Tensor]:
    layouts: dict[str, Tensor] = {}
    for plan in emitted.program.execution_plan:
        for value in plan.values:
            info = getattr(value.val, "extra_tensor_info", None)
            if info is not None and info.location is TensorDataLocation.EXTERNAL:
                layouts[info.fully_qualified_name] = value.val
    return layouts


def _label(name: str, layout: Any) -> Label:
    """``layout`` is anything with a scalar type and sizes, or None."""
    if layout is None:
        return Label(name)
    dtype: torch.dtype = get_scalar_type(layout.scalar_type)
    return Label(name, dtype_name(dtype), shape_of(layout.sizes))


def _entry(label: Label, file: str, piece: Piece) -> TensorEntry:
    return TensorEntry(
        name=label.name,
        file=file,
        offset=piece.offset,
        nbytes=len(piece),
        dtype=label.dtype,
        shape=label.shape,
    )
