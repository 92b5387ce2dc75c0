"""Names from outside: what may become part of a path, and that nothing else can."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas import layout
from cas.digest import Digest
from cas.errors import InvalidName
from cas.layout import Layout
from cas.testing.strategies import file_names, no_deadlines, ref_names

no_deadlines()

HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "a/../b",
    "a/..",
    "/etc/passwd",
    "a//b",
    "a/",
    "/",
    ".hidden",
    "-rf",
    "a/-rf",
    "a\\b",
    "a\x00b",
    "a\nb",
    "a\x1b[31mb",
    "a\x7f",
    "a b",
    "a@b",
    "a%2Fb",
    "a:b",
    "a*",
    "caf\u00e9",
    "\u202egnp.exe",
    "a\u200bb",
    "x" * 201,
    "x" * 300,
    "a/" * 80 + "a",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_ref_name_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(InvalidName) as caught:
        layout.check_ref_name(name)
    assert caught.value.reason
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 250
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a", "a/b", "gemma/q4", "X_1.2+3=4,5-6", "x" * 200, "a..b"])
def test_a_reasonable_ref_name_is_allowed(name: str) -> None:
    assert layout.check_ref_name(name) == name


@given(st.text(max_size=30))
def test_no_text_makes_a_ref_directory_outside_of_refs(name: str) -> None:
    store = Layout(Path("/store"))
    try:
        path = store.ref_dir(name)
    except InvalidName:
        return
    assert path.parent == store.refs
    assert len(path.name.encode()) <= 255


@given(ref_names)
def test_escaped_ref_names_round_trip(name: str) -> None:
    escaped = layout.escape_ref_name(layout.check_ref_name(name))
    assert "/" not in escaped
    assert layout.unescape_ref_name(escaped) == name


@given(st.lists(ref_names, unique=True, max_size=5))
def test_different_names_have_different_directories(names: list[str]) -> None:
    assert len({layout.escape_ref_name(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/a",
        "a\\b",
        "a\nb",
        "a\x00",
        "\x7f",
        "\ud800",
        "x" * 201,
        "\u00e9" * 101,
    ],
)
def test_a_hostile_file_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="file name"):
        layout.check_file_name(name)


@given(file_names)
def test_a_file_name_is_one_component(name: str) -> None:
    if len(name.encode()) <= layout.MAX_NAME:
        assert (Path("/d") / layout.check_file_name(name)).parent == Path("/d")


@pytest.mark.parametrize("name", ["model.pte", ".hidden", "caf\u00e9.ptd", "a b", "x" * 200])
def test_a_reasonable_file_name_is_allowed(name: str) -> None:
    assert layout.check_file_name(name) == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", ("a", None)), ("a/b@3", ("a/b", 3)), ("a@0003", ("a", 3))],
)
def test_a_ref_parses(text: str, expected: tuple[str, int | None]) -> None:
    assert layout.parse_ref(text) == expected


@pytest.mark.parametrize(
    "text", ["a@", "a@0", "a@-1", "a@1.5", "a@x", "a@1@2", "a@" + "9" * 19, "a@\u0661", "@1"]
)
def test_a_malformed_generation_is_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        layout.parse_ref(text)


@given(st.text(alphabet="0123456789x", max_size=20))
def test_only_the_canonical_spelling_of_a_generation_counts(text: str) -> None:
    generation = layout.parse_generation(text)
    if generation is not None:
        assert generation >= 1
        assert f"{generation:08d}" == text


@given(st.integers(1, 10**18 - 1))
def test_every_generation_is_found_under_its_own_name(generation: int) -> None:
    path = Layout(Path("/store")).ref("a", generation)
    assert layout.parse_generation(path.name) == generation


@given(st.text(max_size=70))
def test_a_chunk_file_name_is_a_digest_or_nothing(name: str) -> None:
    digest = layout.parse_digest_name(name)
    assert digest is None or digest.hex() == name


def test_every_path_lies_below_the_root() -> None:
    store = Layout(Path("/store"))
    digest = Digest.of(b"x")
    paths = [
        store.chunk(digest),
        store.manifest(digest),
        store.ref("a/b", 1),
        store.lease("0" * 32),
        store.staged("0" * 32, digest),
        store.quarantined(digest),
        store.index_lock,
        store.gc_lock,
        *store.directories(),
    ]
    for path in paths:
        assert path.is_relative_to("/store")
        assert ".." not in path.parts
    assert store.chunk(digest).parent in store.directories()
    assert store.manifest(digest).parent in store.directories()
