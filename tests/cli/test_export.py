"""`cas export`: what it writes, and what it says about sources that cannot be exported."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cas.exportspec import parse_source
from cas.testing.damage import fill_disk

from .conftest import Outcome, Run

pytest.importorskip("executorch")

SOURCE = """
import ctypes
import sys

import torch
from torch.export import Dim

print("the user's own output")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(32, 64)
        self.second = torch.nn.Linear(64, 32)
        self.register_buffer("scale", torch.arange(32.0))

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * self.scale + 1


class Keyword(Net):
    def forward(self, *, x):
        return super().forward(x)


X = torch.ones(4, 32)


def make():
    return Net().eval(), (X,)


def dynamic():
    return Net().eval(), (X,), {"x": {0: Dim("batch", max=16)}}


def keyword():
    return Keyword().eval(), (), {"x": X}


def methods():
    net = Net().eval()
    return {"one": (net, (X,)), "two": (net, (torch.ones(2, 32),))}


def exported():
    return torch.export.export(Net().eval(), (X,))


program = torch.export.export(Net().eval(), (X,))
table = {"a": program, "b": (Net().eval(), (X,))}


class Holder:
    inner = staticmethod(make)


def bare():
    return Net()


def nothing():
    return None


def text():
    return "a model"


def short():
    return (Net(),)


def long():
    return Net(), (X,), {}, None, 1


def no_module():
    return "Net", (X,)


def loose_input():
    return Net(), X


def bad_keywords():
    return Net(), (X,), 3, None


def empty():
    return {}


def bad_method():
    return {"not a name": (Net(), (X,))}


def raises():
    missing = {}
    return missing["weights"]


def parameters(size):
    return Net(), (X,)


class Branch(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def untraceable():
    return Branch().eval(), (X,)


class Exits(torch.nn.Module):
    def forward(self, x):
        sys.exit()


def exits():
    return Exits().eval(), (X,)


class Handled(torch.nn.Module):
    def forward(self, x):
        try:
            open("no such file")
        except OSError:
            raise ValueError("the real reason")


def handled():
    return Handled().eval(), (X,)


def wrong_shape():
    return Net().eval(), (torch.ones(4, 7),)


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        return x


def complex_buffer():
    return Complex().eval(), (X,)


def prints():
    ctypes.CDLL(None).printf(b"from native code\\n")
    sys.__stdout__.write("around the redirection\\n")
    return make()


def partitioner_exits():
    sys.exit(0)


def not_quantized_outside():
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    net = Net().eval()
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    )
    quantize_(net, config)
    return net, (X,)
"""


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
    (directory / "net.py").write_text(SOURCE)
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


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def export(run: Run, net: Path) -> Callable[..., Outcome]:
    def call(attr: str, *options: object) -> Outcome:
        return run("export", f"net.py:{attr}", "-o", "out", *options)

    return call


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_those_of_a_stock_script(
    export: Callable[..., Outcome], run: Run, net: Path, stock: Path, name: str
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


def test_external_weights_of_a_delegate_leave_the_program(
    export: Callable[..., Outcome], net: Path
) -> None:
    assert export("dynamic", "--backend", "xnnpack", "--external-tag", "w").code == 0
    assert sorted(path.name for path in (net / "out").iterdir()) == ["model.pte", "w.ptd"]
    assert (net / "out" / "w.ptd").stat().st_size > 4 * 2 * 32 * 64
    assert (net / "out" / "model.pte").stat().st_size < 8192


def test_json_has_the_documented_keys_and_nothing_else_on_stdout(
    export: Callable[..., Outcome], net: Path
) -> None:
    document = export("make", "--json", "--basename", "net").json
    assert list(document) == [
        "ref",
        "manifest",
        "files",
        "logical_bytes",
        "new_bytes",
        "chunks",
        "new_chunks",
        "seconds",
    ]
    assert document["ref"] == "net/make@1"
    assert document["files"][0]["path"] == str(Path("out") / "net.pte")
    assert document["logical_bytes"] == (net / "out" / "net.pte").stat().st_size
    assert document["new_bytes"] > 0


def test_what_the_source_prints_goes_to_stderr(export: Callable[..., Outcome]) -> None:
    outcome = export("make")
    assert "the user's own output" in outcome.err
    assert "the user's own output" not in outcome.out


def test_a_second_export_adds_nothing(export: Callable[..., Outcome]) -> None:
    assert export("make", "--json").json["new_chunks"] > 0
    again = export("make", "--json").json
    assert (again["ref"], again["new_chunks"], again["new_bytes"]) == ("net/make@2", 0, 0)


def test_the_same_export_again_is_not_lowered(
    export: Callable[..., Outcome], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = export("make", "--json").json["files"][0]["blake3"]
    assert export("make", "--json", "--no-actions").json["files"][0]["blake3"] == first
    monkeypatch.setattr(
        "executorch.exir.program._program._gen_edge_manager_for_partitioners",
        lambda *_: pytest.fail("it was lowered"),
    )
    again = export("make", "--json").json
    assert (again["files"][0]["blake3"], again["ref"]) == (first, "net/make@3")
    monkeypatch.undo()
    assert run("stats", "--json", "-v").json["action_counters"]["hits"] == 1


def test_the_origin_is_recorded(export: Callable[..., Outcome], run: Run) -> None:
    assert export("make", "--name", "n", "--no-dim-order", "--dtype", "float16").code == 0
    document = run("show", "n", "--json").json
    found = document["provenance"]
    assert found["source"] == "net.py:make"
    assert found["options"] == {
        "backend": "portable",
        "external_weights": False,
        "dtype": "float16",
        "dim_order": False,
    }
    assert set(found["versions"]) == {"cas", "executorch", "torch"}
    assert found["created"].endswith("+00:00")
    assert {t["dtype"] for t in document["tensors"]} & {"float16", "half", "torch.float16"}


@pytest.mark.parametrize(
    "attr", ["keyword", "exported", "program", "table", "Holder.inner"], ids=str
)
def test_every_form_of_source_is_taken(export: Callable[..., Outcome], attr: str) -> None:
    outcome = export(attr)
    assert outcome.code == 0, outcome.err


def test_a_program_file_and_a_module_are_sources_too(run: Run, net: Path) -> None:
    import torch

    (net / "pkg").mkdir()
    (net / "pkg" / "__init__.py").write_text("")
    (net / "pkg" / "model.py").write_text(SOURCE.replace("print", "len"))
    outcome = run("export", "pkg.model:make", "-o", "out", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["ref"] == "model/make@1"
    net_module = torch.nn.Linear(4, 4).eval()
    torch.export.save(torch.export.export(net_module, (torch.ones(1, 4),)), "saved model.pt2")
    outcome = run("export", "saved model.pt2", "-o", "out", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["ref"] == "saved-model@1"


def test_a_partitioner_of_ones_own(export: Callable[..., Outcome], net: Path) -> None:
    backend = "executorch.backends.xnnpack.partition.xnnpack_partitioner:XnnpackPartitioner"
    assert export("make", "--backend", backend).code == 0
    own = sha256(net / "out" / "model.pte")
    assert export("make", "--backend", "xnnpack").code == 0
    assert sha256(net / "out" / "model.pte") == own


# --- what cannot be exported --------------------------------------------------------------------


def test_backend_cuda_on_a_machine_without_cuda(export: Callable[..., Outcome], net: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    outcome = export("make", "--backend", "cuda", "--spec", "low_memory_mode=ON")
    assert outcome.code == 5
    assert outcome.err.startswith("cas: backend cuda ")
    assert "GPU" in outcome.err
    assert not (net / "out").exists()


INVALID = {
    "bare": "gave a module without example inputs; return (module, args)",
    "nothing": "gave None; expected (module, args[, kwargs][, dynamic_shapes])",
    "text": "gave a str; expected",
    "short": "gave a tuple of 1 entries",
    "long": "gave a tuple of 5 entries",
    "no_module": "begins with a str, not with a torch.nn.Module",
    "loose_input": "the example inputs are a Tensor, not a tuple; for one input write",
    "bad_keywords": "the keyword inputs are an int, not a dict",
    "empty": "gave an empty dict",
    "bad_method": "the key 'not a name': not a method name",
    "raises": "KeyError: 'weights'\n    return missing[\"weights\"]",
    "parameters": "missing 1 required positional argument: 'size'",
    "X": "gave a Tensor; expected",
}


@pytest.mark.parametrize("attr", INVALID)
def test_a_source_that_gives_the_wrong_thing(
    export: Callable[..., Outcome], net: Path, run: Run, attr: str
) -> None:
    outcome = export(attr)
    assert outcome.code == 2, outcome.err
    assert INVALID[attr] in outcome.err
    assert "Traceback" not in outcome.err
    assert not (net / "out").exists()
    assert run("ls", "--json").json["refs"] == []


def test_an_error_in_the_source_is_shown_at_its_own_line(
    export: Callable[..., Outcome], net: Path
) -> None:
    line = SOURCE.splitlines().index('    return missing["weights"]') + 1
    assert f"{net / 'net.py'}:{line}: KeyError" in export("raises").err
    assert "Traceback" in export("raises", "-v").err


def test_an_attribute_that_does_not_exist(export: Callable[..., Outcome]) -> None:
    outcome = export("mkae")
    assert outcome.code == 3
    assert "net.py has no 'mkae'; it defines Net, Keyword, make" in outcome.err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named"),
        ("def broken(:\n    pass", "SyntaxError"),
        ("import sys\nsys.exit(3)", "it called sys.exit(3); guard that with"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
    ids=["import", "syntax", "exit", "raise"],
)
def test_a_source_that_does_not_import(run: Run, net: Path, body: str, message: str) -> None:
    (net / "bad.py").write_text(f"# a comment\n{body}\n")
    outcome = run("export", "bad.py:make", "-o", "out")
    assert outcome.code == 2
    assert message in outcome.err
    assert "bad.py:" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_module_that_cannot_be_found_and_one_that_fails(run: Run, net: Path) -> None:
    outcome = run("export", "no_such_package.models:make", "-o", "out")
    assert outcome.code == 3
    assert "there is no module 'no_such_package'" in outcome.err
    (net / "needy.py").write_text("import no_such_dependency\n")
    outcome = run("export", "needy:make", "-o", "out")
    assert outcome.code == 2
    assert "needy.py:1" in outcome.err


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_program_file(run: Run, net: Path, keep: int) -> None:
    import torch

    whole = net / "whole.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(1, 4),)), whole)
    (net / "cut.pt2").write_bytes(whole.read_bytes()[: whole.stat().st_size * keep // 200 or keep])
    outcome = run("export", "cut.pt2", "-o", "out")
    assert outcome.code == 4
    assert "cut.pt2" in outcome.err
    assert "torch.export.save" in outcome.err


def test_a_model_that_cannot_be_traced(export: Callable[..., Outcome], run: Run) -> None:
    outcome = export("untraceable")
    assert outcome.code == 1
    assert "cas: export failed: " in outcome.err
    assert "Traceback" not in outcome.err
    assert run("ls", "--json").json["refs"] == []
    assert run("verify").code == 0


@pytest.mark.parametrize(
    ("attr", "message"),
    [
        ("exits", "cas: export failed: the code called sys.exit()"),
        ("handled", "cas: export failed: ValueError: the real reason"),
        ("wrong_shape", "cas: export failed: RuntimeError: a and b must have same reduction dim"),
    ],
)
def test_a_model_that_fails_while_it_is_traced(
    export: Callable[..., Outcome], spawn: Run, net: Path, attr: str, message: str
) -> None:
    outcome = spawn("export", f"net.py:{attr}", "-o", "out", cwd=net)
    assert outcome.code == 1
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert lines[-1].startswith(message)
    assert lines[:-1] == ["the user's own output"]


def test_a_partitioner_that_exits(export: Callable[..., Outcome]) -> None:
    outcome = export("make", "--backend", "net:partitioner_exits")
    assert outcome.code == 1
    assert "making the partitioner net:partitioner_exits failed: the code called" in outcome.err


@pytest.mark.parametrize("backend", ["no_such_module.x:Y", "net:Missing"])
def test_a_backend_that_does_not_exist(export: Callable[..., Outcome], backend: str) -> None:
    outcome = export("make", "--backend", backend)
    assert outcome.code == 3, outcome.err
    assert f"backend {backend}: " in outcome.err


def test_native_output_does_not_reach_stdout(spawn: Run, net: Path) -> None:
    buffered = {"PYTHONUNBUFFERED": ""}
    outcome = spawn("export", "net.py:prints", "-o", "out", "--json", cwd=net, **buffered)
    assert outcome.code == 0, outcome.err
    assert outcome.json["ref"] == "net/prints@1"
    assert "from native code" in outcome.err
    assert "around the redirection" in outcome.err


def test_a_complex_weight_is_not_converted(export: Callable[..., Outcome]) -> None:
    outcome = export("complex_buffer", "--dtype", "float16")
    assert outcome.code == 2
    assert "cannot convert phase, which is complex" in outcome.err


def test_weights_that_stay_inside_are_told(export: Callable[..., Outcome]) -> None:
    outcome = export("not_quantized_outside", "--backend", "xnnpack", "--external-weights")
    assert outcome.code == 0, outcome.err
    assert "bytes of weights stayed in model.pte" in outcome.err
    assert "stayed in" not in export("make", "--backend", "xnnpack", "--external-weights").err


@pytest.mark.parametrize(("flags", "spill"), [([], True), (["--no-spill"], False)])
def test_a_model_is_spilled_unless_told_not_to(
    flags: list[str],
    spill: bool,
    export: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cas.errors import Refused
    from cas.executorch import exporting

    def record(*args: object, **kwargs: object) -> None:
        raise Refused(f"spill is {kwargs['spill']}")

    monkeypatch.setattr(exporting, "export_source", record)
    assert f"spill is {spill}" in export("make", *flags).err


def test_a_file_of_torch_save_is_no_source(run: Run, net: Path) -> None:
    import torch

    torch.save(torch.nn.Linear(4, 4).state_dict(), net / "weights.pt2")
    outcome = run("export", "weights.pt2", "-o", "out")
    assert outcome.code == 2
    assert "was not written by torch.export.save" in outcome.err


def test_a_program_file_that_may_not_be_read(
    run: Run, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cas.executorch import loading

    (net / "closed.pt2").write_bytes(b"")

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(loading, "open", refuse, raising=False)
    outcome = run("export", "closed.pt2", "-o", "out")
    assert outcome.code == 5
    assert "cannot read closed.pt2: permission denied" in outcome.err


def test_the_directory_of_a_program_file_is_not_imported_from(tmp_path: Path) -> None:
    from cas.executorch.loading import import_path

    before = list(sys.path)
    with import_path(parse_source(str(tmp_path / "program.pt2"))):
        assert sys.path == before
    with import_path(parse_source(f"{tmp_path / 'net.py'}:make")):
        assert sys.path == [str(tmp_path), *before]


def test_an_unsupported_executorch_is_found_before_the_source_runs(
    run: Run, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executorch import version

    monkeypatch.setattr(version, "__version__", "1.6.0")
    outcome = run("export", "net.py:make", "-o", "out")
    assert outcome.code == 5
    assert "the user's own output" not in outcome.err


def test_a_full_disk_under_the_store(net: Path, small_disk: Path, run: Run) -> None:
    (net / "big.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(1024, 1024).eval(), (torch.zeros(1, 1024),)\n"
    )
    outcome = run("--store", small_disk / "store", "export", "big.py:make", "-o", "out")
    assert outcome.code == 6, outcome.err
    assert "no space left" in outcome.err
    assert str(small_disk) in outcome.err
    assert not (net / "out" / "model.pte").exists()


def test_a_full_disk_under_the_output_leaves_nothing_behind(
    net: Path, small_disk: Path, export: Callable[..., Outcome], run: Run
) -> None:
    fill_disk(small_disk, leave=8192)
    outcome = run("export", "net.py:make", "-o", small_disk / "out")
    assert outcome.code == 6
    assert "only 8192 are free for the output" in outcome.err, "told before the export began"
    assert str(small_disk) in outcome.err
    assert list((small_disk / "out").iterdir()) == []
    assert run("ls", "--json").json["refs"] == []
    assert run("verify").code == 0
