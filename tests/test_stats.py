"""Stats: logical, physical, garbage, staged and set-aside bytes, told apart and adding up."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas import Digest, Store, refs
from cas.layout import Layout
from cas.refs import Ref, RefId
from cas.stats import stats
from cas.testing import Child
from cas.testing.damage import flip_bit
from cas.testing.processes import children
from cas.testing.stores import CHUNK, collect, commit, contents, open_store
from cas.verify import verify


def test_an_empty_store_has_nothing(store: Store) -> None:
    found = stats(store)
    assert (found.refs, found.generations, found.manifests, found.chunks) == (0, 0, 0, 0)
    assert (found.logical_bytes, found.physical_bytes, found.garbage_bytes) == (0, 0, 0)


def test_shared_bytes_are_logical_twice_and_physical_once(store: Store) -> None:
    data = contents(1, 3 * CHUNK)
    commit(store, "a", data)
    commit(store, "a", data)
    commit(store, "b", data + b"more" + bytes(CHUNK))
    found = stats(store)
    assert (found.refs, found.generations) == (2, 3)
    assert found.logical_bytes == 9 * CHUNK + 4 + CHUNK
    assert found.physical_bytes == sum(p.stat().st_size for p in store.path.glob("chunks/*/*"))
    assert found.garbage_bytes == 0


def test_garbage_is_what_gc_would_free(store: Store) -> None:
    commit(store, "a", contents(1, 3 * CHUNK))
    commit(store, "b", contents(1, CHUNK) + contents(2, CHUNK))
    store.remove("a")
    before = stats(store)
    assert before.garbage_bytes == 2 * CHUNK
    assert collect(store).freed_bytes == before.garbage_bytes
    after = stats(store)
    assert after.garbage_bytes == 0
    assert after.physical_bytes == before.physical_bytes - before.garbage_bytes


def test_a_name_that_was_removed_and_committed_anew_meanwhile_is_no_problem(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, "again", contents(1, CHUNK))
    real = refs.read

    def read(layout: Layout, ref_id: RefId) -> Ref:
        found = real(layout, ref_id)
        monkeypatch.undo()
        store.remove("again")
        collect(store)
        commit(store, "again", contents(2, CHUNK))
        return found

    monkeypatch.setattr(refs, "read", read)
    assert stats(store).problems == ()


def test_what_a_live_writer_uses_is_staged_or_in_use_but_no_garbage(store: Store) -> None:
    with store.writer() as writer:
        writer.put(contents(1, 2 * CHUNK))
        found = stats(store)
        assert (found.staged_bytes, found.orphaned_bytes) == (2 * CHUNK, 0)
        writer.barrier()
        found = stats(store)
        assert (found.staged_bytes, found.garbage_bytes) == (0, 0)
        assert found.physical_bytes == 2 * CHUNK
    assert stats(store).garbage_bytes == 2 * CHUNK


def test_what_a_killed_writer_staged_is_orphaned(root: Path) -> None:
    def stage(child: Child) -> None:
        with open_store(root / "s") as mine, mine.writer() as writer:
            writer.put(contents(1, 2 * CHUNK))
            child.tell("staged")
            child.wait_for("never")

    with children(stage) as (writer,):
        writer.wait_for("staged")
    with open_store(root / "s") as store:
        assert stats(store).orphaned_bytes == 2 * CHUNK


def test_what_was_set_aside_is_counted(store: Store) -> None:
    commit(store, "a", contents(1, CHUNK))
    flip_bit(next(store.path.glob("chunks/*/*")))
    verify(store)
    found = stats(store)
    assert (found.quarantined_bytes, found.physical_bytes, found.chunks) == (CHUNK, 0, 0)
    for path in store.context.layout.quarantine.iterdir():
        path.unlink()
    store.context.layout.quarantine.rmdir()  # somebody wanted the space back
    assert stats(store).quarantined_bytes == 0


def test_what_cannot_be_read_is_a_problem_not_a_crash(store: Store) -> None:
    commit(store, "a", contents(1, CHUNK))
    store.context.layout.manifest(store.resolve("a").manifest).unlink()
    found = stats(store)
    assert len(found.problems) == 1
    assert found.physical_bytes == CHUNK


def test_a_read_only_view_counts_the_same(store: Store, root: Path) -> None:
    commit(store, "a", contents(1, 3 * CHUNK))
    commit(store, "b", contents(2, CHUNK))
    store.remove("a")
    expected = stats(store)
    store.close()
    with Store.open(root / "s", read_only=True) as reader:
        assert stats(reader) == expected


def test_what_only_action_records_need_is_told_apart_from_garbage(store: Store) -> None:
    commit(store, "a", contents(1, CHUNK))
    key = Digest.of(b"action")
    with store.writer() as writer:
        recipe = writer.put(contents(1, CHUNK) + contents(2, 2 * CHUNK))
        writer.put_action(key, kind="test", factors={}, result=0, recipes=[recipe], seconds=1)
    found = stats(store)
    assert (found.actions, found.action_bytes, found.garbage_bytes) == (1, 2 * CHUNK, 0)
    store.actions.drop(key)
    found = stats(store)
    assert (found.actions, found.action_bytes, found.garbage_bytes) == (0, 0, 2 * CHUNK)
