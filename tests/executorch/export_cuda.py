"""Exports by ExecuTorch's CudaBackend, and by plain AOTInductor, on a machine without a GPU.

The backend, the partitioner and AOTInductor are the real ones, with "cpu" in place of "cuda" as the
device and all kernels allowed. Run as a script, one process writes everything twice: first stock,
before it imports cas, then under capture; each time in the same Inductor cache::

    python export_cuda.py OUT    ->  OUT/stock/<case>/...  OUT/captured/<case>/...  OUT/report.json
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from executorch.backends.cuda.cuda_backend import CudaBackend
from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.backend.compile_spec_schema import CompileSpec
from export_models import CachedAttention, ConvNet, mlp
from torch import nn
from torch._inductor.package import package_aoti
from torch.export import ExportedProgram, export
from torch.export.pt2_archive._package_weights import Weights

Methods = dict[str, ExportedProgram]

#: What a user would pass on this machine: no autotuning, and no Triton kernels.
SPECS = {"max_autotune": "OFF", "triton_kernel_mode": "OFF"}


class AnyKernel(dict[str, None]):
    """The kernels that the runtime has: on another device they have other names."""

    def __contains__(self, name: object) -> bool:
        return True


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """CudaBackend compiles for the CPU within the block."""
    options = CudaBackend.get_aoti_compile_options

    def for_the_cpu(cls: Any, compile_specs: Any) -> dict[str, Any]:
        # Triton has no convolution for the CPU. The rest of it saves time only.
        return {
            **options(compile_specs),
            "max_autotune_conv_backends": "ATEN",
            "aot_inductor.compile_wrapper_opt_level": "O0",
        }

    with (
        mock.patch.object(CudaBackend, "get_aoti_compile_options", classmethod(for_the_cpu)),
        mock.patch.object(CudaBackend, "get_device_name", classmethod(lambda cls: "cpu")),
        mock.patch.object(
            CudaBackend, "get_supported_fallback_kernels", classmethod(lambda cls: AnyKernel())
        ),
    ):
        yield


class Odd(nn.Module):
    """Tied, bfloat16, integer and empty weights, as parameters and as buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.one = nn.Linear(96, 96, bias=False)
        self.two = nn.Linear(96, 96, bias=False)
        self.two.weight = self.one.weight
        self.low = nn.Linear(96, 90).to(torch.bfloat16)
        self.register_buffer("empty", torch.zeros(0, 96))
        self.register_buffer("int8", torch.randint(-128, 127, (96, 96), dtype=torch.int8))
        self.register_buffer("transposed", torch.randn(96, 70).t())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.two(torch.relu(self.one(x))) @ self.int8.float()
        return (
            self.low(y.to(torch.bfloat16)),
            torch.nn.functional.linear(y, self.transposed),
            torch.cumsum(self.empty, 1),  # not folded away, nor inlined
        )


class Decoder(nn.Module):
    """The low-memory mode knows a key-value cache by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_cache = CachedAttention()
        self.requires_grad_(False)

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return self.kv_cache(token, position)


def two_methods() -> Methods:
    model = mlp()
    return {
        name: export(model, (torch.ones(rows, 64),), strict=False)
        for name, rows in {"prefill": 5, "decode": 1}.items()
    }


def _forward(module: nn.Module, *inputs: torch.Tensor) -> Methods:
    return {"forward": export(module.eval(), inputs, strict=False)}


CASES: dict[str, Callable[[], Methods]] = {
    "mlp_two_methods": two_methods,
    "convnet": lambda: _forward(ConvNet(), torch.ones(1, 3, 16, 16)),
    "kv_cache": lambda: _forward(Decoder(), torch.tensor([7]), torch.tensor([3])),
    "odd": lambda: _forward(Odd(), torch.ones(2, 96)),
}
MODES = ("OFF", "ON")


def lower(methods: Methods, low_memory: str) -> Any:
    """The program, by the calls of ExecuTorch's own CUDA export script."""
    specs = [CompileSpec(key, value.encode()) for key, value in SPECS.items()]
    if low_memory == "ON":
        specs.append(CompileSpec("low_memory_mode", b"ON"))
    partitioner = {
        name: [CudaPartitioner([CudaBackend.generate_method_name_compile_spec(name), *specs])]
        for name in methods
    }
    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    edge = to_edge_transform_and_lower(methods, partitioner=partitioner, compile_config=config)
    return edge.to_executorch()


def write(program: Any, directory: Path) -> None:
    directory.mkdir(parents=True)
    with open(directory / "model.pte", "wb") as file:
        program.write_to_file(file)
    program.write_tensor_data_to_file(str(directory))


# --- plain AOTInductor --------------------------------------------------------------------------


class Plain(Odd):
    """The same weights, and a buffer that is a view of another one, which CudaBackend refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.int8[10:43])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*super().forward(x), torch.nn.functional.linear(x, self.view.float()))


def compile_plain(disk_format: str) -> list[Any]:
    """What ``aot_compile`` gives for a package with its weights outside the library."""
    program = export(Plain().eval(), (torch.ones(2, 96),), strict=False)
    options = {
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": disk_format,
        "aot_inductor.compile_wrapper_opt_level": "O0",
    }
    with torch.no_grad():
        found = torch._inductor.aot_compile(program.module(), (torch.ones(2, 96),), options=options)
    assert isinstance(found, list)
    return found


def keep_files(outputs: list[Any], directory: Path) -> None:
    directory.mkdir(parents=True)
    for path in outputs:
        if isinstance(path, str):
            shutil.copy(path, directory)


# --- the process --------------------------------------------------------------------------------


def write_stock(out: Path) -> None:
    with stand_in():
        for case, methods in CASES.items():
            for mode in MODES:
                write(lower(methods(), mode), out / f"{case}-{mode}")
    keep_files(compile_plain("binary_blob"), out / "aoti")
    if "cas" in sys.modules:
        raise RuntimeError("a stock export must not know of cas")


def write_captured(out: Path, cache: Path) -> dict[str, Any]:
    import cas
    from cas.executorch import capture

    report: dict[str, Any] = {}
    with cas.Store.open(out / "store", chunk_size=64 << 10) as store, stand_in():
        for case, methods in CASES.items():
            for mode in MODES:
                name = f"{case}-{mode}"
                with capture(store, name, threshold=1, map_threshold=1) as cap:
                    before = set(cache.rglob("*"))
                    saved = cap.save(lower(methods(), mode), out / name)
                    made = {path.name for path in set(cache.rglob("*")) - before}
                report[name] = {
                    "tensors": len(store.manifest(saved.commit.ref).tensors),
                    "new_bytes": saved.commit.new_bytes,
                    "left": sorted(name for name in made if name.startswith(".")),
                }
    return report


def export_by_command(out: Path) -> dict[str, Any]:
    """What ``cas export --backend cuda`` does with the options that `lower` uses."""
    from click.testing import CliRunner

    from cas.executorch import backends
    from cas_cli.main import cli

    source = out / "model.py"
    source.write_text("from export_cuda import two_methods\n")
    arguments = [*("--store", str(out / "store"), "export", f"{source}:two_methods")]
    arguments += ["-o", str(out / "command"), "--backend", "cuda", "--json"]
    for key, value in {**SPECS, "low_memory_mode": "ON"}.items():
        arguments += ["--spec", f"{key}={value}"]
    with stand_in(), mock.patch.object(backends, "require_cuda", lambda: None):
        done = CliRunner().invoke(cli, arguments, prog_name="cas")
    return {"code": done.exit_code, "stdout": done.stdout, "stderr": done.stderr[-2000:]}


def export_without_library(out: Path) -> str:
    """What an export says whose compile gave no library."""
    import cas
    from cas.executorch import capture

    outputs = ["/cache/c.wrapper.cpp", Weights({"w": (torch.ones(9), None)})]
    with (
        cas.Store.open(out / "store") as store,
        stand_in(),
        mock.patch.object(torch._inductor, "aot_compile", lambda gm, args, options: outputs),
        capture(store),
    ):
        try:
            lower(_forward(nn.Linear(4, 4), torch.ones(1, 4)), "OFF")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def write_packages(out: Path) -> None:
    """The same graph with its weights in a file and as tensors, as a list and as an archive."""
    import cas
    from cas.executorch import capture, hooks_aoti
    from cas.executorch.aoti import capture_package

    with cas.Store.open(out / "store", chunk_size=64 << 10) as store:
        with capture(store, map_threshold=1), mock.patch.object(hooks_aoti, "MIN_SCRATCH", 1):
            outputs = compile_plain("binary_blob")
        capture_package(store, outputs, "aoti", out / "aoti")
        keep_files(outputs, out / "aoti_files")
        capture_package(store, compile_plain("pickle_weights"), "tensors", out / "aoti_tensors")
        archive = str(out / "model.pt2")
        package_aoti(archive, outputs)
        capture_package(store, archive, "archive", out / "aoti_archive")


def main(out: Path) -> None:
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    began = time.process_time(), time.monotonic()
    write_stock(out / "stock")
    report = write_captured(out / "captured", cache)
    report["command"] = export_by_command(out / "captured")
    report["without library"] = export_without_library(out / "captured")
    write_packages(out / "captured")
    children = os.times()
    report["seconds"] = {
        "wall": time.monotonic() - began[1],
        "cpu": time.process_time() - began[0] + children.children_user + children.children_system,
    }
    (out / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
