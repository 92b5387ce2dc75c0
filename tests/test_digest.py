"""Digests: a value that can never be a path."""

from __future__ import annotations

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas.digest import Digest
from cas.errors import UsageError
from cas.testing.strategies import no_deadlines

no_deadlines()


@given(st.binary(max_size=200))
def test_text_round_trips(data: bytes) -> None:
    digest = Digest.of(data)
    assert Digest.parse(str(digest)) == digest
    assert digest == blake3.blake3(data).digest()
    assert str(digest) == "blake3:" + blake3.blake3(data).hexdigest()


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_pieces_give_the_digest_of_the_whole(pieces: list[bytes]) -> None:
    assert Digest.of_stream(pieces) == Digest.of(b"".join(pieces))


@given(st.text(max_size=80))
def test_arbitrary_text_is_a_digest_only_if_it_is_exactly_one(text: str) -> None:
    try:
        parsed = Digest.parse(text)
    except UsageError:
        return
    assert str(parsed) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "blake3:",
        "blake3:../../../etc/passwd",
        "blake3:" + "A" * 64,
        "blake3:" + "a" * 63,
        "blake3:" + "a" * 65,
        "blake3:" + "a" * 64 + "\n",
        "sha256:" + "a" * 64,
        " blake3:" + "a" * 64,
        "blake3:" + "\u0663" * 64,
        None,
        b"blake3:" + b"a" * 64,
    ],
)
def test_what_is_no_digest_is_refused(text: object) -> None:
    with pytest.raises(UsageError):
        Digest.parse(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 31, 33])
def test_other_lengths_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="32 bytes"):
        Digest(bytes(size))
