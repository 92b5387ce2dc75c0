"""Debug handles: small numbers that count through a whole model, and so change with any edit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from cas.executorch.actions.errors import Unkeyable


class Handles:
    """The handles of an action, in the order in which they first appear.

    With "pattern", a key holds positions in that order instead of the handles: two partitions that
    differ by nothing else then share a record, and its handles are replaced on a hit.
    """

    def __init__(self, mode: Literal["exact", "pattern", "ignored"]) -> None:
        self._mode = mode
        self._seen: dict[int, int] = {}

    @property
    def in_order(self) -> tuple[int, ...]:
        return tuple(self._seen)

    def encode(self, value: Any) -> Iterator[int]:
        """What goes into the key for one node's handle, which is an int or several."""
        handles = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        for handle in handles:
            if type(handle) is not int or handle < 0:
                raise Unkeyable(f"a debug handle of type {type(handle).__name__}")
            position = self._seen.setdefault(handle, len(self._seen))
            if self._mode == "exact":
                yield handle
            elif self._mode == "pattern":
                yield position
        if self._mode != "ignored":
            yield len(handles)
