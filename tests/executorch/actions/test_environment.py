"""Facts about the environment, what compiles read, and what they change."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from action_backends import Plain
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend

from cas.errors import UsageError
from cas.executorch.actions import backends, dependencies, facts, observer, places, sources
from cas.executorch.actions.dependencies import Dependencies
from cas.executorch.actions.drift import Drift
from cas.executorch.actions.errors import Unkeyable, Unrecordable
from cas.executorch.actions.observer import Observed, observing

# --- facts --------------------------------------------------------------------------------------


def all_facts(backend: type) -> dict[str, str]:
    return {
        **facts.fixed_facts(),
        **backends.fixed_facts(backend),
        **backends.ambient_facts(backend),
    }


@pytest.mark.parametrize("backend", [XnnpackBackend, Plain])
def test_no_fact_names_a_path_a_user_or_a_time(backend: type) -> None:
    found = all_facts(backend)
    assert "version: torch" in found
    for name, value in found.items():
        if name.startswith("variable: "):
            continue  # what a user sets may be anything; a path is shown as a digest, see below
        assert not places.names_a_path(value), (name, value)
        assert sys.prefix not in value and str(Path.home()) not in value
        assert not re.search(r"20\d\d-\d\d|\d\d:\d\d:\d\d| at 0x", value), (name, value)


def test_variables_that_count_and_variables_that_do_not() -> None:
    def with_variables(**values: str) -> dict[str, str]:
        return facts.ambient_facts({"PATH": "/bin", **values})

    base = with_variables()
    assert with_variables(HOME="/home/a", USER="a", PYTHONHASHSEED="1", MY_OWN="x") == base
    assert with_variables(TORCH_LOGS="+dynamo", TORCHINDUCTOR_CACHE_DIR="/tmp/b") == base
    for name in ("TORCHINDUCTOR_MAX_AUTOTUNE", "ET_CUDA_TARGET_SMEM_BYTES", "CFLAGS", "CUDA_HOME"):
        one, other = with_variables(**{name: "1"}), with_variables(**{name: "2"})
        assert base != one != other != base


def test_a_path_in_a_variable_is_shown_as_a_digest_and_one_of_the_installation_as_that() -> None:
    shown = facts.shown("/home/somebody/include")
    assert shown.startswith("blake3:")
    assert shown != facts.shown("/home/another/include")
    tool = str(Path(places.roots()[0][1]) / "nvidia" / "ptxas")
    assert facts.shown(tool) == f"{places.roots()[0][0]}/nvidia/ptxas"


def test_settings_of_torch_are_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts.ambient_facts({})
    torch.set_default_dtype(torch.float64)
    try:
        assert facts.ambient_facts({}) != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert facts.ambient_facts({}) == before


def test_a_replaced_method_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    before = backends.ambient_facts(Plain)["backend: code"]
    assert backends.ambient_facts(Plain)["backend: code"] == before
    real = Plain.preprocess
    for number in (1, 2):
        replaced = staticmethod(lambda p, s, number=number: (number, real(p, s)))
        monkeypatch.setattr(Plain, "preprocess", replaced)
        found = backends.ambient_facts(Plain)["backend: code"]
        assert found != before
        before = found


# --- sources ------------------------------------------------------------------------------------


def test_a_tree_is_known_by_names_and_contents_and_not_by_its_place(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name / "inner" / "__pycache__").mkdir(parents=True)
        (tmp_path / name / "a.py").write_text("a = 1\n")
        (tmp_path / name / "inner" / "b.fbs").write_text("b\n")
        (tmp_path / name / "inner" / "__pycache__" / "a.pyc").write_text(name)
    here = sources.tree_digest(tmp_path / "here")
    assert here == sources.tree_digest(tmp_path / "there")
    (tmp_path / "there" / "inner" / "b.fbs").write_text("c\n")
    assert here != sources.tree_digest(tmp_path / "there")
    (tmp_path / "here" / "a.py").rename(tmp_path / "here" / "c.py")
    assert here != sources.tree_digest(tmp_path / "here")


def test_a_module_is_known_with_the_modules_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cas_test_helper.py").write_text("def value(): return 1\n")
    (tmp_path / "cas_test_user.py").write_text("from cas_test_helper import value\nimport torch\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("cas_test_user")
    first = sources.module_digest("cas_test_user")
    assert first == sources.module_digest("cas_test_user")
    (tmp_path / "cas_test_helper.py").write_text("def value(): return 23\n")
    assert sources.module_digest("cas_test_user") != first
    for name in ("cas_test_user", "cas_test_helper"):
        del sys.modules[name]


def test_a_module_without_a_file_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typed_in", types.ModuleType("typed_in"))
    with pytest.raises(Unkeyable, match="no source file"):
        sources.module_digest("typed_in")


# --- places -------------------------------------------------------------------------------------


def test_a_path_of_the_installation_is_found_again() -> None:
    for path in (torch.__file__, os.__file__):
        name = places.portable(path)
        assert name.startswith("{") and sys.prefix not in name
        assert os.path.samefile(places.local(name), path)
    assert places.portable("/etc/hostname") == os.path.realpath("/etc/hostname")
    assert places.local("{site}/no/such/file") == "{site}/no/such/file"


# --- watching -----------------------------------------------------------------------------------


def watched(do: Any) -> Observed:
    with observing(time.clock_gettime_ns(5)) as observed:
        do()
    return observed


def test_files_variables_programs_and_modules_are_seen(tmp_path: Path) -> None:
    (tmp_path / "read").write_text("x")

    def work() -> None:
        (tmp_path / "read").read_text()
        (tmp_path / "written").write_text("y")
        os.environ.get("CAS_TEST_NOT_SET")
        "CAS_TEST_ASKED" in os.environ  # noqa: B015
        os.getenv("PATH")
        subprocess.run(["true"], check=True)
        import this  # noqa: F401

    sys.modules.pop("this", None)
    found = watched(work)
    assert str(tmp_path / "read") in found.files
    assert str(tmp_path / "written") not in found.files
    assert found.variables["CAS_TEST_NOT_SET"] is None
    assert found.variables["CAS_TEST_ASKED"] is None
    assert found.variables["PATH"] == os.environ["PATH"]
    assert "true" in found.programs
    assert any(path.endswith("this.py") for path in found.modules)
    assert not found.network


def test_copying_the_environment_reads_no_variable_and_asking_for_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CAS_TEST_A", "1")
    for copies in (lambda: dict(os.environ), lambda: os.environ.copy(), lambda: {**os.environ}):
        assert "CAS_TEST_A" not in watched(copies).variables
        asked = watched(lambda copies=copies: (copies(), os.environ["CAS_TEST_A"]))
        assert asked.variables["CAS_TEST_A"] == "1"
    assert os.environ["CAS_TEST_A"] == "1"


def test_nothing_is_watched_afterwards() -> None:
    before = type(os.environ).__getitem__
    outer = watched(lambda: watched(lambda: os.environ.get("CAS_TEST_INNER")))
    assert "CAS_TEST_INNER" in outer.variables  # an outer compile read what an inner one did
    assert type(os.environ).__getitem__ is before
    assert observer._active == []
    with pytest.raises(KeyError):
        watched(lambda: os.environ["CAS_TEST_NOT_SET"])
    assert type(os.environ).__getitem__ is before


def test_looking_up_source_lines_is_not_reading(tmp_path: Path) -> None:
    import linecache

    path = tmp_path / "script.py"
    path.write_text("x = 1\n")
    assert str(path) not in watched(lambda: linecache.getlines(str(path))).files
    assert str(path) in watched(path.read_text).files


# --- dependencies -------------------------------------------------------------------------------


def depends_on(observed: Observed, *ignored: Path) -> dict[str, Any]:
    return dict(Dependencies().add(observed, ignored))


def test_a_changed_file_variable_or_program_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, tool = tmp_path / "table", tmp_path / "tool"
    table.write_text("1")
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    time.sleep(0.02)

    def work() -> None:
        table.read_text()
        os.environ.get("CAS_TEST_A")
        subprocess.run([str(tool)], check=True)

    recorded = depends_on(watched(work))
    assert dependencies.changed(recorded) == []
    table.write_text("2")
    monkeypatch.setenv("CAS_TEST_A", "1")
    tool.write_text("#!/bin/sh\ntrue\n")
    assert dependencies.changed(recorded) == [
        f"the file {table}",
        f"the program {tool}",
        "the environment variable CAS_TEST_A",
    ]
    table.unlink()
    assert f"the file {table}" in dependencies.changed(recorded)


def test_what_the_compile_made_itself_and_what_is_ignored_are_no_dependencies(
    tmp_path: Path,
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kept").write_text("1")
    time.sleep(0.02)

    def work() -> None:
        (tmp_path / "made").write_text("1")
        (tmp_path / "made").read_text()
        (tmp_path / "cache" / "kept").read_text()
        os.environ.get("HOME")
        os.environ.get("TORCH_LOGS")

    assert depends_on(watched(work), tmp_path / "cache") == {
        "files": {},
        "programs": {},
        "variables": {},
    }


def test_what_earlier_compiles_read_is_an_input_of_later_ones(tmp_path: Path) -> None:
    (tmp_path / "table").write_text("1")
    time.sleep(0.02)
    known = Dependencies()
    first = known.add(watched((tmp_path / "table").read_text), ())
    second = known.add(watched(lambda: None), ())
    assert first == second
    assert str(tmp_path / "table") in str(second)
    (tmp_path / "table").write_text("2")  # the process goes on with what it has read
    assert dependencies.changed(dict(known.add(watched(lambda: None), ()))) != []


def test_what_cannot_be_checked_later_cannot_be_recorded() -> None:
    with pytest.raises(Unrecordable, match="another machine"):
        depends_on(Observed(0, network=True))


@pytest.mark.parametrize("section", [[], "x", {"file": 1}, {"file": None}])
def test_hostile_dependencies_are_refused(section: Any) -> None:
    for name in ("files", "programs", "variables"):
        with pytest.raises(UsageError):
            dependencies.changed({name: section})


# --- drift --------------------------------------------------------------------------------------


def test_only_the_value_that_a_compile_left_is_taken_back() -> None:
    drift = Drift()
    drift.learn({"a": "1", "c": "1"}, {"a": "2", "b": "new"})
    assert drift.rebase({"a": "2", "b": "new"}) == {"a": "1", "c": "1"}
    assert drift.rebase({"a": "3", "b": "user's", "c": "1"}) == {"a": "3", "b": "user's", "c": "1"}


def test_drift_upon_drift_has_the_first_origin() -> None:
    drift = Drift()
    drift.learn({"a": "1"}, {"a": "2"})
    drift.learn({"a": "2"}, {"a": "3"})
    assert drift.rebase({"a": "3"}) == {"a": "1"}
    drift.learn({"a": "9"}, {"a": "3"})  # the user had set another value in between
    assert drift.rebase({"a": "3"}) == {"a": "9"}
