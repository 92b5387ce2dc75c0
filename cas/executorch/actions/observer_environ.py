"""Who reads which environment variables: the methods of the class of `os.environ`, replaced.

A variable that is asked for by name is seen. Whoever copies the whole environment may look for
anything in the copy, out of sight, so that counts as reading all of it; except where the copy is
known to be made for a program that is started, as torch does for compilers.
"""

from __future__ import annotations

import functools
import os
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from cas.executorch.actions import places
from cas.executorch.actions.frames import caller, module_of, outside


class Reads(Protocol):
    """Takes down what is read while it is installed."""

    def variable(self, name: str, *, by_user: bool) -> None:
        """``by_user``: by code of which it is not known that variables of the process such as
        HOME are of no consequence to what it does.
        """

    def whole_environment(self) -> None:
        """Code that is not known has copied it, or shown it."""

    def program(self, name: str) -> None:
        """A program was looked for on the ``PATH``."""


#: They read where caches, logs and temporary files go, and nothing of it gets into a result.
_KNOWN: Final = frozenset(
    {
        "cas", "coremltools", "executorch", "filelock", "flatbuffers", "fsspec", "functorch",
        "mpmath", "numpy", "sympy", "torch", "torchao", "torchgen", "triton", "typing_extensions",
    }
)  # fmt: skip
#: They copy the environment for a program that they start, or to put it back.
_FOR_CHILDREN: Final = frozenset({"cas", "multiprocessing", "subprocess", "torch", "triton"})
_RESTORING: Final = "unittest.mock"
#: Where names of variables are looked up for somebody else.
_MACHINERY: Final = frozenset({"_collections_abc", "collections", "collections.abc", "copy", "os"})
#: Of Python's own: what they read leads to programs, which are seen, or is where scratch files go.
_HARMLESS: Final = frozenset({"multiprocessing", "subprocess", "tempfile"})

_Environ: Any = type(os.environ)
_METHODS: Final = ("__contains__", "__getitem__", "__iter__", "__repr__")
_original: Final[dict[str, Any]] = {name: getattr(_Environ, name) for name in _METHODS}


class _Copying(threading.local):
    """Who iterates over the environment in this thread, and the names that are read next."""

    def __init__(self) -> None:
        self.code: types.CodeType | None = None
        self.names: deque[str] = deque()


_copying: Final = _Copying()
#: Variables that were passed on already, and the code that has read them: by ``id()``, since code
#: is slow to hash.
_noted: Final[dict[tuple[str, int], types.CodeType]] = {}


def forget() -> None:
    """Pass on everything again, for somebody who watches from now on."""
    _noted.clear()


def install(reads: Reads) -> None:
    """Pass on what is read, until `restore`."""

    def read_item(self: Any, name: Any) -> Any:
        _note(reads, name)
        return _original["__getitem__"](self, name)

    def has_item(self: Any, name: Any) -> Any:
        _note(reads, name)
        return _original["__contains__"](self, name)

    def iterate(self: Any) -> Iterator[Any]:
        names = list(_original["__iter__"](self))
        frame = outside(caller(1), _MACHINERY)
        _copying.code = None if frame is None else frame.f_code
        _copying.names = deque(map(os.fsdecode, names))
        _note_whole(reads, frame)
        return iter(names)

    def show(self: Any) -> Any:
        _note_whole(reads, outside(caller(1), _MACHINERY))
        return _original["__repr__"](self)

    methods: tuple[Callable[..., Any], ...] = (has_item, read_item, iterate, show)
    for name, method in zip(_METHODS, methods, strict=True):
        setattr(_Environ, name, method)


def restore() -> None:
    for name, method in _original.items():
        setattr(_Environ, name, method)


def is_watchable() -> bool:
    """Whether `os.environ` is what Python made, and not a program's own mapping."""
    return type(os.environ) is _Environ


def _note(reads: Reads, name: Any) -> None:
    if not isinstance(name, (str, bytes)):
        return
    text = os.fsdecode(name)
    frame = outside(caller(2), _MACHINERY)
    expected = _copying.names
    if expected:
        if expected[0] == text and frame is not None and frame.f_code is _copying.code:
            expected.popleft()
            return
        expected.clear()
    if frame is not None:
        code = frame.f_code
        if (text, id(code)) in _noted:
            return
        if not _is_stdlib(module_of(frame)):  # else it depends on who has called
            _noted[text, id(code)] = code
    looked_for = _looked_for(frame) if text == "PATH" else None
    if looked_for is not None:
        reads.program(looked_for)
    reads.variable(text, by_user=looked_for is None and _is_by_user(frame))


def _note_whole(reads: Reads, frame: types.FrameType | None) -> None:
    module = module_of(frame)
    if module.split(".", 1)[0] not in _FOR_CHILDREN and module != _RESTORING:
        reads.whole_environment()


def _looked_for(frame: types.FrameType | None) -> str | None:
    """The program that `shutil.which` looks for."""
    if frame is None or frame.f_code.co_name != "which" or module_of(frame) != "shutil":
        return None
    command = frame.f_locals.get("cmd")
    return os.fsdecode(command) if isinstance(command, (str, bytes)) else None


def _is_by_user(frame: types.FrameType | None) -> bool:
    """Whether code asks that is not known; Python's own asks for whoever has called it."""
    while frame is not None:
        module = module_of(frame)
        top = module.split(".", 1)[0]
        if top in _HARMLESS or top in _KNOWN:
            return False
        if not _is_stdlib(module):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=1024)
def _is_stdlib(module: str) -> bool:
    return places.is_stdlib(module)
