"""``max_size``: every writer keeps it, of whatever process, and none waits or fails for it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cas import Store, gc, ingest
from cas.errors import StoreDamaged, UsageError
from cas.index import Stuck
from cas.limits import LONGEST, SHORTEST, SizeLimit, reconsider
from cas.retention import Policy
from cas.testing import Child
from cas.testing.damage import truncate
from cas.testing.processes import children
from cas.testing.stores import (
    CHUNK,
    assert_sound,
    chunk_files,
    commit,
    contents,
    open_store,
)


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    """At most ten chunks."""
    with open_store(root / "s") as opened:
        opened.set_config("max_size", str(10 * CHUNK))
        yield opened


def size(store: Store) -> int:
    return sum(path.stat().st_size for path in chunk_files(store))


def names(store: Store) -> list[str]:
    return [str(ref) for ref in store.refs()]


def age(store: Store, name: str, seconds: float) -> None:
    ref = store.resolve(name)
    when = store.context.clock() - seconds
    os.utime(store.context.layout.ref(ref.name, ref.generation), (when, when))


def test_a_commit_makes_room_by_dropping_what_is_old(store: Store, root: Path) -> None:
    for number in range(1, 8):
        commit(store, "m", contents(number, 3 * CHUNK))
        age(store, f"m@{number}", 1000 - number)
    assert names(store) == ["m@5", "m@6", "m@7"]
    assert size(store) == 9 * CHUNK
    for number in (5, 6, 7):
        (path,) = store.assemble(f"m@{number}", root / "out")
        assert path.read_bytes() == contents(number, 3 * CHUNK)
    assert_sound(store)


def test_garbage_goes_before_any_name(store: Store) -> None:
    commit(store, "m", contents(1, 3 * CHUNK))
    commit(store, "m", contents(2, 3 * CHUNK))
    commit(store, "gone", contents(3, 3 * CHUNK))
    store.remove("gone")
    commit(store, "m", contents(4, 4 * CHUNK))
    assert names(store) == ["m@1", "m@2", "m@3"]
    assert size(store) == 10 * CHUNK


def test_a_long_write_makes_room_before_it_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "BARRIER_BYTES", 2 * CHUNK)
    for number in range(1, 4):
        commit(store, "m", contents(number, 3 * CHUNK))
        age(store, f"m@{number}", 1000 - number)
    with store.writer() as writer:
        largest = 0
        for number in range(10, 17):
            recipe = writer.put(contents(number, CHUNK))
            largest = max(largest, size(store))
        assert names(store) == ["m@3"], "those that were in the way are gone before the commit"
        assert largest <= 12 * CHUNK, "the limit, and what one barrier brings"
        writer.commit("n", {"f": recipe})
    assert names(store) == ["m@3", "n@1"]


def test_a_limit_that_cannot_be_kept_fails_nobody_and_is_told_once(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "BARRIER_BYTES", CHUNK)
    with caplog.at_level(logging.WARNING, "cas"), store.writer() as writer:
        recipes = [writer.put(contents(number, CHUNK)) for number in range(30)]
        writer.commit("big", {"f": recipes[0], "g": recipes[29]})
    assert names(store) == ["big@1"]
    told = [record for record in caplog.records if "max_size" in record.getMessage()]
    assert len(told) == 1
    assert "in use" in told[0].getMessage()


def test_only_as_much_growth_as_matters_brings_the_next_try(root: Path) -> None:
    with open_store(root / "s") as store:
        store.set_config("max_size", str(100 * CHUNK))
        limit = SizeLimit(store.context)
        with store.writer() as writer:
            for number in range(103):
                writer.put(contents(number, CHUNK))
            writer.barrier()
            limit.keep()
            assert limit._enough == 108 * CHUNK
            for number in range(200, 204):
                writer.put(contents(number, CHUNK))
            writer.barrier()
            limit.keep()
            assert limit._enough == 108 * CHUNK


def test_another_gc_is_not_waited_for(store: Store, root: Path) -> None:
    commit(store, "m", contents(1, 6 * CHUNK))
    store.close()

    def hold(child: Child) -> None:
        with open_store(root / "s") as mine, gc._only_one(mine.context):
            child.tell("inside")
            child.wait_for("go on")

    with children(hold) as (other,):
        other.wait_for("inside")
        with open_store(root / "s") as mine:
            commit(mine, "m", contents(2, 6 * CHUNK))
            assert size(mine) == 12 * CHUNK, "somebody else is at it"
        other.tell("go on")
        other.result()
    with open_store(root / "s") as mine:
        commit(mine, "m", contents(2, 6 * CHUNK))
        assert names(mine) == ["m@2", "m@3"] and size(mine) == 6 * CHUNK


def test_writers_of_several_processes_keep_it_together(store: Store, root: Path) -> None:
    store.close()

    def write(number: int) -> None:
        with open_store(root / "s") as mine:
            for step in range(4):
                commit(mine, f"n{number}", contents(100 * number + step, 2 * CHUNK))

    with children(*(lambda _, n=n: write(n) for n in range(3))) as started:
        for child in started:
            child.result()
    with open_store(root / "s") as mine:
        assert {ref.name for ref in mine.refs()} == {"n0", "n1", "n2"}
        for number in range(3):
            (path,) = mine.assemble(f"n{number}", root / "out")
            assert path.read_bytes() == contents(100 * number + 3, 2 * CHUNK)
        SizeLimit(mine.context).keep()  # the last two may have met
        assert size(mine) <= 10 * CHUNK
        assert_sound(mine)


def test_a_setting_of_another_process_counts_at_once(store: Store, root: Path) -> None:
    commit(store, "m", contents(1, 3 * CHUNK))
    with open_store(root / "s") as other:
        other.set_config("max_size", str(4 * CHUNK))
    commit(store, "m", contents(2, 3 * CHUNK))
    assert names(store) == ["m@2"]


def test_what_is_protected_by_the_other_settings_stays(store: Store) -> None:
    store.set_config("keep_last", "3")
    for number in range(1, 6):
        commit(store, "m", contents(number, 4 * CHUNK))
    assert names(store) == ["m@3", "m@4", "m@5"]


def test_settings_given_at_opening_beat_the_stores(store: Store, root: Path) -> None:
    with open_store(root / "s", settings={"max_size": "none"}) as mine:
        for number in range(1, 5):
            commit(mine, "m", contents(number, 4 * CHUNK))
    assert size(store) == 16 * CHUNK
    with open_store(root / "s", settings={"max_size": str(8 * CHUNK)}) as mine:
        commit(mine, "m", contents(4, 4 * CHUNK))
        assert size(mine) <= 8 * CHUNK
    with pytest.raises(UsageError, match="size"):
        open_store(root / "s", settings={"max_size": "much"})


def test_what_cannot_be_read_is_told_and_fails_no_commit(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    commit(store, "m", contents(1, 6 * CHUNK))
    commit(store, "broken", contents(2, 100))
    truncate(store.context.layout.ref("broken", 1), 30)
    with caplog.at_level(logging.WARNING, "cas"):
        commit(store, "m", contents(3, 6 * CHUNK))
    assert names(store) == ["broken@1", "m@1", "m@2"]
    assert "broken" in caplog.text


def test_a_config_that_rotted_meanwhile_fails_no_commit(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.context.layout.config.write_text("max_size = [")
    with caplog.at_level(logging.WARNING, "cas"):
        commit(store, "m", contents(3, CHUNK))
    assert "config.toml" in caplog.text
    with pytest.raises(StoreDamaged):
        store.context.settings()


# --- what cannot be kept is not looked for again and again --------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One entry for each gc that a writer runs."""
    seen: list[float] = []
    real = gc.collect

    def counting(*given: Any, **options: Any) -> gc.Report:
        seen.append(time.monotonic())
        return real(*given, **options)

    monkeypatch.setattr(gc, "collect", counting)
    return seen


@pytest.fixture
def stuck(root: Path, looks: list[float]) -> Iterator[Callable[[float], Store]]:
    """Opens a store at a time; its one artifact is current, and more than its largest size."""
    with contextlib.ExitStack() as stack:

        def opened(now: float) -> Store:
            return stack.enter_context(open_store(root / "s", clock=lambda: now))

        store = opened(1e9)
        store.set_config("max_size", str(10 * CHUNK))
        commit(store, "big", contents(1, 12 * CHUNK))
        commit(store, "small", b"the first writer that finds it so")
        looks.clear()
        yield opened


def test_what_one_writer_found_out_holds_for_the_next(
    stuck: Callable[[float], Store], looks: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        caplog.clear()
        commit(stuck(1e9 + 1), f"n{number}", contents(number, 100))
        assert "could drop nothing more" in caplog.text, "every writer is told"
    assert looks == []


def test_it_is_looked_at_again_when_the_store_has_grown(
    stuck: Callable[[float], Store], looks: list[float]
) -> None:
    commit(stuck(1e9 + 1), "n", contents(2, CHUNK // 2 + 1))
    assert len(looks) == 1


@pytest.mark.parametrize("now", [1e9 + SHORTEST + 1, 1e9 - LONGEST - 1])
def test_it_is_looked_at_again_after_a_while_and_when_the_clock_was_set(
    stuck: Callable[[float], Store], looks: list[float], now: float
) -> None:
    commit(stuck(now), "n", contents(2, 100))
    assert len(looks) == 1


def test_it_is_looked_at_again_when_something_was_removed(
    stuck: Callable[[float], Store], looks: list[float]
) -> None:
    store = stuck(1e9 + 1)
    store.remove("big")
    commit(store, "n", contents(2, 100))
    assert len(looks) == 1 and size(store) < 200


def test_it_is_looked_at_again_when_something_became_old(
    stuck: Callable[[float], Store], looks: list[float]
) -> None:
    store = stuck(1e9 + 1)
    commit(store, "big", contents(2, 100))
    assert len(looks) == 1 and names(store) == ["big@2", "small@1"]
    assert size(store) < 200


def test_it_is_looked_at_again_when_something_became_old_while_all_fitted(
    stuck: Callable[[float], Store], looks: list[float]
) -> None:
    store = stuck(1e9 + 1)
    gc.execute(store, gc.plan(store, policy=Policy(max_bytes=100, include_current=True)))
    commit(store, "a", contents(2, 4 * CHUNK))
    commit(store, "a", contents(3, 4 * CHUNK))
    assert looks == []
    commit(store, "b", contents(4, 4 * CHUNK))
    assert len(looks) == 1 and names(store) == ["a@2", "b@1", "small@1"]


def test_it_is_looked_at_again_when_the_rules_are_others(
    stuck: Callable[[float], Store], looks: list[float]
) -> None:
    store = stuck(1e9 + 1)
    store.set_config("max_size", str(11 * CHUNK))
    commit(store, "n", contents(2, 100))
    assert len(looks) == 1


def test_what_only_a_live_process_keeps_is_not_remembered(store: Store, looks: list[float]) -> None:
    with store.writer() as writer:
        writer.put(contents(1, 12 * CHUNK))
        writer.barrier()
    assert len(looks) == 1 and size(store) == 12 * CHUNK
    commit(store, "n", contents(2, 100))
    assert len(looks) == 2 and size(store) == 100


def test_nothing_is_remembered_if_something_became_old_while_gc_looked(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gc.collect

    def interrupted(*given: Any, **options: Any) -> gc.Report:
        report = real(*given, **options)
        reconsider(store.context)
        return report

    monkeypatch.setattr(gc, "collect", interrupted)
    commit(store, "big", contents(1, 12 * CHUNK))
    with store.context.index.read() as txn:
        assert txn.stuck() == Stuck(changes=1)


def test_a_new_index_remembers_nothing(stuck: Callable[[float], Store], looks: list[float]) -> None:
    store = stuck(1e9 + 1)
    store.context.index.rebuild()
    commit(store, "n", contents(2, 100))
    assert len(looks) == 1
