"""Exports through ExecuTorch's CudaBackend, on a GPU or with the CPU standing in for one.

The stand-in is the real backend and the real AOTInductor; only what they ask about the device is
answered differently. It needs the `triton` wheel and a C++ compiler, and its artifacts do not run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.export import export

Inputs = Mapping[str, tuple[torch.Tensor, ...]]


#: Triton knows no convolutions for the CPU; and nobody waits for the speed of what does not run.
_CPU_OPTIONS = {
    "max_autotune_conv_backends": "ATEN",
    "aot_inductor.compile_wrapper_opt_level": "O0",
}


class _AnyKernel(dict[str, Any]):
    """CPU kernels are not in the table of fallbacks for CUDA."""

    def __contains__(self, key: object) -> bool:
        return True


@contextlib.contextmanager
def cpu_stands_in() -> Iterator[None]:
    """Let CudaBackend compile for the CPU, for the length of the block."""
    from executorch.backends.cuda.cuda_backend import CudaBackend

    stock_options = CudaBackend.get_aoti_compile_options
    answers = {
        "get_device_name": lambda cls: "cpu",
        "get_supported_fallback_kernels": lambda cls: _AnyKernel(),
        "get_aoti_compile_options": lambda cls, specs: {**stock_options(specs), **_CPU_OPTIONS},
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(CudaBackend, name, classmethod(answer)))
        yield


def lower_to_cuda(model: nn.Module, inputs: Inputs, spec: dict[str, Any]) -> Any:
    """One method for each of ``inputs``; all of them the model's ``forward``."""
    standing_in = cpu_stands_in() if spec.get("stand_in") else contextlib.nullcontext()
    with standing_in:
        return _lower(model, inputs, spec)


def _lower(model: nn.Module, inputs: Inputs, spec: dict[str, Any]) -> Any:
    from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    programs = {
        method: export(model, values, strict=spec["strict"]) for method, values in inputs.items()
    }
    partitioners = {method: [CudaPartitioner(_compile_specs(method, spec))] for method in inputs}
    edge = to_edge_transform_and_lower(
        programs,
        partitioner=partitioners,
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )
    return edge.to_executorch()


def _compile_specs(method: str, spec: dict[str, Any]) -> list[Any]:
    from executorch.backends.cuda.cuda_backend import CudaBackend
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    specs = [CudaBackend.generate_method_name_compile_spec(method)]
    if spec.get("stand_in"):
        # On a GPU autotuning is what finds the Triton kernels that the backend insists on.
        specs.append(CompileSpec("max_autotune", b"OFF"))
    if spec.get("low_memory"):
        specs.append(CompileSpec("low_memory_mode", b"ON"))
    return specs


# --- small models for comparing bytes -----------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is the last layer's too, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.mix = nn.Linear(64, 64)
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = torch.relu(self.mix(self.embed(tokens)))
        return self.head(hidden)


class Cached(nn.Module):
    """A step that writes to a cache, whose initial value is all zeros."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("cache", torch.zeros(16, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.add_(x)
        return self.linear(self.cache)


def _stack(width: int = 128, layers: int = 3) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*blocks)


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1))


def _rows(*counts: int) -> Inputs:
    names = ("forward", "prefill")
    return {name: (torch.ones(count, 128),) for name, count in zip(names, counts, strict=False)}


#: Name -> how to make the model, its methods' example inputs, and what differs in the spec.
CASES: dict[str, tuple[Callable[[], nn.Module], Inputs, dict[str, Any]]] = {
    "layers": (_stack, _rows(4), {}),
    "layers, low memory": (_stack, _rows(4), {"low_memory": True}),
    "two methods": (_stack, _rows(4, 8), {}),
    "two methods, low memory": (_stack, _rows(4, 8), {"low_memory": True}),
    "tied bfloat16": (
        lambda: Tied().to(torch.bfloat16),
        {"forward": (torch.arange(8).view(1, 8),)},
        {},
    ),
    "cache, low memory": (Cached, {"forward": (torch.ones(16, 64),)}, {"low_memory": True}),
    "convolutions": (_convolutions, {"forward": (torch.ones(1, 3, 16, 16),)}, {}),
}


def make_case(name: str) -> tuple[nn.Module, Inputs, dict[str, Any]]:
    """The model with the same weights in every process, its inputs, and the spec for it."""
    factory, inputs, spec = CASES[name]
    torch.manual_seed(0)
    return factory().eval(), inputs, {"strict": False, "backend": "cuda", **spec}
