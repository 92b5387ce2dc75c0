"""The exports that the memory benchmarks run, each in a process of its own.

    python bench/workload.py '{"engine": "cas", "backend": "xnnpack", ...}'

Prints "idle" when everything is imported and warm, waits for a line, exports, and prints a JSON
object. The parent samples this process's memory meanwhile. With ``"engine": "stock"`` nothing of
`cas` is imported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import enter
from torch.export import export


class Stack(torch.nn.Module):
    """``layers`` square linear layers of ``width`` with a ReLU after each, fp32."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def random_stack(width: int, layers: int) -> Stack:
    """The model in anonymous memory, with weights that compress and deduplicate badly."""
    with torch.device("meta"):
        model = Stack(width, layers)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02, generator=generator)
    return model.eval()


def mapped_stack(width: int, layers: int, checkpoint: Path) -> Stack:
    """The model with its weights mapped from a safetensors file."""
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = Stack(width, layers)
    model.load_state_dict(load_file(checkpoint), assign=True)
    return model.eval()


def as_buffers(model: Stack) -> Stack:
    """The same model with buffers in place of its parameters."""
    for layer in model.layers:
        for name, value in list(layer.named_parameters()):
            delattr(layer, name)
            layer.register_buffer(name, value.detach())
    return model


def write_checkpoint(width: int, layers: int, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(random_stack(width, layers).state_dict(), path)


def lower(model: Stack, spec: dict[str, Any]) -> Any:
    if spec["backend"] == "cuda":
        from cuda_flow import lower_to_cuda

        return lower_to_cuda(model, {"forward": (torch.randn(1, spec["width"]),)}, spec)

    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

    exported = export(model, (torch.randn(1, spec["width"]),), strict=spec["strict"])
    partitioners = []
    if spec["backend"] == "xnnpack":
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        partitioners = [XnnpackPartitioner()]
    if spec["external"] and partitioners:
        for node in exported.graph.nodes:
            if node.op == "placeholder" and node.name.startswith("p_"):
                node.meta.setdefault("custom", {})["delegate_constant_tag"] = "weights"
    edge = to_edge_transform_and_lower(exported, partitioner=partitioners)
    if not spec["external"]:
        return edge.to_executorch()
    return edge.to_executorch(ExecutorchBackendConfig(external_constants=True))


def run_stock(model: Callable[[], Stack], spec: dict[str, Any], out: Path) -> None:
    save_stock(lower(model(), spec), out)


def save_stock(program: Any, out: Path) -> None:
    """Write a program's files as a user of ExecuTorch does."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "model.pte", "wb") as file:
        program.write_to_file(file)
    program.write_tensor_data_to_file(str(out))
    for path in out.iterdir():  # durable, as what `cas` writes is
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def run_cas(model: Callable[[], Stack], spec: dict[str, Any], out: Path) -> dict[str, int]:
    from cas import Store
    from cas.executorch import capture

    loaded = model()
    with Store.open(spec["store"]) as store, capture(store, "bench") as cap:
        if spec["engine"] == "spill":
            enter("spill")
            cap.spill(loaded)
            enter("export")
        commit = cap.save(lower(loaded, spec), out).commit
    return {"new_bytes": commit.new_bytes, "new_chunks": commit.new_chunks}


def run(spec: dict[str, Any], out: Path) -> dict[str, Any]:
    """Load, export, write. Seconds are counted from when the model is loaded."""
    width, layers = spec["width"], spec["layers"]
    loaded_at = 0.0

    def model() -> Stack:
        nonlocal loaded_at
        if spec["source"] == "ram":
            made = random_stack(width, layers)
        else:
            made = mapped_stack(width, layers, Path(spec["checkpoint"]))
        if spec.get("buffers"):
            made = as_buffers(made)
        loaded_at = time.monotonic()
        return made

    extra: dict[str, Any] = {}
    if spec["engine"] != "stock":
        extra = run_cas(model, spec, out)
    else:
        run_stock(model, spec, out)
    return {"seconds": time.monotonic() - loaded_at, **device_memory(), **extra}


def device_memory() -> dict[str, int]:
    """The most that torch held on the GPU; nothing without one."""
    if not torch.cuda.is_initialized():
        return {}
    return {
        "vram_allocated": torch.cuda.max_memory_allocated(),
        "vram_reserved": torch.cuda.max_memory_reserved(),
    }


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    spec = json.loads(sys.argv[1])
    warm = {**spec, "width": 64, "layers": 2, "source": "ram", "store": spec["store"] + ".warm"}
    # Imports and first-use state belong to the base, so nothing may come out of the store here.
    shutil.rmtree(warm["store"], ignore_errors=True)
    run(warm, Path(spec["out"] + ".warm"))
    print("idle", flush=True)
    sys.stdin.readline()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    out = Path(spec["out"])
    result = run(spec, out)
    print("done", flush=True)
    sys.stdin.readline()
    result["sha256"] = {path.name: sha256(path) for path in sorted(out.iterdir())}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
