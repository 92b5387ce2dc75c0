"""The quarantine is emptied of what nobody needs, and of nothing else unless by force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cas import Digest, Store, quarantine, verify
from cas.errors import ReadOnlyStore
from cas.testing.damage import flip_bit, truncate
from cas.testing.stores import assert_sound, collect, commit, contents, open_store

NEEDED, GARBAGE = contents(1, 1000), contents(2, 2000)


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    """Two damaged chunks in quarantine: one that an artifact needs, and one that none does."""
    with open_store(root / "s") as opened:
        commit(opened, "needs", NEEDED)
        commit(opened, "gone", GARBAGE)
        opened.remove("gone")
        for data in (NEEDED, GARBAGE):
            flip_bit(opened.context.layout.chunk(Digest.of(data)))
        assert len(verify.verify(opened).damaged) == 2
        yield opened


def names(items: tuple[quarantine.Item, ...]) -> set[str]:
    return {item.name for item in items}


def lying(store: Store) -> set[str]:
    return {path.name for path in store.context.layout.quarantine.iterdir()}


def hexes(*data: bytes) -> set[str]:
    return {Digest.of(piece).hex() for piece in data}


def test_what_an_artifact_still_lacks_stays_and_the_rest_goes(store: Store) -> None:
    plan = quarantine.plan(store)
    assert names(plan.drop) == hexes(GARBAGE)
    assert plan.dropped_bytes == len(GARBAGE)
    (kept,) = plan.keep
    assert (kept.name, kept.reason) == (*hexes(NEEDED), "needs@1 needs it")
    assert lying(store) == hexes(NEEDED, GARBAGE), "planning deletes nothing"
    quarantine.execute(store, plan)
    assert lying(store) == hexes(NEEDED)


def test_it_goes_when_a_good_copy_is_back_but_not_when_that_is_damaged_too(store: Store) -> None:
    commit(store, "again", NEEDED)
    copy = store.context.layout.chunk(Digest.of(NEEDED))
    flip_bit(copy, 3)
    assert names(quarantine.plan(store).keep) == hexes(NEEDED)
    flip_bit(copy, 3)
    quarantine.execute(store, quarantine.plan(store))
    assert lying(store) == set()
    assert_sound(store)


def test_it_goes_when_the_artifact_is_given_up(store: Store) -> None:
    store.remove("needs")
    quarantine.execute(store, quarantine.plan(store))
    assert lying(store) == set()


def test_force_deletes_all_of_it(store: Store) -> None:
    plan = quarantine.plan(store, force=True)
    assert names(plan.drop) == hexes(NEEDED, GARBAGE) and plan.keep == ()
    quarantine.execute(store, plan)
    assert lying(store) == set()


@pytest.mark.parametrize("how", ["a damaged ref", "a stranger among the refs"])
def test_what_cannot_be_read_might_need_anything(store: Store, how: str) -> None:
    if how == "a damaged ref":
        truncate(commit_ref(store), 3)
    else:
        (store.context.layout.refs / "na\x01me").mkdir()
    plan = quarantine.plan(store)
    assert plan.drop == ()
    assert any("might need it" in item.reason for item in plan.keep)


def commit_ref(store: Store) -> Path:
    commit(store, "other", b"x")
    return store.context.layout.ref("other", 1)


def test_what_a_live_writer_announced_stays(store: Store) -> None:
    with store.context.lease() as lease:
        lease.add_chunks([Digest.of(GARBAGE)])
        assert quarantine.plan(store).drop == ()
    assert names(quarantine.plan(store).drop) == hexes(GARBAGE)


def set_aside(store: Store, data: bytes) -> Path:
    """Damage the good copy of ``data``, and let verify move it over the one that lies there."""
    copy = store.context.layout.chunk(Digest.of(data))
    flip_bit(copy, 5)
    assert verify.verify(store).damaged == (Digest.of(data),)
    return store.context.layout.quarantined(Digest.of(data))


def test_what_was_set_aside_since_the_plan_stays(store: Store) -> None:
    """It was to go because of a good copy; that is what lies there now, and the nearest thing."""
    commit(store, "again", NEEDED)
    plan = quarantine.plan(store)
    assert names(plan.drop) == hexes(NEEDED, GARBAGE)
    newer = set_aside(store, NEEDED).read_bytes()
    done = quarantine.execute(store, plan)
    assert names(done.drop) == hexes(GARBAGE) and names(done.keep) == hexes(NEEDED)
    assert "look again" in done.keep[0].reason
    assert store.context.layout.quarantined(Digest.of(NEEDED)).read_bytes() == newer


def test_it_stays_when_its_good_copy_vanished_since_the_plan(store: Store) -> None:
    commit(store, "again", NEEDED)
    plan = quarantine.plan(store)
    store.context.layout.chunk(Digest.of(NEEDED)).unlink()
    done = quarantine.execute(store, plan)
    assert lying(store) == hexes(NEEDED) == names(done.keep)


def test_it_stays_when_somebody_needs_it_since_the_plan(store: Store) -> None:
    plan = quarantine.plan(store)
    with store.context.lease() as lease:
        lease.add_chunks([Digest.of(GARBAGE)])
        done = quarantine.execute(store, plan)
        assert done.drop == () and "a process uses it" in {item.reason for item in done.keep}
    assert lying(store) == hexes(NEEDED, GARBAGE)


def test_what_is_gone_since_the_plan_is_no_error(store: Store) -> None:
    plan = quarantine.plan(store)
    quarantine.execute(store, plan)
    done = quarantine.execute(store, plan)
    assert done.drop == () and names(done.keep) == hexes(NEEDED)


def test_even_by_force_only_the_file_that_was_planned_for_goes(store: Store, root: Path) -> None:
    plan = quarantine.plan(store, force=True)
    one, other = (store.context.layout.quarantined(Digest.of(data)) for data in (NEEDED, GARBAGE))
    for path in (one, other):
        path.unlink()
    outside = root / "outside"
    outside.write_bytes(b"precious")
    one.symlink_to(outside)
    other.mkdir()
    done = quarantine.execute(store, plan)
    assert done.drop == () and names(done.keep) == hexes(NEEDED, GARBAGE)
    assert outside.read_bytes() == b"precious" and one.is_symlink() and other.is_dir()
    assert quarantine.plan(store, force=True).drop == ()


def test_a_plan_deletes_nothing_outside_the_quarantine_of_its_store(
    store: Store, root: Path
) -> None:
    plan = quarantine.plan(store, force=True)
    outside = root / Digest.of(NEEDED).hex()
    outside.write_bytes(b"precious")
    for name in (outside, root / ".."):
        forged = replace(plan.drop[0], path=name)
        quarantine.execute(store, replace(plan, drop=(forged,)))
    with open_store(root / "other") as other:
        commit(other, "a", b"b")
        quarantine.execute(other, plan)
    assert outside.read_bytes() == b"precious"
    assert lying(store) == hexes(NEEDED, GARBAGE)


def test_damaged_action_records_go_and_strangers_stay(store: Store) -> None:
    directory = store.context.layout.quarantine
    record = directory / f"action-{'a' * 64}"
    record.write_bytes(b"damaged")
    for name in ("README", "action-x", "a" * 63):
        (directory / name).write_bytes(b"not ours")
    quarantine.execute(store, quarantine.plan(store, force=True))
    assert lying(store) == {"README", "action-x", "a" * 63}


def test_a_read_only_store_keeps_it(store: Store) -> None:
    with Store.open(store.path, read_only=True) as reader:
        plan = quarantine.plan(reader)
        assert names(plan.drop) == hexes(GARBAGE)
        with pytest.raises(ReadOnlyStore):
            quarantine.execute(reader, plan)


def test_gc_leaves_it_alone(store: Store) -> None:
    collect(store)
    assert lying(store) == hexes(NEEDED, GARBAGE)
