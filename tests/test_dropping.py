"""gc by a policy: names go first, and only those that nobody uses and the policy still gives up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cas import ActionRecord, Digest, Recipe, Store, gc
from cas.retention import Policy
from cas.testing import Child, Interleaving, step_hook
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

DAY = 86400


def data(number: int) -> bytes:
    """Two chunks of its own, and one that all share."""
    return contents(number, 2 * CHUNK) + contents(1000, CHUNK)


def used(store: Store, name: str, days_ago: float) -> None:
    """Set when a generation was used last."""
    ref = store.resolve(name)
    when = store.context.clock() - days_ago * DAY
    os.utime(store.context.layout.ref(ref.name, ref.generation), (when, when))


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    """``m`` in four generations, used 40, 30, 20 and 10 days ago, and ``n`` in one, 50 days ago."""
    with open_store(root / "s") as opened:
        for number in range(1, 5):
            commit(opened, "m", data(number))
            used(opened, f"m@{number}", 50 - 10 * number)
        commit(opened, "n", data(5))
        used(opened, "n@1", 50)
        yield opened


def names(store: Store) -> list[str]:
    return [str(ref) for ref in store.refs()]


def collect(store: Store, **policy: object) -> gc.Report:
    return gc.execute(store, gc.plan(store, policy=Policy(**policy)))  # type: ignore[arg-type]


def assert_whole(store: Store, root: Path) -> None:
    for ref in store.refs():
        number = 5 if ref.name == "n" else ref.generation
        (path,) = store.assemble(str(ref), root / "out")
        assert path.read_bytes() == data(number)
    assert_sound(store)


def test_keep_last_drops_names_and_frees_what_only_they_needed(store: Store, root: Path) -> None:
    report = collect(store, keep_last=2)
    assert [str(item) for item in report.dropped] == ["m@1", "m@2"]
    assert names(store) == ["m@3", "m@4", "n@1"]
    assert (report.dead_chunks, report.freed_bytes) == (4, 4 * CHUNK)
    assert len(chunk_files(store)) == 7
    assert_whole(store, root)


def test_older_than_drops_what_was_not_used_for_so_long(store: Store, root: Path) -> None:
    assert names(store)[-1] == "n@1"
    report = collect(store, older_than=25 * DAY)
    assert [str(item) for item in report.dropped] == ["m@1", "m@2"]
    assert names(store) == ["m@3", "m@4", "n@1"], "the current generation stays, however old"
    collect(store, older_than=25 * DAY, include_current=True)
    assert names(store) == ["m@3", "m@4"]
    assert_whole(store, root)


def test_assembling_counts_as_use(store: Store, root: Path) -> None:
    store.assemble("m@1", root / "out")
    collect(store, older_than=25 * DAY)
    assert names(store) == ["m@1", "m@3", "m@4", "n@1"]


def test_a_reader_without_the_right_to_write_is_not_noted(store: Store, root: Path) -> None:
    before = os.stat(store.context.layout.ref("m", 1)).st_mtime
    with Store.open(root / "s", read_only=True) as reader:
        reader.assemble("m@1", root / "out")
    assert os.stat(store.context.layout.ref("m", 1)).st_mtime == before


def test_artifacts_make_no_room_for_what_a_record_lacks(store: Store, root: Path) -> None:
    before = set(chunk_files(store))
    with store.writer() as writer:
        recipe = writer.put(contents(77, 5 * CHUNK))
        writer.put_action(
            Digest.of(b"young"),
            kind="delegate",
            factors={},
            result=None,
            recipes=[recipe],
            seconds=1.0,
        )
    for path in set(chunk_files(store)) - before:
        path.unlink()
    report = collect(store, max_bytes=len(before) * CHUNK, older_than=3 * DAY)
    assert report.dropped == () and len(names(store)) == 5
    assert_whole(store, root)


def test_max_size_drops_the_least_recently_used_until_the_rest_fits(
    store: Store, root: Path
) -> None:
    used(store, "m@1", 5)
    plan = gc.plan(store, policy=Policy(max_bytes=9 * CHUNK))
    assert [str(item) for item in plan.drops] == ["m@2"]
    assert (plan.over_bytes, len(plan.chunks)) == (0, 2)
    gc.execute(store, plan)
    assert names(store) == ["m@1", "m@3", "m@4", "n@1"]
    assert sum(path.stat().st_size for path in chunk_files(store)) == 9 * CHUNK
    assert_whole(store, root)


def test_a_size_that_fits_drops_nothing_and_garbage_counts_first(store: Store) -> None:
    commit(store, "gone", contents(7, 3 * CHUNK))
    store.remove("gone")
    report = collect(store, max_bytes=11 * CHUNK)
    assert report.dropped == () and report.freed_bytes == 3 * CHUNK
    assert collect(store, max_bytes=11 * CHUNK).dropped == ()


def test_what_does_not_fit_is_told(store: Store) -> None:
    plan = gc.plan(store, policy=Policy(max_bytes=CHUNK))
    assert [str(item) for item in plan.drops] == ["m@1", "m@2", "m@3"]
    assert plan.over_bytes == 4 * CHUNK


def test_what_a_live_writer_holds_counts_as_needed(store: Store, root: Path) -> None:
    with store.writer() as writer:
        recipe = writer.put(contents(8, 4 * CHUNK))
        writer.barrier()
        report = collect(store, max_bytes=11 * CHUNK)
        assert [str(item) for item in report.dropped] == ["m@1", "m@2"]
        writer.commit("new", {"f": recipe})
    assert sum(path.stat().st_size for path in chunk_files(store)) == 11 * CHUNK
    assert store.assemble("new", root / "out")[0].read_bytes() == contents(8, 4 * CHUNK)


# --- action records -----------------------------------------------------------------------------


def record(store: Store, number: int, days_ago: float) -> Digest:
    key = Digest.of(f"action {number}".encode())
    with store.writer() as writer:
        recipe = writer.put(contents(100 + number, CHUNK))
        writer.put_action(key, kind="test", factors={}, result={}, recipes=[recipe], seconds=1)
    when = store.context.clock() - days_ago * DAY
    os.utime(store.context.layout.action(key), (when, when))
    return key


def recorded(store: Store) -> set[Digest]:
    return {item.key for item in store.actions.list() if isinstance(item, ActionRecord)}


def test_records_keep_their_chunks_and_go_first_for_a_size(store: Store, root: Path) -> None:
    old, young = record(store, 1, 3), record(store, 2, 2)
    assert collect(store).freed_bytes == 0
    report = collect(store, max_bytes=12 * CHUNK)
    assert [str(item) for item in report.dropped] == [str(old)]
    assert (report.freed_bytes, recorded(store)) == (CHUNK, {young})
    assert store.actions.find(young).record is not None
    report = collect(store, max_bytes=9 * CHUNK)
    assert [str(item) for item in report.dropped] == [str(young), "m@1"]
    assert_whole(store, root)


def test_records_go_by_age_and_not_by_count(store: Store) -> None:
    old, young = record(store, 1, 30), record(store, 2, 2)
    assert recorded(store) == {old, young}
    collect(store, keep_last=1)
    assert recorded(store) == {old, young}
    collect(store, older_than=10 * DAY)
    assert recorded(store) == {young}


def test_a_record_used_after_the_plan_stays(store: Store) -> None:
    key = record(store, 1, 30)
    plan = gc.plan(store, policy=Policy(older_than=10 * DAY, keep_last=4))
    assert [str(item) for item in plan.drops] == [str(key)]
    assert store.actions.find(key).record is not None
    report = gc.execute(store, plan)
    assert (report.dropped, report.spared) == ((), 1)
    assert store.actions.find(key).record is not None


# --- between the plan and the execution ---------------------------------------------------------


def use(store: Store, root: Path) -> None:
    store.assemble("m@1", root / "out")


def remove_the_newer_ones(store: Store, root: Path) -> None:
    for number in (2, 3, 4):
        store.remove(f"m@{number}")


def replace_it(store: Store, root: Path) -> None:
    store.remove("m")
    commit(store, "m", data(1) + b"something else")
    used(store, "m@1", 40)


def damage_it(store: Store, root: Path) -> None:
    truncate(store.context.layout.ref("m", 1), 30)


@pytest.mark.parametrize("change", [use, remove_the_newer_ones, replace_it, damage_it])
def test_a_name_that_changed_since_the_plan_stays(
    store: Store, root: Path, change: Callable[[Store, Path], None]
) -> None:
    plan = gc.plan(store, policy=Policy(keep_last=3))
    assert [str(item) for item in plan.drops] == ["m@1"]
    change(store, root)
    report = gc.execute(store, plan)
    assert report.dropped == ()
    assert "m@1" in names(store)
    if change is not damage_it:
        store.assemble("m@1", root / "out")
        assert_sound(store)


def test_a_name_that_is_gone_since_the_plan_is_no_error(store: Store, root: Path) -> None:
    plan = gc.plan(store, policy=Policy(keep_last=3))
    store.remove("m@1")
    assert gc.execute(store, plan).dropped == ()
    assert len(chunk_files(store)) == 9
    assert_whole(store, root)


def test_what_cannot_be_read_keeps_every_name(store: Store) -> None:
    truncate(store.context.layout.ref("n", 1), 30)
    for policy in (Policy(keep_last=1), Policy(max_bytes=1)):
        plan = gc.plan(store, policy=policy)
        assert (plan.drops, plan.chunks) == ((), ())
        assert "n@1" in plan.problems[0]


def test_a_manifest_that_cannot_be_read_keeps_every_name(store: Store) -> None:
    store.context.layout.manifest(store.resolve("m@2").manifest).unlink()
    plan = gc.plan(store, policy=Policy(max_bytes=1))
    assert (plan.drops, plan.chunks) == ((), ())
    assert "m@2" in plan.problems[0]


def test_a_reader_of_what_is_dropped_reads_on(store: Store, root: Path) -> None:
    class Meanwhile:
        def start(self, label: str, total: int | None) -> None:
            dropped = [str(item) for item in collect(store, keep_last=1).dropped]
            assert dropped == ["m@2", "m@3", "m@1"], "the one that was just used, last"

        def advance(self, nbytes: int) -> None: ...

        def finish(self) -> None: ...

    (path,) = store.assemble("m@1", root / "out", progress=Meanwhile())
    assert path.read_bytes() == data(1)
    assert names(store) == ["m@4", "n@1"]
    assert collect(store).dead_chunks == 2


#: The steps of a gc that drops names, and then deletes.
STEPS = [
    ("unlink", "/refs/", 1),
    ("sync", "/refs/", 2),
    ("index-commit", "/index", 2),
    ("unlink", "/manifests/", 1),
    ("unlink", "/chunks/", 2),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step[0]}{step[1]}-{step[2]}")
@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "is killed"])
def test_a_writer_beside_a_gc_that_drops_names_loses_nothing(
    store: Store, root: Path, step: tuple[str, str, int], killed: bool
) -> None:
    """The writer commits again what is being dropped, and other processes' gc cleans up."""
    store.close()
    operation, part, nth = step

    def run_gc(child: Child) -> None:
        def meet() -> None:
            child.tell("here")
            child.wait_for("go on")

        hook = Interleaving(lambda name, path: name == operation and part in path, meet, nth=nth)
        with step_hook(hook), open_store(root / "s") as mine:
            collect(mine, keep_last=2)

    def write(child: Child) -> None:
        child.wait_for("go")
        with open_store(root / "s") as mine:
            commit(mine, "again", data(1))

    with children(run_gc, write) as (collector, writer):
        collector.wait_for("here")
        writer.tell("go")
        writer.has_news(0.2)
        if killed:
            collector.kill()
        else:
            collector.tell("go on")
            collector.result()
        writer.result()
    with open_store(root / "s") as mine:
        for _ in range(2):
            assert mine.assemble("again", root / "out")[0].read_bytes() == data(1)
            assert mine.assemble("m@4", root / "out")[0].read_bytes() == data(4)
            assert_sound(mine)
            collect(mine, keep_last=2)
        assert names(mine) == ["again@1", "m@3", "m@4", "n@1"]


# --- who may only look --------------------------------------------------------------------------


def test_a_plan_for_a_read_only_store_says_the_same(store: Store, root: Path) -> None:
    commit(store, "gone", contents(7, 3 * CHUNK))
    store.remove("gone")
    for policy in (Policy(), Policy(keep_last=2), Policy(max_bytes=6 * CHUNK)):
        expected = gc.plan(store, policy=policy)
        with Store.open(root / "s", read_only=True) as reader:
            plan = gc.plan(reader, policy=policy)
        assert plan.drops == expected.drops
        assert set(plan.chunks) == set(expected.chunks)
        assert set(plan.manifests) == set(expected.manifests)
        assert plan.dead_bytes == expected.dead_bytes >= 3 * CHUNK


def test_recipes_that_are_shared_by_records_and_artifacts_are_counted_once(store: Store) -> None:
    with store.writer() as writer:
        recipe = Recipe.concat([entry.recipe for entry in store.manifest("m@1").files])
        writer.put_action(
            Digest.of(b"k"), kind="test", factors={}, result={}, recipes=[recipe], seconds=1
        )
    plan = gc.plan(store, policy=Policy(max_bytes=10 * CHUNK, include_current=True))
    # The record holds nothing of its own, so that it stays; n is what was not used for longest.
    assert [str(item) for item in plan.drops] == ["n@1"]
