"""A checkpoint is loaded tensor by tensor, and what fits and what does not is told like torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cas
from cas.errors import CasError, NoSpace, PermissionRefused, Refused, UsageError
from cas.writer import Writer

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
from safetensors.torch import save_file  # noqa: E402

from cas.torch import (  # noqa: E402
    CheckpointDamaged,
    CheckpointNotFound,
    StateMismatch,
    checkpoint,
    load_into,
)
from cas.torch.memory import anonymous_bytes  # noqa: E402

#: 1 MiB of float32.
SIDE = 512


@pytest.fixture
def chunk_size() -> int:
    return 256 << 10


class Model(torch.nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(SIDE, SIDE)
        self.second = torch.nn.Linear(SIDE, SIDE)
        if tied:
            self.second.weight = self.first.weight
        self.register_buffer("table", torch.zeros(SIDE, SIDE))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)


def on_meta(tied: bool = False) -> Model:
    with torch.device("meta"):
        return Model(tied)


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: torch.randn(value.shape) for name, value in on_meta().state_dict().items()}


def sharded(folder: Path, values: dict[str, Any]) -> Path:
    """Two shards and their index; the path of the index."""
    names = list(values)
    table = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    folder.mkdir(exist_ok=True)
    for shard in sorted(set(table.values())):
        save_file({name: values[name] for name in names if table[name] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}))
    return index


def assert_holds(model: Any, values: dict[str, Any]) -> None:
    found = model.state_dict()
    assert list(found) == list(values)
    assert all(torch.equal(found[name], values[name]) for name in values)


def is_mapped(tensor: Any) -> bool:
    return anonymous_bytes(tensor.data_ptr(), tensor.nbytes) == 0


@pytest.mark.parametrize("kind", ["file", "directory", "shards", "index", "dict", "pairs"])
def test_every_kind_of_source(kind: str, tmp_path: Path, writer: Writer) -> None:
    values = state()
    source: Any = {"dict": values, "pairs": iter(values.items())}.get(kind)
    if kind in ("shards", "index"):
        index = sharded(tmp_path / "model", values)
        source = index if kind == "index" else index.parent
    elif source is None:
        (tmp_path / "model").mkdir()
        save_file(values, tmp_path / "model" / "weights.safetensors")
        source = tmp_path / "model" / ("weights.safetensors" if kind == "file" else "")
    model = on_meta()
    loaded = load_into(model, str(source) if kind == "file" else source, writer)
    assert (loaded.missing, loaded.unexpected) == ((), ())
    assert loaded.unmaterialized == ("scratch",)
    assert_holds(model, values)
    assert is_mapped(model.first.weight)
    assert is_mapped(model.table)
    assert all(type(value) is torch.nn.Parameter for value in model.parameters())
    assert all(value.requires_grad for value in model.parameters())


def test_the_checkpoint_and_the_writer_may_go(tmp_path: Path) -> None:
    values, model = state(), on_meta()
    save_file(values, tmp_path / "model.safetensors")
    with cas.Store.open(tmp_path / "store") as store, store.writer() as writer:
        load_into(model, tmp_path / "model.safetensors", writer)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(0)
    assert_holds(model, values)


def test_a_transform_makes_what_is_loaded(tmp_path: Path, writer: Writer) -> None:
    values = state()
    save_file({**values, "extra": torch.ones(3)}, tmp_path / "model.safetensors")
    seen: list[str] = []

    def transform(name: str, tensor: Any) -> Any:
        seen.append(name)
        if name == "extra":
            return None
        if name == "first.weight":
            return (tensor * 10).to(torch.int8)
        return tensor.to(torch.bfloat16) if name.endswith("weight") else tensor

    model = on_meta()
    load_into(model, tmp_path / "model.safetensors", writer, transform=transform)
    assert sorted(seen) == sorted([*values, "extra"])
    assert torch.equal(model.first.weight, (values["first.weight"] * 10).to(torch.int8))
    assert not model.first.weight.requires_grad
    assert torch.equal(model.second.weight, values["second.weight"].bfloat16())
    assert model.second.weight.requires_grad
    assert torch.equal(model.table, values["table"])


def test_one_tensor_is_held_at_a_time(writer: Writer) -> None:
    import gc
    import weakref

    alive: list[weakref.ref[Any]] = []

    def pairs() -> Iterator[tuple[str, Any]]:
        for name, value in state().items():
            made = value.clone()
            alive.append(weakref.ref(made))
            yield name, made
            del made
            gc.collect()
            assert [ref() for ref in alive[:-1]] == [None] * (len(alive) - 1)

    load_into(on_meta(), pairs(), writer, transform=lambda name, value: value)
    assert len(alive) == len(state())


def test_strides_and_shared_memory_survive(writer: Writer) -> None:
    values = state()
    whole = torch.randn(SIDE, SIDE)
    values["first.weight"] = torch.randn(SIDE, SIDE).t()
    values["second.weight"] = torch.randn(SIDE, 2 * SIDE)[:, ::2]
    values["table"] = whole
    values["first.bias"], values["second.bias"] = torch.ones(1).expand(SIDE), torch.ones(SIDE)
    model = on_meta()
    load_into(model, values, writer)
    assert_holds(model, values)
    assert model.first.weight.stride() == (1, SIDE)
    assert model.second.weight.stride() == (2 * SIDE, 2)
    model.table.zero_()
    assert whole.any()


@pytest.mark.parametrize("given", ["first.weight", "second.weight", "both", "one object"])
def test_ties_hold(given: str, writer: Writer) -> None:
    values = state()
    values["second.weight"] = values["first.weight"]
    if given == "both":
        values["second.weight"] = values["first.weight"].clone()
    elif given != "one object":
        del values["second.weight" if given == "first.weight" else "first.weight"]
    model = on_meta(tied=True)
    load_into(model, values, writer)
    # A checkpoint that has two tensors for the names unties them, as torch's `assign` does.
    assert (model.first.weight is model.second.weight) == (given != "both")
    assert torch.equal(model.first.weight, state()["first.weight"])
    assert torch.equal(model.second.weight, model.first.weight)


@pytest.mark.parametrize("source", ["file", "dict"])
def test_names_are_checked_like_torch(source: str, tmp_path: Path, writer: Writer) -> None:
    values = state()
    del values["first.weight"], values["table"]
    values["third"] = torch.ones(1)
    if source == "file":
        save_file(values, tmp_path / "model.safetensors")
    given: Any = tmp_path / "model.safetensors" if source == "file" else values
    model = on_meta()
    with pytest.raises(StateMismatch, match=r"does not fit Model: 2 missing \(table, f") as e:
        load_into(model, given, writer)
    assert (e.value.missing, e.value.unexpected) == (("table", "first.weight"), ("third",))
    assert isinstance(e.value, UsageError)
    assert all(parameter.is_meta for parameter in model.parameters())
    loaded = load_into(model, given, writer, strict=False)
    assert (loaded.missing, loaded.unexpected) == (("table", "first.weight"), ("third",))
    assert loaded.unmaterialized == ("first.weight", "table", "scratch")
    assert torch.equal(model.second.weight, values["second.weight"])


def test_a_mismatch_of_names_is_told_before_anything_is_stored(
    tmp_path: Path, writer: Writer
) -> None:
    save_file({"other": torch.zeros(SIDE, SIDE)}, tmp_path / "model.safetensors")
    with pytest.raises(StateMismatch, match="missing"):
        load_into(
            on_meta(), tmp_path / "model.safetensors", writer, transform=lambda name, value: value
        )
    assert writer.counters.logical_bytes == 0


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_refused(strict: bool, writer: Writer) -> None:
    values = {**state(), "table": torch.zeros(2, 2)}
    with pytest.raises(StateMismatch, match=r"size mismatch for table.*\[2, 2\]"):
        load_into(on_meta(), values, writer, strict=strict)


def test_modules_that_load_in_their_own_way_are_let_to(writer: Writer) -> None:
    model = on_meta()

    def rename(module: Any, values: dict[str, Any], prefix: str, *rest: Any) -> None:
        values[prefix + "weight"] = values.pop(prefix + "kernel")

    model.first.register_load_state_dict_pre_hook(rename)
    values = state()
    values["first.kernel"] = values.pop("first.weight")
    load_into(model, values, writer)
    assert torch.equal(model.first.weight, values["first.kernel"])
    model.first._load_state_dict_pre_hooks.clear()
    with pytest.raises(StateMismatch, match=r"first\.kernel"):
        load_into(on_meta(), values, writer)


def test_extra_state_is_passed_on(writer: Writer) -> None:
    class Extra(Model):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return {"calls": 0}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    with torch.device("meta"):
        model = Extra()
    values = {**state(), "_extra_state": {"calls": 3}}
    load_into(model, values, writer, transform=lambda name, value: value)
    assert model.extra == {"calls": 3}


def test_a_full_disk_leaves_the_module_as_it_was(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, data: Any) -> Any:
        raise NoSpace(Path("disk"))

    monkeypatch.setattr(Writer, "put", full)
    model = on_meta()
    with pytest.raises(NoSpace):
        load_into(model, state(), writer)
    assert all(parameter.is_meta for parameter in model.parameters())


# --- files that are not what they should be ------------------------------------------------------


def header(document: Any, body: bytes = b"") -> bytes:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(data)) + data + body


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 1000) + b"{}",
        header(b"no json"),
        header([]),
        header(b"[" * 100_000),
        header(entry(), b"x" * 15),
        header(entry(), b"x" * 17),
        header(entry(shape=[2**62, 4]), b"x" * 16),
        header(entry(shape=[-4]), b"x" * 16),
        header(entry(data_offsets=[16, 0]), b"x" * 16),
        header(entry(data_offsets=[4, 20]), b"x" * 20),
        header(entry(dtype="F32; import os"), b"x" * 16),
        header(entry(dtype="F6_E2M3", shape=[16], data_offsets=[0, 12]), b"x" * 12),
    ],
)
def test_a_hostile_file_is_refused(data: bytes, tmp_path: Path, writer: Writer) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    module = torch.nn.Module()
    module.register_buffer("a", torch.empty(4, device="meta"))
    with pytest.raises(CheckpointDamaged, match="cannot be read") as caught:
        load_into(module, path, writer)
    assert caught.value.path == path
    assert caught.value.exit_code == 4
    assert module.a.is_meta


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"\xff", "not JSON"),
        ([], "no 'weight_map'"),
        ({"weight_map": []}, "no 'weight_map'"),
        ({"weight_map": {}}, "no 'weight_map'"),
        ({"weight_map": {"a": "../secret.safetensors"}}, "not allowed"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not allowed"),
        ({"weight_map": {"a": None}}, "there is no checkpoint file"),
        ({"weight_map": {"a": "gone.safetensors"}}, "there is no checkpoint file"),
        ({"weight_map": {"b": "shard.safetensors"}}, "holds 'b', which it does not"),
    ],
)
def test_a_hostile_index_is_refused(
    document: Any, message: str, tmp_path: Path, writer: Writer
) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "shard.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    with pytest.raises((CheckpointDamaged, CheckpointNotFound), match=message):
        load_into(torch.nn.Module(), path, writer)


def test_a_huge_index_is_not_read(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_INDEX_BYTES", 10)
    index = sharded(tmp_path / "model", state())
    with pytest.raises(CheckpointDamaged, match="more than an index needs"):
        load_into(on_meta(), index, writer)


def test_what_is_not_there_is_named(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoint file"):
        load_into(on_meta(), tmp_path / "no.safetensors", writer)
    with pytest.raises(CheckpointNotFound, match="found none"):
        load_into(on_meta(), tmp_path, writer)
    for name in ("a", "b"):
        save_file(state(), tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointNotFound, match=r"found a\.safetensors, b\.safetensors"):
        load_into(on_meta(), tmp_path, writer)
    (tmp_path / "d.safetensors.index.json").mkdir()
    with pytest.raises(CasError):
        load_into(on_meta(), tmp_path / "d.safetensors.index.json", writer)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("safetensors.safe_open", refuse)
    with pytest.raises(PermissionRefused, match=r"a\.safetensors: permission denied"):
        load_into(on_meta(), tmp_path / "a.safetensors", writer)


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    save_file(state(), tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(Refused, match="pip install safetensors"):
        load_into(on_meta(), tmp_path / "a.safetensors", writer)
