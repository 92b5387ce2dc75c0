"""Scripts under `cas run`: the same files as alone, and each program recorded once."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from executorch.exir import EdgeProgramManager

import cas
from cas.executorch.running import ArtifactNames, name_of_stem
from cas.running import RunOptions, RunResult, run
from cas.scripts import Script, execute
from cas.verify import verify

BEGINNING = """
import copy, io, os, sys, threading
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

def lower():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 600), torch.nn.Linear(600, 8)).eval()
    return to_edge_transform_and_lower(torch.export.export(model, (torch.zeros(1, 96),)))

edge = lower()

def program(**config):
    return copy.deepcopy(edge).to_executorch(ExecutorchBackendConfig(**config))
"""


@dataclass(frozen=True)
class Ran:
    """A script's files when it ran alone and when it ran under the store, and what came of it."""

    alone: dict[str, bytes]
    files: dict[str, bytes]
    result: RunResult

    @property
    def refs(self) -> dict[str, list[str]]:
        return {
            str(found.commit.ref): [file.name for file in found.commit.files]
            for found in self.result.artifacts
        }


RunBoth = Callable[..., Ran]


@pytest.fixture
def process_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script that ran leaves behind, put back."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture
def both(
    store: cas.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    process_restored: None,
) -> RunBoth:
    """Run a script alone and under the store, each in a directory of its own.

    Afterwards every artifact assembles to the very files that the script wrote.
    """

    def enter(name: str) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        monkeypatch.chdir(directory)
        return directory

    def call(text: str, name: str | None = None) -> Ran:
        path = tmp_path / "script.py"
        path.write_text(BEGINNING + text)
        alone = enter("alone")
        execute(Script(str(path)))
        stored = enter("stored")
        result = run(store, Script(str(path)), RunOptions(name))
        _check_assembled(store, result, tmp_path / "again")
        assert verify(store).clean
        return Ran(_contents(alone), _contents(stored), result)

    return call


def _contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def _check_assembled(store: cas.Store, result: RunResult, directory: Path) -> None:
    for recorded in result.artifacts:
        target = directory / recorded.commit.ref.name
        for path in store.assemble(recorded.commit.ref, target):
            where = recorded.paths.get(path.name)
            assert where is None or where.read_bytes() == path.read_bytes()
        for entry in store.manifest(recorded.commit.ref).files:
            assert cas.Digest.of((target / entry.name).read_bytes()) == entry.digest


def test_a_program_and_its_data_files_are_one_artifact(both: RunBoth, store: cas.Store) -> None:
    ran = both("""
p = program(external_constants=lambda node: "first" if "0" in node.name else "second")
with open("model.pte", "wb") as file:
    p.write_to_file(file)
p.write_tensor_data_to_file(".")
""")
    assert ran.files == ran.alone
    assert len(ran.files) == 3
    assert ran.refs == {"model@1": ["first.ptd", "model.pte", "second.ptd"]}
    manifest = store.manifest("model")
    assert {tensor.file for tensor in manifest.tensors} == {"first.ptd", "second.ptd"}
    assert {tensor.name for tensor in manifest.tensors} >= {"0.weight", "1.weight"}
    assert manifest.provenance["methods"] == ["forward"]


def test_every_way_to_write(both: RunBoth) -> None:
    ran = both("""
from executorch.extension.export_util.utils import save_pte_program
os.mkdir("below")
program().save("saved.pte")
save_pte_program(program(), "utility", "below")
p = program(external_constants=True)
save_pte_program(p, "with_data", "below")
with open("taken.pte", "wb") as file:
    file.write(program().buffer)
p = program(external_constants=True)
with open("half.pte", "wb") as file:
    file.write(p.buffer)
os.mkdir("half")
p.write_tensor_data_to_file("half")
memory = io.BytesIO()
program().write_to_file(memory)
open("from_memory.pte", "wb").write(memory.getvalue())
""")
    assert ran.files == ran.alone
    assert ran.refs == {
        "saved@1": ["saved.pte"],
        "utility@1": ["utility.pte"],
        "with_data@1": ["_default_external_constant.ptd", "with_data.pte"],
        # Of the program's own file nothing is known but what is in it.
        "model@1": ["_default_external_constant.ptd", "model.pte"],
    }
    assert ran.result.unwritten == 2


def test_the_place_in_the_file_and_the_directory_are_the_scripts(both: RunBoth) -> None:
    ran = both("""
class Strange:
    '''A file that keeps what it is given, and knows nothing else.'''
    def __init__(self):
        self.pieces = []
    def write(self, data):
        self.pieces.append(data)

p = program()
with open("middle.bin", "wb") as file:
    file.write(b"before")
    p.write_to_file(file)
    file.write(b"after %d" % file.tell())
with open("appended.bin", "ab") as file:
    file.write(b"x")
    p.write_to_file(file)
with open("raw.pte", "wb", buffering=0) as file:
    p.write_to_file(file)
strange = Strange()
p.write_to_file(strange)
open("strange.bin", "wb").write(b"".join(strange.pieces))
os.mkdir("elsewhere")
late = open("relative.pte", "wb")
os.chdir("elsewhere")
with late:
    p.write_to_file(late)
p.save("inside.pte")
with open("inside.pte.tmp", "wb") as file:
    program().write_to_file(file)
os.rename("inside.pte.tmp", "renamed.pte")
with os.fdopen(os.open("by_number.pte", os.O_WRONLY | os.O_CREAT), "wb") as file:
    program().write_to_file(file)
""")
    assert ran.files == ran.alone
    assert "elsewhere/inside.pte" in ran.files
    assert list(ran.refs.values()) == [["inside.pte"], ["renamed.pte"], ["by_number.pte"]]
    assert ran.refs["inside@1"] and ran.result.unwritten == 0


def test_a_name_that_is_given(both: RunBoth) -> None:
    text = "program().save('one.pte')\nprogram().save('two.pte')\n"
    assert both(text, "phones/v1").refs == {
        "phones/v1@1": ["one.pte"],
        "phones/v1-2@1": ["two.pte"],
    }


def test_a_name_from_a_file_is_always_a_name() -> None:
    assert name_of_stem("llama 3.2 (8b)") == "llama-3.2-8b"
    assert name_of_stem("..") == name_of_stem("") == "program"


def test_programs_of_the_same_name_get_numbers() -> None:
    names = ArtifactNames(None)
    found = [names.next(stem) for stem in ("a", "a-2", "a", "b", "a")]
    assert found == ["a", "a-2", "a-3", "b", "a-4"]
    names = ArtifactNames("phones/v1")
    assert [names.next(stem) for stem in "aab"] == ["phones/v1", "phones/v1-2", "phones/v1-3"]


@pytest.mark.parametrize(
    "end", ["sys.exit(1)", "1 / 0", "raise KeyboardInterrupt"], ids=["exit", "error", "ctrl-c"]
)
def test_a_script_that_fails_records_nothing(both: RunBoth, store: cas.Store, end: str) -> None:
    ran = both(f"p = program()\np.save('whole.pte')\n{end}\n")
    assert ran.files == ran.alone
    assert ran.result.artifacts == ()
    assert ran.result.outcome.exit_code in (1, 130)
    assert list(store.refs()) == []


def test_an_error_shows_the_frames_of_the_script_only(
    store: cas.Store, tmp_path: Path, process_restored: None
) -> None:
    path = tmp_path / "script.py"
    path.write_text(BEGINNING + "class Bad:\n    def write(self, data):\n        1 / 0\n"
                    "program().write_to_file(Bad())\n")  # fmt: skip
    error = run(store, Script(str(path))).outcome.error
    assert isinstance(error, ZeroDivisionError)
    files = []
    trace = error.__traceback__
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    assert files[0] == files[-1] == str(path)
    assert [file for file in files if "/cas/" in file] == []
    assert len(files) > 3, "ExecuTorch's own are there"


def test_a_file_that_could_not_be_written_is_not_recorded(both: RunBoth) -> None:
    ran = both("""
class Full(io.FileIO):
    def write(self, data):
        raise OSError(28, "no space")

p = program()
try:
    p.write_to_file(Full("lost.pte", "wb"))
except OSError:
    p.save("kept.pte")
""")
    assert ran.files == ran.alone
    assert list(ran.refs.values()) == [["kept.pte"]]


def test_what_handlers_threads_and_children_write_later_is_right(both: RunBoth) -> None:
    registered = []
    original = atexit.register
    try:
        atexit.register = lambda f, *args: registered.append((f, args)) or f  # type: ignore
        ran = both("""
import atexit
p = program()
p.save("main.pte")
q = program()

def save(name):
    with open(name, "wb") as file:
        q.write_to_file(file)
    lower().to_executorch().save("new_" + name)

child = os.fork()
if not child:
    try:
        save("child.pte")
    finally:
        os._exit(0 if os.path.exists("new_child.pte") else 1)
assert os.waitpid(child, 0)[1] == 0
thread = threading.Thread(target=save, args=("thread.pte",))
thread.start()
thread.join()
atexit.register(save, os.path.abspath("handler.pte"))
""")
    finally:
        atexit.register = original
    assert ran.files == ran.alone
    assert {"main.pte", "child.pte", "new_child.pte", "thread.pte", "new_thread.pte"} == set(
        ran.files
    )
    # The thread's own export was not captured, but what it wrote is recorded.
    assert list(ran.refs.values()) == [["main.pte"], ["thread.pte"], ["new_thread.pte"]]
    _, (stored, arguments) = registered  # the first is the script's that ran alone
    stored.__globals__["lower"] = lambda: stored.__globals__["edge"]
    stored(arguments[0])
    handled = Path(arguments[0])
    assert handled.read_bytes() == ran.files["thread.pte"]


def test_a_process_that_uses_capture_itself_is_told(
    store: cas.Store, tmp_path: Path, process_restored: None
) -> None:
    from cas.executorch import CaptureActive, capture

    path = tmp_path / "script.py"
    path.write_text(BEGINNING + "program()\n")
    with capture(store, "outer"):
        error = run(store, Script(str(path))).outcome.error
    assert isinstance(error, CaptureActive)
    assert run(store, Script(str(path))).outcome.error is None


def test_what_was_armed_is_harmless_after_the_end(
    store: cas.Store, tmp_path: Path, process_restored: None
) -> None:
    from cas.executorch import capture

    path = tmp_path / "script.py"
    path.write_text(
        "from executorch.exir.program._program import to_edge_transform_and_lower as lower\n"
    )
    result = run(store, Script(str(path)))
    assert result.outcome.error is None
    lower = sys.modules["__main__"].lower  # type: ignore[attr-defined]
    model = torch.nn.Linear(4, 4).eval()
    edge = lower(torch.export.export(model, (torch.zeros(1, 4),)))
    assert type(edge) is EdgeProgramManager
    with capture(store, "free"):  # no other one is active
        pass


def test_a_script_run_again_has_its_export_out_of_the_store(
    both: RunBoth, store: cas.Store
) -> None:
    text = "edge.to_executorch().save('model.pte')\n"
    assert both(text).result.actions.misses == 1
    result = run(store, Script(sys.argv[0]))
    assert (result.actions.hits, result.actions.total) == (1, 1)
    assert result.actions.seconds_saved > 0
    first, second = store.manifest("model@1"), store.manifest("model@2")
    assert (first.files, first.tensors) == (second.files, second.tensors)
    assert second.provenance["actions"] == first.provenance["actions"]
