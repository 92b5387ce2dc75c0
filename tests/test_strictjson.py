"""Strict JSON: one spelling out, and only what is exactly as it must be in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from cas.digest import Digest
from cas.errors import UsageError
from cas.strictjson import (
    MAX_LISTS,
    MAX_NAME_CHARS,
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
from cas.testing.strategies import json_values, no_deadlines

no_deadlines()

DIGEST = Digest.of(b"a")


@given(json_values)
def test_what_is_checked_and_written_is_read_back_the_same(value: Json) -> None:
    data = canonical_json(check_json(value))
    assert load_json(data) == value
    assert canonical_json(load_json(data)) == data
    assert data.isascii()


def test_the_order_of_keys_does_not_change_the_spelling() -> None:
    assert canonical_json({"b": 1, "a": [2, None]}) == b'{"a":[2,null],"b":1}'
    assert canonical_json({"a": [2, None], "b": 1}) == b'{"a":[2,null],"b":1}'


def test_load_json_keeps_what_a_manifest_needs() -> None:
    assert load_json(b'{"a":[1,true,null,"x"]}') == {"a": [1, True, None, "x"]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a":1,"a":1}', "twice"),
        (b"[1.0]", "1.0 is not an integer"),
        (b"[NaN]", "NaN is not an integer"),
        (b"[1] [2]", "not JSON"),
        (b"\xef\xbb\xbf[]", "not JSON"),
        (b"[" * (MAX_LISTS + 1), "more than"),
    ],
    ids=["key twice", "float", "NaN", "two documents", "byte order mark", "lists"],
)
def test_what_is_not_strict_is_refused_with_the_reason(data: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_json(data)


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (as_int, [0, 7, MAX_SIZE], [True, -1, MAX_SIZE + 1, "7", None]),
        (as_text, ["", "x" * MAX_NAME_CHARS], ["x" * (MAX_NAME_CHARS + 1), 7, None, ["x"]]),
        (as_list, [[], [1]], [{}, "ab", None]),
        (as_digest, [], [DIGEST.hex()[:-1], DIGEST.hex().upper(), str(DIGEST), None]),
    ],
)
def test_a_reader_gives_back_what_is_right_and_names_what_is_not(
    read: Callable[[Any, str], Any], good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        assert read(value, "the thing") is value
    for value in bad:
        with pytest.raises(UsageError):
            read(value, "the thing")
    assert as_digest(DIGEST.hex(), "the thing") == DIGEST


def test_an_object_has_the_keys_asked_for_and_no_others() -> None:
    assert require_keys({"a": 1, "b": 2}, ("b", "a"), "a pair") == {"a": 1, "b": 2}
    for value in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, ["a", "b"], None):
        with pytest.raises(UsageError, match="a pair must have exactly the keys a, b"):
            require_keys(value, ("b", "a"), "a pair")
