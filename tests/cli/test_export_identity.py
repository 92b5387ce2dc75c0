"""`cas export` writes the files that a script of one's own writes with stock ExecuTorch."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .conftest import NET, Run

pytest.importorskip("executorch")


@dataclass(frozen=True)
class Case:
    """The same export twice: as options of the command, and as arguments of a stock script."""

    attr: str
    backend: str
    options: tuple[str, ...] = ()
    config: str = ""
    stock: Mapping[str, str] = field(default_factory=dict)


#: The name that ExecuTorch gives to the file of external constants.
EXTERNAL = "'_default_external_constant'"

CASES = {
    "portable": Case("make", "portable"),
    "xnnpack": Case("make", "xnnpack"),
    "two methods": Case("methods", "xnnpack"),
    "dynamic shape": Case("dynamic", "xnnpack"),
    "strict": Case("make", "xnnpack", ("--strict",), stock={"strict": "True"}),
    "bfloat16": Case(
        "make", "portable", ("--dtype", "bfloat16"), stock={"dtype": "torch.bfloat16"}
    ),
    "saved": Case("saved.pt2", "xnnpack"),
    # ExecuTorch's own way for a delegate: tag the weights of an unlifted module, export it again.
    "external xnnpack": Case(
        "make",
        "xnnpack",
        ("--external-weights",),
        "ExecutorchBackendConfig(external_constants=True)",
        {"tag": EXTERNAL},
    ),
    "external dynamic": Case(
        "dynamic",
        "xnnpack",
        ("--external-weights",),
        "ExecutorchBackendConfig(external_constants=True)",
        {"tag": EXTERNAL},
    ),
    "external": Case(
        "make",
        "portable",
        ("--external-weights",),
        "ExecutorchBackendConfig(external_constants=True)",
    ),
    "external, own name": Case(
        "make",
        "portable",
        ("--external-tag", "weights"),
        "ExecutorchBackendConfig(external_constants=lambda node: 'weights')",
    ),
    "segments": Case(
        "make",
        "xnnpack",
        ("--no-extract-delegate-segments", "--segment-alignment", "4096"),
        "ExecutorchBackendConfig(extract_delegate_segments=False, segment_alignment=4096)",
    ),
}


#: The three calls of a stock script, for each case, in a process that knows nothing of cas.
STOCK = """
import pathlib, sys, warnings
warnings.simplefilter("ignore")
import net, torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes.external_constants_pass import (
    delegate_external_constants_pass_unlifted,
)

def exported(call, strict=False, dtype=None, tag=None):
    module, args, *rest = call
    shapes = rest[0] if rest else None
    if dtype is not None:
        module, args = module.to(dtype), tuple(arg.to(dtype) for arg in args)
    program = torch.export.export(module, args, dynamic_shapes=shapes, strict=strict)
    if tag is None:
        return program
    unlifted = program.module()
    delegate_external_constants_pass_unlifted(unlifted, gen_tag_fn=lambda node: tag)
    return torch.export.export(unlifted, args, dynamic_shapes=shapes, strict=strict)

def stock(directory, attr, backend, *config, **options):
    if attr == "saved.pt2":
        torch.export.save(exported(net.make()), attr)
        programs = {"forward": torch.export.load(attr)}
    else:
        made = getattr(net, attr)()
        made = made if isinstance(made, dict) else {"forward": made}
        programs = {name: exported(call, **options) for name, call in made.items()}
    partitioner = [XnnpackPartitioner()] if backend == "xnnpack" else None
    edge = to_edge_transform_and_lower(programs, partitioner=partitioner)
    program = edge.to_executorch(*config)
    out = pathlib.Path(directory)
    out.mkdir()
    with open(out / "model.pte", "wb") as file:
        program.write_to_file(file)
    program.write_tensor_data_to_file(str(out))

"""


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory per case, with what stock ExecuTorch writes."""
    directory = tmp_path_factory.mktemp("stock")
    (directory / "net.py").write_text(NET)
    calls = "".join(
        f"stock({name!r}, {case.attr!r}, {case.backend!r}, {case.config or '*()'}, "
        f"{', '.join(f'{key}={value}' for key, value in case.stock.items())})\n"
        for name, case in CASES.items()
    )
    check = "assert not any(name.partition('.')[0] == 'cas' for name in sys.modules)\n"
    subprocess.run(
        [sys.executable, "-c", STOCK + calls + check],
        cwd=directory,
        check=True,
        capture_output=True,
    )
    return directory


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_those_of_a_stock_script(
    export: Run, run: Run, net: Path, stock: Path, name: str
) -> None:
    case = CASES[name]
    if case.attr.endswith(".pt2"):
        outcome = run("export", stock / case.attr, "-o", "out", "--backend", case.backend)
    else:
        outcome = export(case.attr, "--backend", case.backend, *case.options)
    assert outcome.code == 0, outcome.err
    theirs = {path.name: sha256(path) for path in (stock / name).iterdir()}
    assert {path.name: sha256(path) for path in (net / "out").iterdir()} == theirs
    assert (len(theirs) > 1) == ("external" in name)


def test_external_weights_of_a_delegate_leave_the_program(export: Run, net: Path) -> None:
    assert export("dynamic", "--backend", "xnnpack", "--external-tag", "w").code == 0
    assert sorted(path.name for path in (net / "out").iterdir()) == ["model.pte", "w.ptd"]
    assert (net / "out" / "w.ptd").stat().st_size > 4 * 2 * 32 * 64
    assert (net / "out" / "model.pte").stat().st_size < 8192


def test_a_partitioner_of_ones_own(export: Run, net: Path) -> None:
    backend = "executorch.backends.xnnpack.partition.xnnpack_partitioner:XnnpackPartitioner"
    assert export("make", "--backend", backend).code == 0
    own = sha256(net / "out" / "model.pte")
    assert export("make", "--backend", "xnnpack").code == 0
    assert sha256(net / "out" / "model.pte") == own
