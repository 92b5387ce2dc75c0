"""One export of a Gemma 4 by the steps of ExecuTorch's CUDA script, for `gemma_flow.py`.

The model is ExecuTorch's ``examples/models/gemma4_31b``, small in its numbers but whole in its
parts. The steps are those of ``_export_cuda`` there: both methods exported with ``strict=True``,
lowered together by CudaBackend in low-memory mode, emitted and written. What needs a GPU is left
out: the transforms that put Triton kernels into the source, and the packing of weights for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from cuda_flow import cpu_stands_in, lower_to_cuda
from executorch.examples.models.gemma4_31b.model import (
    Gemma4_31B,
    Gemma4_31BConfig,
    materialize_runtime_buffers,
)
from executorch.exir import (
    EdgeCompileConfig,
    ExecutorchBackendConfig,
    to_edge_transform_and_lower,
)
from executorch.exir.passes import MemoryPlanningPass
from executorch.extension.llm.export.load import assign_state_dict
from executorch.extension.llm.export.quant import (
    QuantConfig,
    QuantRecipe,
    QuantRule,
    quantize_model,
    quantize_weight,
    to_default,
)
from executorch.extension.llm.export.quant.convert import fuse_along_output
from measure import enter
from torch import nn
from torch.export import Dim, export
from workload import sha256

#: Weights that a step of the streaming loader quantizes at once.
BLOCK = 4 << 20


def config_of(spec: dict[str, Any]) -> Gemma4_31BConfig:
    hidden = spec["hidden"]
    return Gemma4_31BConfig(
        vocab_size=spec["vocabulary"],
        hidden_size=hidden,
        intermediate_size=spec["intermediate"],
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_global_key_value_heads=1,
        global_head_dim=128,
        sliding_window=16,
        max_seq_len=64,
    )


def recipe_of(config: Gemma4_31BConfig) -> QuantRecipe:
    int8 = QuantConfig(bits=8, group_size=config.hidden_size, symmetric=True, method="min_max")
    int4 = QuantConfig(bits=4, group_size=32, symmetric=True, method="min_max")
    return QuantRecipe(
        rules=[
            QuantRule(r"embed_tokens\.weight", int8),
            QuantRule(r".*norm\.weight", None),
            QuantRule(r".*\.weight", int4),
        ]
    )


def on_meta(config: Gemma4_31BConfig) -> Gemma4_31B:
    with torch.device("meta"):
        return Gemma4_31B(config).to(torch.bfloat16).requires_grad_(False)


def write_checkpoint(spec: dict[str, Any], folder: Path) -> int:
    """Random bfloat16 weights, a file for each; the bytes of them all."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    table = {}
    total = 0
    generator = torch.Generator().manual_seed(0)
    for number, (name, meta) in enumerate(on_meta(config_of(spec)).state_dict().items()):
        value = torch.empty(meta.shape, dtype=meta.dtype).normal_(0, 0.02, generator=generator)
        table[name] = f"model-{number:05}.safetensors"
        save_file({name: value}, folder / table[name])
        total += value.nbytes
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": table}))
    return total


# --- loading ------------------------------------------------------------------------------------


def load_stock(config: Gemma4_31BConfig, checkpoint: Path) -> Gemma4_31B:
    """ExecuTorch's ``load_and_quantize``: map the checkpoint, quantize it into a state dict."""
    from safetensors.torch import load_file

    source = on_meta(config)
    for file in sorted(checkpoint.glob("*.safetensors")):
        source.load_state_dict(load_file(file), strict=False, assign=True)
    quantized = quantize_model(source, recipe_of(config))
    del source
    model = on_meta(config)
    assign_state_dict(model, quantized)
    return finished(model)


def load_streaming(config: Gemma4_31BConfig, checkpoint: Path, writer: Any) -> Gemma4_31B:
    """The same weights, each quantized by itself and kept in the store from then on."""
    from cas.torch import load_into

    recipe = recipe_of(config)

    def quantize(name: str, weight: torch.Tensor) -> torch.Tensor:
        wanted = recipe.get_config(name)
        if wanted is None:
            return weight
        # Groups lie within a row, so a weight quantized by rows is the weight quantized whole.
        rows = max(1, BLOCK // weight.shape[-1])
        blocks = [to_default(name, quantize_weight(part, wanted)) for part in weight.split(rows)]
        return fuse_along_output(blocks)

    model = on_meta(config)
    load_into(model, checkpoint, writer, transform=quantize)
    return finished(model)


def finished(model: Gemma4_31B) -> Gemma4_31B:
    model.eval()
    materialize_runtime_buffers(model, dtype=torch.bfloat16)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what quantizing left in the heap is no part of the model
    return model


def weight_bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(weight_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


# --- the steps of the script ----------------------------------------------------------------------


def lower(models: list[Gemma4_31B], config: Gemma4_31BConfig) -> Any:
    """``models`` holds the model, and is emptied when it is not needed any more."""
    longest = min(config.max_seq_len - 1, config.sliding_window * 2)
    length = Dim("seq_len", min=5, max=longest)
    temperature = torch.tensor([1.0])
    enter("export prefill")
    with torch.no_grad():
        prefill = export(
            models[0],
            (torch.zeros((1, longest), dtype=torch.long), torch.arange(longest), temperature),
            dynamic_shapes=({1: length}, {0: length}, None),
            strict=True,
        )
    enter("export decode")
    with torch.no_grad():
        decode = export(
            models.pop(), (torch.tensor([[0]]), torch.tensor([0]), temperature), strict=True
        )
    gc.collect()
    enter("lower")
    inductor_config.coordinate_descent_tuning = False
    inductor_config.aot_inductor.compile_wrapper_opt_level = "O0"
    programs = {"decode": decode, "prefill": prefill}
    with cpu_stands_in():
        edge = to_edge_transform_and_lower(
            programs,
            partitioner={name: [partitioner(name)] for name in programs},
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods={
                "get_max_seq_len": config.max_seq_len,
                "get_vocab_size": config.vocab_size,
                "get_n_layers": config.num_hidden_layers,
                "get_max_prefill_chunk": longest,
                "get_min_prefill_chunk": 5,
                "use_kv_cache": True,
                "use_sdpa_with_kv_cache": False,
                "enable_dynamic_shape": True,
            },
        )
    del decode, prefill, programs
    gc.collect()
    enter("emit")
    return edge.to_executorch(
        ExecutorchBackendConfig(
            extract_delegate_segments=True,
            do_quant_fusion_and_const_prop=True,
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
            emit_mutable_buffer_names=True,
        )
    )


def partitioner(method: str) -> Any:
    from executorch.backends.cuda.cuda_backend import CudaBackend
    from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    return CudaPartitioner(
        [
            CudaBackend.generate_method_name_compile_spec(method),
            CompileSpec("low_memory_mode", b"ON"),
            # Not in the script: these need a GPU.
            CompileSpec("max_autotune", b"OFF"),
            CompileSpec("triton_kernel_mode", b"OFF"),
        ]
    )


def write_stock(program: Any, out: Path) -> None:
    enter("write")
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "model.pte", "wb") as file:
        program.write_to_file(file)
    program.write_tensor_data_to_file(str(out))


def run_stock(spec: dict[str, Any], config: Gemma4_31BConfig, out: Path) -> dict[str, Any]:
    enter("load")
    models = [load_stock(config, Path(spec["checkpoint"]))]
    weights = sum(map(weight_bytes, models[0].parameters()))
    write_stock(lower(models, config), out)
    return {"weights": weights}


def run_cas(spec: dict[str, Any], config: Gemma4_31BConfig, out: Path) -> dict[str, Any]:
    """``engine``: "cas" holds the model in memory, "spill" gives it back, "stream" never does."""
    from cas import Store
    from cas.executorch import capture

    engine = spec["engine"]
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store.open(spec["store"]))
        enter("load")
        if engine == "stream":
            with store.writer() as writer:
                models = [load_streaming(config, Path(spec["checkpoint"]), writer)]
                writer.barrier()
        else:
            models = [load_stock(config, Path(spec["checkpoint"]))]
        weights = sum(map(weight_bytes, models[0].parameters()))
        cap = stack.enter_context(capture(store, "gemma", spill=engine != "cas"))
        if engine != "cas":
            enter("spill")
            cap.spill(models[0])
        program = lower(models, config)
        enter("write")
        cap.save(program, out)
    return {"weights": weights}


def run(spec: dict[str, Any], out: Path) -> dict[str, Any]:
    began = time.monotonic()
    config = config_of(spec)
    engine = run_stock if spec["engine"] == "stock" else run_cas
    return {**engine(spec, config, out), "seconds": round(time.monotonic() - began, 1)}


def warm_up(spec: dict[str, Any]) -> None:
    """Imports and first-use state belong to the idle process: export one layer first."""
    out = Path(spec["out"] + ".warm")
    asked = {"stand_in": True, "strict": True, "low_memory": True}
    inputs = {"forward": (torch.ones(1, 8),)}
    layer = nn.Linear(8, 8).eval()
    if spec["engine"] == "stock":
        write_stock(lower_to_cuda(layer, inputs, asked), out)
        return
    from cas import Store
    from cas.executorch import capture

    with Store.open(spec["store"] + ".warm") as store, capture(store, "warm", spill=True) as cap:
        cap.save(lower_to_cuda(layer, inputs, asked), out)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    spec = json.loads(sys.argv[1])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = spec["inductor"]
    out = Path(spec["out"])
    writes_checkpoint = spec["engine"] == "checkpoint"
    if not writes_checkpoint:
        warm_up(spec)
    print("idle", flush=True)
    sys.stdin.readline()
    if writes_checkpoint:
        result: dict[str, Any] = {"bytes": write_checkpoint(spec, Path(spec["checkpoint"]))}
    else:
        result = run(spec, out)
    print("done", flush=True)
    sys.stdin.readline()
    if not writes_checkpoint:
        result["sha256"] = {path.name: sha256(path) for path in sorted(out.iterdir())}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
