"""Why an action is compiled without the store. Never an error of the export itself."""

from __future__ import annotations

import logging

from cas.errors import CasError

logger = logging.getLogger(__name__)


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


def reasons(error: Exception, what: str) -> tuple[str, str]:
    """Why something is not kept: the reason, and which thing it is about.

    A mistake of ours, on a program like no other, must not end an export that is none of its own.
    """
    if isinstance(error, (Unkeyable, Unrecordable)):
        return error.reason, ""
    if isinstance(error, RecursionError):
        return "objects nested too deeply", ""
    if not isinstance(error, CasError):
        logger.warning("%s", what, exc_info=error)
        what = f"{what} ({type(error).__name__})"
    return what, str(error)
