"""What a compile really reads: files, programs, environment variables, modules.

No backend says what it looks at, so it is watched. Python sees every file that Python code opens
and every program that it starts. It does not see what those programs read, nor what C++ code
reads by itself; and a value that Python keeps in a variable is not read again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass
class Observed:
    """What one compile read.

    ``variables`` maps a name to its value before the compile (None: not set). ``network`` says
    whether it talked to another machine. ``started`` is when it began, in nanoseconds of the
    clock that files are stamped with.
    """

    started: int
    files: set[str] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)
    variables: dict[str, str | None] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    network: bool = False
    before: dict[str, str] = field(default_factory=dict, repr=False)


_active: list[Observed] = []
_lock: Final = threading.Lock()
_hooked = False


@contextlib.contextmanager
def observing(started: int) -> Iterator[Observed]:
    """Watch the whole process for the length of the block."""
    observed = Observed(started, before=dict(os.environ))
    known = set(sys.modules)
    with _lock:
        _install()
        _active.append(observed)
    try:
        yield observed
    finally:
        with _lock:
            _active.remove(observed)
            if not _active:
                _restore()
        observed.modules = {
            path
            for name in set(sys.modules) - known
            if isinstance(path := getattr(sys.modules.get(name), "__file__", None), str)
        }


# --- files and programs: an audit hook, which Python never removes ------------------------------


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    handler = _EVENTS.get(event)
    if handler is not None:
        for observed in tuple(_active):
            handler(observed, arguments)


def _opened(observed: Observed, arguments: tuple[Any, ...]) -> None:
    path, _, flags = arguments
    if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or not isinstance(path, (str, bytes)):
        return
    if not _for_a_traceback():
        observed.files.add(os.path.abspath(os.fsdecode(path)))


def _for_a_traceback() -> bool:
    """Whether source lines are looked up, as torch does to say where a node was made.

    Then every file on the stack is read, the user's script too, and none is an input.
    """
    frame = sys._getframe(3)
    for _ in range(2):
        if frame.f_globals.get("__name__") == "linecache":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _started(observed: Observed, arguments: tuple[Any, ...]) -> None:
    executable, command = arguments[0], arguments[1]
    if executable is None:
        executable = command if isinstance(command, (str, bytes)) else next(iter(command), "")
    observed.programs.add(os.fsdecode(executable))


def _shell(observed: Observed, arguments: tuple[Any, ...]) -> None:
    words = os.fsdecode(arguments[0]).split()
    observed.programs.update(words[:1])


def _connected(observed: Observed, arguments: tuple[Any, ...]) -> None:
    address = arguments[1]
    # A Unix socket, or a port of this machine: how worker processes talk to each other.
    local = not isinstance(address, tuple) or str(address[0]) in ("127.0.0.1", "::1", "localhost")
    observed.network = observed.network or not local


_EVENTS: Final[dict[str, Callable[[Observed, tuple[Any, ...]], None]]] = {
    "open": _opened,
    "os.posix_spawn": _started,
    "os.system": _shell,
    "socket.connect": _connected,
    "subprocess.Popen": _started,
}


# --- environment variables: three methods of the class of `os.environ` --------------------------

_Environ: Any = type(os.environ)
_getitem: Final = _Environ.__getitem__
_contains: Final = _Environ.__contains__
_iterate: Final = _Environ.__iter__


class _Copying(threading.local):
    """The names that whoever iterates over the environment is expected to read next.

    Copying all of it, to start a program or to restore it later, is no use of any one variable.
    """

    def __init__(self) -> None:
        self.names: deque[str] = deque()


_copying: Final = _Copying()


def _read_item(self: Any, name: Any) -> Any:
    _note(name)
    return _getitem(self, name)


def _has_item(self: Any, name: Any) -> Any:
    _note(name)
    return _contains(self, name)


def _iterate_items(self: Any) -> Iterator[Any]:
    names = list(_iterate(self))
    _copying.names = deque(os.fsdecode(name) for name in names)
    yield from names


def _note(name: Any) -> None:
    if not isinstance(name, (str, bytes)):
        return
    text = os.fsdecode(name)
    expected = _copying.names
    if expected and expected[0] == text:
        expected.popleft()
        return
    expected.clear()
    for observed in tuple(_active):
        observed.variables.setdefault(text, observed.before.get(text))


def _install() -> None:
    global _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    _Environ.__getitem__ = _read_item
    _Environ.__contains__ = _has_item
    _Environ.__iter__ = _iterate_items


def _restore() -> None:
    _Environ.__getitem__ = _getitem
    _Environ.__contains__ = _contains
    _Environ.__iter__ = _iterate
