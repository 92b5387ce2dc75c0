"""The dense weights file has the bytes that AOTInductor's own code writes."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import codecache
from torch._inductor.utils import ALIGN_BYTES

import cas
from cas.executorch.aoti_layout import ALIGNMENT, BlobLayout, Slot, put_blob
from cas.torch.streaming import UnsupportedTensor


class OnCuda(torch.Tensor):
    """A tensor in host memory that says it is on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    big = torch.randn(100, 33)
    return {
        "first": torch.randn(33, 65),
        "odd": torch.randn(19),  # 76 bytes
        "view": big[10:43],
        "big": big,
        "transposed": torch.randn(33, 40).t(),
        "empty": torch.zeros(0, 33),
        "empty_view": big[:0],  # no elements of a storage that has some
        "bfloat16": torch.randn(7, 33).to(torch.bfloat16),
        "nibbles": torch.randint(0, 255, (33, 17), dtype=torch.uint8),
        "flag": torch.tensor(True),
        "large": torch.randn(300, 301),  # several chunks and a tail
        "last": torch.arange(3, dtype=torch.int8),
    }


def on_cuda(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.as_subclass(OnCuda) for name, tensor in tensors.items()}


def mixed() -> dict[str, torch.Tensor]:
    tensors = weights()
    return {**on_cuda(tensors), "odd": tensors["odd"]}


@pytest.fixture(scope="module")
def torchs_own() -> Callable[[dict[str, torch.Tensor]], bytes]:
    """The statements of torch's ``AotCodeCompiler.compile`` that build the file, as a function."""
    tree = ast.parse(Path(codecache.__file__).read_text())
    compiler = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "AotCodeCompiler"
    )
    body = [
        _only(compiler, ast.Assign, lambda node: ast.unparse(node.targets[0]) == "all_cuda"),
        _only(compiler, ast.FunctionDef, lambda node: node.name == "_constant_nbytes"),
        *_only(
            compiler,
            ast.With,
            lambda node: "aoti_serialize_constants" in ast.unparse(node.items[0]),
        ).body,
        *ast.parse("return bytes(serialized_weights)").body,
    ]
    function = ast.parse("def build(graph): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = body
    module = ast.fix_missing_locations(ast.Module([function], []))
    names: dict[str, Any] = {"torch": torch, "ALIGN_BYTES": ALIGN_BYTES}
    exec("import ctypes", names)
    exec(compile(module, "codecache", "exec"), names)

    def call(tensors: dict[str, torch.Tensor]) -> bytes:
        constants = {"folded": torch.zeros(5), **tensors}
        graph = types.SimpleNamespace(
            constants=constants,
            folded_constants={"folded"},
            get_original_value_of_constant=constants.__getitem__,
        )
        return bytes(names["build"](graph))

    return call


def _only(tree: ast.AST, kind: type[Any], test: Callable[[Any], bool]) -> Any:
    found = [node for node in ast.walk(tree) if isinstance(node, kind) and test(node)]
    assert len(found) == 1, found
    return found[0]


def test_the_alignment_is_torchs() -> None:
    assert ALIGNMENT == ALIGN_BYTES


@pytest.mark.parametrize(
    ("tensors", "padded"),
    [
        (weights(), True),
        (on_cuda(weights()), False),
        (mixed(), True),
        ({"one": torch.arange(3)}, True),
        ({"one": torch.arange(3).as_subclass(OnCuda)}, False),
        ({"empty": torch.zeros(0)}, True),
        ({}, False),
    ],
    ids=["cpu", "all cuda", "mixed", "one on cpu", "one on cuda", "empty", "none"],
)
def test_the_bytes_are_those_that_torchs_own_code_writes(
    tensors: dict[str, torch.Tensor],
    padded: bool,
    torchs_own: Callable[[dict[str, torch.Tensor]], bytes],
    store: cas.Store,
) -> None:
    expected = torchs_own(tensors)
    with store.writer() as writer:
        layout, recipe = put_blob(writer, tensors)
        assert writer.read(recipe) == expected
    assert (layout.padded, layout.size) == (padded, len(expected))


def test_packed_and_padded_places() -> None:
    sizes = {"a": 76, "none": 0, "b": 64, "c": 1}
    assert BlobLayout.place(sizes, padded=False).slots == (
        Slot("a", 0, 76, 0),
        Slot("none", 76, 0, 0),
        Slot("b", 76, 64, 0),
        Slot("c", 140, 1, 0),
    )
    padded = BlobLayout.place(sizes, padded=True)
    assert padded.slots == (
        Slot("a", 0, 76, 52),
        Slot("none", 128, 0, 0),
        Slot("b", 128, 64, 0),
        Slot("c", 192, 1, 63),
    )
    assert padded.size == 256


def test_weights_that_the_store_has_cost_nothing(store: cas.Store) -> None:
    tensors = weights()
    with store.writer() as writer:
        writer.put(memoryview(tensors["large"].numpy()))
        writer.put(memoryview(tensors["big"].numpy()))
        writer.put(memoryview(tensors["first"].numpy()))
        writer.put(memoryview(tensors["transposed"].t().numpy()))
        before = writer.counters.new_chunks
        put_blob(writer, tensors)
        assert writer.counters.new_chunks == before


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(3).to_sparse(), r"'w', an? torch.sparse_coo tensor"),
        (torch.empty(70, 70, device="meta"), "meta or fake"),
    ],
    ids=["sparse", "meta"],
)
def test_what_has_no_plain_bytes_is_refused(
    tensor: torch.Tensor, message: str, store: cas.Store
) -> None:
    with store.writer() as writer, pytest.raises(UnsupportedTensor, match=message):
        put_blob(writer, {"w": tensor})


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_mkldnn_is_refused_by_name(store: cas.Store) -> None:
    with store.writer() as writer, pytest.raises(UnsupportedTensor, match="'w', a mkldnn tensor"):
        put_blob(writer, {"w": torch.eye(3).to_mkldnn()})
