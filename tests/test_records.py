"""The encoding of action records: what is written reads back, and nothing else is believed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas.digest import Digest
from cas.errors import ActionDamaged, UsageError
from cas.manifest import ChunkPart, Recipe, ZeroPart
from cas.records import MAX_RECORD_BYTES, TRAILER_BYTES, ActionRecord, scan_chunks
from cas.strictjson import canonical_json
from cas.testing.strategies import json_values, no_deadlines, recipes

no_deadlines()

CHUNKS = [b"one", b"another chunk"]
KEY = Digest.of(b"key")
RECORD = ActionRecord(
    key=KEY,
    kind="delegate",
    label="XnnpackBackend: forward, partition 1",
    factors={"options": {"a": 1}, "weights": {"w": "00"}},
    result={"results": [{"blob": 0}]},
    recipes=(Recipe((ChunkPart.whole(Digest.of(CHUNKS[0]), 3), ZeroPart(9))), Recipe.literal(b"x")),
    dependencies={"variables": {"HOME": None}},
    microseconds=1_500_000,
    created=7,
)


def sealed(document: object) -> bytes:
    body = canonical_json(document) + b"\n"
    return body + f"{Digest.of(body)}\n".encode()


def changed(**fields: Any) -> bytes:
    return sealed({**json.loads(RECORD.encode().splitlines()[0]), **fields})


@given(
    factors=st.dictionaries(st.text(max_size=8), json_values, max_size=3),
    result=json_values,
    found=st.lists(recipes(CHUNKS), max_size=3),
    label=st.text(max_size=20),
    created=st.integers(0, 2**40),
)
def test_a_record_reads_back_as_it_was_written(
    factors: dict[str, Any], result: Any, found: list[Recipe], label: str, created: int
) -> None:
    record = ActionRecord(
        KEY, "whole-export", factors, result, tuple(found), factors, label, 5, created
    )
    assert ActionRecord.parse(record.encode(), KEY) == record


def test_the_document_is_canonical_and_its_last_line_confirms_it() -> None:
    first, second, rest = RECORD.encode().split(b"\n")
    assert canonical_json(json.loads(first)) == first and not rest
    assert second.decode() == str(Digest.of(first + b"\n"))
    assert len(second) + 1 == TRAILER_BYTES
    assert RECORD.seconds == 1.5 and RECORD.chunks() == {Digest.of(CHUNKS[0]): 3}


@given(found=st.lists(recipes(CHUNKS), max_size=4), text=st.text(max_size=30))
def test_a_scan_finds_the_chunks_that_parsing_does(found: list[Recipe], text: str) -> None:
    looks_like_one = '["chunk","' + "00" * 32 + '",7]' + text
    factors: dict[str, Any] = {"options": {looks_like_one: looks_like_one}}
    record = ActionRecord(KEY, "delegate", factors, looks_like_one, tuple(found))
    assert scan_chunks(record.encode(), KEY) == record.chunks()


def test_a_scan_keeps_too_much_rather_than_too_little_and_refuses_damage() -> None:
    other = Digest.of(b"no recipe of it")
    record = ActionRecord(KEY, "delegate", {}, ["chunk", other.hex(), 5], RECORD.recipes)
    assert scan_chunks(record.encode(), KEY) == {**RECORD.chunks(), other: 5}
    data = bytearray(record.encode())
    data[40] ^= 1
    with pytest.raises(ActionDamaged):
        scan_chunks(bytes(data), KEY)


def test_every_flipped_bit_is_found() -> None:
    data = bytearray(RECORD.encode())
    for position in range(len(data)):
        for bit in (1, 16, 128):
            data[position] ^= bit
            with pytest.raises(ActionDamaged, match="cas verify"):
                ActionRecord.parse(bytes(data), KEY)
            data[position] ^= bit
    assert ActionRecord.parse(bytes(data), KEY) == RECORD


@pytest.mark.parametrize("length", [0, 1, TRAILER_BYTES, 200])
def test_a_torn_record_is_refused(length: int) -> None:
    with pytest.raises(ActionDamaged):
        ActionRecord.parse(RECORD.encode()[:length], KEY)


def test_the_record_of_another_action_is_refused() -> None:
    with pytest.raises(ActionDamaged, match="another action"):
        ActionRecord.parse(RECORD.encode(), Digest.of(b"other"))


HOSTILE = {
    "an unknown format": {"format": 2},
    "no digest for a key": {"key": "../../etc/passwd"},
    "a kind that is no word": {"kind": "../x"},
    "an empty kind": {"kind": ""},
    "a long label": {"label": "x" * 5000},
    "factors that are a list": {"factors": []},
    "dependencies that are text": {"dependencies": "x"},
    "a negative time": {"microseconds": -1},
    "a time that is a truth": {"created": True},
    "a recipe that is text": {"recipes": ["chunk"]},
    "a chunk named like a path": {"recipes": [[["chunk", "../" * 20, 3]]]},
    "a chunk of two sizes": {
        "recipes": [[["chunk", "00" * 32, 3]], [["slice", "00" * 32, 4, 0, 1]]]
    },
    "a recipe larger than any disk": {"recipes": [[["zero", 2**63 - 1], ["zero", 2**63 - 1]]]},
    "too many recipes": {"recipes": [[]] * 70_000},
    "an unknown field": {"pickle": "gASVAA=="},
    "deep nesting": {"result": json.loads("[" * 40 + "]" * 40)},
    "a number too large": {"result": 2**63},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
def test_a_well_sealed_record_is_still_not_believed(fields: dict[str, Any]) -> None:
    with pytest.raises(ActionDamaged):
        ActionRecord.parse(changed(**fields), KEY)


@pytest.mark.parametrize(
    "body",
    [b'{"a":1,"a":2}\n', b"[1.5]\n", b"[" * 100_000 + b"\n", b"\xff\n", b"null\n"],
    ids=["duplicate keys", "floats", "deep", "not UTF-8", "nothing"],
)
def test_what_is_no_such_json_is_refused(body: bytes) -> None:
    with pytest.raises(ActionDamaged):
        ActionRecord.parse(body + f"{Digest.of(body)}\n".encode(), KEY)


def test_a_record_too_large_is_neither_written_nor_read() -> None:
    big = {"x": "y" * MAX_RECORD_BYTES}
    with pytest.raises(UsageError, match="more than"):
        ActionRecord(KEY, "delegate", big, None).encode()
    with pytest.raises(ActionDamaged, match="more than"):
        ActionRecord.parse(changed(factors=big), KEY)


@pytest.mark.parametrize("result", [1.5, b"bytes", {"a": {1, 2}}, {1: 2}])
def test_what_json_cannot_hold_is_refused_when_it_is_written(result: Any) -> None:
    with pytest.raises(UsageError, match="result cannot hold"):
        ActionRecord(KEY, "delegate", {}, result).encode()
