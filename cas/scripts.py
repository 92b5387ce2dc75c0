"""Run a Python script, module or directory inside this process, as ``python`` itself would.

What a program can see of how it was started is what it would see without us: `sys.argv`,
``sys.path[0]``, and a ``__main__`` of its own with ``__file__``, ``__spec__`` and the rest. The
process becomes the program's: nothing is put back when it ends, because handlers that it left with
`atexit`, and threads that outlive its last line, may need it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final

from cas.errors import NotFound

#: Where this package's own frames come from, and the import system's.
_OWN: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_FROZEN: Final = ("<frozen ",)


class ScriptNotFound(NotFound):
    """There is nothing to run under that name."""


@dataclass(frozen=True, slots=True)
class Script:
    """What to run: a file, a directory or zip file with a ``__main__.py``, or a module."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def text(self) -> str:
        """As it stands on a command line."""
        return f"-m {self.target}" if self.is_module else self.target

    def check(self) -> None:
        """Find out before anything else is done that there is no such file.

        A module is looked for when it is run: that can take importing its packages.

        Raises:
            ScriptNotFound
        """
        if not self.is_module and not os.path.exists(self.target):
            raise ScriptNotFound(f"there is no script {self.target}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended: ``error`` is what it let out, None if it came to its last line."""

    error: BaseException | None = None

    @property
    def succeeded(self) -> bool:
        """Whether Python would exit with 0."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """What Python would exit with; 130 stands for a process that Ctrl-C ended."""
        if self.error is None:
            return 0
        if isinstance(self.error, KeyboardInterrupt):
            return 130
        if not isinstance(self.error, SystemExit):
            return 1
        code = self.error.code
        if code is None:
            return 0
        return code & 0xFF if isinstance(code, int) else 1


def execute(script: Script) -> Outcome:
    """Run ``script`` to its end, in this process and this thread.

    Whatever it raises is part of the outcome, with a traceback that shows the program's frames and
    not those of whoever started it.
    """
    try:
        code, module = _prepare(script)
        exec(code, module.__dict__)
    except BaseException as error:
        return Outcome(as_without_us(error))
    return Outcome()


# --- what the interpreter does before the first line --------------------------------------------


def _prepare(script: Script) -> tuple[CodeType, ModuleType]:
    if script.is_module:
        return _prepare_module(script)
    # As in the interpreter: relative to where it started, and otherwise as it was written.
    path = os.path.join(os.getcwd(), script.target)
    sys.argv[:] = [script.target, *script.arguments]
    if _is_container(path):
        return _prepare_container(script, path)
    _set_path0(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module = _main_module(path, loader, None)
    return _compile(path), module


def _prepare_module(script: Script) -> tuple[CodeType, ModuleType]:
    _set_path0(os.getcwd())
    sys.argv[:] = ["-m", *script.arguments]  # what packages see while they are imported
    spec = _find_module(script.target)
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    if code is None:
        raise ScriptNotFound(f"module {spec.name!r} has no code that could be run")
    sys.argv[0] = spec.origin or script.target
    return code, _main_module(spec.origin, loader, spec)


def _prepare_container(script: Script, path: str) -> tuple[CodeType, ModuleType]:
    """A directory or an archive: it goes on the path, even where nothing else would."""
    _set_path0(path, always=True)
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    code = None if spec is None else spec.loader.get_code("__main__")  # type: ignore[union-attr]
    if spec is None or code is None:
        raise ScriptNotFound(f"cannot find a '__main__' module in {script.target}")
    return code, _main_module(spec.origin, spec.loader, spec)


def _is_container(path: str) -> bool:
    """Whether Python would import from ``path`` instead of reading it."""
    if os.path.isdir(path):
        return True
    finder: Any = pkgutil.get_importer(path)
    return finder is not None and not isinstance(finder, importlib.machinery.FileFinder)


def _set_path0(entry: str, *, always: bool = False) -> None:
    """Put ``entry`` where the interpreter put the directory of the command that was started."""
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0:1] = [entry]
    elif always:
        sys.path.insert(0, entry)


def _compile(path: str) -> CodeType:
    """The code of a file; like the interpreter, also of a compiled one."""
    try:
        with io.open_code(path) as file:  # once: it may be a pipe
            data = file.read()
    except OSError as error:
        raise ScriptNotFound(f"cannot read the script {path}: {error.strerror}") from error
    code = pkgutil.read_code(io.BytesIO(data))
    return code if isinstance(code, CodeType) else compile(data, path, "exec", dont_inherit=True)


def _find_module(name: str) -> importlib.machinery.ModuleSpec:
    """The spec that ``python -m name`` would run; importing its packages is part of that.

    Raises:
        ScriptNotFound
    """
    spec = _spec_of(name)
    if spec.submodule_search_locations is None:
        return spec
    if name.rpartition(".")[2] == "__main__":
        raise ScriptNotFound(f"cannot use the package {name!r} as a __main__ module")
    try:
        return _spec_of(f"{name}.__main__")
    except ScriptNotFound:
        raise ScriptNotFound(
            f"{name!r} is a package without a __main__ module, so it cannot be run"
        ) from None


def _spec_of(name: str) -> importlib.machinery.ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # Of a package on the way there; one that a package itself misses is the program's error.
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ScriptNotFound(f"there is no module {error.name!r}") from None
        raise
    except ValueError:  # relative, or a module without a spec
        spec = None
    if spec is None:
        raise ScriptNotFound(f"there is no module {name!r}")
    return spec


def _main_module(
    path: str | None, loader: Any, spec: importlib.machinery.ModuleSpec | None
) -> ModuleType:
    """A new ``__main__`` with the attributes that the interpreter's own has."""
    module = ModuleType("__main__")
    module.__dict__.update(
        __package__=None if spec is None else spec.parent,
        __loader__=loader,
        __spec__=spec,
        __annotations__={},
        __builtins__=sys.modules["builtins"],
        __cached__=None if spec is None else spec.cached,
    )
    if path is not None:
        module.__file__ = path
    sys.modules["__main__"] = module
    return module


# --- tracebacks ---------------------------------------------------------------------------------


def as_without_us(error: BaseException) -> BaseException:
    """``error``, and what it came from, with tracebacks that show no frame of this package.

    The frames at the end of a traceback stay: they are where it was raised.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = _drop(current.__traceback__, _is_ours)
        pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
    return error


def _drop(
    trace: TracebackType | None, is_ours: Callable[[TracebackType], bool]
) -> TracebackType | None:
    """The traceback without our frames, except for those after the last one of somebody else."""
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    last = max((i for i, entry in enumerate(entries) if not is_ours(entry)), default=-1)
    kept = [entry for i, entry in enumerate(entries) if i > last or not is_ours(entry)]
    if last < 0:  # nobody else's: the program did not even begin
        return None
    for entry, following in zip(kept, [*kept[1:], None], strict=True):
        entry.tb_next = following
    return kept[0]


def _is_ours(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(_OWN) or file.startswith(_FROZEN)
