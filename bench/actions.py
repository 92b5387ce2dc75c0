"""What finding a compile in the store saves: stock ExecuTorch, `cas` the first time, and again.

    python bench/actions.py [--only aoti,whole,edits] [--layers 32] [--rounds 1] [--json FILE]

- aoti: a transformer of four layers through AOTInductor with max_autotune, on the CPU.
- whole: a model of many small layers through XNNPACK, its whole export as one action.
- delegates: the same model, each partition an action.
- edits: the actions of a model after an edit, with canonical and with strict keys.

Every export of the first three runs in a fresh process, with an Inductor cache that nothing is in.
Seconds run from the programs that ``torch.export`` made to the written files: that is lowering,
``to_executorch`` and writing. "cold" is the first export with an empty store, "warm" the same one
in another process. Files are compared byte for byte; those of stock and of a tuned compile differ
from run to run, so a warm one is compared with the cold one there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Experiment -> at least so many times as fast as stock when warm, and at most so slow when cold.
BUDGETS = {"aoti": 10.0, "whole": 50.0, "delegates": 1.0}
COLD = 1.10
ENGINES = ("stock", "cold", "warm")


# --- the models, and the export in a process of its own -----------------------------------------


def decoder(layers: int, width: int, seeds: tuple[int, ...] = ()) -> Any:
    import torch
    from torch import nn

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Any) -> Any:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight

    class Layer(nn.Module):
        def __init__(self, seed: int, heads: int = 4) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.heads = heads
            self.before, self.between = Norm(), Norm()
            self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
            self.gate, self.up = (nn.Linear(width, 3 * width) for _ in range(2))
            self.down = nn.Linear(3 * width, width)

        def split(self, x: Any) -> Any:
            return x.view(x.shape[0], self.heads, width // self.heads).transpose(0, 1)

        def forward(self, x: Any) -> Any:
            y = self.before(x)
            q, k, v = self.split(self.q(y)), self.split(self.k(y)), self.split(self.v(y))
            scores = torch.softmax(q @ k.transpose(1, 2) / (width // self.heads) ** 0.5, -1)
            x = x + self.o((scores @ v).transpose(0, 1).reshape(x.shape))
            y = self.between(x)
            return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    model = nn.Sequential(*(Layer(seed) for seed in seeds or range(layers))).eval()
    return model.requires_grad_(False)


def exported(layers: int, width: int, seeds: tuple[int, ...] = (), rows: int = 16) -> Any:
    import torch

    inputs = (torch.ones(rows, width),)
    return torch.export.export(decoder(layers, width, seeds), inputs, strict=False)


def aoti_partitioner() -> Any:
    """AOTInductor for the CPU, by the code that compiles for GPUs."""
    from executorch.backends.aoti.aoti_backend import AotiBackend
    from executorch.backends.aoti.aoti_partitioner import AotiPartitioner
    from executorch.exir.backend.backend_details import BackendDetails
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    class AnyKernel(dict[str, None]):
        def __contains__(self, name: object) -> bool:
            return True

    class AotiOnCpu(AotiBackend, BackendDetails):
        @classmethod
        def get_device_name(cls) -> str:
            return "cpu"

        @classmethod
        def get_supported_fallback_kernels(cls) -> Any:
            return AnyKernel()

        @classmethod
        def get_decomposition_table(cls) -> Any:
            return {}

        @classmethod
        def get_custom_passes(cls, compile_specs: Any) -> Any:
            return []

        @classmethod
        def save_data_externally(cls) -> bool:
            return True

        @classmethod
        def get_aoti_compile_options(cls, compile_specs: Any) -> Any:
            return {
                "aot_inductor.link_libtorch": False,
                "aot_inductor.package": True,
                "aot_inductor.package_constants_in_so": False,
                "aot_inductor.package_constants_on_disk_format": "binary_blob",
                "max_autotune": True,
            }

    specs = [
        AotiOnCpu.generate_method_name_compile_spec("forward"),
        CompileSpec("max_autotune", b"ON"),
    ]
    partitioner = AotiPartitioner("AotiOnCpu", specs)
    partitioner.backend = AotiOnCpu  # which ExecuTorch knows by its name, and does not hold
    return partitioner


def xnnpack_partitioner() -> Any:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    return XnnpackPartitioner()


def lower_and_write(program: Any, partitioner: Any, out: Path) -> float:
    import executorch.exir as exir

    started = time.perf_counter()
    config = exir.EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    edge = exir.to_edge_transform_and_lower(
        program, partitioner=[partitioner], compile_config=config
    )
    finished = edge.to_executorch()
    out.mkdir(parents=True)
    with open(out / "model.pte", "wb") as file:
        finished.write_to_file(file)
    finished.write_tensor_data_to_file(str(out))
    return time.perf_counter() - started


@contextlib.contextmanager
def engine(name: str, experiment: str, store: Path) -> Iterator[Any]:
    """Nothing around a stock export, and a capture around the others."""
    if name == "stock":
        yield None
        return
    import cas
    from cas.executorch import capture
    from cas.executorch.actions.outcomes import ActionOptions

    options = ActionOptions(whole=experiment == "whole")
    with cas.Store.open(store) as opened, capture(opened, actions=options) as captured:
        yield captured


def child(experiment: str, name: str, store: Path, out: Path, layers: int) -> dict[str, Any]:
    """One export; the clocks stand still while modules are imported."""
    if experiment == "aoti":
        program, partitioner = exported(4, 256), aoti_partitioner()
        import torch._inductor.lowering  # noqa: F401  as the backend does anyway
    else:
        program, partitioner = exported(layers, 128), xnnpack_partitioner()
    # Once, so that imports and one-time set-up are in nobody's figure.
    small = exported(1, 32, rows=2)
    lower_and_write(small, xnnpack_partitioner(), out / "small")
    with engine(name, experiment, store) as captured:
        cpu = time.process_time() + children_seconds()
        seconds = lower_and_write(program, partitioner, out / "files")
        cpu = time.process_time() + children_seconds() - cpu
    found: dict[str, Any] = {"seconds": seconds, "cpu": cpu, "hits": 0, "misses": 0}
    if captured is not None:
        found["hits"] = captured.outcomes.hits
        found["misses"] = captured.outcomes.missed
        found["uncacheable"] = dict(captured.outcomes.uncacheable)
        found["key_seconds"] = captured.outcomes.key_seconds
    found["sha256"] = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((out / "files").iterdir())
    }
    return found


def children_seconds() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


# --- the experiments ----------------------------------------------------------------------------


def run(work: Path, experiment: str, name: str, layers: int) -> dict[str, Any]:
    """One export in a fresh process, with an Inductor cache of its own."""
    out = work / "out"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor")}
    command = [sys.executable, "-W", "ignore", __file__, "--child", experiment, name]
    command += [str(work / "store"), str(out), str(layers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{experiment} {name} failed:\n{done.stderr[-3000:]}")
    shutil.rmtree(out)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(work: Path, experiment: str, layers: int, rounds: int) -> dict[str, Any]:
    """The three engines, taking turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
    for _ in range(rounds):
        shutil.rmtree(work / "store", ignore_errors=True)
        for name in ENGINES:
            found[name].append(run(work, experiment, name, layers))
        cold, warm = found["cold"][-1], found["warm"][-1]
        if warm["sha256"] != cold["sha256"]:
            raise SystemExit(f"{experiment}: a hit gave other files")
        if experiment != "aoti" and cold["sha256"] != found["stock"][-1]["sha256"]:
            raise SystemExit(f"{experiment}: the files are not those of stock")
    middle = {name: statistics.median(r["seconds"] for r in found[name]) for name in ENGINES}
    cpu = {name: statistics.median(r["cpu"] for r in found[name]) for name in ENGINES}
    last = {name: found[name][-1] for name in ENGINES}
    return {
        "seconds": middle,
        "cpu": cpu,
        "faster": middle["stock"] / middle["warm"],
        "cold": middle["cold"] / middle["stock"],
        "cold cpu": cpu["cold"] / cpu["stock"],
        "cold misses": last["cold"]["misses"],
        "warm hits": last["warm"]["hits"],
        "warm misses": last["warm"]["misses"],
    }


def report(experiment: str, found: dict[str, Any]) -> bool:
    """Print one experiment; whether it is within its budgets."""
    seconds = found["seconds"]
    budget = BUDGETS[experiment]
    fine = found["faster"] >= budget and found["cold"] <= COLD
    print(
        f"{experiment:10} stock {seconds['stock']:7.2f} s   cold {seconds['cold']:7.2f} s "
        f"({found['cold']:.2f} x, CPU {found['cold cpu']:.2f} x, {found['cold misses']} misses)   "
        f"warm {seconds['warm']:6.2f} s ({found['faster']:.1f} x faster, CPU "
        f"{found['cpu']['stock'] / found['cpu']['warm']:.1f} x, "
        f"{found['warm hits']} hits, {found['warm misses']} misses)   "
        f"{'ok' if fine else f'MISSED: warm >= {budget:g} x, cold <= {COLD:g} x'}",
        flush=True,
    )
    return fine


#: Edit -> the seeds of the layers, and the length of the input.
EDITS: dict[str, tuple[tuple[int, ...], int]] = {
    "first export": ((1, 2, 3, 4), 16),
    "same again": ((1, 2, 3, 4), 16),
    "one weight changed": ((1, 2, 3, 4), 16),
    "layer inserted in front": ((9, 1, 2, 3, 4), 16),
    "layer removed": ((1, 3, 4), 16),
    "sequence length 16 -> 24": ((1, 2, 3, 4), 24),
}


def edit(name: str) -> Any:
    seeds, rows = EDITS[name]
    program = exported(0, 128, seeds, rows)
    if name == "one weight changed":
        program.state_dict["1.up.weight"][0, 0] += 1.0
    return program


def edits(work: Path, canonical: bool) -> dict[str, Any]:
    """In one process: what an edit costs in hits, misses and bytes."""
    import cas
    from cas.executorch import capture
    from cas.executorch.actions import backends

    known = backends._XNNPACK_SOURCES
    backends._XNNPACK_SOURCES = known if canonical else frozenset()
    found = {}
    try:
        with cas.Store.open(work / f"edits-{canonical}") as store:
            for n, name in enumerate(EDITS):
                program = edit(name)
                with capture(store) as captured:
                    out = work / f"{canonical}-{n}"
                    lower_and_write(program, xnnpack_partitioner(), out)
                    outcomes, counters = captured.outcomes, captured.counters
                    grown = counters.new_bytes
                found[name] = {"hits": outcomes.hits, "misses": outcomes.missed, "new": grown}
    finally:
        backends._XNNPACK_SOURCES = known
    return found


def report_edits(canonical: dict[str, Any], strict: dict[str, Any]) -> bool:
    print(f"{'edit':28} {'canonical':>12} {'strict':>12} {'new bytes':>14}   (hits/misses)")
    for name in EDITS:
        cells = [f"{found[name]['hits']}/{found[name]['misses']}" for found in (canonical, strict)]
        print(f"{name:28} {cells[0]:>12} {cells[1]:>12} {canonical[name]['new']:>14,}")
    before = canonical["same again"]["hits"]
    fine = canonical["layer inserted in front"]["hits"] == before
    print(f"{'':28} {'ok' if fine else 'MISSED: a hit for every partition that is unchanged'}")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="aoti,whole,delegates,edits")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        experiment, name, store, out, layers = given.child
        warnings.simplefilter("ignore")
        print(json.dumps(child(experiment, name, Path(store), Path(out), int(layers))))
        return 0
    results: dict[str, Any] = {}
    fine = True
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        for experiment in given.only.split(","):
            if experiment == "edits":
                results["edits"] = {
                    name: edits(work, name == "canonical") for name in ("canonical", "strict")
                }
                fine &= report_edits(results["edits"]["canonical"], results["edits"]["strict"])
            else:
                found = compare(work, experiment, given.layers, given.rounds)
                results[experiment] = found
                fine &= report(experiment, found)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
