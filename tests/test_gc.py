"""Garbage collection: what nothing uses goes, what anything may use stays.

What runs beside it is in test_interleavings.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cas import Digest, Store, gc
from cas.closures import Closure
from cas.context import Context
from cas.errors import Busy
from cas.locks import FileLock
from cas.testing import Child, Interleaving, step_hook
from cas.testing.damage import flip_bit, truncate
from cas.testing.processes import children
from cas.testing.stores import (
    CHUNK,
    KEPT,
    OLD,
    assert_kept,
    chunk_files,
    collect,
    commit,
    contents,
    litter,
    open_store,
)

HOUR = 3600


class Clock:
    """Seconds that a test moves."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with open_store(root / "s") as opened:
        litter(opened)
        yield opened


# --- what goes and what stays -------------------------------------------------------------------


def test_only_what_nothing_uses_is_deleted(store: Store, root: Path) -> None:
    report = collect(store)
    assert (report.dead_chunks, report.freed_bytes) == (3, 3 * CHUNK)
    assert len(chunk_files(store)) == 2
    assert len(list(store.context.layout.manifests.glob("*/*"))) == 1
    assert_kept(store, root)
    again = collect(store)
    assert (again.dead_chunks, again.freed_bytes, again.spared) == (0, 0, 0)


def test_a_plan_deletes_nothing(store: Store) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.path.rglob("*") if path.is_file()}
    plan = gc.plan(store)
    after = {path: path.stat().st_mtime_ns for path in store.path.rglob("*") if path.is_file()}
    assert after == before
    assert (len(plan.chunks), len(plan.manifests), plan.dead_bytes) == (3, 1, 3 * CHUNK)


def test_chunks_that_artifacts_share_stay_until_the_last_is_removed(
    store: Store, root: Path
) -> None:
    commit(store, "one", OLD)
    commit(store, "two", OLD + b"tail")
    collect(store)
    assert_kept(store, root, one=OLD, two=OLD + b"tail")
    store.remove("one")
    collect(store)
    assert_kept(store, root, two=OLD + b"tail")
    store.remove("two")
    collect(store)
    assert len(chunk_files(store)) == 2


def test_every_generation_is_kept(store: Store, root: Path) -> None:
    commit(store, "kept", OLD)
    collect(store)
    for generation, data in ((1, KEPT), (2, OLD)):
        (path,) = store.assemble(f"kept@{generation}", root / "out")
        assert path.read_bytes() == data


def test_grace_spares_what_was_used_lately(root: Path) -> None:
    clock = Clock(0)
    with open_store(root / "s", clock=clock) as store:
        clock.now = max(p.stat().st_mtime for p in [root]) + 10
        commit(store, "old", OLD)
        store.remove("old")
        report = collect(store, grace=HOUR)
        assert (report.dead_chunks, report.spared, report.freed_bytes) == (0, 3, 0)
        clock.now += HOUR - 1
        commit(store, "again", OLD[:CHUNK])  # known, so only its stamp moves
        store.remove("again")
        clock.now += 2
        report = collect(store, grace=HOUR)
        assert (report.dead_chunks, report.spared) == (2, 1)
        clock.now += HOUR
        assert collect(store, grace=HOUR).dead_chunks == 1
        assert chunk_files(store) == []


def test_a_clock_in_the_future_or_set_back_deletes_nothing_early(root: Path) -> None:
    clock = Clock(4e9)
    with open_store(root / "s", clock=clock) as store:
        commit(store, "kept", KEPT)
        commit(store, "old", OLD)
        store.remove("old")
        clock.now = 1e9  # long before every stamp
        assert collect(store, grace=60).spared == 3
        assert collect(store, grace=0).dead_chunks == 3
        assert_kept(store, root)


# --- what cannot be read blocks -----------------------------------------------------------------


def damaged_manifest(store: Store) -> None:
    flip_bit(store.context.layout.manifest(store.resolve("kept").manifest), 10)


def missing_manifest(store: Store) -> None:
    store.context.layout.manifest(store.resolve("kept").manifest).unlink()


def damaged_ref(store: Store) -> None:
    truncate(store.context.layout.ref("kept", 1), 30)


def ref_is_a_directory(store: Store) -> None:
    store.context.layout.ref("kept", 2).mkdir()


UNREADABLE = [damaged_manifest, missing_manifest, damaged_ref, ref_is_a_directory]


@pytest.mark.parametrize("spoil", UNREADABLE)
def test_what_cannot_be_read_blocks_deletion_and_is_reported(
    store: Store, spoil: Callable[[Store], None]
) -> None:
    spoil(store)
    plan = gc.plan(store)
    assert plan.chunks == plan.manifests == ()
    assert len(plan.problems) == 1
    assert "kept@" in plan.problems[0]
    report = gc.execute(store, plan)
    assert (report.freed_bytes, report.problems) == (0, plan.problems)
    assert len(chunk_files(store)) == 5


@pytest.mark.parametrize("spoil", [damaged_ref, ref_is_a_directory])
def test_what_becomes_unreadable_after_the_plan_blocks_too(
    store: Store, spoil: Callable[[Store], None]
) -> None:
    plan = gc.plan(store)
    spoil(store)
    report = gc.execute(store, plan)
    assert report.freed_bytes == 0
    assert len(report.problems) == 1
    assert len(chunk_files(store)) == 5


def test_after_removing_the_unreadable_ref_gc_works_again(store: Store) -> None:
    damaged_ref(store)
    store.remove("kept")
    assert collect(store).dead_chunks == 5


# --- ended and killed writers -------------------------------------------------------------------


def test_a_name_that_was_removed_and_committed_anew_during_the_plan_is_no_problem(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = commit(store, "again", contents(91, 100)).ref.manifest
    real = Context.load_closure

    def load(self: Context, digest: Digest) -> Closure:
        if digest == old:
            monkeypatch.undo()
            store.remove("again")
            assert collect(store).problems == ()
            assert str(commit(store, "again", contents(92, 100)).ref) == "again@1"
        return real(self, digest)

    monkeypatch.setattr(Context, "load_closure", load)
    plan = gc.plan(store)
    assert plan.problems == ()
    gc.execute(store, plan)
    assert (store.assemble("again", store.path.parent / "out")[0]).read_bytes() == contents(92, 100)


def test_what_killed_writers_staged_is_removed(store: Store, root: Path) -> None:
    store.close()

    def stage(child: Child) -> None:
        with open_store(root / "s") as mine, mine.writer() as writer:
            writer.put(contents(7, 2 * CHUNK))
            child.tell("staged")
            child.wait_for("never")

    with children(stage) as (writer,):
        writer.wait_for("staged")
        with open_store(root / "s") as mine:
            collect(mine)
            assert len(list(mine.context.layout.tmp.iterdir())) == 1, "its writer lives"
    with open_store(root / "s") as mine:
        plan = gc.plan(mine)
        assert (len(plan.dead_writers), plan.staged_bytes) == (1, 2 * CHUNK)
        assert gc.execute(mine, plan).freed_bytes == 2 * CHUNK
        assert list(mine.context.layout.tmp.iterdir()) == []
        assert list(mine.context.layout.leases.iterdir()) == []
        assert_kept(mine, root)


def test_leftovers_of_killed_rebuilds_and_creations_are_removed(store: Store) -> None:
    tmp = store.context.layout.tmp
    (tmp / "index-0123").mkdir()
    (tmp / "index-0123" / "data.mdb").write_bytes(b"half")
    (tmp / "header-4567").write_bytes(b"half")
    (tmp / "notes.txt").write_bytes(b"not ours")
    collect(store)
    assert [path.name for path in tmp.iterdir()] == ["notes.txt"]


def test_entries_that_a_killed_gc_left_are_forgotten(store: Store, root: Path) -> None:
    for path in chunk_files(store):
        if path.read_bytes() in (OLD[i : i + CHUNK] for i in range(0, len(OLD), CHUNK)):
            path.unlink()
    plan = gc.plan(store)
    assert plan.stale_entries
    gc.execute(store, plan)
    assert_kept(store, root)


# --- another gc ---------------------------------------------------------------------------------


def test_a_second_gc_is_refused_while_one_runs(store: Store, root: Path) -> None:
    store.close()

    def run(child: Child) -> None:
        def pause() -> None:
            child.tell("inside")
            child.wait_for("go on")

        hook = Interleaving(
            lambda operation, path: operation == "unlink" and "/chunks/" in str(path), pause
        )
        with step_hook(hook), open_store(root / "s") as mine:
            collect(mine)

    with children(run) as (first,):
        first.wait_for("inside")
        with open_store(root / "s", create=False) as mine:
            plan_error: list[Busy] = []
            lock = FileLock.open(mine.context.layout.gc_lock, 0o666)
            assert not lock.try_exclusive()
            lock.close()
            try:
                with gc._only_one(mine.context):
                    pass
            except Busy as error:
                plan_error.append(error)
            assert plan_error[0].exit_code == 5
        first.tell("go on")
        first.result()
    with open_store(root / "s") as mine:
        assert_kept(mine, root)


def test_a_killed_gc_is_in_nobodys_way(store: Store, root: Path) -> None:
    store.close()

    def run(child: Child) -> None:
        hook = Interleaving(
            lambda operation, path: operation == "unlink" and "/chunks/" in path,
            lambda: (child.tell("inside"), child.wait_for("never")),
        )
        with step_hook(hook), open_store(root / "s") as mine:
            collect(mine)

    with children(run) as (first,):
        first.wait_for("inside")
    with open_store(root / "s") as mine:
        collect(mine)
        assert len(chunk_files(mine)) == 2
        assert_kept(mine, root)


def test_gc_unlinks_only_inside_its_own_directories(store: Store, root: Path) -> None:
    (root / "outside").write_bytes(b"mine")
    os.symlink(root / "outside", store.context.layout.chunks / "00" / ("00" + "e" * 62))
    os.symlink(root, store.context.layout.tmp / ("d" * 32))
    collect(store)
    assert (root / "outside").read_bytes() == b"mine"
    assert_kept(store, root)


def test_a_ref_whose_directory_was_renamed_keeps_gc_from_its_chunks(root: Path) -> None:
    with open_store(root / "r") as store:
        commit(store, "name", contents(5, 3 * CHUNK))
        directory = store.context.layout.refs / "name"
        directory.rename(directory.with_name("na\x01me"))
        report = collect(store)
        assert report.freed_bytes == 0 and "no ref has such a name" in report.problems[0]
        directory.with_name("na\x01me").rename(directory)
        assert store.assemble("name", root / "out")[0].read_bytes() == contents(5, 3 * CHUNK)
