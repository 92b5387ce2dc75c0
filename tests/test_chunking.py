"""Cuts: they cover all, overlap nowhere, and depend on nothing but the length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas.chunking import MAX_CHUNK_SIZE, MIN_CHUNK_SIZE, check_chunk_size, cut
from cas.errors import UsageError
from cas.testing.strategies import no_deadlines

no_deadlines()


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 64, 4096]))
def test_cuts_cover_everything_once_and_in_order(length: int, size: int) -> None:
    position = 0
    for offset, count in cut(length, size):
        assert offset == position
        assert 1 <= count <= size
        position += count
    assert position == length


@given(st.integers(1, 10_000))
def test_only_the_last_cut_is_short(length: int) -> None:
    lengths = [count for _, count in cut(length, 64)]
    assert all(count == 64 for count in lengths[:-1])


@pytest.mark.parametrize("size", [0, -1, 1, 65535, 65537, 3 << 16, MAX_CHUNK_SIZE * 2, 2**62])
def test_an_unsuitable_chunk_size_is_refused(size: int) -> None:
    with pytest.raises(UsageError, match="power of two"):
        check_chunk_size(size)


@pytest.mark.parametrize("size", [MIN_CHUNK_SIZE, 4 << 20, MAX_CHUNK_SIZE])
def test_the_documented_chunk_sizes_are_allowed(size: int) -> None:
    assert check_chunk_size(size) == size
    assert size % 4096 == 0  # so that a chunk can be mapped anywhere in a tensor
