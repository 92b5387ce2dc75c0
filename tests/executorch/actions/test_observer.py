"""What compiles are seen to read, whether it is still so, and what they change."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import importlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cas.errors import UsageError
from cas.executorch.actions import dependencies, observer
from cas.executorch.actions.cache import FILE_CLOCK
from cas.executorch.actions.dependencies import Dependencies
from cas.executorch.actions.drift import Drift
from cas.executorch.actions.errors import Unrecordable
from cas.executorch.actions.observer import Observed, observing
from cas.testing.processes import until

# --- watching -----------------------------------------------------------------------------------


def watched(do: Any) -> Observed:
    with observing(time.clock_gettime_ns(5)) as observed:
        do()
    return observed


def test_calls_of_a_thread_without_python_code_work_and_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    (tmp_path / "read").write_text("x")
    (tmp_path / "directory").mkdir()
    with observing(time.clock_gettime_ns(5)) as seen:
        _thread.start_new_thread(io.FileIO, (str(tmp_path / "read"),))
        _thread.start_new_thread(os.listdir, (str(tmp_path / "directory"),))
        _thread.start_new_thread(os.stat, (str(tmp_path / "directory"),))
        until(lambda: bool(failed or (seen.files and seen.listed and seen.found)))
    assert failed == []


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


COPIES: dict[str, Callable[[], Any]] = {
    "dict": lambda: dict(os.environ),
    "copy": lambda: os.environ.copy(),
    "unpacked": lambda: {**os.environ},
    "items": lambda: [value for _, value in os.environ.items()],
    "names": lambda: sorted(os.environ),
    "merged": lambda: os.environ | {"a": "b"},
    "bytes": lambda: dict(os.environb),
    "shown": lambda: str(os.environ),
    "compared": lambda: os.environ == {},
}


@pytest.mark.parametrize("copy", COPIES)
def test_whoever_copies_the_environment_may_read_all_of_it(
    copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAS_TEST_A", "1")
    recorded = depends_on(watched(COPIES[copy]))
    assert dependencies.changed(recorded) == []
    monkeypatch.setenv("SHLVL", "77")  # nobody copies all for this one
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert dependencies.changed(recorded) == []
    monkeypatch.setenv("CAS_TEST_A", "2")
    assert dependencies.changed(recorded) == ["the environment variable CAS_TEST_A"]
    monkeypatch.setenv("CAS_TEST_A", "1")
    monkeypatch.setenv("CAS_TEST_B", "1")
    assert dependencies.changed(recorded) == ["which environment variables there are"]
    assert os.environ["CAS_TEST_A"] == "1"


def as_if_in(module: str, source: str) -> Callable[[], Any]:
    """A function of a module that is not there, for what matters is what it is called."""
    namespace: dict[str, Any] = {"__name__": module, "os": os, "shutil": shutil}
    exec(f"def work():\n    return {source}", namespace)
    work: Callable[[], Any] = namespace["work"]
    return work


def test_torch_copies_the_environment_for_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAS_TEST_A", "1")
    for source in ("dict(os.environ)", "os.environ.copy()", "{**os.environ}"):
        found = watched(as_if_in("torch._inductor.cpp_builder", source))
        assert "CAS_TEST_A" not in found.variables and not found.whole_environment
        asked = watched(as_if_in("torch.any", f"({source}, os.environ['CAS_TEST_A'])"))
        assert asked.variables["CAS_TEST_A"] == "1"

    def start() -> None:
        subprocess.run(["true"], check=True, env=os.environ)

    assert not watched(start).whole_environment


def test_names_that_torch_lists_are_not_taken_for_a_copy_of_somebody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = next(iter(os.environ))
    listing = as_if_in("torch.any", "list(os.environ)")
    assert first in watched(lambda: (listing(), os.environ[first])).variables


def test_home_counts_for_code_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def after(work: Callable[[], Any], **changes: str) -> list[str]:
        with monkeypatch.context() as patch:
            recorded = depends_on(watched(work))
            for name, value in changes.items():
                patch.setenv(name, value)
            return dependencies.changed(recorded)

    asks, expands = "os.environ.get('HOME')", "os.path.expanduser('~/x')"
    for source in (asks, expands, "os.getenv('HOME')", "dict(os.environ)['HOME']"):
        assert after(as_if_in("a_pass", source), HOME="/elsewhere") == [
            "the environment variable HOME"
        ]
        assert after(as_if_in("torch.any", source), HOME="/elsewhere") == []
    assert after(as_if_in("a_pass", "os.environ.get('LANG')"), LANG="tlh") != []
    assert after(lambda: tempfile.mkdtemp(), TMPDIR="/elsewhere") == []


def test_an_environment_of_the_programs_own_cannot_be_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {"A": "b"})
    with pytest.raises(Unrecordable, match="replaced"):
        depends_on(watched(lambda: None))


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


LOOKS: dict[str, Callable[[Path], Any]] = {
    "opened": lambda path: suppressed(FileNotFoundError, path.read_text),
    "exists": lambda path: path.exists(),
    "os.path.exists": lambda path: os.path.exists(path),
    "os.path.isfile": lambda path: os.path.isfile(str(path)),
    "os.access": lambda path: os.access(path, os.R_OK),
    "os.path.lexists": lambda path: os.path.lexists(os.fsencode(path)),
    "os.stat": lambda path: suppressed(FileNotFoundError, lambda: os.stat(path)),
    "os.listdir": lambda path: os.listdir(path.parent),
    "glob": lambda path: list(path.parent.glob("*")),
    "os.walk": lambda path: list(os.walk(path.parent)),
}


def suppressed(error: type[Exception], work: Callable[[], Any]) -> None:
    with contextlib.suppress(error):
        work()


@pytest.mark.parametrize("how", LOOKS)
def test_a_file_that_was_looked_for_in_vain_counts_when_it_is_there(
    how: str, tmp_path: Path
) -> None:
    (tmp_path / "place").mkdir()
    path = tmp_path / "place" / "table"
    absent = depends_on(watched(lambda: LOOKS[how](path)))
    assert dependencies.changed(absent) == []
    path.write_text("1")
    assert any("what is at" in reason for reason in dependencies.changed(absent)), absent
    time.sleep(0.02)
    present = depends_on(watched(lambda: LOOKS[how](path)))
    assert dependencies.changed(present) == []
    path.unlink()
    assert dependencies.changed(present) != []


RELATIVE: dict[str, Callable[[], Any]] = {
    "opened": lambda: open("table").close(),
    "above": lambda: open("../one/table").close(),
    "os.open": lambda: os.close(os.open(b"table", os.O_RDONLY)),
    "FileIO": lambda: io.FileIO(Path("table")).close(),
    "resolved": lambda: Path("table").resolve().read_text(),
    "of the directory": lambda: (Path.cwd() / "table").read_text(),
}


@pytest.mark.parametrize("how", RELATIVE)
def test_a_file_of_the_directory_of_the_process_is_another_one_in_another_directory(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / place / "one").mkdir(parents=True)
        (tmp_path / place / "one" / "table").write_text(text)
    time.sleep(0.02)
    monkeypatch.chdir(tmp_path / "a" / "one")
    recorded = depends_on(watched(RELATIVE[how]))
    assert recorded["files"] and dependencies.changed(recorded) == []
    monkeypatch.chdir(tmp_path / "b" / "one")
    assert dependencies.changed(recorded) == []
    monkeypatch.chdir(tmp_path / "c" / "one")
    assert dependencies.changed(recorded) != []


def test_what_is_looked_for_in_the_directory_of_the_process_counts_in_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("a/data", "b"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    absent = depends_on(watched(lambda: os.path.exists("table")))
    found = depends_on(watched(lambda: os.path.isdir("data/")))
    listed = depends_on(watched(lambda: (os.listdir(), os.listdir("."))))
    shutil.rmtree(tmp_path / "a" / "data")
    (tmp_path / "a" / "data").mkdir()
    for recorded in (absent, found, listed):
        assert dependencies.changed(recorded) == []
    monkeypatch.chdir(tmp_path / "b")
    (tmp_path / "b" / "table").touch()
    for recorded in (absent, found, listed):
        assert len(dependencies.changed(recorded)) == 1


def test_what_is_relative_to_a_directory_that_the_compile_goes_to_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "table").write_text("1")
    time.sleep(0.02)
    monkeypatch.chdir("/")

    def work() -> None:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / "place")
            open("table").close()

    assert str(tmp_path / "place" / "table") in depends_on(watched(work))["files"]


def test_a_link_that_leads_elsewhere_counts(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table").write_text(name)
    (tmp_path / "current").symlink_to("1")
    time.sleep(0.02)
    recorded = depends_on(watched((tmp_path / "current" / "table").read_text))
    assert dependencies.changed(recorded) == []
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("2")
    assert dependencies.changed(recorded) != []


def test_a_module_is_the_one_that_is_imported_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "cas_test_late.py").write_text(f"value = {text}\n")
    time.sleep(0.02)

    def changes_in(place: str) -> list[str]:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / place)
            return dependencies.changed(recorded)

    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path / "a")
        recorded = depends_on(watched(lambda: importlib.import_module("cas_test_late")))
    del sys.modules["cas_test_late"]
    assert recorded["files"]
    assert changes_in("a") == changes_in("b") == []
    assert changes_in("c") == ["the file {path}/cas_test_late.py"]


def test_a_program_that_was_looked_for_in_vain_counts_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    recorded = depends_on(watched(lambda: shutil.which("a-tool-of-the-test")))
    assert recorded["programs"] == {"a-tool-of-the-test": "absent"}
    assert recorded["variables"] == {}  # not the PATH, which is another one elsewhere
    (tmp_path / "a-tool-of-the-test").write_text("#!/bin/sh\n")
    (tmp_path / "a-tool-of-the-test").chmod(0o755)
    assert dependencies.changed(recorded) == ["the program a-tool-of-the-test"]


def test_what_a_compile_reads_and_then_writes_cannot_be_recorded(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    path.write_text("1")
    time.sleep(0.02)
    with pytest.raises(Unrecordable, match="counter was read, and changed"):
        depends_on(watched(lambda: path.write_text(path.read_text() + "1")))
    with pytest.raises(Unrecordable, match="was listed, and changed"):
        depends_on(watched(lambda: (os.listdir(tmp_path), (tmp_path / "new").touch())))
    time.sleep(0.02)
    assert str(path) in depends_on(watched(lambda: path.open("r+").close()))["files"]


def test_a_file_written_just_before_is_no_work_of_the_compile(tmp_path: Path) -> None:
    path = tmp_path / "table"
    with observing(time.clock_gettime_ns(FILE_CLOCK) - 50_000_000) as observed:
        written_by_c(path)
        path.read_text()
    assert [*depends_on(observed)["files"]] == [str(path)]


def written_by_c(path: Path) -> None:
    """No audit hook of Python's sees that."""
    memory = ctypes.CDLL(None)
    handle = memory.creat(os.fsencode(path), 0o644)
    memory.write(handle, b"1", 1)
    memory.close(handle)


def test_the_functions_of_os_are_themselves_again_afterwards(tmp_path: Path) -> None:
    before = os.stat, os.lstat, os.access, set(os.supports_follow_symlinks)

    def work() -> None:
        (tmp_path / "link").symlink_to("nowhere")
        shutil.copy2(tmp_path / "link", tmp_path / "other", follow_symlinks=False)

    watched(lambda: watched(work))
    assert (tmp_path / "other").is_symlink()
    assert before == (os.stat, os.lstat, os.access, os.supports_follow_symlinks)


def test_directories_of_the_compiles_own_are_no_dependencies(tmp_path: Path) -> None:
    def work() -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as scratch:
            inner = Path(scratch, "inner")
            assert not inner.exists()
            inner.mkdir()
            (inner / "file").write_text("1")
            assert (inner / "file").read_text() and os.listdir(inner)

    assert not any(depends_on(watched(work)).values())


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
        known()

    known = as_if_in("torch.any", "(os.environ.get('HOME'), os.environ.get('TORCH_LOGS'))")
    assert depends_on(watched(work), tmp_path / "cache") == {
        "files": {},
        "found": {},
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


@pytest.mark.parametrize("name", ["a\0b", "/a\0b/", "{cwd}/\0", "{path}/\0", "\ud800"])
def test_names_that_nothing_can_have_are_refused(name: str) -> None:
    for section in ("files", "found"):
        with pytest.raises(UsageError, match="nothing can have"):
            dependencies.changed({section: {name: "x"}})


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
