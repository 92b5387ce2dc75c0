"""Keep stdout for data and stderr readable while PyTorch, ExecuTorch and the user's code run."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import warnings
from collections.abc import Iterator

#: Loggers that warn at every import or export about what a user of cas can do nothing about. What
#: they report as errors, such as a traceback of several pages, comes as an exception as well.
_NOISY = ("", "torch", "torchao", "executorch", "coremltools", "transformers")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what is printed to stderr, by Python and by native code."""
    _flush()
    try:
        target, other = sys.__stdout__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
        saved = os.dup(target)
    except (AttributeError, OSError, ValueError):  # no real streams, in an embedded interpreter
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    try:
        os.dup2(other, target)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _flush()
        os.dup2(saved, target)
        os.close(saved)


def _flush() -> None:
    """Write out what waits in the buffers of Python and of C, to where stdout leads now."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None and not stream.closed:
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _loggers() -> list[str]:
    known = logging.root.manager.loggerDict
    children = [
        name
        for name, logger in known.items()
        if isinstance(logger, logging.Logger)
        and logger.level != logging.NOTSET
        and name.partition(".")[0] in _NOISY
    ]
    return [*_NOISY, *(name for name in children if name not in _NOISY)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings of the frameworks; those of cas itself have a handler of their own."""
    # Also their children with a level of their own, of which torch has dozens.
    levels = {name: logging.getLogger(name).level for name in _loggers()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
