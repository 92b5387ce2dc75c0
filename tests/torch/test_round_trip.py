"""Any strided tensor comes out of the store, through a mapping, with the bytes that it had."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas.testing.stores import CHUNK, open_store, scratch
from cas.testing.strategies import no_deadlines
from cas.writer import Writer

torch = pytest.importorskip("torch")
from cas.torch import (  # noqa: E402
    Mapper,
    memory_view,
    put_storage,
    put_tensor,
    storage_view,
)
from cas.torch.devices import CudaCopier, PageableCopier  # noqa: E402
from cas.torch.ring import put_through_ring  # noqa: E402
from cas.torch.testing import FakeCuda, SlowDevice  # noqa: E402

no_deadlines()

DTYPES = [
    torch.uint8,
    torch.bool,
    torch.int4,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]
CPU = torch.device("cpu")
#: Three chunks and a bit, mostly zeros after the first, so that zero runs occur as well.
MEMORY = bytearray(random.Random(0).randbytes(CHUNK + 1000)) + bytearray(2 * CHUNK)


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    with scratch() as path, open_store(path / "store") as store, store.writer() as opened:
        yield opened


@dataclass(frozen=True)
class View:
    """A tensor over `MEMORY`. Torch cannot show some of them, so they are described."""

    dtype: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def make(self) -> Any:
        storage = torch.frombuffer(MEMORY, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.strides)


@st.composite
def views(draw: Any) -> View:
    """Any sizes, strides (zero and overlapping ones too) and offset within `MEMORY`."""
    dtype = draw(st.sampled_from(DTYPES))
    elements = len(MEMORY) // dtype.itemsize
    shape = draw(st.lists(st.integers(0, 20), max_size=4))
    longest = draw(st.integers(0, 3))
    if longest < len(shape):
        rest = math.prod(size for size in shape if size) * dtype.itemsize
        shape[longest] = draw(st.integers(0, min(3000, 8 * CHUNK // rest)))
    strides: list[int] = []
    room = elements - 1
    for size in shape:
        most = room // (size - 1) if size > 1 else elements
        stride = draw(st.one_of(st.integers(0, min(most, 50)), st.integers(0, most)))
        strides.append(stride)
        room -= max(0, size - 1) * stride
    offset = draw(st.integers(0, room))
    return View(dtype, offset, tuple(shape), tuple(strides))


def row_major(tensor: Any) -> bytes:
    """By torch's own means. Integers of the same size stand in for types it cannot copy."""
    if not tensor.numel():
        return b""
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = tensor.view(carriers.get(tensor.element_size(), tensor.dtype))
    return plain.contiguous().numpy().tobytes()


@given(view=views(), copier=st.sampled_from([None, "slow", "cuda", "pageable"]))
def test_put_then_mapped_is_the_same(view: View, copier: str | None, writer: Writer) -> None:
    tensor = view.make()
    expected = row_major(tensor)
    copiers = {
        "slow": SlowDevice,
        "cuda": lambda: CudaCopier(CPU, FakeCuda()),
        "pageable": PageableCopier,
    }
    if copier is None:
        recipe = put_tensor(writer, tensor)
    else:
        recipe = put_through_ring(writer, tensor, copier=copiers[copier]())
    assert recipe.size == len(expected)
    assert recipe == writer.put(expected)
    storage = Mapper(writer, min_size=1).storage(recipe)
    assert bytes(storage_view(storage)) == expected
    again = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)
    assert row_major(again) == expected


@given(view=views())
def test_memory_that_is_one_range_is_shown_as_it_lies(view: View) -> None:
    tensor = view.make()
    shown = memory_view(tensor)
    if shown is None:
        assert tensor.numel() > 1
        assert not tensor.is_contiguous()
        return
    assert len(shown) == tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    assert shown == MEMORY[start : start + len(shown)]


def test_the_whole_storage_is_what_lies_in_memory(writer: Writer) -> None:
    flat = torch.frombuffer(MEMORY, dtype=torch.uint8)
    recipe = put_storage(writer, flat[5:7].untyped_storage())
    assert bytes(storage_view(Mapper(writer).storage(recipe))) == MEMORY
