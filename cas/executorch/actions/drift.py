"""Changes to the environment that compiling itself made.

A compile fills in options of Inductor and sets environment variables. Without correction the
second export of a process would have other keys than the same export done first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


class Drift:
    """Facts that changed during our own compiles, and what they were before.

    Only the very value that a compile left behind is taken back: what a user changes between two
    exports counts.
    """

    def __init__(self) -> None:
        self._changes: dict[str, tuple[str | None, str | None]] = {}

    def learn(self, before: Mapping[str, str], after: Mapping[str, str]) -> None:
        """Note the facts that differ; both are as they really were, not rebased."""
        for name in before.keys() | after.keys():
            old, new = before.get(name), after.get(name)
            if old != new:
                first = self._changes.get(name, (old, new))
                # Further drift of a fact that has drifted before still has the same origin.
                origin = first[0] if first[1] == old else old
                self._changes[name] = (origin, new)

    def rebase(self, facts: Mapping[str, str]) -> dict[str, str]:
        """The facts as they would be if no compile had changed them."""
        rebased = dict(facts)
        for name in self._changes:
            value = self.value(name, facts.get(name))
            if value is None:
                rebased.pop(name, None)
            else:
                rebased[name] = value
        return rebased

    def value(self, name: str, now: str | None) -> str | None:
        """One fact as it would be; None for one that would not be there."""
        before, after = self._changes.get(name, (now, now))
        return before if now == after else now


#: Of this process: what a compile changed stays changed when a capture ends.
FACTS: Final = Drift()
VARIABLES: Final = Drift()
