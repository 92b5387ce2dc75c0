"""Attributes replaced for a while, and put back exactly as they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class _Patch:
    owner: Any
    name: str
    before: Any


class Patches:
    """A stack of attribute replacements on classes and modules."""

    def __init__(self) -> None:
        self._applied: list[_Patch] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; what ``owner`` itself held before comes back with `undo`."""
        # From the owner's own dictionary: an inherited or built-in name must be absent again
        # afterwards, and a property or staticmethod must come back as the descriptor it was.
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._applied.append(_Patch(owner, name, before))

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
