"""A mapped storage has the recipe's bytes, is private, and goes away with its last user."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import random
from pathlib import Path
from typing import Any

import pytest

import cas
from cas.errors import ChunkDamaged
from cas.manifest import ChunkPart, DataPart, Recipe, ZeroPart
from cas.writer import Writer

torch = pytest.importorskip("torch")
from cas.torch import MapBudget, Mapper, map_recipe, mapping, storage_view  # noqa: E402

CHUNK = 64 << 10


def data(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def content(storage: Any) -> bytes:
    return bytes(storage_view(storage))


def mappings_of(store: cas.Store) -> int:
    return Path("/proc/self/maps").read_text().count(str(store.path / "chunks")) + Path(
        "/proc/self/maps"
    ).read_text().count(str(store.path / "tmp"))


@pytest.mark.parametrize("size", [1, 4095, 4096, CHUNK, CHUNK + 1, 3 * CHUNK + 5000])
def test_has_the_bytes(size: int, writer: Writer) -> None:
    recipe = writer.put(data(size))
    storage = map_recipe(writer, recipe, min_size=1)
    assert storage.nbytes() == size
    assert content(storage) == data(size)


def test_staged_and_published_chunks_are_mapped(store: cas.Store, writer: Writer) -> None:
    first = writer.put(data(3 * CHUNK))
    staged = map_recipe(writer, first, min_size=1)
    assert mappings_of(store) == 3
    writer.barrier()
    published = map_recipe(writer, first, min_size=1)
    assert mappings_of(store) == 6
    assert content(staged) == content(published) == data(3 * CHUNK)


def test_writes_stay_private(store: cas.Store, writer: Writer) -> None:
    recipe = writer.put(data(2 * CHUNK))
    one, two = (map_recipe(writer, recipe, min_size=1) for _ in range(2))
    one.fill_(0)
    assert content(one) == bytes(2 * CHUNK)
    assert content(two) == writer.read(recipe) == data(2 * CHUNK)


def test_is_unmapped_with_its_last_tensor(store: cas.Store, writer: Writer) -> None:
    budget = MapBudget(100)
    storage = map_recipe(writer, writer.put(data(2 * CHUNK)), min_size=1, budget=budget)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (2 * CHUNK,), (1,))
    part = tensor[5:9]
    del storage, tensor
    gc.collect()
    assert mappings_of(store) == 2
    assert budget.used == 3
    assert bytes(part.tolist()) == data(2 * CHUNK)[5:9]
    del part
    gc.collect()
    assert mappings_of(store) == 0
    assert budget.used == 0


def test_zeros_stay_anonymous_and_literals_are_copied(store: cas.Store, writer: Writer) -> None:
    chunk = writer.put(data(CHUNK)).parts[0]
    parts = (ZeroPart(2 * CHUNK), chunk, ZeroPart(100), DataPart(b"abc"))
    storage = map_recipe(writer, Recipe(parts), min_size=1)
    assert content(storage) == bytes(2 * CHUNK) + data(CHUNK) + bytes(100) + b"abc"
    assert mappings_of(store) == 1


def test_parts_off_the_page_grid_are_copied(store: cas.Store, writer: Writer) -> None:
    chunk = writer.put(data(CHUNK)).parts[0]
    assert isinstance(chunk, ChunkPart)
    odd = ChunkPart(chunk.digest, chunk.size, 100, 5000)
    aligned = ChunkPart(chunk.digest, chunk.size, mmap.PAGESIZE, 3 * mmap.PAGESIZE)
    expected = data(CHUNK)
    storage = map_recipe(writer, Recipe((aligned, odd, chunk)), min_size=1)
    page = mmap.PAGESIZE
    assert content(storage) == expected[page : 4 * page] + expected[100:5100] + expected
    assert mappings_of(store) == 1
    end = ChunkPart(chunk.digest, chunk.size, page, 777)
    assert content(map_recipe(writer, Recipe((end,)), min_size=1)) == expected[page : page + 777]


def test_small_recipes_are_copied(store: cas.Store, writer: Writer) -> None:
    recipe = writer.put(data(CHUNK))
    mapper = Mapper(writer, min_size=CHUNK + 1)
    assert content(mapper.storage(recipe)) == data(CHUNK)
    zeros = Recipe((ZeroPart(10), DataPart(b"x"), ZeroPart(3)))
    assert content(mapper.storage(zeros)) == bytes(10) + b"x" + bytes(3)
    assert mapper.storage(Recipe()).nbytes() == 0
    assert mappings_of(store) == 0
    assert mapper.copied_bytes == CHUNK + 14


def test_falls_back_to_copies_when_the_budget_is_used_up(
    store: cas.Store, writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = writer.put(data(2 * CHUNK))
    budget = MapBudget(4)
    mapper = Mapper(writer, min_size=1, budget=budget)
    with caplog.at_level(logging.WARNING, "cas.torch"):
        kept = [mapper.storage(recipe) for _ in range(3)]
    assert [content(storage) for storage in kept] == [data(2 * CHUNK)] * 3
    assert mappings_of(store) == 2
    assert len(caplog.records) == 1
    assert "vm.max_map_count" in caplog.text
    kept.clear()
    gc.collect()
    assert budget.used == 0


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_falls_back_to_copies_when_the_kernel_refuses(
    failing: int,
    store: cas.Store,
    writer: Writer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0
    real = mapping._libc_mmap

    def refuse(*args: int) -> int:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(*args)

    recipe = writer.put(data(2 * CHUNK))
    monkeypatch.setattr(mapping, "_libc_mmap", refuse)
    budget = MapBudget(100)
    storage = map_recipe(writer, recipe, min_size=1, budget=budget)
    assert content(storage) == data(2 * CHUNK)
    assert mappings_of(store) == 0
    assert budget.used == 0
    assert "kernel refused" in caplog.text


def test_another_failure_is_not_hidden(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = writer.put(data(2 * CHUNK))

    def fail(*args: int) -> int:
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(mapping, "_libc_mmap", fail)
    budget = MapBudget(100)
    with pytest.raises(PermissionError):
        map_recipe(writer, recipe, min_size=1, budget=budget)
    assert budget.used == 0


@pytest.mark.parametrize("damage", [b"short", data(CHUNK, seed=9)], ids=["short", "altered"])
@pytest.mark.parametrize("min_size", [1, 1 << 30], ids=["mapped", "copied"])
def test_a_damaged_chunk_is_not_used(
    damage: bytes, min_size: int, store: cas.Store, writer: Writer
) -> None:
    recipe = writer.put(data(2 * CHUNK))
    writer.barrier()
    (part, _) = recipe.chunks()
    (path,) = (store.path / "chunks").rglob(part.digest.hex() + "*")
    path.chmod(0o644)
    path.write_bytes(damage)
    budget = MapBudget(100)
    with pytest.raises(ChunkDamaged) as caught:
        map_recipe(writer, recipe, min_size=min_size, budget=budget)
    assert caught.value.digest == str(part.digest)
    assert caught.value.path == path
    assert budget.used == 0


def test_the_budget_leaves_room_below_the_kernels_limit() -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert 0 < MapBudget.of_kernel().limit < limit


def test_many_mappings_and_releases(store: cas.Store, writer: Writer) -> None:
    recipe = writer.put(data(CHUNK))
    mapper = Mapper(writer, min_size=1)
    for _ in range(20):
        batch = [mapper.storage(recipe) for _ in range(50)]
        assert mappings_of(store) == 50
        del batch
    gc.collect()
    assert mappings_of(store) == 0
