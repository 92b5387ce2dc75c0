"""Hypothesis strategies for recipes, manifests and names. Needs hypothesis."""

from __future__ import annotations

import string
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cas.digest import Digest
from cas.manifest import (
    ChunkPart,
    DataPart,
    FileEntry,
    Manifest,
    Part,
    Recipe,
    TensorEntry,
    ZeroPart,
)
from cas.strictjson import Json

_NAME = string.ascii_letters + string.digits + "._+=,-"


def no_deadlines() -> None:
    """Let a test take its time: on a busy machine a deadline only tells that it was busy."""
    settings.register_profile("cas", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("cas")


#: Components of valid ref names.
components = st.builds(
    lambda first, rest: first + rest,
    st.sampled_from(string.ascii_letters + string.digits + "_+=,"),
    st.text(_NAME, max_size=12),
)

#: Valid names of artifacts.
ref_names = st.lists(components, min_size=1, max_size=4).map("/".join)

#: Valid names of an artifact's files, not only ASCII.
file_names = st.text(
    st.characters(exclude_categories=["C", "Z"], exclude_characters="/\\"), min_size=1, max_size=20
).filter(lambda name: name not in (".", "..") and name.isprintable())

#: What provenance may hold.
json_values: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3)
    ),
    max_leaves=8,
)


def chunk_parts(chunk: bytes) -> st.SearchStrategy[ChunkPart]:
    """Whole and partial uses of one chunk."""
    digest, size = Digest.of(chunk), len(chunk)
    return st.integers(0, size - 1).flatmap(
        lambda offset: st.integers(1, size - offset).map(
            lambda length: ChunkPart(digest, size, offset, length)
        )
    )


def parts(chunks: list[bytes]) -> st.SearchStrategy[Part]:
    """Parts of a recipe over the given chunks."""
    kinds: list[st.SearchStrategy[Any]] = [
        st.integers(1, 40).map(ZeroPart),
        st.binary(min_size=1, max_size=40).map(DataPart),
    ]
    kinds += [chunk_parts(chunk) for chunk in chunks]
    return st.one_of(kinds)


def recipes(chunks: list[bytes]) -> st.SearchStrategy[Recipe]:
    return st.lists(parts(chunks), max_size=8).map(
        lambda found: Recipe.concat([Recipe(tuple(found))])
    )


def contents(recipe: Recipe, chunks: list[bytes]) -> bytes:
    """The bytes that ``recipe`` stands for: the model that recipes are tested against."""
    known = {Digest.of(chunk): chunk for chunk in chunks}
    pieces = []
    for part in recipe.parts:
        if isinstance(part, ZeroPart):
            pieces.append(bytes(part.length))
        elif isinstance(part, DataPart):
            pieces.append(part.data)
        else:
            pieces.append(known[part.digest][part.offset : part.offset + part.length])
    return b"".join(pieces)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Valid manifests."""
    chunks = draw(st.lists(st.binary(min_size=1, max_size=30), max_size=4, unique=True))
    names = draw(st.lists(file_names, max_size=3, unique_by=lambda name: name.casefold()))
    files = []
    for name in names:
        recipe = draw(recipes(chunks))
        files.append(FileEntry(name, Digest.of(contents(recipe, chunks)), recipe))
    tensors = []
    for entry in files:
        for _ in range(draw(st.integers(0, 2))):
            offset = draw(st.integers(0, entry.size))
            tensors.append(
                TensorEntry(
                    draw(st.text(max_size=10)),
                    entry.name,
                    offset,
                    draw(st.integers(0, entry.size - offset)),
                    draw(st.none() | st.just("float32")),
                    draw(st.none() | st.lists(st.integers(0, 99), max_size=3).map(tuple)),
                )
            )
    provenance = draw(st.dictionaries(st.text(max_size=10), json_values, max_size=3))
    return Manifest(tuple(files), tuple(tensors), provenance)
