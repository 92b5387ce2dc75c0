"""Counters and the journal: right with many processes, bounded, and harmless when damaged."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cas import Digest, Store, journal
from cas.errors import NoSpace, UsageError
from cas.journal import JOURNAL_BYTES, MAX_REASONS, Event, Tally
from cas.testing.processes import Child, children
from cas.testing.steps import step_hook
from cas.testing.stores import collect, open_store

KEY = Digest.of(b"key")
EVENTS = [
    Event("hit", "delegate", "forward 1", key=KEY, microseconds=3_000_000),
    Event("miss", "delegate", "forward 2", "absent", "", KEY, 500_000),
    Event("miss", "delegate", "forward 3", "stale", "the file x", KEY, 500_000),
    Event("uncacheable", "delegate", "forward 4", "a user's function", microseconds=100),
    Event("mismatch", "delegate", "forward 5", "blob 0", key=KEY, microseconds=7),
]


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with open_store(root / "store", clock=lambda: 1234.5) as opened:
        yield opened


def test_events_are_counted_by_reason_and_kept_in_order(store: Store) -> None:
    store.actions.note(EVENTS)
    store.actions.note(EVENTS[:1])
    tally = store.actions.tally()
    assert (tally.hits, tally.mismatches) == (2, 1)
    assert tally.saved_microseconds == 6_000_000 and tally.computed_microseconds == 1_000_107
    assert tally.misses == {"absent": 1, "stale": 1}
    assert tally.uncacheable == {"a user's function": 1}
    events = store.actions.events()
    assert [event.label for event in events] == [f"forward {i}" for i in (1, 2, 3, 4, 5, 1)]
    assert {event.time for event in events} == {1234}
    assert len({event.run for event in events}) == 2 and events[0].run == events[4].run
    assert events[2].detail == "the file x"
    assert events[1].key == KEY and events[3].key is None


def test_nothing_is_lost_when_many_processes_count(root: Path) -> None:
    with open_store(root / "s"):
        pass

    def count(_: Child) -> None:
        with open_store(root / "s") as store:
            for _number in range(25):
                store.actions.note(EVENTS[:2])

    with children(*[count] * 4) as started:
        for child in started:
            child.result()
    with open_store(root / "s") as store:
        assert store.actions.tally().hits == 100
        assert store.actions.tally().misses == {"absent": 100}
        assert len(store.actions.events()) == 200


def test_the_journal_keeps_the_newest_and_stays_small(store: Store) -> None:
    long = [Event("miss", "delegate", f"{number:06d} " + "x" * 150) for number in range(3000)]
    for _ in range(6):
        store.actions.note(long)
    assert store.context.layout.action_journal.stat().st_size <= JOURNAL_BYTES
    events = store.actions.events()
    assert events[-1].label.startswith("002999") and len(events) > 1000
    assert store.actions.tally().misses == {"unknown": 18_000}


def test_reasons_without_number_are_counted_together() -> None:
    tally = Tally().plus(Event("miss", "delegate", reason=f"{i}") for i in range(500))
    assert len(tally.misses) == MAX_REASONS + 1 and tally.misses["other"] == 500 - MAX_REASONS
    assert journal.parse_tally(json.dumps(tally.document()).encode()) == tally


def test_long_texts_are_cut(store: Store) -> None:
    store.actions.note([Event("uncacheable", "delegate", "l" * 10_000, "r" * 10_000)])
    (event,) = store.actions.events()
    assert len(event.label) == len(event.reason) == 200
    assert list(store.actions.tally().uncacheable) == ["r" * 200]


@pytest.mark.parametrize("rot", [b"", b"\xff\xfe", b"{}", b"[" * 9999, b'{"hits":-1}'])
def test_damaged_files_are_begun_anew(store: Store, rot: bytes) -> None:
    store.actions.note(EVENTS)
    store.context.layout.action_counters.write_bytes(rot)
    store.context.layout.action_journal.write_bytes(b"torn {" + rot)
    assert store.actions.tally() == Tally() and not store.actions.events()
    store.actions.note(EVENTS[:1])
    assert store.actions.tally().hits == 1
    assert [event.label for event in store.actions.events()] == ["forward 1"]


HOSTILE: list[dict[str, Any]] = [
    {"hits": True},
    {"hits": "1"},
    {"misses": []},
    {"misses": {"a": -1}},
    {"misses": {str(i): 1 for i in range(5000)}},
    {"more": 1},
]


@pytest.mark.parametrize("fields", HOSTILE)
def test_counters_are_not_believed(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        journal.parse_tally(json.dumps({**Tally().document(), **fields}).encode())


@pytest.mark.parametrize("error", [NoSpace(Path("x")), OSError(errno.EIO, "broken")])
def test_a_full_or_broken_disk_loses_the_note_and_nothing_else(
    store: Store, error: Exception
) -> None:
    def full(operation: str, path: Path | str) -> None:
        if operation in ("append", "create"):
            raise error

    store.actions.note(EVENTS)
    with step_hook(full):
        store.actions.note(EVENTS)
    assert store.actions.tally().hits == 1


def test_a_read_only_store_notes_nothing(store: Store) -> None:
    with Store.open(store.path, read_only=True) as reader:
        reader.actions.note(EVENTS)
        assert reader.actions.tally() == Tally()
    assert not store.context.layout.action_journal.exists()


def test_gc_and_listing_take_no_notice_of_it(store: Store) -> None:
    store.actions.note(EVENTS)
    assert list(store.actions.entries()) == []
    collect(store)
    assert store.actions.tally().hits == 1
