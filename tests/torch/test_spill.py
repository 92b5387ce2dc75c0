"""A model moved into the store is the same model, and takes no memory of its own."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest

import cas
from cas import gc as collect
from cas.errors import ChunkDamaged, NoSpace
from cas.manifest import ZeroPart
from cas.writer import Writer

torch = pytest.importorskip("torch")
from cas.torch import Mapper, Spilled, SpillUnsupported, put_tensor, spill  # noqa: E402
from cas.torch import spill as spill_function  # noqa: E402
from cas.torch.mapping import MapBudget  # noqa: E402
from cas.torch.memory import anonymous_bytes  # noqa: E402

CHUNK = 256 << 10
#: 1 MiB of float32: several chunks, in pages of its own.
SIDE = 512


@pytest.fixture
def chunk_size() -> int:
    return CHUNK


def sample(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*(shape or (SIDE, SIDE)), generator=torch.Generator().manual_seed(seed))


def anonymous(tensor: Any) -> int:
    storage = tensor.untyped_storage()
    return anonymous_bytes(storage.data_ptr(), storage.nbytes())


def is_spilled(tensor: Any) -> bool:
    """Whether nothing but file pages, or pages never touched, is under the tensor."""
    return anonymous(tensor) <= 8 << 10


class Model(torch.nn.Module):
    """Tied and shared weights, views, odd strides and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(SIDE, SIDE)
        self.head = torch.nn.Linear(SIDE, SIDE, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = torch.nn.Parameter(sample(seed=1), requires_grad=False)
        self.columns = torch.nn.Parameter(sample(seed=2).t())
        whole = sample(4 * SIDE, SIDE, seed=3)
        self.register_buffer("whole", whole)
        self.register_buffer("tail", whole[SIDE:])
        self.register_buffer("strided", sample(seed=4)[:, ::2])
        self.register_buffer("flags", sample(2 * SIDE, 2 * SIDE, seed=5) > 0, persistent=False)
        self.constant = sample(seed=6)
        self.small = torch.nn.Parameter(torch.ones(4))


def snapshot(model: Any) -> dict[str, Any]:
    values = {**model.state_dict(keep_vars=True), "flags": model.flags, "constant": model.constant}
    return {
        name: (value.detach().clone(), value.shape, value.stride(), value.storage_offset())
        for name, value in values.items()
    }


def assert_unchanged(model: Any, before: dict[str, Any]) -> None:
    for name, (value, *geometry) in snapshot(model).items():
        assert torch.equal(value, before[name][0]), name
        assert geometry == list(before[name][1:]), name


def test_a_model_keeps_its_values_objects_and_geometry(writer: Writer) -> None:
    model = Model()
    before, identities = snapshot(model), {n: id(p) for n, p in model.named_parameters()}
    wanted = [tensor.requires_grad for tensor in model.parameters()]
    versions = [tensor._version for tensor in model.parameters()]
    report = spill(model, writer)
    assert_unchanged(model, before)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
    assert [tensor.requires_grad for tensor in model.parameters()] == wanted
    assert [tensor._version for tensor in model.parameters()] == versions
    assert model.head.weight is model.embedding.weight
    assert report.moved_storages == 7
    assert report.moved_bytes == (5 * 1 + 4 + 1) << 20
    assert report.held_bytes == 0
    large = (model.embedding.weight, model.frozen, model.columns, model.whole, model.tail)
    for tensor in (*large, model.strided, model.flags, model.constant):
        assert is_spilled(tensor)


def test_a_second_spill_finds_nothing_to_do(writer: Writer) -> None:
    model = Model()
    spill(model, writer)
    logical = writer.counters.logical_bytes
    assert spill(model, writer).moved_storages == 0
    assert writer.counters.logical_bytes == logical


def test_aliases_follow_wherever_they_are(writer: Writer) -> None:
    model = Model()
    copies = model.state_dict()
    aside = [model.frozen.detach()[3], model.whole.view(-1)]
    spill(model, writer)
    assert {name: value.data_ptr() for name, value in copies.items()} == {
        name: value.data_ptr() for name, value in model.state_dict().items()
    }
    with torch.no_grad():
        model.frozen[3] = 7.0
        model.tail.fill_(9.0)
        model.embedding.weight[0, 0] = 5.0
    assert torch.equal(aside[0], torch.full((SIDE,), 7.0))
    assert torch.equal(aside[1][SIDE * SIDE :], torch.full((3 * SIDE * SIDE,), 9.0))
    assert torch.equal(copies["whole"], model.whole)
    assert float(model.head.weight.detach()[0, 0]) == float(copies["head.weight"][0, 0]) == 5.0


def test_a_view_keeps_a_base_alive_that_nobody_else_holds(writer: Writer) -> None:
    views = [sample(2 * SIDE, SIDE)[:SIDE], sample(2 * SIDE, SIDE, seed=1)[SIDE:][5:]]
    before = [view.clone() for view in views]
    assert spill(views, writer).moved_storages == 2
    assert all(map(torch.equal, views, before))
    assert all(map(is_spilled, views))


def test_writes_stay_private(writer: Writer) -> None:
    first, second = sample(), sample()
    spill([first, second], writer)
    first.mul_(2)
    assert torch.equal(first, sample() * 2)
    assert torch.equal(second, sample())
    assert writer.read(put_tensor(writer, second)) == sample().numpy().tobytes()
    assert anonymous(first) == first.nbytes
    assert spill([first], writer) == Spilled()
    assert torch.equal(first, sample() * 2)


def test_gradients_and_training_go_on(writer: Writer) -> None:
    layer = torch.nn.Linear(SIDE, SIDE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    spill(layer, writer)
    before = layer.weight.detach().clone()
    layer(sample(2, SIDE)).sum().backward()
    gradient = layer.weight.grad.clone()
    optimizer.step()
    assert torch.allclose(layer.weight, before - 0.5 * gradient)


def test_the_tensors_outlive_writer_store_and_chunks(tmp_path: Path) -> None:
    model = Model()
    before = snapshot(model)
    with cas.Store.open(tmp_path / "s", chunk_size=CHUNK) as store:
        with store.writer() as writer:
            spill(model, writer)
            writer.barrier()
        gc.collect()
        freed = collect.execute(store, collect.plan(store)).freed_bytes
        assert freed >= 8 << 20
        assert not any(path.is_file() for path in (store.path / "chunks").rglob("*"))
    assert_unchanged(model, before)
    with torch.no_grad():
        model.frozen.add_(1)
    assert torch.equal(model.frozen, before["frozen"][0] + 1)


def test_chunks_that_were_never_published_stay_mapped(store: cas.Store) -> None:
    tensor = sample()
    with store.writer() as writer:
        spill([tensor], writer)
    assert not any(path.is_file() for path in (store.path / "tmp").rglob("*"))
    assert torch.equal(tensor, sample())


def resident_anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError


def test_zeros_cost_no_disk_and_no_memory(writer: Writer) -> None:
    cache = torch.nn.Module()
    cache.register_buffer("kv", torch.zeros(32, 1, SIDE, SIDE))
    assert anonymous(cache.kv) == cache.kv.nbytes
    held = resident_anonymous()
    assert spill(cache, writer).moved_bytes == cache.kv.nbytes
    assert anonymous(cache.kv) == 0
    assert resident_anonymous() < held - cache.kv.nbytes // 2
    # Reading pages that were never written maps the kernel's one page of zeros.
    before = resident_anonymous()
    recipe = put_tensor(writer, cache.kv)
    assert not cache.kv.any()
    # `any` takes a byte for each element, which the heap may keep.
    assert resident_anonymous() < before + cache.kv.nbytes // 2
    assert recipe.parts == (ZeroPart(cache.kv.nbytes),)
    assert writer.counters.new_chunks == 0
    assert spill(cache, writer) == Spilled()
    cache.kv[1] = 3.0
    assert cache.kv.sum() == 3.0 * SIDE * SIDE


def test_memory_that_was_never_touched_is_left_alone(writer: Writer) -> None:
    tensor = torch.empty(48 << 20, dtype=torch.uint8)  # too large for the heap's used pages
    assert anonymous(tensor) < 64 << 10
    assert spill([tensor], writer).moved_storages == 0
    assert writer.counters.logical_bytes == 0


def test_mapped_checkpoints_are_left_alone_until_written(tmp_path: Path, writer: Writer) -> None:
    torch.save({"a": sample()}, tmp_path / "weights.pt")
    tensor = torch.load(tmp_path / "weights.pt", mmap=True)["a"]
    address = tensor.data_ptr()
    assert float(tensor.sum()) == float(sample().sum())
    assert spill([tensor], writer).moved_storages == 0
    assert tensor.data_ptr() == address
    assert writer.counters.logical_bytes == 0


@pytest.mark.filterwarnings("ignore")
def test_small_device_and_strange_tensors_are_passed_over(writer: Writer) -> None:
    strange = [
        torch.ones(4),
        torch.empty(SIDE, SIDE, device="meta"),
        sample().to_sparse(),
        torch.nn.parameter.UninitializedParameter(),
        torch.quantize_per_tensor(sample(), 0.1, 0, torch.qint8),
        torch.zeros(0),
        "not a tensor",
        None,
    ]
    assert spill(strange, writer) == Spilled()
    assert writer.counters.logical_bytes == 0


def test_memory_that_numpy_or_dlpack_uses_is_left_alone(writer: Writer) -> None:
    numpy = pytest.importorskip("numpy")
    lent, exported, hidden, borrowed, free = (sample(seed=n) for n in range(5))
    arrays = [lent.numpy(), numpy.from_dlpack(exported), numpy.from_dlpack(hidden.detach())]
    source = sample(seed=3).numpy().copy()
    borrowed = torch.from_numpy(source)
    report = spill([lent, exported, hidden, borrowed, free], writer)
    assert report.moved_storages == 1
    assert report.held_bytes == 4 * free.nbytes
    assert is_spilled(free)
    for tensor, array in zip((lent, exported, hidden, borrowed), [*arrays, source], strict=True):
        tensor[0, 0] = 42.0
        assert array[0, 0] == 42.0


def test_a_weight_that_was_used_is_spilled(writer: Writer) -> None:
    weights = [torch.nn.Parameter(sample(seed=n)) for n in range(2)]
    copy, product = weights[0].clone(), weights[1].detach() * 2
    assert copy.requires_grad
    assert spill(weights, writer).moved_storages == 2
    copy.sum().backward()
    assert torch.equal(weights[0].grad, torch.ones(SIDE, SIDE))
    assert torch.equal(product, 2 * weights[1])


class Odd(torch.Tensor):
    """A subclass that is no wrapper, and denies what every tensor has."""

    def untyped_storage(self) -> Any:
        raise TypeError


def test_inference_mode_and_subclasses_on_top_do_no_harm(writer: Writer) -> None:
    with torch.inference_mode():
        layer = torch.nn.Linear(SIDE, SIDE)
        table = sample()
    plain = sample(seed=1)
    odd = plain.as_subclass(Odd)
    before = layer.weight.detach().clone()
    with torch.inference_mode():
        assert spill([layer.weight, torch.nn.Parameter(sample(seed=2))], writer).moved_storages == 2
    assert spill([table, plain, odd], writer).moved_storages == 2
    assert torch.equal(layer.weight, before)
    assert torch.equal(table, sample())
    plain.fill_(3)
    assert bool((odd == 3).all())


def test_a_capsule_of_a_weight_is_noticed(writer: Writer) -> None:
    weight = torch.nn.Parameter(sample())
    capsule = torch.utils.dlpack.to_dlpack(weight)
    assert spill([weight], writer).moved_storages == 0
    copy = weight.clone()
    assert spill([weight], writer).moved_storages == 0
    del capsule, copy


def test_a_saved_graph_keeps_its_weights(writer: Writer) -> None:
    weight = torch.nn.Parameter(sample())
    out = (weight * weight).sum()
    assert spill([weight], writer).held_bytes == weight.nbytes
    out.backward()
    assert torch.equal(weight.grad, 2 * sample())
    cycle = [out]
    cycle.append(cycle)
    del out, cycle
    assert spill([weight], writer).moved_bytes == weight.nbytes


class Wrapped(torch.Tensor):
    """A wrapper around two tensors, as the quantized weights of torchao are."""

    @staticmethod
    def __new__(cls, payload: Any, scale: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=scale.dtype)

    def __init__(self, payload: Any, scale: Any) -> None:
        self.payload, self.scale = payload, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["payload", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["payload"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].payload, args[0].scale)
        raise NotImplementedError(func)


def test_a_subclass_is_spilled_by_its_inner_tensors(writer: Writer) -> None:
    payload = (sample(2 * SIDE, SIDE) * 50).to(torch.int8)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(Wrapped(payload.repeat(2, 1), sample()), requires_grad=False)
    assert spill(module, writer).moved_storages == 2
    assert is_spilled(module.weight.payload)
    assert torch.equal(module.weight.payload, payload.repeat(2, 1))
    assert torch.equal(module.weight.scale, sample())


@pytest.mark.parametrize(
    "error", [NoSpace, KeyboardInterrupt, ChunkDamaged], ids=lambda error: error.__name__
)
def test_a_failure_midway_leaves_a_usable_model(
    error: type[BaseException], store: cas.Store, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    before = snapshot(model)
    calls = itertools.count()
    target = Mapper if error is ChunkDamaged else Writer
    name = "mapped" if error is ChunkDamaged else "put"
    original = getattr(target, name)

    def fail(self: Any, *args: Any) -> Any:
        if next(calls) == 3:
            raise error.__new__(error)
        return original(self, *args)

    monkeypatch.setattr(target, name, fail)
    with pytest.raises(error):
        spill(model, writer)
    assert_unchanged(model, before)
    assert sum(map(is_spilled, [model.embedding.weight, model.frozen, model.constant])) < 3
    monkeypatch.undo()
    assert spill(model, writer).moved_storages == 4
    assert_unchanged(model, before)


def test_what_cannot_be_mapped_stays_in_memory(writer: Writer) -> None:
    tensor = sample()
    address = tensor.data_ptr()
    mapper = Mapper(writer, budget=MapBudget(0))
    assert spill([tensor], writer, mapper=mapper).moved_storages == 0
    assert tensor.data_ptr() == address


def test_a_torch_that_cannot_is_named(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    import cas.torch.spill  # noqa: F401

    module = __import__("sys").modules[spill_function.__module__]
    monkeypatch.setattr(module.torch, "UntypedStorage", object)
    with pytest.raises(SpillUnsupported, match=r"no object\._swap_data_ptr_.*2\.13") as caught:
        spill([], writer)
    assert caught.value.exit_code == 5
