"""Strict JSON: what is written has one spelling, and what is read is believed in nothing.

Integers and text only, no key twice, bounded in bytes, values and depth: a document comes from disk
or from another machine. Each reader here returns what it was given, if that is as it must be.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

from cas.digest import Digest
from cas.errors import UsageError

Json: TypeAlias = "str | int | bool | list[Json] | dict[str, Json] | None"

MAX_SIZE: Final = 2**63 - 1
#: A manifest of 800,000 chunks, 3 TB of weights, and no more: what a hostile one can cost.
MAX_DOCUMENT_BYTES: Final = 64 << 20
#: Twice what that many chunks need. An empty list of three bytes takes twenty times that in memory.
MAX_LISTS: Final = 2_000_000
MAX_VALUES: Final = 8_000_000
MAX_JSON_DEPTH: Final = 16
MAX_NAME_CHARS: Final = 4096


def canonical_json(document: object) -> bytes:
    """The one spelling of a document that `check_json` lets pass: sorted keys, no spaces, ASCII."""
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode("ascii")


def check_json(value: object, what: str = "provenance", depth: int = 0) -> Json:
    """Only what survives a round trip unchanged: no floats, no other types, bounded depth.

    Raises:
        UsageError: ``what`` holds something else.
    """
    if depth > MAX_JSON_DEPTH:
        raise UsageError(f"{what} is nested more than {MAX_JSON_DEPTH} deep")
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        if abs(value) > MAX_SIZE:
            raise UsageError(f"a number in the {what} is out of range")
        return value
    if isinstance(value, (list, tuple)):
        return [check_json(item, what, depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: check_json(item, what, depth + 1) for key, item in value.items()}
    raise UsageError(f"{what} cannot hold a {type(value).__name__}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise UsageError("a key occurs twice")
    return document


def _no_float(text: str) -> Any:
    raise UsageError(f"{text[:20]} is not an integer")


def load_json(data: bytes) -> Any:
    """Strict JSON: one document, no duplicate keys, no floats.

    Raises:
        UsageError: anything else, however large or deep.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise UsageError(f"it has {len(data)} bytes, more than {MAX_DOCUMENT_BYTES}")
    if data.count(b"[") + data.count(b"{") > MAX_LISTS or data.count(b",") > MAX_VALUES:
        raise UsageError(f"it has more than {MAX_LISTS} lists or {MAX_VALUES} values")
    try:
        return json.loads(
            data.decode("utf-8"),  # or json would guess other encodings, and skip a BOM
            object_pairs_hook=_no_duplicates,
            parse_float=_no_float,
            parse_constant=_no_float,
        )
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON ({type(error).__name__})") from None


def require_keys(value: Any, keys: Iterable[str], what: str) -> dict[str, Any]:
    """``value`` if it is an object with exactly ``keys``; UsageError otherwise."""
    if not isinstance(value, dict) or set(value) != set(keys):
        raise UsageError(f"{what} must have exactly the keys {', '.join(sorted(keys))}")
    return value


def as_list(value: Any, what: str) -> list[Any]:
    """``value`` if it is a list; UsageError otherwise."""
    if not isinstance(value, list):
        raise UsageError(f"{what} must be a list")
    return value


def as_int(value: Any, what: str, low: int = 0, high: int = MAX_SIZE) -> int:
    """``value`` if it is an int (no bool) in the range; UsageError otherwise."""
    if type(value) is not int or not low <= value <= high:
        raise UsageError(f"{what} must be a whole number from {low} to {high}")
    return value


def as_text(value: Any, what: str) -> str:
    """``value`` if it is a string of a reasonable length; UsageError otherwise."""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise UsageError(f"{what} must be a string of at most {MAX_NAME_CHARS} characters")
    return value


def as_digest(value: Any, what: str) -> Digest:
    """The digest that 64 hexadecimal digits spell; UsageError otherwise."""
    return Digest.parse("blake3:" + as_text(value, what))
