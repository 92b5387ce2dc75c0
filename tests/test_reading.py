"""Chunk buffers, and reading ahead."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cas import Store
from cas.reading import Buffers
from cas.testing.stores import CHUNK, contents


def test_buffers_are_used_again() -> None:
    buffers = Buffers(100)
    first = buffers.take(10)
    assert len(first) == 100
    buffers.give(first)
    assert buffers.take(100) is first
    assert buffers.take(100) is not first


def test_one_that_is_too_short_is_not_given_out() -> None:
    buffers = Buffers(100)
    buffers.give(bytearray(100))
    assert len(buffers.take(101)) == 101


def test_dropped_buffers_are_gone() -> None:
    buffers = Buffers(100)
    first = buffers.take(100)
    buffers.give(first)
    buffers.drop()
    assert buffers.take(100) is not first


def test_all_that_a_writer_does_shares_a_few_buffers(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, bytearray] = {}
    real = Buffers.take

    def take(self: Buffers, size: int) -> bytearray:
        buffer = real(self, size)
        seen[id(buffer)] = buffer  # kept, so that no other gets its id
        return buffer

    monkeypatch.setattr(Buffers, "take", take)
    data = contents(1, 40 * CHUNK)
    with Store.open(root / "s", chunk_size=CHUNK, workers=2) as store, store.writer() as writer:
        recipe = writer.put(data)
        assert writer.put_stream(io.BytesIO(data)) == recipe
        assert writer.read(recipe) == data
        writer.commit("a", {"f": recipe}, directory=root / "out")
    assert (root / "out/f").read_bytes() == data
    # The stream's ring is the longest: twice the workers.
    assert len(seen) <= 5, len(seen)
