"""What a compile really reads: files, programs, environment variables, modules.

No backend says what it looks at, so it is watched. Python sees every file that Python code opens
or looks for and every program that it starts. It does not see what those programs read, nor what
C++ code reads by itself; and a value that Python keeps in a variable is not read again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from cas.executorch.actions import observer_environ, observer_places
from cas.executorch.actions.frames import caller
from cas.executorch.actions.observer_places import FileStamp

_Handler: TypeAlias = "Callable[[Observed, tuple[Any, ...]], None]"


@dataclass
class Observed:
    """What one compile read.

    Attributes:
        started: when it began, in nanoseconds of the clock that files are stamped with.
        files: what was opened to be read, as it was just before; None: it was not there.
        relative: of what was looked at by a path relative to the directory of the process, that.
        direct: what was looked at by an absolute path.
        directory: that of the process at the start; empty if it is not there any more.
        search: where modules were looked for, at the start.
        written: what was opened to be written.
        found: what was looked for: "absent", "file" or "directory".
        listed: directories whose entries were looked at, by `listing_at` as they were then.
        made: directories that the compile made.
        programs: what was started, or looked for on the ``PATH``.
        variables: environment variables by their value before the compile (None: not set).
        by_user: those of them that code has asked for which is not known.
        whole_environment: whether such code has copied all of them.
        modules: source files of what was imported.
        network: whether it talked to another machine.
        replaced: whether it had another `os.environ`, of which nothing is seen.
    """

    started: int
    files: dict[str, FileStamp | None] = field(default_factory=dict)
    relative: dict[str, str] = field(default_factory=dict)
    direct: set[str] = field(default_factory=set)
    directory: str = ""
    search: tuple[str, ...] = ()
    written: set[str] = field(default_factory=set)
    found: dict[str, str] = field(default_factory=dict)
    listed: dict[str, str] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)
    variables: dict[str, str | None] = field(default_factory=dict)
    by_user: set[str] = field(default_factory=set)
    whole_environment: bool = False
    modules: set[str] = field(default_factory=set)
    network: bool = False
    replaced: bool = False
    before: dict[str, str] = field(default_factory=dict, repr=False)

    def place(self, path: Any) -> str:
        """What a path that somebody asks for is called here, which is absolute."""
        text = os.fsdecode(path)
        name = _absolute(text)
        if os.path.isabs(text):
            self.direct.add(name)
        elif name == _absolute(os.path.join(self.directory, text)):
            self.relative[name] = text.rstrip(os.sep)
        return name


def _absolute(path: str) -> str:
    # What is above a link is not where the link is.
    return os.path.realpath(path) if os.pardir in path.split(os.sep) else os.path.abspath(path)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


_active: list[Observed] = []
_lock: Final = threading.Lock()
_hooked = False


@contextlib.contextmanager
def observing(started: int) -> Iterator[Observed]:
    """Watch the whole process for the length of the block."""
    observed = Observed(
        started, before=dict(os.environ), directory=_directory(), search=tuple(sys.path)
    )
    known = set(sys.modules)
    with _lock:
        _install()
        _active.append(observed)
        observer_environ.forget()
    try:
        observed.replaced = not observer_environ.is_watchable()
        yield observed
    finally:
        observed.replaced |= not observer_environ.is_watchable()
        with _lock:
            _active.remove(observed)
            if not _active:
                observer_environ.restore()
                observer_places.restore()
        observed.modules = {
            path
            for name in set(sys.modules) - known
            if isinstance(path := getattr(sys.modules.get(name), "__file__", None), str)
        }


def _install() -> None:
    global _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    if not _active:
        observer_environ.install(_READS)
        observer_places.install(_looked)


class _Reads:
    """Passes reads of the environment on to all that watch."""

    def variable(self, name: str, *, by_user: bool) -> None:
        for observed in tuple(_active):
            observed.variables.setdefault(name, observed.before.get(name))
            if by_user:
                observed.by_user.add(name)

    def whole_environment(self) -> None:
        for observed in tuple(_active):
            observed.whole_environment = True

    def program(self, name: str) -> None:
        for observed in tuple(_active):
            observed.programs.add(name)


_READS: Final = _Reads()


def _looked(path: str, kind: str) -> None:
    """Somebody asked what is at a path."""
    for observed in tuple(_active):
        observed.found.setdefault(observed.place(path), kind)


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
    frame = caller(2)
    if not isinstance(path, (str, bytes, os.PathLike)) or observer_places.is_removed(frame):
        return
    if observer_places.is_for_source_lines(frame):
        return
    name = observed.place(path)
    written = flags & (os.O_WRONLY | os.O_TRUNC)
    stamp = None if written else FileStamp.of(name)
    if written or (flags & os.O_CREAT and stamp is None):
        observed.written.add(name)
    elif name not in observed.written:
        observed.files.setdefault(name, stamp)


def _renamed(observed: Observed, arguments: tuple[Any, ...]) -> None:
    if isinstance(arguments[1], (str, bytes)):
        observed.written.add(os.path.abspath(os.fsdecode(arguments[1])))


def _made(observed: Observed, arguments: tuple[Any, ...]) -> None:
    if isinstance(arguments[0], (str, bytes)):
        observed.made.add(os.path.abspath(os.fsdecode(arguments[0])))


def _listed(observed: Observed, arguments: tuple[Any, ...]) -> None:
    path = arguments[0]
    if isinstance(path, int) or observer_places.is_unimportant(caller(2)):
        return
    name = observed.place(os.curdir if path is None else path)
    if name not in observed.listed:
        observed.listed[name] = observer_places.listing_at(name)


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


_EVENTS: Final[dict[str, _Handler]] = {
    "open": _opened,
    "os.listdir": _listed,
    "os.mkdir": _made,
    "os.posix_spawn": _started,
    "os.rename": _renamed,
    "os.scandir": _listed,
    "os.system": _shell,
    "socket.connect": _connected,
    "subprocess.Popen": _started,
}
