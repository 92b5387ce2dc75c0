"""The chunks of a manifest, without the manifest: the same as it says, or a refusal."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from cas.closures import Closure
from cas.errors import ManifestDamaged
from cas.manifest import Manifest
from cas.testing.strategies import manifests, no_deadlines

no_deadlines()


@given(manifests())
def test_a_closure_is_what_the_manifest_says(manifest: Manifest) -> None:
    closure = Closure.parse(manifest.encode())
    assert closure == Closure(manifest.size, dict(manifest.chunks()))


@given(manifests())
def test_a_closure_does_not_depend_on_how_the_json_is_spelled(manifest: Manifest) -> None:
    spelled = json.dumps(json.loads(manifest.encode()), indent=3).encode()
    assert Manifest.parse(spelled) == manifest
    assert Closure.parse(spelled).chunks == manifest.chunks()


_DIGEST = "ab" * 32
BAD_RECIPES = [
    [["chunk", _DIGEST[:-1], 10]],
    [["chunk", _DIGEST + "00", 10]],
    [["chunk", "  " + _DIGEST[:-2], 10]],
    [["chunk", 7, 10]],
    [["chunk", None, 10]],
    [["chunk", _DIGEST]],
    [["chunk", _DIGEST, 0]],
    [["chunk", _DIGEST, -1]],
    [["chunk", _DIGEST, 1 << 40]],
    [["chunk", _DIGEST, "10"]],
    [["chunk", _DIGEST, True]],
    [["chunk", _DIGEST, [10]]],
    [["future", _DIGEST, 10]],
    [[]],
    [{"chunk": _DIGEST}],
    ["chunk"],
    [7],
    {"chunk": 1},
    {},
    None,
]


@pytest.mark.parametrize("recipe", BAD_RECIPES, ids=str)
def test_what_could_name_a_chunk_otherwise_is_refused_by_the_closure_too(recipe: object) -> None:
    """gc marks from closures: it must not pass over a chunk because it stands there oddly."""
    file = {"name": "f", "size": 10, "blake3": "0" * 64, "recipe": recipe}
    document = {"format": 1, "files": [file], "tensors": [], "provenance": {}}
    with pytest.raises(ManifestDamaged):
        Closure.parse(json.dumps(document).encode())


@pytest.mark.parametrize(
    "document",
    [
        {"format": 2, "files": [], "tensors": [], "provenance": {}},
        {"format": "1", "files": [], "tensors": [], "provenance": {}},
        {"format": 1, "files": [], "tensors": [], "provenance": {}, "more": []},
        {"format": 1, "files": [{"more": []}], "tensors": [], "provenance": {}},
        {"format": 1, "files": {}, "tensors": [], "provenance": {}},
        {"format": 1, "files": 3, "tensors": [], "provenance": {}},
        [],
        None,
    ],
    ids=str,
)
def test_a_closure_of_something_else_is_refused(document: object) -> None:
    with pytest.raises(ManifestDamaged):
        Closure.parse(json.dumps(document).encode())
