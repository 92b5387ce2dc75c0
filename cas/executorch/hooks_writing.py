"""Hooks: a finished program on its way into files that the program's own code opened."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from cas.executorch.patches import Patches
from cas.executorch.seams import CORD, PROGRAM


class WriteObserver(Protocol):
    """Who wants to know which program becomes which file. Called from any thread."""

    def write(self, program: Any, cord: Any, outfile: Any, write: Callable[[Any], None], /) -> None:
        """Have ``write(sink)`` write the bytes of ``cord``, which belong to ``program``."""

    def take(self, program: Any, /) -> None:
        """The program's bytes were asked for, in memory."""


def install(patches: Patches, observer: WriteObserver) -> None:
    """Let ``observer`` pass on what programs write.

    How a file is opened, named, positioned and closed stays the business of who writes it.
    """
    writing = _Writing()
    module: Any = importlib.import_module(PROGRAM)
    for owner in (module.ExecutorchProgramManager, module.ExecutorchProgram):
        for name in ("write_to_file", "write_tensor_data_to_file"):
            patches.set(owner, name, _noting(writing, getattr(owner, name)))
    _install_buffer(patches, observer, module.ExecutorchProgramManager)
    cord_class: Any = importlib.import_module(CORD).Cord
    original = cord_class.write_to_file

    @functools.wraps(original)
    def write_to_file(self: Any, outfile: Any) -> None:
        program = writing.program
        if program is None:
            original(self, outfile)
        else:
            observer.write(program, self, outfile, functools.partial(original, self))

    patches.set(cord_class, "write_to_file", write_to_file)


def _noting(writing: _Writing, original: Callable[..., Any]) -> Callable[..., Any]:
    """The method, in which the cords that are written belong to ``self``."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with writing.of(self):
            return original(self, *args, **kwargs)

    return method


def _install_buffer(patches: Patches, observer: WriteObserver, owner: Any) -> None:
    original = vars(owner)["buffer"]

    def buffer(self: Any) -> Any:
        if patches.active():
            observer.take(self)
        return original.fget(self)

    patches.set(owner, "buffer", property(buffer, doc=original.__doc__))


class _Writing(threading.local):
    """The program that this thread is writing."""

    program: Any = None

    @contextlib.contextmanager
    def of(self, program: Any) -> Iterator[None]:
        outer, self.program = self.program, program
        try:
            yield
        finally:
            self.program = outer
