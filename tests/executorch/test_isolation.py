"""Copies of a program are private: as with a stock deepcopy, nobody sees another's changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir.backend.canonical_partitioners import duplicate_constant_node_pass
from export_cases import CASES, lower, one, quantized_int4, x_mlp, x_square
from export_models import Layouts, Tied, mlp
from torch import nn
from torch.export import ExportedProgram, export

import cas
from cas.executorch import capture
from cas.executorch.copies import PrivateCopies
from cas.executorch.hooks_dynamo import private_clone
from cas.torch import Mapper


def is_mapped(tensor: torch.Tensor, store: cas.Store) -> bool:
    """Whether the tensor's first page belongs to a file of the store."""
    address = tensor.untyped_storage().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            return str(store.path) in line
    return False


@pytest.fixture
def capturing(store: cas.Store) -> Iterator[cas.Store]:
    with capture(store, map_threshold=1):
        yield store


def exported(module: nn.Module, inputs: Any) -> ExportedProgram:
    return export(module, inputs, strict=False)


def test_a_copy_is_mapped_equal_and_private(capturing: cas.Store) -> None:
    program = exported(mlp(), x_mlp())
    duplicate = copy.deepcopy(program)
    assert type(duplicate) is ExportedProgram
    for key, original in program.state_dict.items():
        private = duplicate.state_dict[key]
        assert is_mapped(private, capturing)
        assert type(private) is type(original) is nn.Parameter
        assert private.requires_grad == original.requires_grad
        assert torch.equal(private, original)
        before = original.detach().clone()
        private.data.mul_(3)
        assert torch.equal(original, before)
        assert not torch.equal(private, original)
    again = copy.deepcopy(program)
    assert torch.equal(again.state_dict["first.weight"], program.state_dict["first.weight"])


def test_a_copy_is_the_stock_copy_in_all_but_its_pages(store: cas.Store) -> None:
    for module, inputs in ((Tied().eval(), x_square(96)), (Layouts().eval(), x_square(32))):
        program = exported(module, inputs)
        stock = copy.deepcopy(program)
        with capture(store, map_threshold=1):
            ours = copy.deepcopy(program)
        assert ours.graph_module.code == stock.graph_module.code
        for mine, theirs in (
            (ours.state_dict, stock.state_dict),
            (ours.constants, stock.constants),
        ):
            assert list(mine) == list(theirs)
            for key, tensor in theirs.items():
                assert_same_shape_of_memory(mine[key], tensor)


def assert_same_shape_of_memory(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert type(mine) is type(theirs)
    assert torch.equal(mine, theirs)
    assert mine.stride() == theirs.stride()
    assert mine.storage_offset() == theirs.storage_offset()
    assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    assert mine.dtype == theirs.dtype
    assert mine.requires_grad == theirs.requires_grad


def test_aliases_stay_aliases_within_one_copy(capturing: cas.Store) -> None:
    program = exported(Tied().eval(), x_square(96))
    duplicate = copy.deepcopy(program)
    values = {**duplicate.state_dict, **duplicate.constants}
    assert values["one.weight"] is values["two.weight"]
    whole, view = values["whole"], values["view"]
    assert whole.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    whole.fill_(7)
    assert bool((view == 7).all())
    other = copy.deepcopy(program)
    assert not bool((other.state_dict["whole"] == 7).any())


def test_a_parameter_that_views_a_large_storage_becomes_compact(capturing: cas.Store) -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(4096.0).reshape(64, 64)[8:40])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    program = exported(Sliced(), (torch.ones(2, 32),))
    private = copy.deepcopy(program).state_dict["weight"]
    assert private.storage_offset() == 0
    assert private.untyped_storage().nbytes() == 32 * 64 * 4
    assert torch.equal(private, program.state_dict["weight"])


def test_a_change_between_two_copies_is_seen(capturing: cas.Store) -> None:
    program = exported(mlp(), x_mlp())
    weight = program.state_dict["second.weight"]
    first = copy.deepcopy(program).state_dict["second.weight"]
    weight.data.add_(1)  # does not change weight._version
    second = copy.deepcopy(program).state_dict["second.weight"]
    assert torch.equal(second, weight)
    assert not torch.equal(first, second)


def test_small_tensors_are_copied_as_ever(store: cas.Store) -> None:
    program = exported(mlp(), x_mlp())
    with capture(store) as cap:
        duplicate = copy.deepcopy(program)
        assert cap.counters.logical_bytes == 0
    assert not is_mapped(duplicate.state_dict["second.weight"], store)


def test_a_copy_outlives_the_capture(store: cas.Store) -> None:
    program = exported(mlp(), x_mlp())
    with capture(store, map_threshold=1):
        duplicate = copy.deepcopy(program)
    assert torch.equal(duplicate.state_dict["second.weight"], program.state_dict["second.weight"])


def test_quantized_subclasses_are_copied(capturing: cas.Store) -> None:
    program = exported(quantized_int4(), x_mlp())
    duplicate = copy.deepcopy(program)
    assert list(duplicate.state_dict) == list(program.state_dict)
    for key, tensor in program.state_dict.items():
        assert type(duplicate.state_dict[key]) is type(tensor)


def test_editing_a_weight_in_place_between_two_exports(store: cas.Store, tmp_path: Path) -> None:
    model = mlp()
    with capture(store, threshold=1, map_threshold=1) as cap:
        cap.save(one(model, x_mlp()).program, tmp_path / "a", name="before")
        for parameter in model.parameters():
            parameter.data.mul_(2)
        cap.save(one(model, x_mlp()).program, tmp_path / "b", name="after")
    assert (tmp_path / "a/model.pte").read_bytes() != (tmp_path / "b/model.pte").read_bytes()
    (weight,) = (t for t in store.manifest("after").tensors if t.name == "second.weight")
    data = (tmp_path / "b/model.pte").read_bytes()[weight.offset : weight.offset + weight.nbytes]
    assert data == model.get_parameter("second.weight").detach().numpy().tobytes()


# --- weights that several users share ------------------------------------------------------------


def test_a_weight_that_partitions_share_is_mapped_and_private(capturing: cas.Store) -> None:
    parameter = nn.Parameter(torch.randn(64, 64))
    private = duplicate_constant_node_pass.copy.deepcopy(parameter)
    assert type(private) is nn.Parameter
    assert is_mapped(private, capturing)
    private.data.zero_()
    assert bool(parameter.any())
    view = torch.randn(128, 64)[64:]
    private_view = duplicate_constant_node_pass.copy.deepcopy(view)
    assert is_mapped(private_view, capturing)
    assert_same_shape_of_memory(private_view, view)
    assert duplicate_constant_node_pass.copy.deepcopy([parameter]) is not None
    assert duplicate_constant_node_pass.copy.copy is copy.copy


def test_a_tied_weight_is_copied_by_that_pass(
    capturing: cas.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the hook: it is of no use if the pass copies in another way."""
    seen: list[bool] = []
    hooked = duplicate_constant_node_pass.copy

    class Watching:
        def deepcopy(self, value: Any) -> Any:
            result = hooked.deepcopy(value)
            if isinstance(value, torch.Tensor):
                seen.append(is_mapped(result, capturing))
            return result

    with monkeypatch.context() as patching:
        patching.setattr(duplicate_constant_node_pass, "copy", Watching())
        CASES["attention_xnnpack"]()
    assert seen
    assert all(seen)


class Views(nn.Module):
    """Weights that are slices of one storage, as a mapped checkpoint may hold them."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(3, 64, 64)
        self.one, self.two = (nn.Parameter(part, requires_grad=False) for part in whole[1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.one @ self.two


def test_the_emitter_keeps_no_clone_of_a_weight(capturing: cas.Store) -> None:
    program = lower(exported(Views(), (torch.ones(2, 64),)))
    specs = [
        node.meta["spec"]
        for node in program.exported_program().graph.nodes
        if node.op == "placeholder" and node.meta["spec"].const
    ]
    assert len(specs) == 2
    for spec in specs:
        assert is_mapped(torch.empty(0).set_(spec.storage), capturing)


# --- the clones of a strict export ----------------------------------------------------------------


@pytest.fixture
def copies(store: cas.Store) -> Iterator[PrivateCopies]:
    with store.writer() as writer:
        yield PrivateCopies(writer, Mapper(writer, min_size=1))


def test_a_dynamo_clone_is_mapped_and_private(copies: PrivateCopies, store: cas.Store) -> None:
    parameter = nn.Parameter(torch.randn(64, 48).t())
    torch._dynamo.mark_dynamic(parameter, 0)
    clone = private_clone(parameter, copies)
    assert clone is not None
    assert type(clone) is torch.Tensor
    assert clone.requires_grad
    assert clone.stride() == parameter.stride()
    assert torch.equal(clone, parameter)
    assert is_mapped(clone, store)
    assert clone._dynamo_dynamic_indices == {0}  # type: ignore[attr-defined]
    clone.data.zero_()
    assert bool(parameter.any())


def test_a_dynamo_clone_of_a_quantized_weight(copies: PrivateCopies, store: cas.Store) -> None:
    weight = quantized_int4().get_parameter("second.weight")
    clone = private_clone(weight, copies)
    assert clone is not None
    assert type(clone) is type(weight)
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        inner, original = getattr(clone, name), getattr(weight, name)
        assert torch.equal(inner, original)
        assert inner.data_ptr() != original.data_ptr()


def test_only_weights_are_cloned_into_the_store(store: cas.Store) -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    with capture(store, map_threshold=1) as cap:
        export(Doubled(), (torch.rand(128, 64),), strict=True)
        counters = cap.counters
    assert counters.new_bytes == 64 * 64 * 4


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 1).expand(4, 8),
        torch.ones(16, 16)[:, ::2],
        torch.ones(4, 4).to_sparse(),
        torch.empty(4, 4, device="meta"),
        torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(3, requires_grad=True) * 2,
    ],
    ids=["expanded", "strided", "sparse", "meta", "quantized", "conjugate", "no leaf"],
)
def test_other_tensors_are_left_to_dynamo(tensor: torch.Tensor, copies: PrivateCopies) -> None:
    assert private_clone(tensor, copies) is None
