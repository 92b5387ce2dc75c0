"""Who calls: what those who watch a compile learn from Python's stack."""

from __future__ import annotations

import sys
import types
from collections.abc import Container


def caller(depth: int) -> types.FrameType | None:
    """The frame that is ``depth`` calls above the one that asks.

    None where there is none: C code may have begun a thread with a function that is watched.
    """
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None


def module_of(frame: types.FrameType | None) -> str:
    """The name of the module whose code runs there; empty if that has none."""
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def outside(frame: types.FrameType | None, machinery: Container[str]) -> types.FrameType | None:
    """The first frame from there upwards whose module is not part of ``machinery``."""
    while frame is not None and module_of(frame) in machinery:
        frame = frame.f_back
    return frame
