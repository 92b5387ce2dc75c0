"""What a capture compiles, and what it finds in the store."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import action_backends
import pytest
import torch
from action_backends import COMPILED, HIDDEN
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir.backend import backend_api
from executorch.exir.backend.backend_details import BackendDetails
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch import nn
from torch.export import ExportedProgram, export

import cas
from cas.executorch import capture
from cas.executorch.actions import cache
from cas.executorch.actions.outcomes import ActionMismatch, ActionOptions, Outcomes
from cas.testing.damage import flip_bit

Results = dict[str, list[Any]]


class Small(nn.Module):
    """One weight of several chunks, and a small one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(300, 120)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def program_of(seed: int) -> ExportedProgram:
    return export(Small(seed).eval(), (torch.zeros(2, 300),), strict=False)


@pytest.fixture(scope="module")
def programs() -> tuple[ExportedProgram, ExportedProgram]:
    return program_of(1), program_of(2)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the process had compiled nothing yet."""
    COMPILED.clear()
    monkeypatch.setattr(cache, "_dependencies", {})
    yield
    HIDDEN["value"] = b"one"


def backend_in_capture(name: str) -> Any:
    """The backend as ExecuTorch finds it now."""
    found = [b for b in backend_api.BackendDetails.__subclasses__() if b.__name__ == name]
    assert len(found) == 1
    return found[0]


def compile_with(
    store: cas.Store,
    name: str,
    methods: dict[str, list[ExportedProgram]],
    specs: list[CompileSpec] | None = None,
    actions: bool | ActionOptions = True,
    threshold: int = 4096,
) -> tuple[Results, Outcomes]:
    """One capture in which a backend is asked to compile; the results as plain bytes."""
    options: dict[str, Any] = {"actions": actions, "threshold": threshold}
    with capture(store, **options) as captured:
        given = {method: [list(specs or []) for _ in parts] for method, parts in methods.items()}
        backend = backend_in_capture(name)
        copies = {
            method: [backend.copy_exported_program_for_preprocess(p, []) for p in parts]
            for method, parts in methods.items()
        }
        results = backend.preprocess_multimethod(copies, given)
        plain = {method: [plain_result(one) for one in parts] for method, parts in results.items()}
    return plain, captured.outcomes


def plain_bytes(data: Any) -> bytes:
    return data.to_bytes() if isinstance(data, FileBackedData) else bytes(data)


def plain_result(result: Any) -> tuple[Any, ...]:
    store = result.data_store_output
    named = None
    if store is not None:
        named = (
            [plain_bytes(buffer) for buffer in store.buffers],
            list(store.pte_data.items()),
            [(tag, list(table.items())) for tag, table in store.external_data.items()],
        )
    return plain_bytes(result.processed_bytes), result.debug_handle_map, named


def stock(name: str, methods: dict[str, list[ExportedProgram]]) -> Results:
    backend = next(b for b in BackendDetails.__subclasses__() if b.__name__ == name)
    results = backend.preprocess_multimethod(
        {method: [copy.deepcopy(p) for p in parts] for method, parts in methods.items()},
        {method: [[] for _ in parts] for method, parts in methods.items()},
    )
    return {method: [plain_result(one) for one in parts] for method, parts in results.items()}


# --- hits and misses ----------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 4096, 1 << 30])
@pytest.mark.parametrize("name", ["Plain", "Together"])
def test_the_second_time_comes_out_of_the_store(
    name: str, threshold: int, programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    methods = {"one": [programs[0], programs[1]], "two": [programs[1]]}
    expected = stock(name, methods)
    COMPILED.clear()
    first, outcomes = compile_with(store, name, methods, threshold=threshold)
    units = 1 if name == "Together" else 3
    assert (outcomes.hits, outcomes.misses) == (0, {"absent": units})
    second, again = compile_with(store, name, methods, threshold=threshold)
    assert (again.hits, again.misses, COMPILED) == (units, {}, [name] * units)
    assert first == second == expected
    assert again.seconds_saved > 0


def test_results_that_shared_named_data_share_it_again(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    for _ in range(2):
        with capture(store):
            results = backend_in_capture("Together").preprocess_multimethod(
                {"a": [programs[0]], "b": [programs[1]]}, {"a": [[]], "b": [[]]}
            )
        shared = results["a"][0].data_store_output
        assert shared is results["b"][0].data_store_output
        assert all(type(key) is str for key in results["a"][0].debug_handle_map)
    assert COMPILED == ["Together"]


def test_equal_partitions_are_compiled_once(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    _, outcomes = compile_with(store, "Plain", {"one": [programs[0]] * 3})
    assert (outcomes.hits, outcomes.missed, COMPILED) == (2, 1, ["Plain"])


def test_other_weights_options_or_names_are_compiled(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    for methods, specs in (
        ({"one": [programs[0]]}, []),
        ({"one": [programs[1]]}, []),
        ({"two": [programs[0]]}, []),
        ({"one": [programs[0]]}, [CompileSpec("mode", b"fast")]),
        ({"one": [programs[0]]}, [CompileSpec("mode", b"small")]),
    ):
        _, outcomes = compile_with(store, "Plain", methods, specs)
        assert outcomes.misses == {"absent": 1}


def test_without_actions_everything_is_compiled_and_nothing_kept(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    for _ in range(2):
        with capture(store, actions=False):
            assert backend_api.BackendDetails is BackendDetails
    assert list(store.actions.list()) == []


def test_a_program_is_copied_only_to_be_compiled(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    before = programs[0].state_dict["linear.weight"].clone()
    for _ in range(2):
        compile_with(store, "Changes", {"one": [programs[0]]})
        assert torch.equal(programs[0].state_dict["linear.weight"], before)
    assert COMPILED == ["Changes"]


def test_the_old_way_to_lower_is_served_too(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    for _ in range(2):
        with capture(store) as captured:
            result = backend_in_capture("Plain").preprocess(programs[0], [])
            assert plain_result(result) == stock("Plain", {"m": [programs[0]]})["m"][0]
    assert captured.outcomes.hits == 1


def test_other_threads_find_the_real_backends(store: cas.Store) -> None:
    found: list[Any] = []
    with capture(store):
        thread = threading.Thread(
            target=lambda: found.extend(backend_api.BackendDetails.__subclasses__())
        )
        thread.start()
        thread.join()
    assert action_backends.Plain in found


def test_a_failing_compile_fails_as_ever_and_keeps_what_was_done(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    methods = {"m": [programs[0], programs[1]]}
    HIDDEN["value"] = b"fail"
    with pytest.raises(RuntimeError, match="not supported"):
        compile_with(store, "FailsSecond", methods)
    HIDDEN["value"] = b"work"
    _, outcomes = compile_with(store, "FailsSecond", methods)
    assert (outcomes.hits, outcomes.missed, len(COMPILED)) == (1, 1, 2)


# --- what cannot be kept ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, specs, reason",
    [
        ("LiveObjects", [], "live objects"),
        ("Connects", [], "another machine"),
        ("Plain", [CompileSpec("dump_debug_info", b"")], "files aside"),
    ],
)
def test_what_cannot_be_kept_is_compiled_each_time_and_named(
    name: str,
    specs: list[CompileSpec],
    reason: str,
    programs: tuple[ExportedProgram, ...],
    store: cas.Store,
) -> None:
    for _ in range(2):
        _, outcomes = compile_with(store, name, {"m": [programs[0]]}, specs)
        assert outcomes.hits == outcomes.missed == 0
        assert [reason in found for found in outcomes.uncacheable] == [True]
        assert [reason in note for note in outcomes.notes()] == [True]
    assert len(COMPILED) == 2
    assert list(store.actions.list()) == []
    assert store.actions.tally().uncacheable == {next(iter(outcomes.uncacheable)): 2}


@pytest.mark.parametrize("broken", ["action_key", "check_relocatable"])
def test_a_mistake_of_the_cache_does_not_end_an_export(
    broken: str,
    programs: tuple[ExportedProgram, ...],
    store: cas.Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("never thought of")

    methods = {"m": [programs[0]]}
    expected = stock("Plain", methods)
    monkeypatch.setattr(cache, broken, fail)
    results, outcomes = compile_with(store, "Plain", methods)
    assert results == expected
    (reason,) = outcomes.uncacheable
    assert "ZeroDivisionError" in reason
    assert "never thought of" in outcomes.notes()[0]
    assert "ZeroDivisionError" in caplog.text  # with a traceback, for whoever repairs it


# --- liars --------------------------------------------------------------------------------------


def test_an_undeclared_variable_is_noticed(
    programs: tuple[ExportedProgram, ...], store: cas.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {"m": [programs[0]]}
    for value, expected, misses in (
        (None, b"none", {"absent": 1}),
        ("one", b"one", {"stale": 1}),
        ("one", b"one", {}),
        ("two", b"two", {"stale": 1}),
    ):
        if value is not None:
            monkeypatch.setenv("SECRET_OF_THE_BACKEND", value)
        results, outcomes = compile_with(store, "ReadsVariable", methods)
        assert (results["m"][0][0], outcomes.misses) == (expected, misses)
    assert "SECRET_OF_THE_BACKEND has changed" in outcomes.notes()[0]
    text = b"".join(path.read_bytes() for path in (store.path / "actions").rglob("*/*"))
    assert (
        b"SECRET_OF_THE_BACKEND" in text and b'"two"' not in text
    )  # its value is no secret's place


def test_an_undeclared_file_is_noticed(
    programs: tuple[ExportedProgram, ...], store: cas.Store, tmp_path: Path
) -> None:
    methods, path = {"m": [programs[0]]}, tmp_path / "table.txt"
    specs = [CompileSpec("table", str(path).encode())]
    for content, misses in ((b"one", {"absent": 1}), (b"one", {}), (b"two", {"stale": 1})):
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
            time.sleep(0.05)  # a file that was written while it was read is its compile's own
        results, outcomes = compile_with(store, "ReadsFile", methods, specs)
        assert (results["m"][0][0], outcomes.misses) == (content, misses)
    assert str(path) in outcomes.notes()[0]


def test_what_is_out_of_sight_is_noticed_by_a_recheck_and_the_fresh_result_is_used(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    methods = {"m": [programs[0]]}
    compile_with(store, "ReadsHidden", methods)
    HIDDEN["value"] = b"two"
    results, outcomes = compile_with(store, "ReadsHidden", methods)
    assert (results["m"][0][0], outcomes.hits) == (b"one", 1)  # the wrong hit that it can give
    recheck = ActionOptions(recheck=1.0)
    with pytest.warns(ActionMismatch, match="ReadsHidden of m.*the delegate's blob"):
        results, outcomes = compile_with(store, "ReadsHidden", methods, actions=recheck)
    assert (results["m"][0][0], outcomes.mismatches, outcomes.rechecked) == (b"two", 1, 1)
    results, outcomes = compile_with(store, "ReadsHidden", methods)
    assert (results["m"][0][0], outcomes.hits) == (b"two", 1)
    assert store.actions.tally().mismatches == 1


@pytest.mark.parametrize("backend", ["ReadsGlobal", "ReadsClass"])
def test_a_value_that_a_backends_code_refers_to_is_part_of_its_key(
    backend: str, programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    methods = {"m": [programs[0]]}
    set_value = action_backends.SETTINGS.__setitem__
    for value, expected in ((b"one", {"absent": 1}), (b"two", {"absent": 1}), (b"one", {})):
        set_value("value", value)
        action_backends.ReadsClass.WORDS[:] = [value]
        results, outcomes = compile_with(store, backend, methods)
        assert (results["m"][0][0], outcomes.misses) == (value, expected)


def test_a_backend_that_changes_what_its_code_refers_to_is_not_recorded(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    action_backends.Remembers.TIMES.clear()
    for number in (1, 3):
        results, outcomes = compile_with(store, "Remembers", {"m": list(programs)})
        assert [blob for blob, *_ in results["m"]] == [b"%d" % number, b"%d" % (number + 1)]
        assert outcomes.uncacheable == {"the backend changes what its code refers to": 2}


def test_a_backend_that_refers_to_a_lock_is_compiled_each_time(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    for _ in range(2):
        _, outcomes = compile_with(store, "Opaque", {"m": [programs[0]]})
        assert outcomes.uncacheable == {"a value of type _thread.lock": 1}
    assert COMPILED == ["Opaque", "Opaque"]


def test_what_a_backend_looks_for_in_vain_or_in_a_copy_of_the_environment_is_noticed(
    programs: tuple[ExportedProgram, ...],
    store: cas.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods, path = {"m": [programs[0]]}, tmp_path / "table.txt"
    monkeypatch.setenv("HOME", "/home")
    for option, change, before, after in (
        (str(path), path.touch, b"False", b"True"),
        ("CAS_TEST_A", lambda: monkeypatch.setenv("CAS_TEST_A", "a"), b"None", b"'a'"),
        (
            "HOME",
            lambda: monkeypatch.setenv("HOME", "/a"),
            repr(str(Path.home())).encode(),
            b"'/a'",
        ),
    ):
        specs = [CompileSpec("look", option.encode())]
        for expected, misses in ((before, {"absent": 1}), (before, {})):
            results, outcomes = compile_with(store, "Looks", methods, specs)
            assert (results["m"][0][0], outcomes.misses) == (expected, misses)
        change()
        results, outcomes = compile_with(store, "Looks", methods, specs)
        assert (results["m"][0][0], outcomes.misses) == (after, {"stale": 1})


def test_a_recheck_of_an_honest_backend_is_silent(
    programs: tuple[ExportedProgram, ...], store: cas.Store, recwarn: pytest.WarningsRecorder
) -> None:
    methods = {"m": [programs[0]], "n": [programs[1]]}
    compile_with(store, "Plain", methods)
    recheck = ActionOptions(recheck=0.5, chance=iter([0.4, 0.6]).__next__)
    _, outcomes = compile_with(store, "Plain", methods, actions=recheck)
    assert (outcomes.hits, outcomes.rechecked, outcomes.mismatches) == (2, 1, 0)
    assert COMPILED == ["Plain"] * 3
    assert not [warning for warning in recwarn if warning.category is ActionMismatch]


def test_replaced_methods_are_another_backend(
    programs: tuple[ExportedProgram, ...], store: cas.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {"m": [programs[0]]}
    compile_with(store, "Plain", methods)
    real = action_backends.Plain.preprocess
    monkeypatch.setattr(
        action_backends.Plain,
        "preprocess",
        staticmethod(lambda program, specs: real(program, specs)),
    )
    _, outcomes = compile_with(store, "Plain", methods)
    assert outcomes.misses == {"absent": 1}


# --- the environment ----------------------------------------------------------------------------


def test_what_a_compile_changes_is_no_change(
    programs: tuple[ExportedProgram, ...], store: cas.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_TEST_OF_ACTIONS", raising=False)
    first, second = {"m": [programs[0]]}, {"m": [programs[1]]}
    compile_with(store, "SetsVariable", first)
    assert os.environ["TORCH_TEST_OF_ACTIONS"] == "set by the compile"
    _, outcomes = compile_with(store, "SetsVariable", first)
    assert outcomes.hits == 1
    compile_with(store, "SetsVariable", second)  # with the variable set
    del os.environ["TORCH_TEST_OF_ACTIONS"]
    _, outcomes = compile_with(store, "SetsVariable", second)
    assert outcomes.hits == 1
    monkeypatch.setenv("TORCH_TEST_OF_ACTIONS", "set by the user")
    _, outcomes = compile_with(store, "SetsVariable", first)
    assert outcomes.misses == {"absent": 1}


# --- the store ----------------------------------------------------------------------------------


def test_a_record_without_its_chunks_is_a_miss_and_healed(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    methods = {"m": [programs[0]]}
    first, _ = compile_with(store, "Plain", methods)
    record = next(store.actions.list())
    digest = next(iter(record.chunks()))
    store.context.layout.chunk(digest).unlink()
    second, outcomes = compile_with(store, "Plain", methods)
    assert outcomes.misses == {"incomplete": 1}
    third, outcomes = compile_with(store, "Plain", methods)
    assert outcomes.hits == 1
    assert first == second == third


def test_a_record_whose_chunk_has_rotted_is_a_miss_and_healed(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    methods = {"m": [programs[0]]}
    first, _ = compile_with(store, "Plain", methods)
    record = next(store.actions.list())
    flip_bit(store.context.layout.chunk(next(iter(record.chunks()))), 0)
    second, outcomes = compile_with(store, "Plain", methods)
    assert outcomes.misses == {"incomplete": 1}  # the chunk was set aside, and looked for again
    third, outcomes = compile_with(store, "Plain", methods)
    assert outcomes.hits == 1
    assert first == second == third


def test_a_record_that_is_something_else_is_a_miss_and_replaced(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    methods = {"m": [programs[0]]}
    first, _ = compile_with(store, "Plain", methods)
    record = next(store.actions.list())
    with store.writer() as writer:
        writer.put_action(
            record.key, kind="delegate", factors={}, result={"version": 1}, seconds=1.0
        )
    second, outcomes = compile_with(store, "Plain", methods)
    assert (outcomes.misses, second) == ({"damaged": 1}, first)
    assert compile_with(store, "Plain", methods)[1].hits == 1


def test_records_say_what_their_keys_were_made_of(
    programs: tuple[ExportedProgram, ...], store: cas.Store
) -> None:
    compile_with(store, "Plain", {"m": [programs[0]]}, [CompileSpec("mode", b"fast")])
    record = next(store.actions.list())
    assert (record.kind, record.label) == ("delegate", "Plain of m")
    assert record.factors["options"] == {"mode": "fast"}
    assert set(record.factors["weights"]) == {"linear.weight", "linear.bias"}
    assert record.factors["action"]["backend"] == "Plain"
    assert "version: torch" in record.factors["environment"]


CHILD = """
import sys, time
sys.path[:0] = {path!r}
import action_backends, test_cache
from cas import Store
from pathlib import Path
real = action_backends.Plain.preprocess
program = test_cache.program_of(1)
Path({gate!r}, sys.argv[1]).touch()
while len(list(Path({gate!r}).iterdir())) < 2:
    time.sleep(0.01)
with Store.open({store!r}) as store:
    results, outcomes = test_cache.compile_with(store, "Plain", {{"m": [program]}})
print(outcomes.hits, outcomes.missed, len(results["m"][0][0]))
"""


@pytest.mark.slow
def test_two_processes_at_once_compile_once(store: cas.Store, tmp_path: Path) -> None:
    here = Path(__file__).resolve().parent
    gate = tmp_path / "gate"
    gate.mkdir()
    source = CHILD.format(path=[str(here), str(here.parent)], gate=str(gate), store=str(store.path))
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", source, str(n)], stdout=subprocess.PIPE
        )
        for n in range(2)
    ]
    printed = sorted(child.communicate(timeout=900)[0].split() for child in children)
    assert printed == [[b"0", b"1", b"12000"], [b"1", b"0", b"12000"]]
