"""Whole exports out of the store: the same files, nothing lowered, and never the wrong ones."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import (
    EdgeCompileConfig,
    EdgeProgramManager,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.pass_base import ExportPass
from executorch.exir.program import _program
from export_backends import LinearPartitioner, WeightsInBlob
from torch.export import Dim, ExportedProgram, export
from whole_replay import WHOLE, export_cases

import cas
from cas.executorch import capture
from cas.executorch.actions import whole
from cas.executorch.actions.dependencies import Dependencies
from cas.executorch.actions.outcomes import ActionMismatch, ActionOptions
from cas.executorch.actions.putoff import InputsChanged
from cas.executorch.capture import Capture
from cas.verify import verify

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]

REPLAYED = (
    "mlp_xnnpack",
    "mlp_xnnpack_two_tags",
    "methods_xnnpack",
    "mlp_xnnpack_dynamic",
    "attention_xnnpack",
)


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }


# --- in another process -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Any, Any]]:
    """Where cases were recorded, where another process replayed them, and what both say."""
    directory = tmp_path_factory.mktemp("whole")
    with cas.Store.open(directory / "store", chunk_size=64 << 10) as store:
        recorded = export_cases(store, directory / "recorded", list(REPLAYED))
    done = subprocess.run(
        [sys.executable, str(HERE / "whole_replay.py"), str(directory / "store"),
         str(directory / "replayed"), *REPLAYED],
        cwd="/",
        env={**os.environ, "PYTHONHASHSEED": "77", "HOME": str(directory),
             "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    yield directory / "recorded", directory / "replayed", recorded, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("case", REPLAYED)
def test_a_fresh_process_gets_the_stock_files_without_lowering(
    case: str, both: Any, stock: Callable[[str], Path]
) -> None:
    first, second, recorded, replayed = both
    assert ["whole-export", "miss"] in recorded[case]
    assert replayed[case] == [["whole-export", "hit"]]
    assert digests(first / case) == digests(second / case) == digests(stock(case))


# --- in this one --------------------------------------------------------------------------------


class Small(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(96, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def program_of(seed: int = 0) -> ExportedProgram:
    return export(Small(seed).eval(), (torch.zeros(2, 96),), strict=False)


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return program_of()


class Counter:
    """How often something was really lowered, and emitted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lowered = self.emitted = 0
        lower = _program._gen_edge_manager_for_partitioners
        emit = EdgeProgramManager.to_executorch

        def counted_lower(*args: Any) -> Any:
            self.lowered += 1
            return lower(*args)

        def counted_emit(manager: Any, config: Any = None) -> Any:
            self.emitted += 1
            return emit(manager, config)

        monkeypatch.setattr(_program, "_gen_edge_manager_for_partitioners", counted_lower)
        monkeypatch.setattr(EdgeProgramManager, "to_executorch", counted_emit)

    def take(self) -> tuple[int, int]:
        found = self.lowered, self.emitted
        self.lowered = self.emitted = 0
        return found


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counter:
    monkeypatch.setattr(whole, "_dependencies", Dependencies())
    return Counter(monkeypatch)


def outcomes(captured: Capture) -> list[tuple[str, str]]:
    return [
        (event.outcome, event.reason)
        for event in captured.outcomes.events
        if event.kind == "whole-export"
    ]


def exported(
    store: cas.Store,
    program: Any,
    config: Any = None,
    actions: ActionOptions = WHOLE,
    **options: Any,
) -> tuple[bytes, list[tuple[str, str]]]:
    """The bytes of one export, and what became of its action."""
    with capture(store, "small", threshold=1, actions=actions) as captured:
        edge = to_edge_transform_and_lower(program, **options)
        return edge.to_executorch(config).buffer, outcomes(captured)


def test_the_second_time_nothing_is_lowered(
    store: cas.Store, program: ExportedProgram, count: Counter, tmp_path: Path
) -> None:
    found = []
    for turn in ("first", "second"):
        with capture(store, "small", threshold=1, actions=WHOLE) as captured:
            edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
            assert isinstance(edge, EdgeProgramManager)
            finished = edge.to_executorch(ExecutorchBackendConfig(external_constants=True))
            assert isinstance(finished, ExecutorchProgramManager)
            assert finished.methods == {"forward"} and finished.config_methods == set()
            captured.save(finished, tmp_path / turn)
            found += [*outcomes(captured), count.take()]
    assert found == [("miss", "absent"), (1, 1), ("hit", ""), (0, 0)]
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    first, second = store.manifest("small@1"), store.manifest("small@2")
    assert (first.files, first.tensors) == (second.files, second.tensors)
    assert len(first.tensors) == 2
    assert verify(store).clean


class Both(Partitioner):  # type: ignore[misc]
    """Says that it is for one backend, and gives linear layers to another one.

    That is named in an option, or only in what it does.
    """

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.delegation_spec = DelegationSpec("XnnpackBackend", [])
        self.inner = LinearPartitioner(WeightsInBlob) if named else None

    def partition(self, exported_program: Any) -> PartitionResult:
        return (self.inner or LinearPartitioner(WeightsInBlob)).partition(exported_program)


def test_a_second_backend_that_an_option_names_is_part_of_the_key(
    store: cas.Store, program: ExportedProgram, count: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for level in (1, 1, 2, 1):
        monkeypatch.setattr(WeightsInBlob, "LEVEL", level, raising=False)
        found += exported(store, program, partitioner=[Both(named=True)])[1]
    assert found == [("miss", "absent"), ("hit", ""), ("miss", "absent"), ("hit", "")]


def test_an_export_with_a_backend_that_no_option_names_is_not_kept(
    store: cas.Store, program: ExportedProgram, count: Counter
) -> None:
    for _ in range(2):
        _, found = exported(store, program, partitioner=[Both(named=False)])
        assert found == [("uncacheable", "delegates of WeightsInBlob, which no partitioner names")]


class Scaled(ExportPass):  # type: ignore[misc]
    """A pass of the user's, as ExecuTorch wants them; it may count what it has seen."""

    def __init__(self, *, counting: bool) -> None:
        super().__init__()
        self.counting = counting
        self.seen = 0

    def call_operator(self, op: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        self.seen += self.counting
        return super().call_operator(op, args, kwargs, meta)


def test_an_export_with_a_pass_is_kept_unless_the_pass_is_another_one_afterwards(
    store: cas.Store, program: ExportedProgram, count: Counter
) -> None:
    reason = "the export changes its partitioners or passes"
    for counting, expected in (
        (False, [("miss", "absent"), ("hit", "")]),
        (True, [("uncacheable", reason), ("uncacheable", reason)]),
    ):
        found = []
        for _ in range(2):
            passes = [Scaled(counting=counting)]
            found += exported(store, program, transform_passes=passes)[1]
        assert found == expected


def test_whoever_looks_gets_the_lowered_program(
    store: cas.Store, program: ExportedProgram, count: Counter
) -> None:
    with capture(store, "small", actions=WHOLE):
        one = to_edge_transform_and_lower(program).to_executorch()
        size = len(one.buffer)
    with capture(store, "small", actions=WHOLE) as captured:
        edge = to_edge_transform_and_lower(program)
        two = edge.to_executorch()
        count.take()
        assert len(two.buffer) == size
        assert count.take() == (0, 0)
        assert two.debug_handle_map == one.debug_handle_map
        assert count.take() == (1, 1)
        assert str(two.exported_program().graph) == str(one.exported_program().graph)
        # Emitting changes the edge program, so whoever looks at it afterwards finds it changed.
        assert str(edge.exported_program().graph) == str(one.exported_program().graph)
        assert count.take() == (0, 0)
        with pytest.raises(RuntimeError, match="ETRecord was not generated"):
            two.get_etrecord()
        assert outcomes(captured) == [("hit", "")]


def test_an_edge_program_that_is_looked_at_is_lowered(
    store: cas.Store, program: ExportedProgram, count: Counter
) -> None:
    stock = to_edge_transform_and_lower(program).to_executorch().buffer
    exported(store, program)
    count.take()
    with capture(store, "small", actions=WHOLE) as captured:
        edge = to_edge_transform_and_lower(program)
        assert count.take() == (0, 0)
        assert edge.exported_program().graph is edge.exported_program().graph
        assert count.take() == (1, 0)
        assert edge.to_executorch().buffer == stock
        assert count.take() == (0, 1)
        reason = "the edge program is used before to_executorch"
        assert outcomes(captured) == [("uncacheable", reason)]
        moved = to_edge_transform_and_lower(program).transform([])
        assert type(moved) is EdgeProgramManager
        assert moved.to_executorch().buffer == stock


def test_another_configuration_of_a_known_lowering(
    store: cas.Store, program: ExportedProgram, count: Counter
) -> None:
    aligned = ExecutorchBackendConfig(segment_alignment=4096)
    stock = to_edge_transform_and_lower(program).to_executorch(aligned).buffer
    plain, _ = exported(store, program)
    count.take()
    first, outcome = exported(store, program, aligned)
    assert (outcome, count.take()) == ([("miss", "absent")], (1, 1))
    again, outcome = exported(store, program, ExecutorchBackendConfig(segment_alignment=4096))
    assert (outcome, count.take()) == ([("hit", "")], (0, 0))
    assert first == again == stock != plain
    assert exported(store, program) == (plain, [("hit", "")])


def test_an_etrecord_is_always_computed(
    store: cas.Store, program: ExportedProgram, count: Counter
) -> None:
    exported(store, program)
    with capture(store, "small", actions=WHOLE) as captured:
        edge = to_edge_transform_and_lower(program, generate_etrecord=True)
        assert edge.to_executorch().get_etrecord() is not None
        ((outcome, reason),) = outcomes(captured)
        assert outcome == "uncacheable" and "ETRecord" in reason


def test_an_error_comes_where_it_always_came(store: cas.Store, count: Counter) -> None:
    class Failing(Partitioner):
        def partition(self, exported_program: Any) -> Any:
            raise ValueError("no")

    with (
        capture(store, "small", actions=WHOLE),
        pytest.raises(ValueError, match="no"),
    ):
        to_edge_transform_and_lower(program_of(), partitioner=[Failing()])
    assert list(store.actions.entries()) == []
    # Nobody waits for it.
    with store.actions.flight(cas.Digest.of(b"x"), wait=False) as mine:
        assert mine


def test_the_compile_config_is_left_as_lowering_leaves_it(
    store: cas.Store, program: ExportedProgram, count: Counter
) -> None:
    left = []
    for _ in range(2):
        config = EdgeCompileConfig(_skip_dim_order=True)
        exported(store, program, partitioner=[XnnpackPartitioner()], compile_config=config)
        left.append({str(operator) for operator in config._core_aten_ops_exception_list})
    assert count.take() == (1, 1)
    assert left[0] == left[1] != set()


def test_weights_that_change_on_the_way_are_not_recorded(store: cas.Store, count: Counter) -> None:
    program = program_of(5)
    with capture(store, "small", actions=WHOLE) as captured:
        edge = to_edge_transform_and_lower(program)
        program.state_dict["linear.bias"].data.add_(1)
        edge.to_executorch()
        ((outcome, reason),) = outcomes(captured)
    assert outcome == "uncacheable" and "weights that changed" in reason
    assert list(store.actions.entries()) == []


def test_a_lowering_that_was_put_off_is_refused_other_weights(store: cas.Store) -> None:
    program = program_of(6)
    exported(store, program)
    with capture(store, "small", actions=WHOLE):
        edge = to_edge_transform_and_lower(program)
        again = to_edge_transform_and_lower(program)
        program.state_dict["linear.bias"].data.add_(1)
        with pytest.raises(InputsChanged, match="export of forward"):
            edge.to_executorch()
        with pytest.raises(InputsChanged):
            again.exported_program()


class Choosy(Partitioner):
    """Asks whether a symbolic size is the example's, which makes torch take it to be so."""

    def partition(self, exported_program: Any) -> Any:
        values = (node.meta.get("val") for node in exported_program.graph.nodes)
        assert any(value.shape[0] == 8 for value in values if isinstance(value, torch.Tensor))
        return PartitionResult(exported_program, {})


def test_a_lowering_that_changes_its_program_is_done_each_time(
    store: cas.Store, count: Counter
) -> None:
    def program() -> ExportedProgram:
        batch = {0: Dim("batch", min=4, max=64)}
        return export(Small(7).eval(), (torch.zeros(8, 96),), dynamic_shapes=(batch,))

    for turn in range(2):  # the second time there could be a record
        with capture(store, "small", actions=WHOLE) as captured:
            dynamic = program()
            for _ in range(2):
                edge = to_edge_transform_and_lower(dynamic, partitioner=[Choosy()])
                edge.to_executorch()
            ((first, reason), _) = outcomes(captured)
            changes = "the export changes its programs, or their symbolic sizes"
            assert (first, reason) == ("uncacheable", changes), turn
            again = program()
            one = to_edge_transform_and_lower(again, partitioner=[Choosy()])
            two = to_edge_transform_and_lower(again, partitioner=[Choosy()])
            assert str(one.exported_program().graph) == str(two.exported_program().graph)


def test_a_dynamic_program_is_lowered_twice_after_it_was_put_off_twice(
    store: cas.Store, count: Counter
) -> None:
    batch = {0: Dim("batch", min=4, max=64)}
    dynamic = export(Small(8).eval(), (torch.zeros(8, 96),), dynamic_shapes=(batch,))
    partitioner = [XnnpackPartitioner()]
    exported(store, dynamic, partitioner=partitioner)
    count.take()
    with capture(store, "small", threshold=1, actions=WHOLE):
        edges = [to_edge_transform_and_lower(dynamic, partitioner=partitioner) for _ in range(2)]
        assert count.take() == (0, 0)
        graphs = {str(edge.exported_program().graph) for edge in edges}
        assert (len(graphs), count.take()) == (1, (2, 0))


def test_a_lost_chunk_is_a_miss_and_comes_back(
    store: cas.Store, program: ExportedProgram, count: Counter
) -> None:
    plain, _ = exported(store, program)
    (record,) = [record for record in store.actions.list() if record.kind == "whole-export"]
    for digest in record.chunks():
        store.context.layout.chunk(digest).unlink()
    assert exported(store, program) == (plain, [("miss", "incomplete")])
    assert exported(store, program) == (plain, [("hit", "")])


def test_a_recheck_finds_a_wrong_record_and_replaces_it(
    store: cas.Store, program: ExportedProgram, count: Counter
) -> None:
    plain, _ = exported(store, program)
    (record,) = [record for record in store.actions.list() if record.kind == "whole-export"]
    with store.writer() as writer:
        wrong = (writer.put(b"wrong" * 1000), *record.recipes[1:])
        writer.put_actions([replace(record, recipes=wrong)])
    checked = ActionOptions(whole=True, recheck=1.0)
    with pytest.warns(ActionMismatch, match="the program"):
        assert exported(store, program, actions=checked) == (plain, [("mismatch", "")])
    count.take()
    assert exported(store, program, actions=checked) == (plain, [("hit", "")])
    assert count.take() == (1, 1)


class Listening(Partitioner):
    """Looks at a variable of the environment that nobody declared."""

    def partition(self, exported_program: Any) -> Any:
        os.environ.get("UNDECLARED_BY_ANYBODY")
        return PartitionResult(exported_program, {})


def test_what_an_export_reads_is_checked_on_a_hit(
    store: cas.Store, program: ExportedProgram, count: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> list[tuple[str, str]]:
        return exported(store, program, partitioner=[Listening()])[1]

    assert (run(), run()) == ([("miss", "absent")], [("hit", "")])
    monkeypatch.setenv("UNDECLARED_BY_ANYBODY", "1")
    assert run() == [("miss", "stale")]
    assert run() == [("hit", "")]


@pytest.mark.parametrize("broken", ["lowering_key", "weights_digest", "freeze_exceptions"])
def test_a_mistake_of_ours_ends_no_export(
    store: cas.Store,
    program: ExportedProgram,
    count: Counter,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(whole, broken, fail)
    _, ((outcome, reason),) = exported(store, program)
    assert outcome == "uncacheable" and "(ZeroDivisionError)" in reason
    assert list(store.actions.entries()) == []


def test_without_whole_exports_everything_is_as_ever(
    store: cas.Store, program: ExportedProgram, count: Counter
) -> None:
    for actions in (True, False):
        with capture(store, "small", actions=actions) as captured:
            assert type(to_edge_transform_and_lower(program)) is EdgeProgramManager
            assert outcomes(captured) == []
    assert to_edge_transform_and_lower.__module__ != whole.__name__


# --- several at once ----------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
exported = torch.export.export(model.eval(), (torch.zeros(1, 256),))
to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch().save(
    sys.argv[1]
)
"""


@pytest.mark.slow
def test_four_processes_at_once_compile_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'cli'}"}
    command = [sys.executable, "-m", "cas_cli", "--store", str(tmp_path / "store"), "run"]
    names = [f"model{n}.pte" for n in range(4)]
    processes = [
        subprocess.Popen(
            [*command, "--report", f"{name}.json", str(script), name],
            cwd=tmp_path,
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    errors = [process.communicate(timeout=900)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0, 0], errors
    found = [json.loads((tmp_path / f"{name}.json").read_text())["actions"] for name in names]
    # One computes the export and the one delegate in it, and three take the export.
    assert sorted((counts["hits"], counts["misses"]) for counts in found) == [
        (0, 2), (1, 0), (1, 0), (1, 0),
    ]  # fmt: skip
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1
    with cas.Store.open(tmp_path / "store") as store:
        assert verify(store).clean
        assert sorted(ref.name for ref in store.refs()) == [f"model{n}" for n in range(4)]
