"""Forked children that report back. The parent must have no store open when it forks."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


class ChildFailed(AssertionError):
    """The function in the child raised, or the child died; the message has its traceback."""


class Child:
    """A forked process that runs one function.

    The function gets a `Child.say` / `Child.hear` pair through closures if it needs them: `tell`
    and `wait_for` pass single words between the two, to force an order.
    """

    def __init__(self, function: Callable[[Child], Any]) -> None:
        self._up = os.pipe()
        self._down = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function)
        os.close(self._up[1])
        os.close(self._down[0])
        self._in, self._out = self._up[0], self._down[1]
        self._status: int | None = None

    def _run(self, function: Callable[[Child], Any]) -> None:
        status = 1
        try:
            os.close(self._up[0])
            os.close(self._down[1])
            self._in, self._out = self._down[0], self._up[1]
            try:
                self._send(("result", function(self)))
                status = 0
            except BaseException:
                self._send(("error", traceback.format_exc()))
        finally:
            os._exit(status)  # no cleanup of what the parent owns

    # --- words between the two ------------------------------------------------------------------

    def tell(self, word: str) -> None:
        """Let the other side's `wait_for` return."""
        self._send(("word", word))

    def wait_for(self, word: str) -> None:
        """Wait until the other side tells ``word``."""
        kind, value = self._receive()
        if kind == "error":
            raise ChildFailed(value)
        assert (kind, value) == ("word", word), f"expected {word!r}, got {kind} {value!r}"

    def has_news(self, seconds: float) -> bool:
        """Whether the other side said or returned something within ``seconds``."""
        return bool(select.select([self._in], [], [], seconds)[0])

    def _send(self, message: tuple[str, Any]) -> None:
        data = pickle.dumps(message)
        data = struct.pack("<I", len(data)) + data
        while data:
            data = data[os.write(self._out, data) :]

    def _receive(self) -> tuple[str, Any]:
        (size,) = struct.unpack("<I", self._exactly(4))
        kind, value = pickle.loads(self._exactly(size))  # from our own child, through our own pipe
        return kind, value

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = os.read(self._in, count - len(data))
            if not piece:
                raise ChildFailed(f"process {self.pid} ended without a word ({self._wait()})")
            data += piece
        return data

    # --- the end --------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._wait()

    def result(self) -> Any:
        """What the function returned.

        Raises:
            ChildFailed
        """
        kind, value = self._receive()
        self._wait()
        if kind == "error":
            raise ChildFailed(value)
        assert kind == "result", f"unexpected {kind} {value!r}"
        return value

    def _wait(self) -> int:
        if self._status is None:
            _, status = os.waitpid(self.pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
            os.close(self._in)
            os.close(self._out)
        return self._status

    def wait(self) -> int:
        """The exit code; a signal's number, negative, if one ended it."""
        return self._wait()


def forked(function: Callable[[], _T]) -> _T:
    """Run ``function`` in a child and return its result.

    Raises:
        ChildFailed
    """
    result: _T = Child(lambda _: function()).result()
    return result


def can_become(user: int) -> bool:
    """Whether children of this process may become another user: root may, but not everywhere."""

    def become() -> None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)

    try:
        forked(become)
    except ChildFailed:
        return False
    return True


@contextlib.contextmanager
def children(*functions: Callable[[Child], Any]) -> Iterator[list[Child]]:
    """Start one child per function; whatever happens, none outlives the block."""
    started: list[Child] = []
    try:
        for function in functions:
            started.append(Child(function))
        yield started
    finally:
        for child in started:
            child.kill()


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for ``condition``; an AssertionError when it takes longer than on any busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
