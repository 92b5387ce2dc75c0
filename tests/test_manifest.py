"""Recipes against a bytes model; manifests round trip, and hostile ones are only ever refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cas.digest import Digest
from cas.errors import ManifestDamaged, UsageError
from cas.manifest import (
    MAX_LITERAL,
    ChunkPart,
    DataPart,
    FileEntry,
    Manifest,
    Recipe,
    TensorEntry,
    ZeroPart,
)
from cas.strictjson import canonical_json
from cas.testing.strategies import contents, manifests, no_deadlines, recipes

no_deadlines()

CHUNKS = [b"the first chunk", b"another one", b"x"]
HEX = Digest.of(b"a").hex()
#: Seconds of the processor, of which a busy machine gives no less: many times what it takes, and
#: far less than it would if it took longer for each further one.
QUICKLY = 5


# --- recipes ------------------------------------------------------------------------------------


@given(recipes(CHUNKS), st.data())
def test_a_slice_of_a_recipe_is_the_slice_of_its_bytes(recipe: Recipe, data: st.DataObject) -> None:
    whole = contents(recipe, CHUNKS)
    assert recipe.size == len(whole)
    offset = data.draw(st.integers(0, recipe.size))
    length = data.draw(st.integers(0, recipe.size - offset))
    part = recipe.slice(offset, length)
    assert contents(part, CHUNKS) == whole[offset : offset + length]
    assert part.size == length


@given(st.lists(recipes(CHUNKS), max_size=4))
def test_concatenation_is_the_concatenation_of_bytes(several: list[Recipe]) -> None:
    joined = Recipe.concat(several)
    assert contents(joined, CHUNKS) == b"".join(contents(one, CHUNKS) for one in several)


@given(recipes(CHUNKS), st.data())
def test_slices_put_together_give_the_same_recipe_for_the_same_cuts(
    recipe: Recipe, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, recipe.size))
    halves = [recipe.slice(0, cut), recipe.slice(cut, recipe.size - cut)]
    assert contents(Recipe.concat(halves), CHUNKS) == contents(recipe, CHUNKS)


@given(st.lists(recipes(CHUNKS), max_size=4))
def test_concatenation_does_not_depend_on_grouping(several: list[Recipe]) -> None:
    one_by_one = Recipe()
    for recipe in several:
        one_by_one = Recipe.concat([one_by_one, recipe])
    assert one_by_one == Recipe.concat(several)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 6), (6, 0), (0, -1), (2**70, 1)])
def test_a_range_outside_the_recipe_is_refused(offset: int, length: int) -> None:
    with pytest.raises(UsageError):
        Recipe.literal(b"12345").slice(offset, length)


def test_literals_are_bounded() -> None:
    assert Recipe.literal(b"") == Recipe()
    assert Recipe.literal(bytes(MAX_LITERAL)).size == MAX_LITERAL
    with pytest.raises(UsageError, match="at most"):
        Recipe.literal(bytes(MAX_LITERAL + 1))
    half = Recipe.literal(bytes(MAX_LITERAL // 2 + 1))
    joined = Recipe.concat([half, half])
    assert all(part.length <= MAX_LITERAL for part in joined.parts)


def test_joining_many_small_literals_takes_linear_time() -> None:
    pieces = [Recipe.literal(b"0123456789abcdef")] * 600_000
    began = time.process_time()
    assert Recipe.concat(pieces).size == 9_600_000
    assert time.process_time() - began < QUICKLY


# --- manifests ----------------------------------------------------------------------------------


@given(manifests())
def test_a_manifest_round_trips_and_its_encoding_is_canonical(manifest: Manifest) -> None:
    data = manifest.encode()
    parsed = Manifest.parse(data)
    assert parsed == manifest
    assert parsed.encode() == data
    assert data.isascii()
    assert data == canonical_json(json.loads(data))


def document(**changes: Any) -> dict[str, Any]:
    """A valid document, with changes at the top."""
    file = {"name": "f", "size": 4, "blake3": HEX, "recipe": [["chunk", HEX, 4]]}
    tensor = {"name": "t", "file": "f", "offset": 1, "nbytes": 3, "dtype": "int8", "shape": [3]}
    good = {"format": 1, "files": [file], "tensors": [tensor], "provenance": {"by": "test"}}
    return {**good, **changes}


def with_file(**changes: Any) -> dict[str, Any]:
    return document(files=[{**document()["files"][0], **changes}], tensors=[])


def with_tensor(**changes: Any) -> dict[str, Any]:
    return document(tensors=[{**document()["tensors"][0], **changes}])


def with_part(part: Any, size: int = 4) -> dict[str, Any]:
    return with_file(recipe=[part], size=size)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Any] = {
    "not an object": [],
    "a number": 1,
    "format missing": {k: v for k, v in document().items() if k != "format"},
    "unknown format": document(format=2),
    "format as text": document(format="1"),
    "format true": document(format=True),
    "a key too many": document(extra=1),
    "files not a list": document(files={}),
    "tensors null": document(tensors=None),
    "provenance a list": document(provenance=[]),
    "provenance deep": document(provenance={"x": nested(40)}),
    "provenance huge number": document(provenance={"x": 2**63}),
    "file name traversal": with_file(name="../../etc/cron.d/x"),
    "file name absolute": with_file(name="/etc/passwd"),
    "file name dot-dot": with_file(name=".."),
    "file name empty": with_file(name=""),
    "file name control": with_file(name="a\nb"),
    "file name NUL": with_file(name="a\0b"),
    "file name surrogate": with_file(name="\ud800"),
    "file name long": with_file(name="x" * 300),
    "file name number": with_file(name=1),
    "file name twice": document(files=document()["files"] * 2, tensors=[]),
    "file name twice but for case": document(
        files=[{**document()["files"][0], "name": n} for n in ("f", "F")], tensors=[]
    ),
    "size not the sum": with_file(size=5),
    "size negative": with_file(size=-4),
    "size 2^63": with_file(size=2**63, recipe=[["zero", 2**63]]),
    "size overflow in parts": with_file(size=2**63, recipe=[["zero", 2**63 - 1], ["zero", 1]]),
    "sum of files beyond 2^63": document(
        files=[
            {"name": n, "size": 2**62, "blake3": HEX, "recipe": [["zero", 2**62]]} for n in "abc"
        ],
        tensors=[],
    ),
    "size true": with_part(["chunk", HEX, True], 1),
    "size as text": with_file(size="4"),
    "digest traversal": with_file(blake3="../" * 21 + "x"),
    "digest upper case": with_file(blake3=HEX.upper()),
    "digest short": with_file(blake3=HEX[:-1]),
    "digest null": with_file(blake3=None),
    "recipe an object": with_file(recipe={}),
    "part unknown": with_part(["exec", "rm -rf /"]),
    "part empty": with_part([]),
    "part an object": with_part({"chunk": HEX}),
    "part deep": with_part(nested(500)),
    "chunk of nothing": with_part(["chunk", HEX, 0], 0),
    "chunk negative": with_part(["chunk", HEX, -1], 4),
    "chunk larger than any": with_part(["chunk", HEX, 2**40], 2**40),
    "chunk digest traversal": with_part(["chunk", "../" * 21 + "x", 4]),
    "chunk with two sizes": with_file(size=9, recipe=[["chunk", HEX, 4], ["chunk", HEX, 5]]),
    "slice past the end": with_part(["slice", HEX, 4, 2, 4]),
    "slice negative offset": with_part(["slice", HEX, 8, -1, 4]),
    "slice negative length": with_part(["slice", HEX, 8, 4, -4], -4),
    "slice overflowing": with_part(["slice", HEX, 8, 2**63, 4]),
    "zero run of nothing": with_part(["zero", 0], 0),
    "zero run negative": with_part(["zero", -4]),
    "literal not base64": with_part(["data", "!!!!"]),
    "literal not ASCII": with_part(["data", "\u00e9\u00e9\u00e9\u00e9"]),
    "literal empty": with_part(["data", ""], 0),
    "literal a number": with_part(["data", 7]),
    "tensor in no file": with_tensor(file="g"),
    "tensor past the end": with_tensor(nbytes=4),
    "tensor negative": with_tensor(offset=-1),
    "tensor far": with_tensor(offset=2**63),
    "tensor dtype a number": with_tensor(dtype=7),
    "tensor shape negative": with_tensor(shape=[-3]),
    "tensor shape long": with_tensor(shape=[1] * 100),
    "tensor shape text": with_tensor(shape="3"),
    "tensor name huge": with_tensor(name="n" * 5000),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused(case: str) -> None:
    data = json.dumps(HOSTILE[case]).encode()
    with pytest.raises(ManifestDamaged) as caught:
        Manifest.parse(data)
    assert len(str(caught.value)) < 600


def test_the_document_that_the_hostile_ones_vary_is_valid() -> None:
    assert Manifest.parse(json.dumps(document()).encode()).size == 4


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 100,
        b"\xff\xfe\xfd",
        b"{" * 100_000,
        b"[" * 1_000_000,
        b'{"a":' * 50_000,
        b"NaN",
        b"1e400",
        b"-" + b"9" * 100_000,
        b'{"format":1.0}',
        b'{"format":1,"format":1}',
        b'{"format":1,"files":[],"tensors":[],"provenance":{"a":1,"a":2}}',
        b'{"format":1,"files":[],"tensors":[],"provenance":{"a":0.5}}',
        b'{"format":1,"files":[],"tensors":[],"provenance":{"a":Infinity}}',
        b'{"format":1,"files":[],"tensors":[],"provenance":{}} trailing',
        b'\xef\xbb\xbf{"format":1,"files":[],"tensors":[],"provenance":{}}',
    ],
    ids=range(16),
)
def test_bytes_that_are_no_strict_json_are_refused_quickly(data: bytes) -> None:
    began = time.process_time()
    with pytest.raises(ManifestDamaged):
        Manifest.parse(data)
    assert time.process_time() - began < QUICKLY


json_like = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


@given(json_like)
def test_no_json_gives_anything_but_a_manifest_or_an_error(value: Any) -> None:
    with pytest.raises(ManifestDamaged):
        Manifest.parse(json.dumps(value).encode())


@given(st.binary(max_size=300))
def test_no_bytes_give_anything_but_a_manifest_or_an_error(data: bytes) -> None:
    with pytest.raises(ManifestDamaged):
        Manifest.parse(data)


@given(st.sampled_from(sorted(document()["files"][0])), json_like, st.booleans())
def test_any_value_in_any_field_of_a_file_is_checked(key: str, value: Any, keep: bool) -> None:
    data = json.dumps(with_file(**{key: value})).encode()
    try:
        manifest = Manifest.parse(data)
    except ManifestDamaged:
        return
    assert manifest.files[0].size == manifest.files[0].recipe.size == manifest.size


@given(manifests(), st.data())
def test_one_flipped_bit_is_refused_or_parses_to_a_sound_manifest(
    manifest: Manifest, data: st.DataObject
) -> None:
    encoded = bytearray(manifest.encode())
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        parsed = Manifest.parse(bytes(encoded))
    except ManifestDamaged:
        return
    assert Manifest.parse(parsed.encode()) == parsed


@example({"x": nested(20)})
@example({"x": 0.5})
@example({"x": {1: 2}})
@example({"x": b"bytes"})
@example({"x": -(2**63)})
@given(st.dictionaries(st.text(max_size=3), st.floats() | st.binary(max_size=3), min_size=1))
def test_provenance_that_json_cannot_hold_exactly_is_refused_when_written(value: Any) -> None:
    with pytest.raises(UsageError):
        Manifest((), (), value).encode()


def test_distinct_chunks_are_listed_once() -> None:
    digest = Digest.of(b"abcd")
    recipe = Recipe(
        (ChunkPart.whole(digest, 4), ZeroPart(3), DataPart(b"x"), ChunkPart(digest, 4, 1, 2))
    )
    entry = FileEntry("f", digest, recipe)
    manifest = Manifest((entry,), (TensorEntry("t", "f", 0, 4),))
    assert manifest.chunks() == {digest: 4}
    assert manifest.size == entry.size == 10
