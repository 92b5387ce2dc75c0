"""Digests of source files: what a version number does not tell of an edited installation."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from cas.digest import Digest
from cas.executorch.actions import places
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.stream import Stream

#: Not followed from a user's module: their versions are facts.
_SETTLED: Final = frozenset(
    {
        "cas",
        "executorch",
        "flatbuffers",
        "numpy",
        "sympy",
        "torch",
        "torchao",
        "torchgen",
        "triton",
        "typing_extensions",
    }
)

#: While a compile is watched, the one in `os` takes down who looks at what.
_stat: Final = os.stat
_SKIPPED: Final = frozenset({"__pycache__", "test", "tests"})


def file_digest(path: str) -> Digest | None:
    """The digest of a regular file, remembered while its times and size stay; None without one."""
    try:
        found = _stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return _digest(path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@functools.lru_cache(maxsize=8192)
def _digest(path: str, inode: int, size: int, modified: int, changed: int) -> Digest | None:
    try:
        with open(path, "rb") as file:
            return Digest(_hash_file(file))
    except OSError:
        return None


def _hash_file(file: Any) -> bytes:
    return Digest.of_stream(iter(lambda: file.read(1 << 20), b""))


def tree_digest(root: Path, suffixes: tuple[str, ...] = ("",)) -> Digest:
    """Names and contents of all files under a directory; not of its tests, nor compiled ones."""
    stream = Stream()
    for path in sorted(path for path in _files(root) if path.name.endswith(suffixes)):
        stream.put_text(b"fn", path.relative_to(root).as_posix())
        stream.put(b"fd", file_digest(str(path)) or b"")
    return stream.digest()


def _files(root: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _SKIPPED]
        yield from (Path(directory, file) for file in files if not file.endswith((".pyc", ".pyo")))


def module_digest(name: str) -> Digest:
    """A user's module, with the modules that it refers to, the user's also through others.

    Raises:
        Unkeyable: it was typed in, so there is no source to go by.
    """
    stream = Stream()
    found: dict[str, str] = {}
    _follow(name, found, name.split(".", 1)[0])
    if name not in found:
        raise Unkeyable(f"the module {name!r} has no source file")
    for module in sorted(found):
        # The module that a script is run as has another name under `python -m`, or in a test.
        stream.put_text(b"mn", Path(found[module]).name)
        stream.put(b"md", file_digest(found[module]) or b"")
    return stream.digest()


def _follow(name: str, found: dict[str, str], package: str) -> None:
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if module is None or path is None or name in found or is_settled(name):
        return
    found[name] = path
    if places.portable(path).startswith("{") and name.split(".", 1)[0] != package:
        return  # another installed package, which may refer to half of all the others
    for value in list(vars(module).values()):
        if isinstance(value, types.ModuleType):
            _follow(value.__name__, found, package)
        elif isinstance(value, (type, types.FunctionType)) and isinstance(value.__module__, str):
            _follow(value.__module__, found, package)


def is_settled(name: str) -> bool:
    """Whether a module's version is a fact, so that its sources need no look."""
    return name.split(".", 1)[0] in _SETTLED or places.is_stdlib(name)


def code_digest(function: Any) -> Digest:
    """What a Python function does, without where it stands, and what it has closed over."""
    stream = Stream()
    _put_function(stream, function, set())
    return stream.digest()


def _put_function(stream: Stream, function: Any, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    _put_code(stream, function.__code__)
    for value in (function.__defaults__, *_cells(function), getattr(function, "__wrapped__", None)):
        if isinstance(value, types.FunctionType):
            _put_function(stream, value, seen)
        elif " at 0x" not in (text := repr(value)):
            stream.put_text(b"cv", text)


def _cells(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell.cell_contents


def _put_code(stream: Stream, code: types.CodeType) -> None:
    stream.put(b"co", code.co_code)
    for names in (code.co_names, code.co_varnames, code.co_freevars):
        stream.put_text(b"cn", "\0".join(names))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _put_code(stream, constant)
        elif isinstance(constant, frozenset):
            stream.put_text(b"cs", repr(sorted(map(repr, constant))))
        else:
            stream.put_text(b"cc", repr(constant))
