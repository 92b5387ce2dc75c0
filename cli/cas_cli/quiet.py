"""Keep stdout for data and stderr readable while PyTorch, ExecuTorch and the user's code run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

#: Loggers that warn at every import or export about what a user of cas can do nothing about.
_NOISY = ("", "torch", "torchao", "executorch", "coremltools", "transformers")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what is printed to stderr, by Python and by native code."""
    sys.stdout.flush()
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
        os.dup2(saved, target)
        os.close(saved)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings of the frameworks; those of cas itself have a handler of their own."""
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
