"""gc beside writers and readers: no order of their steps loses anything.

The orders are forced: a hook acts exactly between two steps of the gc or of the writer, in the same
process or by means of another, so each test is one interleaving and not a matter of luck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cas import Digest, Store, gc, leases
from cas.errors import ManifestDamaged
from cas.testing import Child, Interleaving, step_hook
from cas.testing.processes import children
from cas.testing.stores import (
    CHUNK,
    KEPT,
    OLD,
    assert_kept,
    collect,
    commit,
    contents,
    litter,
    open_store,
)


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with open_store(root / "s") as opened:
        litter(opened)
        yield opened


def test_what_a_writer_reached_between_plan_and_execution_stays(store: Store, root: Path) -> None:
    plan = gc.plan(store)
    commit(store, "new", OLD)
    report = gc.execute(store, plan)
    assert (report.freed_bytes, report.spared) == (0, 3)
    assert_kept(store, root, new=OLD)


def test_what_a_live_writer_only_put_stays(store: Store, root: Path) -> None:
    plan = gc.plan(store)
    with store.writer() as writer:
        recipe = writer.put(OLD)
        assert writer.counters.new_chunks == 0
        assert gc.execute(store, plan).freed_bytes == 0
        assert collect(store).freed_bytes == 0
        writer.commit("new", {"f": recipe})
    assert_kept(store, root, new=OLD)


def test_a_lease_of_another_process_protects_until_that_is_killed(store: Store, root: Path) -> None:
    store.close()

    def put(child: Child) -> None:
        with open_store(root / "s") as mine, mine.writer() as writer:
            writer.put(OLD)
            child.tell("put")
            child.wait_for("never")

    with children(put) as (writer,):
        writer.wait_for("put")
        with open_store(root / "s") as mine:
            assert collect(mine).freed_bytes == 0
    with open_store(root / "s") as mine:
        assert collect(mine).dead_chunks == 3


def test_a_writer_that_finds_its_chunk_deleted_just_before_it_asks_writes_it_again(
    store: Store, root: Path
) -> None:
    """gc's whole batch between the lease and the question is impossible (the lease protects); a
    batch before the lease is what this forces."""
    hook = Interleaving(lambda operation, path: operation == "lease", lambda: collect(store))
    with step_hook(hook), store.writer() as writer:
        recipe = writer.put(OLD)
        assert hook.happened
        assert writer.counters.new_chunks >= 1
        writer.commit("new", {"f": recipe})
    assert_kept(store, root, new=OLD)


#: (operation, part of the path, which of them): the steps of a writer that matter to a gc.
WRITER_STEPS = [
    ("create", "/leases/", 1),
    ("mkdir", "/tmp/", 1),
    ("lease", "/leases/", 1),
    ("lease", "/leases/", 2),
    ("create", "/tmp/", 1),
    ("rename", "/chunks/", 1),
    ("rename", "/chunks/", 2),
    ("sync", "/chunks/", 1),
    ("index-commit", "/index", 1),
    ("index-commit", "/index", 2),
    ("create", "manifest", 1),
    ("rename", "/manifests/", 1),
    ("mkdir", "/refs/", 1),
    ("create", "/ref", 1),
    ("link", "/refs/", 1),
    ("sync", "/refs/", 1),
    ("unlink", "/ref", 1),
    ("unlink", "/leases/", 1),
    ("rmtree", "/tmp/", 1),
]


@pytest.mark.parametrize("step", WRITER_STEPS, ids=lambda step: f"{step[0]}{step[1]}-{step[2]}")
def test_a_gc_by_another_process_before_any_step_of_a_writer_loses_nothing(
    root: Path, step: tuple[str, str, int]
) -> None:
    """The writer stops before the step; where it holds the store's mutex, gc waits for it."""
    operation, part, nth = step
    with open_store(root / "s") as store:
        commit(store, "kept", KEPT)
        commit(store, "old", OLD)
        store.remove("old")

    def run_gc(child: Child) -> None:
        child.wait_for("go")
        with open_store(root / "s") as mine:
            collect(mine)
            collect(mine)

    def write(child: Child) -> None:
        def meet() -> None:
            child.tell("here")
            child.wait_for("go on")

        def is_it(name: str, path: str) -> bool:
            return name == operation and part in path and "/index/" not in path

        hook = Interleaving(is_it, meet, nth=nth)
        with step_hook(hook), open_store(root / "s") as mine, mine.writer() as writer:
            recipe = writer.put(OLD + contents(5, CHUNK + 9))
            writer.commit("new", {"f": recipe})

    with children(write, run_gc) as (writer, collector):
        writer.wait_for("here")  # fails if the writer ends without coming by the step
        collector.tell("go")
        collector.has_news(0.3)  # time for all of it, or until it waits for the mutex
        writer.tell("go on")
        writer.result()
        collector.result()
    with open_store(root / "s") as store:
        assert_kept(store, root, new=OLD + contents(5, CHUNK + 9))
        collect(store)
        assert_kept(store, root, new=OLD + contents(5, CHUNK + 9))


def collect_with_interruption(store: Store, action: Callable[[], object]) -> None:
    """A gc; ``action`` comes after its plan and its manifests, before its first batch of chunks."""
    real = gc._delete_chunks
    calls: list[int] = []

    def first_acts(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            action()
        return real(*arguments)  # type: ignore[arg-type]

    gc._delete_chunks = first_acts  # type: ignore[assignment]
    try:
        collect(store)
    finally:
        gc._delete_chunks = real
    assert calls


def test_a_commit_between_two_batches_is_seen_though_its_lease_is_gone(
    store: Store, root: Path
) -> None:
    collect_with_interruption(store, lambda: commit(store, "new", OLD))
    assert_kept(store, root, new=OLD)


def test_a_name_removed_and_committed_anew_during_gc_keeps_its_new_chunks(
    store: Store, root: Path
) -> None:
    """The new generation has the number of the old one, which gc has marked already."""
    commit(store, "again", contents(8, 10))

    def replace() -> None:
        store.remove("again")
        assert commit(store, "again", OLD).ref.generation == 1

    collect_with_interruption(store, replace)
    assert_kept(store, root, again=OLD)


def test_a_manifest_leased_before_it_exists_is_marked_from_when_it_does(
    store: Store, root: Path
) -> None:
    """A reader leases a manifest that gc has just deleted; then a writer commits the same again."""
    digest = commit(store, "probe", OLD).ref.manifest
    store.remove("probe")
    plan = gc.plan(store)
    gc._delete_manifests(store.context, plan.marks, plan.manifests)
    with pytest.raises(ManifestDamaged), store.protect(digest):
        pass
    with store.context.lease() as lease:
        lease.add_manifest(digest)
        with gc._batch(store.context, plan.marks):
            pass
    commit(store, "new", OLD)
    gc._delete_chunks(store.context, plan.marks, plan.chunks)
    assert_kept(store, root, new=OLD)


def test_recipes_of_an_older_artifact_are_protected_by_the_manifest_that_reuses_them(
    store: Store, root: Path
) -> None:
    commit(store, "source", OLD)
    recipe = store.manifest("source").files[0].recipe
    plan_holder: list[gc.Plan] = []
    with store.writer() as writer:
        hook = Interleaving(
            lambda operation, path: operation == "create" and path.endswith("/manifest"),
            lambda: None,
        )
        with step_hook(hook):
            writer.commit("copy", {"f": recipe})
        store.remove("source")
        plan_holder.append(gc.plan(store))
    gc.execute(store, plan_holder[0])
    assert_kept(store, root, copy=OLD)


def test_a_reader_that_found_its_manifest_finds_its_chunks(store: Store, root: Path) -> None:
    """The artifact is removed and collected while it is being assembled."""
    ref = commit(store, "read", OLD).ref

    class Meanwhile:
        done = False

        def start(self, label: str, total: int | None) -> None:
            if not self.done:
                self.done = True
                store.remove("read")
                assert collect(store).freed_bytes == 0

        def advance(self, nbytes: int) -> None: ...

        def finish(self) -> None: ...

    progress = Meanwhile()
    (path,) = store.assemble(ref, root / "out", progress=progress)
    assert progress.done
    assert path.read_bytes() == OLD
    assert collect(store).dead_chunks == 3


def test_a_reader_of_a_collected_artifact_is_told_so(store: Store, root: Path) -> None:
    ref = commit(store, "read", OLD).ref
    store.remove("read")
    collect(store)
    with pytest.raises(ManifestDamaged, match="missing"):
        store.assemble(ref, root / "out")
    assert not (root / "out").exists() or not any((root / "out").iterdir())


def test_a_chunk_seen_known_and_then_deleted_by_hand_fails_the_commit_not_the_store(
    store: Store, root: Path
) -> None:
    with store.writer() as writer:
        recipe = writer.put(OLD)
        store.context.layout.chunk(Digest.of(OLD[:CHUNK])).unlink()
        with pytest.raises(Exception, match="is missing"):
            writer.commit("new", {"f": recipe})
    assert_kept(store, root)
    commit(store, "new", OLD)
    assert_kept(store, root, new=OLD)


def test_a_writer_that_starts_while_gc_cleans_up_the_dead_keeps_its_staging(
    store: Store, root: Path
) -> None:
    """gc has just found the lease unlocked; the writer locks it and stages; gc goes on."""
    real = leases.is_live
    writers: list[object] = []
    layout = store.context.layout

    def is_live(where: object, writer: str) -> bool:
        live = real(layout, writer)
        if not writers:
            manager = store.writer()
            writers.extend((manager, manager.__enter__()))
        return live

    layout.lease("f" * 32).write_bytes(b"")
    leases.is_live = is_live  # type: ignore[assignment]
    try:
        collect(store)
    finally:
        leases.is_live = real
    manager, writer = writers
    writer.commit("new", {"f": writer.put(contents(9, CHUNK))})  # type: ignore[attr-defined]
    manager.__exit__(None, None, None)  # type: ignore[attr-defined]
    assert_kept(store, root, new=contents(9, CHUNK))


# --- a gc stopped before each of its steps, and a writer that goes on ---------------------------

GC_STEPS = [
    ("unlink", "/manifests/", 1),
    ("index-commit", "/index", 1),
    ("index-commit", "/index", 2),
    ("unlink", "/chunks/", 1),
    ("unlink", "/chunks/", 3),
    ("index-commit", "/index", 3),
    ("index-commit", "/index", 4),
]


@pytest.mark.parametrize("step", GC_STEPS, ids=lambda step: f"{step[0]}{step[1]}-{step[2]}")
@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "is killed"])
def test_a_writer_beside_a_gc_that_stops_before_any_step_loses_nothing(
    root: Path, step: tuple[str, str, int], killed: bool
) -> None:
    operation, part, nth = step
    with open_store(root / "s") as store:
        commit(store, "kept", KEPT)
        commit(store, "old", OLD)
        store.remove("old")

    def run_gc(child: Child) -> None:
        def meet() -> None:
            child.tell("here")
            child.wait_for("go on")

        def is_it(name: str, path: str) -> bool:
            return name == operation and part in path

        with step_hook(Interleaving(is_it, meet, nth=nth)), open_store(root / "s") as mine:
            collect(mine)

    def write(child: Child) -> None:
        child.wait_for("go")
        with open_store(root / "s") as mine:
            commit(mine, "new", OLD)
            mine.assemble("new", root / "out")

    with children(run_gc, write) as (collector, writer):
        collector.wait_for("here")
        writer.tell("go")
        writer.has_news(0.3)
        if killed:
            collector.kill()
        else:
            collector.tell("go on")
            collector.result()
        writer.result()
    with open_store(root / "s") as store:
        assert_kept(store, root, new=OLD)
        collect(store)
        assert_kept(store, root, new=OLD)
