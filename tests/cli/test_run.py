"""`cas run` is to a script what `python` is: each test compares the two."""

from __future__ import annotations

import importlib.util
import json
import py_compile
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from .conftest import Filled, Run, command_line, environment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None, reason="cas run needs ExecuTorch"
)

#: What cas itself says.
SAYS = re.compile(r"^cas: .*\n", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def without_cas(self) -> Ended:
        return Ended(self.code, self.out, SAYS.sub("", self.err))


Both = Callable[..., tuple[Ended, Ended]]


@pytest.fixture
def both(store_dir: Path, tmp_path: Path) -> Both:
    """How Python ends with these arguments, and how `cas run` does."""

    def call(
        *arguments: str, stdin: str = "", options: tuple[str, ...] = ()
    ) -> tuple[Ended, Ended]:
        commands = (
            [sys.executable, *arguments],
            command_line("--store", store_dir, "run", *options, *arguments),
        )
        python, cas = (_end(list(command), tmp_path, stdin) for command in commands)
        return python, cas

    return call


def _end(command: list[str], cwd: Path, stdin: str) -> Ended:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(PYTHONDONTWRITEBYTECODE="1"),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=500,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def script(directory: Path, text: str, name: str = "script.py") -> str:
    path = directory / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return name


LOOK_AROUND = """
import os, sys, pickle
names = {name for name in globals() if name.startswith("__")}
print(sorted(names), __name__, __file__, __package__, type(__loader__).__name__)
print(__spec__ and (__spec__.name, __spec__.origin), sys.argv, sys.path[0], os.getcwd())
print(__builtins__, sys.modules["__main__"].__dict__ is globals())

class Local: ...
print(type(pickle.loads(pickle.dumps(Local()))) is Local)
"""


def test_a_script_sees_what_it_sees_under_python(both: Both, tmp_path: Path) -> None:
    name = script(tmp_path, LOOK_AROUND)
    python, cas = both(name, "--name", "x", "-m", "--", "-q", "--json", "-h", "")
    assert cas.without_cas == python
    assert "'--name', 'x', '-m', '--', '-q', '--json', '-h', ''" in cas.out


@pytest.mark.parametrize("form", ["./script.py", "below/script.py", "link.py", "absolute"])
def test_however_the_script_is_named(both: Both, tmp_path: Path, form: str) -> None:
    text = LOOK_AROUND
    script(tmp_path, text)
    script(tmp_path, text, "below/script.py")
    (tmp_path / "link.py").symlink_to(tmp_path / "below" / "script.py")
    python, cas = both(str(tmp_path / "script.py") if form == "absolute" else form, "1")
    # Some versions of Python drop the "./" from __file__.
    assert cas.without_cas.out.replace("/./", "/") == python.out.replace("/./", "/")


def test_modules_packages_directories_and_archives(both: Both, tmp_path: Path) -> None:
    text = LOOK_AROUND
    script(tmp_path, "import sys; print(sys.argv, __name__)", "package/__init__.py")
    script(tmp_path, "from . import __name__ as n; print(n)\n" + text, "package/inner.py")
    script(tmp_path, text, "package/__main__.py")
    script(tmp_path, text, "plain/__main__.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", text)
    for form in (["-m", "package.inner"], ["-m", "package"], ["plain"], ["archive.zip"]):
        python, cas = both(*form, "-m", "1")
        assert cas.without_cas == python, form


def test_a_compiled_script_and_one_out_of_a_pipe(both: Both, tmp_path: Path) -> None:
    name = script(tmp_path, "import sys; print(sys.argv, __name__, sys.path[0])")
    py_compile.compile(str(tmp_path / name), cfile=str(tmp_path / "compiled.pyc"))
    python, cas = both("compiled.pyc", "1")
    assert cas.without_cas == python
    _, cas = both("/dev/stdin", "1", stdin="import sys; print(sys.argv)")
    assert (cas.code, cas.out) == (0, "['/dev/stdin', '1']\n")


@pytest.mark.parametrize(
    "ending",
    ["sys.exit()", "sys.exit(0)", "sys.exit(3)", "sys.exit(True)", "sys.exit(-1)",
     "sys.exit('said at the end')", "sys.exit((1, 2))", "raise SystemExit", "os._exit(4)",
     "raise ValueError('one\\ntwo')", "1 / 0", "f()", "os.kill(os.getpid(), 15)", "",
     "raise BrokenPipeError('gone')", "import not_there", "open('not there')"],
)  # fmt: skip
def test_every_ending(both: Both, tmp_path: Path, ending: str) -> None:
    name = script(
        tmp_path,
        f"""
import atexit, os, sys

def f():
    try:
        raise KeyError("first")
    except KeyError:
        raise RuntimeError("second")

atexit.register(lambda: print("at exit", sys.argv, sys.modules["__main__"].f.__name__))
print("begun")
{ending}
""",
    )
    python, cas = both(name)
    assert cas.without_cas == python


@pytest.mark.parametrize(
    "text",
    ["def f(:\n",
     "import sys\nsys.excepthook = lambda *e: print('mine', e[0], e[2].tb_lineno)\n1/0",
     "import sys\ndef hook(*e):\n    sys.exit(7)\nsys.excepthook = hook\n1/0",
     "import sys\ndef hook(*e):\n    raise KeyError(1)\nsys.excepthook = hook\n1/0",
     "import threading, time\ndef late():\n    time.sleep(0.3)\n    print('thread')\n"
     "threading.Thread(target=late).start()\nprint('main')",
     "import warnings\nwarnings.warn('w')", "print(input(), input())",
     "raise ExceptionGroup('g', [ValueError(1), KeyError(2)])",
     "import click\n@click.command()\n@click.option('--name')\ndef main(name):\n"
     "    print(name, click.get_current_context().command_path)\nmain()",
     "import logging\nlogging.warning('to the root')\nlogging.getLogger('x').error('child')"],
)  # fmt: skip
def test_what_else_scripts_do(both: Both, tmp_path: Path, text: str) -> None:
    if "ExceptionGroup" in text and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no ExceptionGroup")
    name = script(tmp_path, text)
    python, cas = both(name, stdin="one\ntwo\n")
    if "KeyError(1)" in text:  # Python shows our hook around the script's: it says so, and goes on
        assert (cas.code, cas.out) == (python.code, python.out)
        assert "Error in sys.excepthook" in cas.err and "ZeroDivisionError" in cas.err
    else:
        assert cas.without_cas == python


def test_ctrl_c_ends_the_process_by_the_signal(both: Both, tmp_path: Path, run: Run) -> None:
    name = script(
        tmp_path,
        "import atexit, os, signal\natexit.register(print, 'at exit')\n"
        "def f():\n    os.kill(os.getpid(), signal.SIGINT)\nf()\n",
    )
    python, cas = both(name)
    assert python.code == -signal.SIGINT
    assert cas.without_cas == python
    assert run("verify").code == 0


def test_a_child_that_runs_on_to_the_end_of_the_script(both: Both, tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import os, sys\nsys.stdout.flush()\nchild = os.fork()\n"
        "if child:\n    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "else:\n    print('child', flush=True)\n    sys.exit(5)\n",
    )
    python, cas = both(name)
    assert cas.without_cas == python
    assert cas.err.count("cas: ") == 1, "only the parent reports"


def test_workers_of_multiprocessing(both: Both, tmp_path: Path) -> None:
    for method in ("fork", "spawn"):
        name = script(
            tmp_path,
            "import multiprocessing, sys\n\ndef square(x):\n    return x * x, sys.argv[1:]\n\n"
            "if __name__ == '__main__':\n"
            f"    with multiprocessing.get_context('{method}').Pool(1) as pool:\n"
            "        print(pool.map(square, range(3)))\n",
        )
        python, cas = both(name, "a")
        assert cas.without_cas == python


def test_a_script_that_exports_nothing_does_not_import_torch(both: Both, tmp_path: Path) -> None:
    name = script(
        tmp_path, "import sys\nprint([m for m in ('torch', 'executorch') if m in sys.modules])"
    )
    _, cas = both(name)
    assert cas.out == "[]\n"
    assert cas.err == "cas: nothing is recorded: the script wrote no ExecuTorch program\n"


def test_the_report_and_quiet(both: Both, tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import os\nos.makedirs('d', exist_ok=True)\nos.chdir('d')\nraise SystemExit(3)",
    )
    _, cas = both(name, options=("--report", "report.json", "-q"))
    assert (cas.code, cas.err) == (3, "")
    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["script"], document["exit_code"], document["artifacts"]) == (name, 3, [])
    _, cas = both(name, options=("--json",))
    assert (cas.code, cas.out) == (3, "")
    assert json.loads(cas.err)["exit_code"] == 3


def test_disabled_it_is_not_there(store_dir: Path, tmp_path: Path) -> None:
    name = script(tmp_path, "import sys\nprint(sys.argv)\n1 / 0")
    command = command_line("--store", store_dir, "run", name, "a")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(CAS_DISABLE="1"), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "['script.py', 'a']\n")
    assert done.stderr.startswith("Traceback") and "cas" not in done.stderr
    assert not store_dir.exists()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, in a process that is not left to a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cas.scripts.exec", lambda *_: pytest.fail("it was run"), raising=False)
    yield tmp_path


def test_what_is_refused_before_the_script_begins(run: Run, here: Path, filled: Filled) -> None:
    assert run("run").code == 2
    missing = run("run", "none.py", "--json")
    assert (missing.code, missing.out) == (3, "")
    assert missing.err == "cas: there is no script none.py\n"
    name = script(here, "")
    assert run("run", "--name", "../x", name).code == 2
    assert run("run", "--report", "none/report.json", name).code == 2
    assert run("run", "--recheck", "2", name).code == 2
    wrong = run("run", name, env={"CAS_RECHECK": "often"})
    assert wrong.code == 2 and "CAS_RECHECK: 'often' is not a number from 0 to 1" in wrong.err
    assert run("--read-only", "run", name).code == 5
    assert run("run", "--json", "none.py").json["error"] == "ScriptNotFound"


@pytest.mark.parametrize("module", ["not_there", "not_there.below", "os.not_there"])
def test_a_module_that_does_not_exist(both: Both, tmp_path: Path, module: str) -> None:
    _, cas = both("-m", module, "--json")
    assert (cas.code, cas.out) == (3, "")
    assert "cas: there is no module" in cas.err
    assert "Traceback" not in cas.err


def test_a_package_without_main_and_a_directory_without(both: Both, tmp_path: Path) -> None:
    script(tmp_path, "", "package/__init__.py")
    assert "without a __main__ module" in both("-m", "package")[1].err
    assert "cannot find a '__main__' module" in both("package")[1].err
