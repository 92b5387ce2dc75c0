"""How often a capture found its work done, and why it did not when it did not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cas.errors import UsageError


class ActionMismatch(UserWarning):
    """A recorded result is not what compiling the same thing gives now."""


@dataclass(frozen=True, slots=True)
class ActionOptions:
    """How a capture uses the action records of its store.

    Attributes:
        reuse: look for records and make them; without, everything is compiled, and nothing kept.
        recheck: the share of hits that are compiled all the same and compared, from 0 to 1.
        chance: gives numbers from 0 to 1 that decide which hits those are.
    """

    reuse: bool = True
    recheck: float = 0.0
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0.0 <= self.recheck <= 1.0:
            raise UsageError(f"the share of hits to recheck is from 0 to 1, not {self.recheck}")

    def is_rechecked(self) -> bool:
        """Whether to compile the next hit."""
        return self.recheck > 0 and self.chance() < self.recheck


#: Reasons of misses that name a thing are counted without it; `Outcomes.notes` has it.
STALE: Final = "stale"


@dataclass
class Outcomes:
    """What happened to the actions of one capture. ``notes`` are sentences for `-v`."""

    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    uncacheable: Counter[str] = field(default_factory=Counter)
    rechecked: int = 0
    mismatches: int = 0
    seconds_saved: float = 0.0
    compile_seconds: float = 0.0
    key_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def missed(self) -> int:
        return sum(self.misses.values())
