"""What AOTInductor copies comes from the store, with the same values and the same isolation."""

from __future__ import annotations

import copy
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.aoti.aoti_backend import AotiBackend
from torch._inductor import codecache, compile_fx

import cas
from cas import fsio
from cas.executorch import StoredBytes, capture, hooks_aoti
from cas.executorch.errors import PackageIncomplete
from cas.torch.mapping import Mapper

BACKEND = "executorch.backends.cuda.cuda_backend"


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each storage that was mapped from the store."""
    sizes: list[int] = []
    original = Mapper.storage

    def storage(self: Mapper, recipe: cas.Recipe) -> torch.UntypedStorage:
        sizes.append(recipe.size)
        return original(self, recipe)

    monkeypatch.setattr(Mapper, "storage", storage)
    return sizes


@pytest.fixture
def unlift(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], torch.Tensor]:
    """Clones a tensor in the place where Inductor clones a lifted buffer."""

    def _unlift_graph(mod: Any, gm: Any, graph_signature: Any) -> torch.Tensor:
        return compile_fx.clone_preserve_strides(mod)  # type: ignore[no-any-return]

    monkeypatch.setattr(compile_fx, "_unlift_graph", _unlift_graph)
    return lambda tensor: compile_fx._unlift_graph(tensor, None, None)


BASE = torch.arange(30_000, dtype=torch.float32)

TENSORS = {
    "plain": BASE.reshape(100, 300),
    "view": BASE[1000:29_000],
    "transposed": BASE.reshape(100, 300).t(),
    "gaps": BASE.reshape(100, 300)[:, 50:250],
    "expanded": BASE.reshape(1, 30_000).expand(5, 30_000),
    "bfloat16": BASE.to(torch.bfloat16),
    "scalar": torch.tensor(3.0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_clone_of_a_buffer_is_what_stock_gives(
    name: str, unlift: Callable[[torch.Tensor], torch.Tensor], mapped: list[int], store: cas.Store
) -> None:
    tensor = TENSORS[name]
    expected = unlift(tensor)
    with capture(store, map_threshold=1):
        clone = unlift(tensor)
        assert mapped == [expected.untyped_storage().nbytes()]
        assert (clone.size(), clone.stride(), clone.storage_offset()) == (
            expected.size(),
            expected.stride(),
            expected.storage_offset(),
        )
        assert bytes(clone.untyped_storage()) == bytes(expected.untyped_storage())
        before = tensor.clone()
        clone.zero_()
        assert torch.equal(tensor, before)
        assert torch.equal(unlift(tensor), before)


@pytest.mark.parametrize("tensor", [torch.zeros(0, 3), BASE.clone().requires_grad_()], ids=str)
def test_what_stock_clones_better_is_left_to_it(
    tensor: torch.Tensor,
    unlift: Callable[[torch.Tensor], torch.Tensor],
    mapped: list[int],
    store: cas.Store,
) -> None:
    with capture(store, map_threshold=1):
        clone = unlift(tensor)
    assert mapped == []
    assert clone.shape == tensor.shape
    assert clone.requires_grad == tensor.requires_grad


def test_other_clones_of_inductor_are_left_alone(mapped: list[int], store: cas.Store) -> None:
    """Its autotuner clones inputs with the same function, and they may be anything."""
    with capture(store, map_threshold=1):
        assert torch.equal(compile_fx.clone_preserve_strides(BASE), BASE)
    assert mapped == []


def test_composes_with_the_low_memory_mode(
    unlift: Callable[[torch.Tensor], torch.Tensor], mapped: list[int], store: cas.Store
) -> None:
    backend = pytest.importorskip(BACKEND, exc_type=ImportError)
    emptied = torch.zeros(300, 100).t()
    emptied.untyped_storage().resize_(0)
    with capture(store, map_threshold=1):
        assert not hooks_aoti._clones_go_to_the_host()
        before = compile_fx.clone_preserve_strides
        with backend._compile_time_cpu_clones(torch.device("cpu")):
            assert hooks_aoti._clones_go_to_the_host()
            assert torch.equal(unlift(BASE), BASE)
            assert mapped == [BASE.nbytes]
            # A key-value cache without storage becomes zeros, which is CudaBackend's own doing.
            zeros = unlift(emptied)
            assert (zeros.shape, zeros.stride()) == (emptied.shape, emptied.stride())
            assert not zeros.any()
        assert compile_fx.clone_preserve_strides is before
    assert not hooks_aoti._clones_go_to_the_host()


class Buffered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", BASE.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def test_a_copy_that_shares_its_tensors_stores_nothing(mapped: list[int], store: cas.Store) -> None:
    """CudaBackend's low-memory copy enters the tensors into the memo; its other one does not."""
    program = torch.export.export(Buffered(), (torch.ones(1),), strict=False)
    weight = program.state_dict["weight"]
    with capture(store, map_threshold=1) as cap:
        shared = copy.deepcopy(program, {id(weight): weight})
        assert shared.state_dict["weight"] is weight
        assert (mapped, cap.counters.logical_bytes) == ([], 0)
        private = copy.deepcopy(program).state_dict["weight"]
        assert torch.equal(private, weight)
        assert private.data_ptr() != weight.data_ptr()
        assert mapped == [BASE.nbytes]


def test_a_device_tensor_comes_to_the_host_as_a_mapping(
    mapped: list[int], store: cas.Store
) -> None:
    """With a tensor in host memory in its place: the way of the bytes is the same."""
    from cas.executorch.copies import PrivateCopies

    with store.writer() as writer:
        copies = PrivateCopies(writer, Mapper(writer, min_size=70_000))
        private = copies.on_host(BASE)
        assert private is not None
        assert torch.equal(private, BASE)
        assert private.data_ptr() != BASE.data_ptr()
        assert copies.on_host(BASE[:100]) is None
    assert mapped == [BASE.nbytes]


# --- the dense weights file ---------------------------------------------------------------------


@pytest.fixture
def build(store: cas.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``bytearray`` as the functions of Inductor's module see it under capture."""
    monkeypatch.setattr(hooks_aoti, "MIN_SCRATCH", 100_000)
    with capture(store):
        yield lambda *args: eval("bytearray(*args)", vars(codecache), {"args": args})


def test_a_large_file_is_built_outside_the_heap(build: Callable[..., Any]) -> None:
    large = build(300_001)
    assert type(large) is memoryview
    assert (len(large), bytes(large)) == (300_001, bytes(300_001))
    large[7] = 9
    assert type(large[5:]) is memoryview
    assert bytes(large[5:9]) == b"\0\0\x09\0"


def test_anything_else_is_a_bytearray(build: Callable[..., Any]) -> None:
    for arguments in [(), (99_999,), (b"abc",), ("abc", "ascii"), ([1, 2],), (True,)]:
        assert build(*arguments) == bytearray(*arguments)
        assert type(build(*arguments)) is bytearray
    with pytest.raises(ValueError, match="negative"):
        build(-1)


def test_after_the_capture_the_builtin_is_back(store: cas.Store) -> None:
    with capture(store):
        assert "bytearray" in vars(codecache)
    assert "bytearray" not in vars(codecache)


def test_the_file_leaves_nothing_behind(build: Callable[..., Any], store: cas.Store) -> None:
    large = build(300_000)
    directory = str(store.context.layout.tmp)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert [line.endswith("(deleted)") for line in maps if directory in line] == [True]
    assert not any(path.is_file() for path in store.context.layout.tmp.rglob("*"))
    del large
    assert directory not in Path("/proc/self/maps").read_text()


def test_a_full_disk_leaves_it_in_memory(
    build: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(directory: Path, size: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fsio, "map_scratch", full)
    assert type(build(300_000)) is bytearray
    assert "300000 bytes is built in memory: [Errno 28] No space left" in caplog.text


@pytest.mark.parametrize("size", [100, 300_001])
def test_the_file_is_not_read_back_into_memory(size: int, store: cas.Store, tmp_path: Path) -> None:
    data = os.urandom(size)
    for captured in (False, True):
        path = tmp_path / "x.wrapper_weights.blob"
        path.write_bytes(data)
        if not captured:
            found, digest = AotiBackend.load_weights_blob(str(path), [])
            assert found == data
        else:
            with capture(store):
                found, digest = AotiBackend.load_weights_blob(str(path), [])
                assert isinstance(found, StoredBytes) == (size > 4096)
                assert bytes(found) == data
        assert digest == hashlib.sha256(data).hexdigest()
        assert not path.exists()


# --- outputs ------------------------------------------------------------------------------------

OUTPUTS = ["/d/c.wrapper.cpp", "/d/c.wrapper.so", "/d/c.wrapper_weights.blob"]


@pytest.mark.parametrize("ending", [".wrapper.so", ".wrapper_weights.blob"])
def test_a_missing_output_is_reported_with_what_there_was(ending: str) -> None:
    left = [path for path in OUTPUTS if not path.endswith(ending)]
    with pytest.raises(PackageIncomplete) as caught:
        hooks_aoti.require_outputs(left)
    assert caught.value.missing == ending
    assert caught.value.found == tuple(Path(path).name for path in left)


def test_weights_as_tensors_stand_for_the_file() -> None:
    hooks_aoti.require_outputs(OUTPUTS)
    hooks_aoti.require_outputs([*OUTPUTS[:2], {"weight": torch.ones(3)}])
    with pytest.raises(PackageIncomplete, match=r"c\.wrapper\.cpp, dict$"):
        hooks_aoti.require_outputs([OUTPUTS[0], {"weight": torch.ones(3)}])


def test_only_exports_for_a_backend_are_checked(
    store: cas.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor, "aot_compile", lambda gm, args: "somewhere/x.so")
    with capture(store):
        assert torch._inductor.aot_compile(None, ()) == "somewhere/x.so"
