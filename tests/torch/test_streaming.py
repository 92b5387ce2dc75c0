"""A tensor's bytes reach the store as they are, without a second copy."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from cas.errors import UsageError
from cas.writer import Writer

torch = pytest.importorskip("torch")
from cas.torch import (  # noqa: E402
    UnsupportedTensor,
    inner_tensors,
    memory_view,
    put_storage,
    put_tensor,
    storage_view,
)


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


def on_every_gpu() -> list[Any]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_tensor_gives_the_bytes_of_the_host_tensor(writer: Writer) -> None:
    tensor = sample(1000, 300)
    for device in on_every_gpu():
        there = tensor.to(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        assert put_tensor(writer, there) == put_tensor(writer, tensor)
        assert put_storage(writer, there.untyped_storage()) == put_tensor(writer, tensor)
        assert torch.cuda.max_memory_allocated(device) == before
        assert put_tensor(writer, there.t()) == put_tensor(writer, tensor.t())
        assert put_tensor(writer, there[3:, ::7]) == put_tensor(writer, tensor[3:, ::7])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_queued_on_the_callers_stream_is_waited_for(writer: Writer) -> None:
    for device in on_every_gpu():
        side = torch.cuda.Stream(device)
        tensor = torch.zeros(4 << 20, device=device)
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            tensor.fill_(1)
            recipe = put_storage(writer, tensor.untyped_storage())
            assert torch.cuda.current_stream(device) == side
        assert writer.read(recipe) == torch.ones(4 << 20).numpy().tobytes()


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


def test_a_tensor_in_a_transformation_is_refused(writer: Writer) -> None:
    def refused(tensor: Any) -> Any:
        assert memory_view(tensor) is None
        with pytest.raises(UnsupportedTensor, match="transformation"):
            put_tensor(writer, tensor)
        return tensor

    torch.vmap(refused)(torch.ones(3, 4))
    torch.func.functionalize(refused)(torch.ones(3))


class Scaled(torch.Tensor):
    """A wrapper like those of torchao, with one inner wrapper more than they have."""

    @staticmethod
    def __new__(cls, data: Any, scale: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: Any, scale: Any) -> None:
        self.data_part, self.scale = data, scale

    def __tensor_flatten__(self) -> Any:
        return ["data_part", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Scaled(inner["data_part"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_a_subclass_is_stored_by_its_inner_tensors(writer: Writer) -> None:
    data, scale, offset = torch.ones(2, 3, dtype=torch.int8), torch.ones(3), torch.zeros(3)
    weight = Scaled(data, Scaled(scale, offset))
    with pytest.raises(UnsupportedTensor, match="inner tensors"):
        put_tensor(writer, weight)
    found = dict(inner_tensors(weight, "layer.weight"))
    assert list(found) == [
        "layer.weight.data_part",
        "layer.weight.scale.data_part",
        "layer.weight.scale.scale",
    ]
    assert found["layer.weight.data_part"] is data
    assert writer.read(put_tensor(writer, found["layer.weight.data_part"])) == b"\1" * 6
    assert list(inner_tensors(scale)) == [("", scale)]
    assert next(name for name, _ in inner_tensors(weight)) == "data_part"


def test_int4_weights_of_torchao_are_their_packed_bytes(writer: Writer) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    linear = torch.nn.Sequential(torch.nn.Linear(128, 64, bias=False)).to(torch.bfloat16)
    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4)
    quantization.quantize_(linear, config)
    parts = dict(inner_tensors(linear[0].weight, "weight"))
    assert len(parts) >= 2
    for name, part in parts.items():
        assert type(part) is torch.Tensor, name
        expected = part.contiguous().view(torch.uint8).numpy().tobytes()
        assert writer.read(put_tensor(writer, part)) == expected


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
