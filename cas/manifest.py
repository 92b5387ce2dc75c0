"""Recipes and manifests: what an artifact consists of. Pure values, canonical JSON.

``docs/format.md`` specifies the encoding. A manifest comes from disk or from another machine, so
`Manifest.parse` believes nothing: every size, name, digest and sum is checked before use.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from cas.chunking import MAX_CHUNK_SIZE
from cas.digest import Digest
from cas.errors import CasError, ManifestDamaged, UsageError
from cas.layout import FORMAT, check_file_name
from cas.strictjson import (
    MAX_SIZE,
    Json,
    as_digest,
    as_int,
    as_list,
    as_text,
    canonical_json,
    check_json,
    load_json,
    require_keys,
)

MAX_LITERAL: Final = 1 << 20
MAX_TENSOR_DIMS: Final = 64
MANIFEST_KEYS: Final = ("format", "files", "tensors", "provenance")
FILE_KEYS: Final = ("name", "size", "blake3", "recipe")


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """``length`` bytes from ``offset`` on of the chunk ``digest``, which has ``size`` bytes."""

    digest: Digest
    size: int
    offset: int
    length: int

    @classmethod
    def whole(cls, digest: Digest, size: int) -> ChunkPart:
        return cls(digest, size, 0, size)


@dataclass(frozen=True, slots=True)
class ZeroPart:
    """``length`` zero bytes; nothing is stored for them."""

    length: int


@dataclass(frozen=True, slots=True)
class DataPart:
    """A few bytes, kept in the recipe itself."""

    data: bytes

    @property
    def length(self) -> int:
        return len(self.data)


Part: TypeAlias = ChunkPart | ZeroPart | DataPart


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to rebuild a run of bytes: its parts in order."""

    parts: tuple[Part, ...] = ()
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(part.length for part in self.parts))

    @classmethod
    def literal(cls, data: bytes) -> Recipe:
        """A recipe that holds ``data`` itself.

        Raises:
            UsageError: more than 1 MiB; such data belongs in chunks.
        """
        if len(data) > MAX_LITERAL:
            raise UsageError(f"a literal holds at most {MAX_LITERAL} bytes, got {len(data)}")
        return cls((DataPart(data),)) if data else cls()

    @classmethod
    def concat(cls, recipes: Iterable[Recipe]) -> Recipe:
        """The bytes of each recipe after the other; adjacent literals and zero runs are joined."""
        return cls(tuple(_joined(part for recipe in recipes for part in recipe.parts)))

    def chunks(self) -> Iterator[ChunkPart]:
        return (part for part in self.parts if isinstance(part, ChunkPart))

    def slice(self, offset: int, length: int) -> Recipe:
        """The recipe of ``length`` bytes from ``offset`` on.

        Raises:
            UsageError: the range is not inside the recipe.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise UsageError(f"bytes {offset}..{offset + length} of a recipe of {self.size}")
        parts: list[Part] = []
        position = 0
        for part in self.parts:
            begin = max(offset, position)
            end = min(offset + length, position + part.length)
            if begin < end:
                parts.append(_sub(part, begin - position, end - begin))
            position += part.length
        return Recipe(tuple(parts))


def _sub(part: Part, offset: int, length: int) -> Part:
    if isinstance(part, ChunkPart):
        return ChunkPart(part.digest, part.size, part.offset + offset, length)
    if isinstance(part, ZeroPart):
        return ZeroPart(length)
    return DataPart(part.data[offset : offset + length])


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Adjacent zero runs as one, and adjacent literals up to the largest that is allowed."""
    for kind, run in itertools.groupby(parts, type):
        if kind is ZeroPart:
            if length := sum(part.length for part in run):
                yield ZeroPart(length)
        elif kind is DataPart:
            yield from _joined_literals(part for part in run if isinstance(part, DataPart))
        else:
            yield from run


def _joined_literals(run: Iterable[DataPart]) -> Iterator[DataPart]:
    held: list[bytes] = []
    size = 0
    for part in run:
        if size and size + part.length > MAX_LITERAL:
            yield DataPart(b"".join(held))
            held, size = [], 0
        held.append(part.data)
        size += part.length
    if size:
        yield DataPart(b"".join(held))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an artifact. ``digest`` is the BLAKE3 of the whole file, as ``b3sum`` has it."""

    name: str
    digest: Digest
    recipe: Recipe

    @property
    def size(self) -> int:
        return self.recipe.size


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place: ``nbytes`` bytes at ``offset`` of ``file``. Its chunks are the recipe's.

    ``dtype`` (as torch prints it, without ``torch.``) and ``shape`` are None where the exporter
    did not say.
    """

    name: str
    file: str
    offset: int
    nbytes: int
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content-addressed document of one artifact."""

    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...] = ()
    provenance: Mapping[str, Json] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files, as they will be assembled."""
        return sum(entry.size for entry in self.files)

    def chunks(self) -> dict[Digest, int]:
        """Each distinct chunk and its size in bytes."""
        return {part.digest: part.size for entry in self.files for part in entry.recipe.chunks()}

    def encode(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII, integers only."""
        document = {
            "format": FORMAT,
            "files": [_encode_file(entry) for entry in self.files],
            "tensors": [_encode_tensor(entry) for entry in self.tensors],
            "provenance": check_json(self.provenance),
        }
        return canonical_json(document)

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read what `encode` wrote.

        Raises:
            ManifestDamaged: it is not exactly that, with the reason.
        """
        subject = str(Digest.of(data))
        try:
            return _parse_manifest(load_json(data))
        except CasError as error:
            raise ManifestDamaged(subject, f"is not valid: {error}") from error


# --- encoding -----------------------------------------------------------------------------------


def encode_part(part: Part) -> list[Json]:
    """A part as the list that `parse_part` reads."""
    if isinstance(part, ZeroPart):
        return ["zero", part.length]
    if isinstance(part, DataPart):
        return ["data", base64.b64encode(part.data).decode("ascii")]
    if part.offset == 0 and part.length == part.size:
        return ["chunk", part.digest.hex(), part.size]
    return ["slice", part.digest.hex(), part.size, part.offset, part.length]


def _encode_file(entry: FileEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "size": entry.size,
        "blake3": entry.digest.hex(),
        "recipe": [encode_part(part) for part in entry.recipe.parts],
    }


def _encode_tensor(entry: TensorEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "file": entry.file,
        "offset": entry.offset,
        "nbytes": entry.nbytes,
        "dtype": entry.dtype,
        "shape": None if entry.shape is None else list(entry.shape),
    }


# --- parsing ------------------------------------------------------------------------------------


def parse_part(value: Any) -> Part:
    """Read one part of a recipe; UsageError if it is none."""
    match value:
        case ["chunk", digest, size]:
            n = as_int(size, "a chunk's size", 1, MAX_CHUNK_SIZE)
            return ChunkPart(as_digest(digest, "a chunk's digest"), n, 0, n)
        case ["slice", digest, size, offset, length]:
            n = as_int(size, "a chunk's size", 1, MAX_CHUNK_SIZE)
            begin = as_int(offset, "a slice's offset", 0, n - 1)
            count = as_int(length, "a slice's length", 1, n - begin)
            return ChunkPart(as_digest(digest, "a chunk's digest"), n, begin, count)
        case ["zero", length]:
            return ZeroPart(as_int(length, "a zero run's length", 1))
        case ["data", str(text)]:
            return _parse_literal(text)
    raise UsageError("a part is not one of chunk, slice, zero and data")


def _parse_literal(text: str) -> DataPart:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError("a literal is not base64") from None
    if not 1 <= len(data) <= MAX_LITERAL:
        raise UsageError(f"a literal has {len(data)} bytes")
    return DataPart(data)


def _parse_file(value: Any) -> FileEntry:
    entry = require_keys(value, FILE_KEYS, "a file")
    name = check_file_name(as_text(entry["name"], "a file's name"))
    size = as_int(entry["size"], "a file's size")
    recipe = Recipe(tuple(parse_part(part) for part in as_list(entry["recipe"], "a recipe")))
    if recipe.size != size:
        raise UsageError(f"the recipe of {name!r} gives {recipe.size} bytes, not {size}")
    return FileEntry(name, as_digest(entry["blake3"], "a file's digest"), recipe)


def _parse_shape(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    dims = as_list(value, "a shape")
    if len(dims) > MAX_TENSOR_DIMS:
        raise UsageError(f"a shape has {len(dims)} dimensions")
    return tuple(as_int(dim, "a dimension") for dim in dims)


def _parse_tensor(value: Any, sizes: Mapping[str, int]) -> TensorEntry:
    keys = ("name", "file", "offset", "nbytes", "dtype", "shape")
    entry = require_keys(value, keys, "a tensor")
    file = as_text(entry["file"], "a tensor's file")
    if file not in sizes:
        raise UsageError(f"a tensor lies in {file!r}, which is not a file of this manifest")
    offset = as_int(entry["offset"], "a tensor's offset", 0, sizes[file])
    return TensorEntry(
        name=as_text(entry["name"], "a tensor's name"),
        file=file,
        offset=offset,
        nbytes=as_int(entry["nbytes"], "a tensor's nbytes", 0, sizes[file] - offset),
        dtype=None if entry["dtype"] is None else as_text(entry["dtype"], "a dtype"),
        shape=_parse_shape(entry["shape"]),
    )


def check_files(files: Iterable[FileEntry]) -> tuple[FileEntry, ...]:
    """``files`` if they can lie in one directory on any filesystem and their sizes add up.

    Raises:
        UsageError: two names that differ only by case, or more bytes than a file can have.
    """
    checked = tuple(files)
    folded = {entry.name.casefold() for entry in checked}
    if len(folded) != len(checked):
        raise UsageError("two files have the same name (upper and lower case are not told apart)")
    if sum(entry.size for entry in checked) > MAX_SIZE:
        raise UsageError("the files are larger than any disk")
    chunk_sizes(entry.recipe for entry in checked)
    return checked


def chunk_sizes(recipes: Iterable[Recipe]) -> dict[Digest, int]:
    """Each distinct chunk of ``recipes`` and its size in bytes.

    Raises:
        UsageError: a chunk is given two sizes.
    """
    sizes: dict[Digest, int] = {}
    for recipe in recipes:
        for part in recipe.chunks():
            if sizes.setdefault(part.digest, part.size) != part.size:
                raise UsageError(f"chunk {part.digest} is given two sizes")
    return sizes


def _parse_manifest(document: Any) -> Manifest:
    top = require_keys(document, MANIFEST_KEYS, "a manifest")
    if as_int(top["format"], "format") != FORMAT:
        raise UsageError(f"format {top['format']} is not known (this version reads {FORMAT})")
    files = check_files(_parse_file(value) for value in as_list(top["files"], "files"))
    sizes = {entry.name: entry.size for entry in files}
    tensors = tuple(_parse_tensor(value, sizes) for value in as_list(top["tensors"], "tensors"))
    provenance = top["provenance"]
    if not isinstance(provenance, dict):
        raise UsageError("provenance must be an object")
    check_json(provenance)
    return Manifest(files, tensors, provenance)
