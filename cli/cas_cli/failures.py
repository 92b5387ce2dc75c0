"""From any error to one line and an exit code: the only place that knows the codes."""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass
from typing import NoReturn

import click

#: Exit code -> meaning. `docs/cli.md` shows this table, and a test keeps the two the same.
EXIT_CODES = {
    0: "done",
    1: "internal error, or an export stage of PyTorch or ExecuTorch failed",
    2: "usage: an option, a name or a source that makes no sense",
    3: "not found: no such store, artifact, generation or source",
    4: "damaged data: a chunk, manifest or file is missing or not what it must be",
    5: "refused: unsafe, read-only, not permitted, unsupported, or in use",
    6: "no space left",
    7: "remote failed (kept for remotes, which are to come)",
    130: "interrupted by Ctrl-C",
    141: "the reader of the output went away",
}

#: What `cas verify` exits with when it found damage.
DAMAGED = 4

_BY_ERRNO = {
    errno.ENOSPC: 6,
    errno.EDQUOT: 6,
    errno.EACCES: 5,
    errno.EPERM: 5,
    errno.EROFS: 5,
    errno.EBUSY: 5,
    errno.ENOENT: 3,
    errno.ENOTDIR: 2,
    errno.EISDIR: 2,
    errno.EEXIST: 2,
}


class OutputGone(Exception):
    """Nobody reads stdout any more."""


class Unhandled(BaseException):
    """What a script of the user's let out, on its way to the interpreter. No error of ours."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def let_out(self) -> NoReturn:
        """Raise the error for the interpreter to end the process by, as if the script were alone.

        How it tells about an exception, what it makes of the value of a SystemExit, and that
        Ctrl-C ends the process by a signal, stays its business. Only our frames, which the
        traceback gains on the way out, are left out again.
        """
        error, trace, hook = self.error, self.error.__traceback__, sys.excepthook

        def without_us(kind: type[BaseException], value: BaseException, _: object) -> None:
            hook(kind, value.with_traceback(trace), trace)

        sys.excepthook = without_us
        raise error


@dataclass(frozen=True, slots=True)
class Failure:
    """What the user is told: ``error`` is a stable class name, ``message`` may change."""

    error: str
    message: str
    exit_code: int


def describe(error: BaseException) -> Failure:
    """The failure that an error amounts to."""
    kind = type(error).__name__
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        message = "interrupted; nothing half-written is kept, and the store is whole"
        return Failure("Interrupted", message, 130)
    if isinstance(error, (BrokenPipeError, OutputGone)):
        return Failure("OutputGone", "the reader of the output went away", 141)
    if isinstance(error, click.UsageError):
        return Failure("UsageError", _usage(error), 2)
    if isinstance(error, click.ClickException):
        return Failure(kind, error.format_message(), error.exit_code)
    if isinstance(error, OSError) and error.errno is not None:
        return Failure(kind, _system(error), _BY_ERRNO.get(error.errno, 1))
    exit_code = getattr(error, "exit_code", None)
    if isinstance(exit_code, int):  # cas.errors.CasError, without importing the library for it
        return Failure(kind, str(error), exit_code)
    text = " ".join(str(error).split())
    message = f"internal error: {kind}{': ' + text if text else ''}; run with -v for the traceback"
    return Failure(kind, message, 1)


def _usage(error: click.UsageError) -> str:
    message = error.format_message()
    if error.ctx is not None:
        message += f" (see `{error.ctx.command_path} --help`)"
    return message


def _system(error: OSError) -> str:
    reason = (error.strerror or type(error).__name__).lower()
    subject = f"{error.filename}: " if error.filename is not None else ""
    return f"{subject}{reason}"
