"""What became of the actions that were looked up: counters for ever, and the last events singly.

Two small files that say nothing about the store's content. They may be lost, and are not synced;
processes take turns by ``locks/journal``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from cas import fsio
from cas.digest import Digest
from cas.errors import CasError, UsageError
from cas.layout import Layout
from cas.locks import FileLock
from cas.modes import Modes
from cas.strictjson import Json, as_digest, as_int, as_text, canonical_json, load_json, require_keys

logger = logging.getLogger(__name__)

#: hit: came out of the store. miss: computed, since there was nothing to use. uncacheable:
#: computed, and could not be recorded. mismatch: a hit that was computed again came out otherwise.
Outcome = Literal["hit", "miss", "uncacheable", "mismatch"]

#: The journal is cut to its newest half at this size.
JOURNAL_BYTES: Final = 1 << 20
#: Reasons are counted singly up to so many, then together: some hold names from a model.
MAX_REASONS: Final = 100
MAX_REASON_CHARS: Final = 200
_OTHER = "other"
_EVENT_KEYS = (
    "time",
    "run",
    "outcome",
    "kind",
    "label",
    "reason",
    "detail",
    "key",
    "microseconds",
)


@dataclass(frozen=True, slots=True)
class Event:
    """One action that was looked up.

    ``reason`` says why there was no hit, in words that are counted, and ``detail`` which thing it
    was about, in words that are not; ``microseconds`` is what a hit saved, or what the
    computation took. ``key`` is None where there was none to be had. ``run`` is the same for all
    events that were noted together.
    """

    outcome: Outcome
    kind: str
    label: str = ""
    reason: str = ""
    detail: str = ""
    key: Digest | None = None
    microseconds: int = 0
    time: int = 0
    run: str = ""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts since the store, or its counters, began. Reasons are of misses and of uncacheables."""

    hits: int = 0
    mismatches: int = 0
    saved_microseconds: int = 0
    computed_microseconds: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    uncacheable: Mapping[str, int] = field(default_factory=dict)

    def plus(self, events: Iterable[Event]) -> Tally:
        """The counts with ``events`` added."""
        hits, mismatches = self.hits, self.mismatches
        saved, computed = self.saved_microseconds, self.computed_microseconds
        misses, uncacheable = dict(self.misses), dict(self.uncacheable)
        for event in events:
            if event.outcome == "hit":
                hits += 1
                saved += event.microseconds
                continue
            computed += event.microseconds
            if event.outcome == "mismatch":
                mismatches += 1
            else:
                _count(misses if event.outcome == "miss" else uncacheable, event.reason)
        return Tally(hits, mismatches, saved, computed, misses, uncacheable)

    def document(self) -> dict[str, Json]:
        """The counts as JSON holds them."""
        return {
            "hits": self.hits,
            "mismatches": self.mismatches,
            "saved_microseconds": self.saved_microseconds,
            "computed_microseconds": self.computed_microseconds,
            "misses": dict(self.misses),
            "uncacheable": dict(self.uncacheable),
        }


def _count(reasons: dict[str, int], reason: str) -> None:
    reason = reason[:MAX_REASON_CHARS] or "unknown"
    if reason not in reasons and len(reasons) >= MAX_REASONS:
        reason = _OTHER
    reasons[reason] = reasons.get(reason, 0) + 1


# --- reading ------------------------------------------------------------------------------------


def tally(layout: Layout) -> Tally:
    """The counts; zeros where they are lost or damaged."""
    try:
        return parse_tally(layout.action_counters.read_bytes())
    except (OSError, UsageError):
        return Tally()


def events(layout: Layout) -> list[Event]:
    """The last events, oldest first. Lines that are none are left out."""
    try:
        data = layout.action_journal.read_bytes()
    except OSError:
        return []
    return parse_events(data)


def parse_tally(data: bytes) -> Tally:
    """
    Raises:
        UsageError: it is not what `Tally.document` gives.
    """
    top = require_keys(load_json(data), Tally().document(), "counters")
    return Tally(
        hits=as_int(top["hits"], "hits"),
        mismatches=as_int(top["mismatches"], "mismatches"),
        saved_microseconds=as_int(top["saved_microseconds"], "saved_microseconds"),
        computed_microseconds=as_int(top["computed_microseconds"], "computed_microseconds"),
        misses=_parse_reasons(top["misses"]),
        uncacheable=_parse_reasons(top["uncacheable"]),
    )


def _parse_reasons(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > MAX_REASONS + 1:
        raise UsageError("reasons must be a small object")
    return {reason: as_int(count, "a count") for reason, count in value.items()}


def parse_events(data: bytes) -> list[Event]:
    """The events of those lines that hold one: a line may be torn, or rotten."""
    found = []
    for line in data[-2 * JOURNAL_BYTES :].splitlines():
        with contextlib.suppress(UsageError):
            found.append(parse_event(line))
    return found


def parse_event(line: bytes) -> Event:
    """
    Raises:
        UsageError: the line holds no event.
    """
    fields = require_keys(load_json(line), _EVENT_KEYS, "an event")
    outcome = fields["outcome"]
    if outcome not in ("hit", "miss", "uncacheable", "mismatch"):
        raise UsageError("an unknown outcome")
    return Event(
        outcome=outcome,
        kind=as_text(fields["kind"], "a kind"),
        label=as_text(fields["label"], "a label"),
        reason=as_text(fields["reason"], "a reason"),
        detail=as_text(fields["detail"], "a detail"),
        key=None if fields["key"] is None else as_digest(fields["key"], "a key"),
        microseconds=as_int(fields["microseconds"], "microseconds"),
        time=as_int(fields["time"], "a time"),
        run=as_text(fields["run"], "a run"),
    )


# --- writing ------------------------------------------------------------------------------------


def note(layout: Layout, modes: Modes, happened: Sequence[Event], now: int) -> None:
    """Count ``happened`` and append it to the journal; where that is not possible, it is lost."""
    if not happened:
        return
    run = secrets.token_hex(4)
    stamped = [replace(event, time=now, run=run) for event in happened]
    try:
        with fsio.os_errors(layout.actions), _alone(layout, modes):
            _append(layout.action_journal, modes, b"".join(map(_line, stamped)))
            counted = canonical_json(tally(layout).plus(stamped).document())
            _replace(layout.action_counters, modes, counted)
    except (CasError, OSError) as error:  # whatever it is, it is no reason to end an export
        logger.info("events were not noted: %s", error)


def _line(event: Event) -> bytes:
    fields = {
        "time": event.time,
        "run": event.run,
        "outcome": event.outcome,
        "kind": event.kind,
        "label": event.label[:MAX_REASON_CHARS],
        "reason": event.reason[:MAX_REASON_CHARS],
        "detail": event.detail[:MAX_REASON_CHARS],
        "key": event.key.hex() if event.key else None,
        "microseconds": event.microseconds,
    }
    return canonical_json(fields) + b"\n"


@contextlib.contextmanager
def _alone(layout: Layout, modes: Modes) -> Iterator[None]:
    lock = FileLock.open(layout.journal_lock, modes.file)
    try:
        lock.exclusive()
        yield
    finally:
        lock.close()


def _append(path: Path, modes: Modes, lines: bytes) -> None:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        size = 0
    if size + len(lines) <= JOURNAL_BYTES:
        fsio.append(path, lines, mode=modes.file)
        return
    newest = (path.read_bytes() if size else b"")[-JOURNAL_BYTES // 2 :]
    newest = newest[newest.find(b"\n") + 1 :]
    _replace(path, modes, (newest + lines)[-JOURNAL_BYTES:])


def _replace(path: Path, modes: Modes, data: bytes) -> None:
    """Put ``data`` at ``path``, whole. The temporary name is the same each time: nobody shares
    it, and what a killed process left there goes with the next one."""
    temporary = path.with_name(f"{path.name}.new")
    fsio.unlink(temporary)
    fsio.create_file(temporary, data, mode=modes.file, sync=False)
    fsio.rename(temporary, path)
