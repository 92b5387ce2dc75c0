"""Why an action is compiled without the store. Never an error of the export itself."""

from __future__ import annotations

from cas.errors import CasError


class Unkeyable(CasError):
    """An action's inputs hold something that has no stable form: compile, and keep nothing."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the action has no stable key: {reason}")


class Unrecordable(CasError):
    """What a backend returned cannot be kept and given back unchanged."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the result of the action cannot be kept: {reason}")
