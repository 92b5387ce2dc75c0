"""What the actions of one capture work with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cas.executorch.actions.outcomes import ActionOptions, Outcomes
from cas.executorch.intake import Intake
from cas.store import Store
from cas.writer import Writer


@dataclass(frozen=True, slots=True)
class ActionContext:
    """One capture's store, its writer, and what is asked and told.

    ``clock`` gives seconds, for the durations that are recorded.
    """

    store: Store
    writer: Writer
    intake: Intake
    options: ActionOptions
    outcomes: Outcomes
    clock: Callable[[], float] = time.perf_counter
