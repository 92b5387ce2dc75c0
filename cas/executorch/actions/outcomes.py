"""How often a capture found its work done, and why it did not when it did not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cas.errors import UsageError
from cas.journal import Event
from cas.strictjson import Json


class ActionMismatch(UserWarning):
    """A recorded result is not what compiling the same thing gives now."""


@dataclass(frozen=True, slots=True)
class ActionOptions:
    """How a capture uses the action records of its store.

    Attributes:
        reuse: look for records and make them; without, everything is compiled, and nothing kept.
        whole: also of whole exports, whose edge programs then are lowered when they are looked at.
        recheck: the share of hits that are compiled all the same and compared, from 0 to 1.
        chance: gives numbers from 0 to 1 that decide which hits those are.
    """

    reuse: bool = True
    whole: bool = False
    recheck: float = 0.0
    chance: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0.0 <= self.recheck <= 1.0:
            raise UsageError(f"the share of hits to recheck is from 0 to 1, not {self.recheck}")

    def is_rechecked(self) -> bool:
        """Whether to compile the next hit."""
        return self.recheck > 0 and self.chance() < self.recheck


#: Reasons of misses besides those of `cas.actions.Miss`: what the compile read has changed.
STALE: Final = "stale"


@dataclass
class Outcomes:
    """What happened to the actions of one capture, in order, and the seconds that it took.

    ``relied`` are the dependencies of all results that were used: an export that contains them
    depends on the same.
    """

    events: list[Event] = field(default_factory=list)
    relied: list[Mapping[str, Json]] = field(default_factory=list)
    rechecked: int = 0
    compile_seconds: float = 0.0
    key_seconds: float = 0.0

    @property
    def hits(self) -> int:
        """Actions whose results came out of the store, rechecked ones among them."""
        return sum(event.outcome in ("hit", "mismatch") for event in self.events)

    @property
    def mismatches(self) -> int:
        """Hits that were compiled all the same, and came out otherwise."""
        return sum(event.outcome == "mismatch" for event in self.events)

    @property
    def misses(self) -> Counter[str]:
        """Actions that were compiled, by the reason why no record was used."""
        return self._reasons("miss")

    @property
    def missed(self) -> int:
        """How many actions were compiled and recorded."""
        return sum(self.misses.values())

    @property
    def uncacheable(self) -> Counter[str]:
        """Actions that were compiled and not kept, by the reason."""
        return self._reasons("uncacheable")

    @property
    def seconds_saved(self) -> float:
        """What compiling the hits had taken."""
        return sum(e.microseconds for e in self.events if e.outcome == "hit") / 1e6

    def keys(self) -> list[str]:
        """The keys of the actions that have a record, in hexadecimal, each once."""
        keyed = (event.key for event in self.events if event.outcome != "uncacheable")
        return [key.hex() for key in dict.fromkeys(keyed) if key is not None]

    def notes(self) -> list[str]:
        """One sentence for each action that was compiled, with the reason."""
        return [_sentence(event) for event in self.events if event.outcome != "hit"]

    def _reasons(self, outcome: str) -> Counter[str]:
        return Counter(event.reason for event in self.events if event.outcome == outcome)


def _sentence(event: Event) -> str:
    detail = f" ({event.detail})" if event.detail else ""
    if event.outcome == "mismatch":
        return f"{event.label}: the record differs from a fresh compile{detail}"
    kept = "" if event.outcome == "miss" else " and not kept"
    return f"{event.label} was compiled{kept}: {event.reason}{detail}"
