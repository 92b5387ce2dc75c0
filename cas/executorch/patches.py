"""Attributes replaced for a while in one process, and put back exactly as they were."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class _Patch:
    owner: Any
    name: str
    before: Any


class Patches:
    """A stack of attribute replacements on classes and modules.

    Attributes are process-wide, a capture is not: what other threads export meanwhile is neither
    its business nor may it depend on a store that closes under them. So a function acts only in
    the thread that made the stack (or, with ``any_thread``, in all), and elsewhere is the one that
    it replaces; and a child that fork() made, which cannot use its parent's store, is elsewhere.
    Values of other kinds ask `active` themselves.
    """

    def __init__(self, *, any_thread: bool = False) -> None:
        self._applied: list[_Patch] = []
        self._thread = None if any_thread else threading.get_ident()
        self._process = os.getpid()

    def active(self) -> bool:
        """Whether the patches act here: in this process and this thread."""
        here = self._thread in (None, threading.get_ident())
        return here and os.getpid() == self._process

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; what ``owner`` itself held before comes back with `undo`."""
        # From the owner's own dictionary: an inherited or built-in name must be absent again
        # afterwards, and a property or staticmethod must come back as the descriptor it was.
        before = vars(owner).get(name, _ABSENT)
        if isinstance(value, FunctionType) and isinstance(before, FunctionType):
            value = self._bound_to_thread(value, before)
        setattr(owner, name, value)
        self._applied.append(_Patch(owner, name, before))

    def _bound_to_thread(
        self, function: Callable[..., Any], before: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(before)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if self.active() else before)(*args, **kwargs)

        return call

    def undo(self) -> None:
        """Put everything back, the last change first."""
        while self._applied:
            patch = self._applied.pop()
            if patch.before is _ABSENT:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.before)

    def __len__(self) -> int:
        return len(self._applied)
