"""A tensor's bytes reach the store as they are, without a second copy."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cas
from cas.errors import UsageError
from cas.writer import Writer

torch = pytest.importorskip("torch")
from cas.torch import (  # noqa: E402
    UnsupportedTensor,
    memory_view,
    put_storage,
    put_tensor,
    storage_view,
    streaming,
)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    with (
        cas.Store.open(tmp_path / "store", chunk_size=64 << 10) as store,
        store.writer() as opened,
    ):
        yield opened


def sample(*shape: int) -> Any:
    torch.manual_seed(0)
    return torch.randn(*shape)


def test_a_storage_is_stored_whole(writer: Writer) -> None:
    tensor = sample(300, 100)[10:20]
    recipe = put_storage(writer, tensor.untyped_storage())
    assert recipe.size == 300 * 100 * 4
    assert writer.read(recipe) == sample(300, 100).numpy().tobytes()


def test_a_tensor_is_stored_in_row_major_order(writer: Writer) -> None:
    for tensor in (sample(100, 300), sample(300, 100).t(), sample(8, 64)[:, ::2], sample(3, 1)):
        recipe = put_tensor(writer, tensor)
        assert writer.read(recipe) == tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]
)
def test_every_dtype_is_bytes(dtype: Any, writer: Writer) -> None:
    tensor = sample(7, 9).to(dtype)
    data = writer.read(put_tensor(writer, tensor))
    assert torch.equal(
        torch.frombuffer(bytearray(data), dtype=torch.uint8),
        tensor.reshape(-1).view(torch.uint8),
    )


def test_parameters_views_and_empty_tensors(writer: Writer) -> None:
    parameter = torch.nn.Parameter(sample(5, 5))
    assert writer.read(put_tensor(writer, parameter)) == sample(5, 5).numpy().tobytes()
    assert put_tensor(writer, torch.empty(0, 4)).size == 0
    assert put_storage(writer, torch.empty(0).untyped_storage()).size == 0
    conjugate = torch.tensor([1 + 2j]).conj()
    assert writer.read(put_tensor(writer, conjugate)) == conjugate.resolve_conj().numpy().tobytes()


def test_a_tensor_and_its_storage_give_the_same_chunks(writer: Writer) -> None:
    tensor = sample(512, 512)
    assert put_tensor(writer, tensor) == put_storage(writer, tensor.untyped_storage())
    assert writer.counters.new_bytes == 512 * 512 * 4


def test_no_copy_is_made(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = sample(512, 512)
    seen: list[int] = []

    class Sink:
        def put(self, data: Any, /) -> Any:
            seen.append(torch.frombuffer(data, dtype=torch.uint8).data_ptr())

        put_stream = put

    put_tensor(Sink(), tensor)
    put_storage(Sink(), tensor.untyped_storage())
    assert seen == [tensor.data_ptr()] * 2


def test_device_memory_comes_over_piece_by_piece(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "DEVICE_PIECE", 1000)
    tensor = sample(64, 32)
    part = tensor[3:50]
    whole = writer.put_stream(streaming._DeviceReader(tensor.untyped_storage()))
    some = writer.put_stream(streaming._DeviceReader.of_tensor(part))
    assert writer.read(whole) == tensor.numpy().tobytes()
    assert writer.read(some) == part.numpy().tobytes()
    assert whole == put_storage(writer, tensor.untyped_storage())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_tensor_gives_the_bytes_of_the_host_tensor(writer: Writer) -> None:
    tensor = sample(1000, 300)
    assert put_tensor(writer, tensor.cuda()) == put_tensor(writer, tensor)
    assert put_tensor(writer, tensor.cuda().t()) == put_tensor(writer, tensor.t())
    assert put_storage(writer, tensor.cuda().untyped_storage()) == put_tensor(writer, tensor)


def test_views_keep_their_memory_alive() -> None:
    tensor = sample(64, 64)
    expected = tensor.numpy().tobytes()
    alive = weakref.ref(tensor)
    view = memory_view(tensor)
    assert view is not None
    del tensor
    gc.collect()
    assert alive() is not None
    assert bytes(view) == expected
    del view
    gc.collect()
    assert alive() is None


def test_memory_view_is_only_for_one_plain_range() -> None:
    dense = sample(4, 6, 8)
    for tensor in (dense, dense.permute(2, 0, 1), dense[1], torch.empty(0, 3)):
        view = memory_view(tensor)
        assert view is not None
        assert len(view) == tensor.numel() * 4
    for tensor in (dense[:, ::2], dense[:, :3], torch.ones(3, 1).expand(3, 4)):
        assert memory_view(tensor) is None
    assert memory_view(torch.empty(4, device="meta")) is None


def unsupported() -> list[Any]:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(4)
    return [
        torch.empty(4, device="meta"),
        fake,
        torch.eye(4).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_mkldnn(),
        torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ]


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_plain_bytes_is_refused(writer: Writer) -> None:
    for tensor in unsupported():
        assert memory_view(tensor) is None
        with pytest.raises(UnsupportedTensor) as caught:
            put_tensor(writer, tensor)
        assert isinstance(caught.value, UsageError)
    with pytest.raises(UnsupportedTensor, match="load the real weights"):
        storage_view(torch.empty(4, device="meta").untyped_storage())
    assert writer.counters.logical_bytes == 0
