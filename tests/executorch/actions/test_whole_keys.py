"""What the key of a whole export depends on, and what it does not."""

from __future__ import annotations

import functools
import importlib
import io
import json
import logging
import operator
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.partitioner import DelegationSpec
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
from torch.export import ExportedProgram, export

import cas
from cas.executorch import capture
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.objects import ObjectEncoder
from cas.executorch.actions.weights import StorageDigests
from cas.executorch.actions.whole_keys import Request, WholeKey, lowering_key

ROOT = Path(__file__).resolve().parents[3]


def program_of(seed: int = 0, width: int = 16) -> ExportedProgram:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU()).eval()
    return export(model, (torch.zeros(2, 8),), strict=False)


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return program_of()


def key(programs: Any, config: Any = None, **options: Any) -> WholeKey:
    request = Request.of((programs,), options)
    assert request is not None
    return lowering_key(request, StorageDigests()).with_config(config)


class Pass:
    """A user's pass with an option and a constant."""

    LIMIT: ClassVar[int] = 3

    def __init__(self, option: Any = None) -> None:
        self.option = option

    def __call__(self, module: Any) -> Any:
        return module, 1.5


def other_pass(name: str = "Pass", number: str = "1.5", limit: str = "3") -> Any:
    """The same class from other source."""
    source = (
        f"class {name}:\n    LIMIT = {limit}\n    def __init__(self, option=None):\n"
        f"        self.option = option\n    def __call__(self, module):\n"
        f"        return module, {number}\n"
    )
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(source, namespace)
    return namespace[name]()


TAG = "model"


def tagger(tag: str) -> Callable[[Any], str]:
    return lambda node: tag


def of_global(node: Any) -> str:
    return TAG


SETTINGS: Any = None


def of_module(node: Any) -> Any:
    return SETTINGS.FACTOR


def encoded(value: Any) -> bytes:
    encoder = ObjectEncoder()
    encoder.put(value)
    return encoder.stream.bytes()


def tensor_constant(value: float) -> dict[str, Any]:
    return {"value": torch.tensor([value]), "length": 3}


def planned(**options: Any) -> ExecutorchBackendConfig:
    return ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(**options))


#: Each makes the arguments of a request, and no two of them are the same.
VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "xnnpack": lambda: {"partitioner": [XnnpackPartitioner()]},
    "xnnpack by method": lambda: {"partitioner": {"forward": [XnnpackPartitioner()]}},
    "two partitioners": lambda: {"partitioner": [XnnpackPartitioner(), XnnpackPartitioner()]},
    "per op": lambda: {"partitioner": [XnnpackPartitioner(per_op_mode=True)]},
    "precision": lambda: {
        "partitioner": [XnnpackPartitioner(config_precisions=ConfigPrecisionType.STATIC_QUANT)]
    },
    "no dim order": lambda: {"compile_config": EdgeCompileConfig(_skip_dim_order=True)},
    "preserved": lambda: {
        "compile_config": EdgeCompileConfig(preserve_ops=[torch.ops.aten.linear.default])
    },
    "constant 1": lambda: {"constant_methods": tensor_constant(1.0)},
    "constant 2": lambda: {"constant_methods": tensor_constant(2.0)},
    "pass": lambda: {"transform_passes": [Pass()]},
    "pass with an option": lambda: {"transform_passes": [Pass(1)]},
    "pass with an option of another type": lambda: {"transform_passes": [Pass(1.0)]},
    "pass with another constant in it": lambda: {"transform_passes": [other_pass(number="2.5")]},
    "pass with another class attribute": lambda: {"transform_passes": [other_pass(limit="4")]},
    "pass of another name": lambda: {"transform_passes": [other_pass("Else")]},
    "pass in a dict": lambda: {"transform_passes": {"forward": [Pass()]}},
    "segments": lambda: {"config": ExecutorchBackendConfig(segment_alignment=4096)},
    "planning": lambda: {"config": planned(alloc_graph_input=False)},
    "planning by another algorithm": lambda: {"config": planned(memory_planning_algo=tagger("a"))},
    "external": lambda: {"config": ExecutorchBackendConfig(external_constants=True)},
    "tag a": lambda: {"config": ExecutorchBackendConfig(external_constants=tagger("a"))},
    "tag b": lambda: {"config": ExecutorchBackendConfig(external_constants=tagger("b"))},
    "partial": lambda: {
        "config": ExecutorchBackendConfig(external_constants=functools.partial(tagger("a"), k=1))
    },
    "global": lambda: {"config": ExecutorchBackendConfig(external_constants=of_global)},
    "shapes": lambda: {
        "config": ExecutorchBackendConfig(sym_shape_eval_pass=ConstraintBasedSymShapeEvalPass())
    },
}
#: What is no variant but another way to say something.
SAME = {"shapes": "nothing"}


def test_everything_that_is_asked_for_counts(program: ExportedProgram) -> None:
    found: dict[Any, str] = {}
    for name, make in VARIANTS.items():
        digest = key(program, **make()).digest
        assert digest == key(program, **make()).digest, f"{name} is not the same twice"
        assert found.setdefault(digest, name) == SAME.get(name, name)
    for other in (program_of(1), program_of(width=24), {"other": program}):
        digest = key(other).digest
        assert digest not in found
        found[digest] = "another program"


def test_defaults_are_what_they_stand_for(program: ExportedProgram) -> None:
    spelled = key(program, ExecutorchBackendConfig(), compile_config=EdgeCompileConfig())
    assert spelled.digest == key({"forward": program}).digest == key(program).digest


def test_a_global_value_that_a_function_uses_counts(
    program: ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ExecutorchBackendConfig(external_constants=of_global)
    before = key(program, config).digest
    monkeypatch.setattr(sys.modules[__name__], "TAG", "else")
    assert key(program, config).digest != before


def test_a_replaced_method_of_a_known_class_counts(
    program: ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(program, partitioner=[XnnpackPartitioner()]).digest
    monkeypatch.setattr(XnnpackPartitioner, "partition", lambda self, program: None)
    assert key(program, partitioner=[XnnpackPartitioner()]).digest != before


def test_a_set_attribute_of_a_known_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = encoded(XnnpackPartitioner)
    monkeypatch.setattr(XnnpackPartitioner, "option", 1, raising=False)
    assert encoded(XnnpackPartitioner) != before


def test_a_list_that_a_known_class_keeps_counts_when_it_is_changed() -> None:
    quantizer = XNNPACKQuantizer()
    before = encoded(quantizer), encoded(XNNPACKQuantizer)
    patterns = XNNPACKQuantizer.SUPPORTED_PATTERNS
    last = patterns.pop()
    try:
        assert encoded(quantizer) != before[0] and encoded(XNNPACKQuantizer) != before[1]
    finally:
        patterns.append(last)
    assert (encoded(quantizer), encoded(XNNPACKQuantizer)) == before


def test_a_value_that_a_known_class_keeps_and_that_has_no_content_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(XnnpackPartitioner, "option", threading.Lock(), raising=False)
    with pytest.raises(Unkeyable, match="lock"):
        encoded(XnnpackPartitioner())


@functools.cache
def remembered(node: Any) -> Any:
    return TAG


def remembering(node: Any) -> Any:
    return remembered(node), remembered_too(node)


remembered_too = functools.partial(remembered)


def test_a_function_that_remembers_counts_as_what_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = encoded(remembering)
    remembering(1)
    assert encoded(remembering) == before
    monkeypatch.setattr(sys.modules[__name__], "TAG", "else")
    assert encoded(remembering) != before


def test_a_script_that_runs_is_the_module_that_it_could_be_imported_as(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def function(node: Any) -> Any:
        return TAG

    found = []
    for module in (Path(__file__).stem, "__main__"):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
        monkeypatch.setattr(function, "__module__", module)
        monkeypatch.setattr(Pass, "__module__", module)
        monkeypatch.setitem(sys.modules, Path(__file__).stem, sys.modules[__name__])
        found.append((encoded(function), encoded(Pass(1))))
    assert found[0] == found[1]


def naming_a_tuple(node: Any) -> Any:
    return DelegationSpec("a", []), Pair(1, 2)


class Pair(NamedTuple):
    one: int
    other: int = 2

    def total(self) -> int:
        return self.one + self.other


def test_a_named_tuple_counts_by_what_somebody_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    before = encoded(naming_a_tuple)
    monkeypatch.setattr(Pair, "total", lambda self: self.one)
    assert encoded(naming_a_tuple) != before


def test_what_a_capture_puts_before_a_function_does_not_count(tmp_path: Path) -> None:
    before = encoded(NamedDataStore), encoded(tempfile)
    with cas.Store.open(tmp_path / "store") as store, capture(store):
        assert (encoded(NamedDataStore), encoded(tempfile)) == before


def test_state_that_an_export_overwrites_does_not_count(program: ExportedProgram) -> None:
    config = planned()
    before = key(program, config).digest
    config.memory_planning_pass.enable_non_cpu_memory_planning = True
    config.memory_planning_pass.state.graph_modules.append("something")
    assert key(program, config).digest == before


def test_what_code_names_in_a_module_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "settings_of_a_pass.py").write_text("FACTOR = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = importlib.import_module("settings_of_a_pass")

    monkeypatch.setattr(sys.modules[__name__], "SETTINGS", settings)

    def inside(module: Any) -> Any:
        from settings_of_a_pass import FACTOR  # type: ignore[import-not-found]

        return FACTOR

    before = encoded(of_module), encoded(inside)
    monkeypatch.setattr(settings, "FACTOR", 2)
    assert encoded(of_module) != before[0] and encoded(inside) != before[1]


def test_a_function_that_has_the_name_of_another_is_looked_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrapped = functools.wraps(torch.nn.functional.relu)(of_global)
    monkeypatch.delattr(wrapped, "__wrapped__")
    before = encoded(wrapped)
    monkeypatch.setattr(sys.modules[__name__], "TAG", "else")
    assert encoded(wrapped) != before


def test_stack_traces_in_a_program_are_refused(program: ExportedProgram) -> None:
    with pytest.raises(Unkeyable, match="stack traces"):
        key(program, ExecutorchBackendConfig(emit_stacktrace=True))


class Circular:
    def __init__(self) -> None:
        self.me = self


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class PrivatelySlotted:
    __slots__ = ("__value",)

    def __init__(self, value: object) -> None:
        self.__value = value


class Table(dict[str, int]):
    def __init__(self, value: object) -> None:
        self.value = value


@pytest.mark.parametrize(
    "value",
    [lambda: io.FileIO(os.devnull), threading.Lock, lambda: iter([1]), lambda: (n for n in [1]),
     lambda: tagger(io.FileIO(os.devnull)), lambda: torch.Generator(),
     lambda: type("Holder", (), {"lock": threading.Lock()})()],
    ids=["file", "lock", "iterator", "generator", "closure over a file", "of torch's C++",
         "class with a lock"],
)  # fmt: skip
def test_what_hides_its_state_is_refused(
    program: ExportedProgram, value: Callable[[], Any]
) -> None:
    with pytest.raises(Unkeyable):
        key(program, transform_passes=[value()])


@pytest.mark.parametrize(
    ("one", "other"),
    [(Slotted(1), Slotted(2)), (Slotted([1]), Slotted((1,))), (re.compile("a"), re.compile("b")),
     (OrderedDict(a=1), {"a": 1}), (Path("a"), Path("b")), (Path("a"), "a"),
     (logging.getLogger("a"), logging.getLogger("b")), ({1, 2}, {1, 3}), (json, re),
     (PrivatelySlotted(1), PrivatelySlotted(2)), (Table(1), Table(2)),
     (operator.itemgetter(1), operator.itemgetter(2)),
     (Pass().__call__, Pass(1).__call__), (int, float), (ConfigPrecisionType, Pass)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_different_values_are_told_apart(one: Any, other: Any) -> None:
    assert encoded(one) == encoded(one) != encoded(other)


def test_what_contains_itself_has_a_key(program: ExportedProgram) -> None:
    assert key(program, transform_passes=[Circular()]).digest != key(program).digest


def test_factors_name_no_path_and_no_user(program: ExportedProgram) -> None:
    text = json.dumps(key(program, partitioner=[XnnpackPartitioner()]).factors)
    assert str(Path.home()) not in text and str(ROOT) not in text and "/tmp" not in text
    assert "XnnpackPartitioner" in text


def test_arguments_that_fit_no_signature_are_left_to_executorch(program: ExportedProgram) -> None:
    assert Request.of((), {}) is None
    assert Request.of((program,), {"unknown": 1}) is None
    assert Request.of(("no program",), {}) is None


def test_an_installed_package_is_taken_as_its_files_are(program: ExportedProgram) -> None:
    def passing(module: Any) -> Any:
        return pytest.approx(1.0), module  # a function of pytest's, which leads to all of it

    encoder = ObjectEncoder()
    encoder.put(passing)
    assert len(encoder._known) < 10


KEYS = """
import test_whole_keys as t
program = t.program_of()
found = [t.key(program, **make()).digest.hex() for make in t.VARIANTS.values()]
"""


@pytest.mark.slow
def test_keys_are_the_same_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(__file__).read_text()
    first = "from __future__ import annotations\n"
    for place, moved in (("here", ""), ("there", "\n# Further down.\n" * 4)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "test_whole_keys.py").write_text(text.replace(first, first + moved, 1))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KEYS + "print(found)"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "11", "PYTHONPATH": f"{tmp_path / 'there'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    here: dict[str, Any] = {}
    exec(KEYS, here)
    assert done.stdout.strip() == str(here["found"])
