"""The manifest knows which weights XNNPACK's constants are, also where nothing was compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import (
    ConstantDataOffset,
    PerChannelGroupQuant,
    XNNDatatype,
    XNNQuantizedTensorValue,
    XNNTensorValue,
)
from executorch.exir import to_edge_transform_and_lower
from executorch.exir._serialize._named_data_store import NamedDataStore
from torch import nn
from torch.export import export

import cas
from cas.executorch import capture, hooks_xnnpack
from cas.executorch.labels import Label, named_labels


class Named(nn.Module):
    """The same computation for all names of its layers. Two of its biases are equal."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.add_module(first, nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)))
        self.add_module(second, nn.Conv2d(8, 8, 1))
        self.names = (first, second)
        for module in (self.get_submodule(first)[0], self.get_submodule(second)):
            nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        y: torch.Tensor = second(torch.relu(first(x)))
        return y


def tensors(store: cas.Store, out: Path, *names: str) -> tuple[Any, Path, tuple[Any, ...]]:
    model = Named(*names).eval()
    with capture(store, "named", threshold=1) as cap:
        exported = export(model, (torch.ones(1, 4, 9, 9),), strict=False)
        edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        saved = cap.save(edge.to_executorch(), out)
        assert (cap.outcomes.hits + cap.outcomes.missed, cap.outcomes.uncacheable) == (1, {})
    return cap.outcomes, saved.paths[0], store.manifest("named").tensors


def test_constants_have_the_names_of_weights(store: cas.Store, tmp_path: Path) -> None:
    _, path, found = tensors(store, tmp_path / "out", "features", "head")
    places = {entry.name: entry for entry in found}
    assert {name: (entry.dtype, entry.shape) for name, entry in places.items()} == {
        # Normalization is part of the convolution; and XNNPACK has the channels last.
        "features_0_weight_fused_bn": ("float32", (8, 3, 3, 4)),
        "features_0_bias_fused_bn": ("float32", (8,)),
        "head.weight": ("float32", (8, 1, 1, 8)),
        "head.bias": ("float32", (8,)),
        "features.1.num_batches_tracked": ("int64", ()),  # of the program, and not of XNNPACK
    }
    # Equal bytes are there once, under both names.
    bias = places["head.bias"]
    assert bias.offset == places["features_0_bias_fused_bn"].offset
    weight = places["head.weight"]
    data = path.read_bytes()[weight.offset : weight.offset + weight.nbytes]
    model = Named("features", "head")
    expected = model.get_parameter("head.weight").detach().permute(0, 2, 3, 1).contiguous()
    assert data == expected.numpy().tobytes()


def test_a_hit_has_the_names_of_the_program_that_asks(store: cas.Store, tmp_path: Path) -> None:
    _, _, recorded = tensors(store, tmp_path / "first", "features", "head")
    again, _, same = tensors(store, tmp_path / "again", "features", "head")
    other, _, renamed = tensors(store, tmp_path / "other", "trunk", "top")
    assert (again.hits, other.hits) == (1, 1)
    assert same == recorded
    names = {"features": "trunk", "head": "top"}
    assert {entry.name for entry in renamed} == {
        entry.name.replace(old, new)
        for entry in recorded
        for old, new in names.items()
        if entry.name.startswith(old)
    }


@pytest.mark.parametrize(
    "kind, dims, size, expected",
    [
        ("bf16", [3, 5], 30, ("bfloat16", (3, 5))),
        ("fp16", [], 2, ("float16", ())),
        ("qcint4", [3, 5], 9, ("uint8", (3, 3))),  # padded to whole bytes
        ("qbint4", [2, 64], 64, ("uint8", (2, 32))),
        ("qdint8", [2, 2], 4, (None, None)),
        ("fp32", [2, 2], 8, (None, None)),  # it is not what it says
    ],
)
def test_types_and_shapes_are_those_of_the_bytes(
    kind: str, dims: list[int], size: int, expected: Any
) -> None:
    store = NamedDataStore()
    tensor = XNNTensorValue(XNNDatatype[f"xnn_datatype_{kind}"], len(dims), dims, 1, 0, 0, 0)
    constants = [ConstantDataOffset(0, 0), ConstantDataOffset(0, size, "k")]
    hooks_xnnpack._label(store, constants, "weight", tensor)
    assert named_labels(store) == {"k": {Label("weight", *expected): None}}


def test_scales_of_groups_are_named_after_their_weight() -> None:
    store = NamedDataStore()
    tensor = XNNTensorValue(XNNDatatype.xnn_datatype_qbint4, 2, [2, 64], 1, 0, 0, 0)
    scales = PerChannelGroupQuant([], 0, 32, scale_buffer_idx=2, num_scales=4)
    constants = [
        ConstantDataOffset(0, 0), ConstantDataOffset(0, 64, "k"), ConstantDataOffset(0, 8, "s")
    ]  # fmt: skip
    hooks_xnnpack._label(store, constants, "w", XNNQuantizedTensorValue(tensor, scales))
    assert named_labels(store)["s"] == {Label("w.scale", "bfloat16", (4,)): None}
