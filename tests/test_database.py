"""LMDB's limits: the table of readers, and the map. Neither needs a hand when it is reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas import database
from cas.digest import Digest
from cas.errors import Refused
from cas.index import Entry
from cas.testing import Child, forked
from cas.testing.processes import ChildFailed, children
from cas.testing.stores import assert_sound, commit, contents, open_store

#: What LMDB has by default; a store has more, so that a full table is rare.
READERS = 126


def limit_readers(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(database, "_MAX_READERS", count)
    monkeypatch.setattr(database, "_LOCK_FILE_BYTES", 64)  # LMDB makes it just large enough


def read(path: Path, child: Child) -> int:
    """Open the index, and when told so be in the middle of reading it until killed."""
    with open_store(path) as store:
        with store.context.index.read():
            pass
        child.tell("open")
        child.wait_for("go")
        with store.context.index.read() as txn:
            count = len(list(txn.items()))
            child.tell("reading")
            child.wait_for("never")
            return count


def test_more_killed_readers_than_the_table_has_room_for_keep_nobody_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has the store open all the time, so the table is never begun anew."""
    limit_readers(monkeypatch, READERS)
    path = root / "s"

    def stay(child: Child) -> tuple[int, str]:
        with open_store(path) as store:
            commit(store, "a", b"1")
            child.tell("open")
            child.wait_for("all are dead")
            commit(store, "a", b"2")
            with store.context.index.read() as txn:
                count, _ = txn.totals()
            assert store.context.index._database is not None
            return count, str(store.context.index._database.env.readers())

    with children(stay) as (holder,):
        holder.wait_for("open")
        for _ in range(READERS + 10):
            with children(lambda child: read(path, child)) as (reader,):
                reader.wait_for("open")
                reader.tell("go")
                reader.wait_for("reading")
        assert forked(lambda: count_chunks(path)) == 1
        holder.tell("all are dead")
        count, table = holder.result()
    assert count == 2
    assert len(table.strip().splitlines()) <= 3, table
    with open_store(path) as store:
        assert_sound(store)


def count_chunks(path: Path) -> int:
    with open_store(path) as store, store.context.index.read() as txn:
        return txn.totals()[0]


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "alive"])
def test_a_table_that_fills_up_in_use_is_cleared_of_the_dead_and_of_nobody_else(
    root: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """All have opened the store, which clears the table, before any takes its place there."""
    limit_readers(monkeypatch, 4)
    path = root / "s"

    def last(child: Child) -> int:
        with open_store(path) as store:
            commit(store, "a", b"1")
            child.tell("open")
            child.wait_for("go")
            with store.context.index.read() as txn:
                return txn.totals()[0]

    with children(last, *[lambda child: read(path, child)] * 4) as (holder, *readers):
        for child in (holder, *readers):
            child.wait_for("open")
        for reader in readers:
            reader.tell("go")
            reader.wait_for("reading")
        if killed:
            for reader in readers:
                reader.kill()
        holder.tell("go")
        if killed:
            assert holder.result() == 1
        else:
            with pytest.raises(ChildFailed, match="too many processes read"):
                holder.result()


@pytest.fixture
def tiny_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process begins that is very short of address space."""
    monkeypatch.setattr(database, "_MAP_SIZES", (128 << 10,))
    # A page for each entry of a batch, and those above them: while the other process reads, no page
    # that was given up can be used again.
    monkeypatch.setattr(database, "HEADROOM", 256 << 10)


def fill(path: Path, seed: int, child: Child) -> int:
    """Entries until the map has grown several times; how large it is then."""
    with open_store(path) as store:
        index = store.context.index
        with index.read():
            pass
        assert index._database is not None
        child.tell("open")
        child.wait_for("go")
        for batch in range(240):
            with index.write() as txn:
                for number in range(25):
                    digest = Digest.of(f"{seed} {batch} {number}".encode())
                    txn.put(digest, Entry(1, 0, 0))
            with index.read() as txn:
                assert txn.totals()[0] >= 25 * (batch + 1)
        return int(index._database.env.info()["map_size"])


def test_two_processes_grow_the_map_at_once(root: Path, tiny_map: None) -> None:
    path = root / "s"
    with children(*[lambda child, n=n: fill(path, n, child) for n in range(2)]) as both:
        for child in both:
            child.wait_for("open")
        for child in both:
            child.tell("go")
        sizes = [child.result() for child in both]
    assert all(size >= 1 << 20 for size in sizes)
    with open_store(path) as store:
        with store.context.index.read() as txn:
            assert txn.totals()[0] == len(list(txn.items())) == 2 * 240 * 25
        assert store.context.index.reconcile() == 2 * 240 * 25  # none of them has a file
        commit(store, "a", contents(1, 1000))
        assert_sound(store)


def test_a_map_that_cannot_grow_is_refused_and_everything_before_it_is_kept(
    root: Path, tiny_map: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database.Database, "_make_room", lambda self: None)
    with open_store(root / "s") as store:
        commit(store, "a", contents(1, 1000))
        with pytest.raises(Refused, match="largest size"), store.context.index.write() as txn:
            for number in range(100_000):
                txn.put(Digest.of(str(number).encode()), Entry(1, 0, 0))
        assert_sound(store)
        assert commit(store, "a", contents(2, 1000)).ref.generation == 2
