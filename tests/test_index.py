"""The index is derived: lost, damaged or deleted while in use, it costs a rebuild, nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from cas import Store
from cas.database import find_damage
from cas.digest import Digest
from cas.errors import CasError, Refused, StoreDamaged
from cas.index import Entry, Index
from cas.stats import stats
from cas.testing import Child, forked
from cas.testing.damage import flip_bit
from cas.testing.processes import children
from cas.testing.stores import (
    CHUNK,
    assert_sound,
    chunk_files,
    collect,
    commit,
    contents,
    open_store,
    scratch,
)

DATA = {f"model/{i}": contents(i, CHUNK * i + i) for i in range(1, 4)}


@pytest.fixture
def root() -> Iterator[Path]:
    """A closed store with three artifacts."""
    with scratch() as path:
        with open_store(path / "s") as store:
            for name, data in DATA.items():
                commit(store, name, data)
        yield path / "s"


def assert_nothing_lost(root: Path) -> None:
    with open_store(root) as store:
        for name, data in DATA.items():
            (path,) = store.assemble(name, root.parent / "out")
            assert path.read_bytes() == data
            before = len(chunk_files(store))
            with store.writer() as writer:
                writer.put(data)
                assert writer.counters.new_chunks == 0, "what is stored is not recognised"
            assert len(chunk_files(store)) == before
        assert_sound(store)


# --- lost and damaged ---------------------------------------------------------------------------


def overwrite(name: str, data: bytes, offset: int = 0) -> Callable[[Path], None]:
    def apply(index: Path) -> None:
        with open(index / name, "r+b") as file:
            file.seek(offset)
            file.write(data)

    return apply


def replace_by_file(index: Path) -> None:
    shutil.rmtree(index)
    index.write_bytes(b"garbage")


def empty_directory(index: Path) -> None:
    for path in index.iterdir():
        path.unlink()


def another_database(index: Path) -> None:
    shutil.rmtree(index)
    lmdb.open(str(index), map_size=1 << 20).close()


def cut_at(size: int) -> Callable[[Path], None]:
    return lambda index: os.truncate(index / "data.mdb", size)


NOISE = random.Random(1).randbytes(40_000)
SPOILT: dict[str, Callable[[Path], object]] = {
    "missing": shutil.rmtree,
    "a file": replace_by_file,
    "empty directory": empty_directory,
    "no data file": lambda index: (index / "data.mdb").unlink(),
    "no lock file": lambda index: (index / "lock.mdb").unlink(),
    "empty data file": cut_at(0),
    "garbage from byte 0": overwrite("data.mdb", NOISE),
    "zeros": overwrite("data.mdb", bytes(40_000)),
    "garbage in the middle": overwrite("data.mdb", NOISE[:5000], 13_000),
    "garbage in the lock file": overwrite("lock.mdb", NOISE),
    "garbage in the stamp": overwrite("stamp", b"\xff{"),
    "another database": another_database,
    "cut at 1": cut_at(1),
    "cut at 4096": cut_at(4096),
    "cut at 8192": cut_at(8192),
    "cut at 12288": cut_at(12288),
    "cut at 13000": cut_at(13000),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_spoilt_index_loses_nothing_and_needs_no_hand(root: Path, kind: str) -> None:
    SPOILT[kind](root / "index")
    assert_nothing_lost(root)


@pytest.mark.parametrize("kind", ["missing", "no data file", "no lock file", "empty directory"])
def test_an_index_deleted_under_an_open_store_is_noticed(root: Path, kind: str) -> None:
    with open_store(root) as store:
        commit(store, "before", b"1")
        SPOILT[kind](root / "index")
        commit(store, "after", contents(9, 3 * CHUNK))
        assert_sound(store)
        collect(store)
        assert_sound(store)
    assert_nothing_lost(root)


def test_two_processes_agree_on_one_index_after_it_was_deleted_under_both(root: Path) -> None:
    def work(child: Child) -> None:
        with open_store(root) as store:
            commit(store, f"from/{child.pid}", contents(20, CHUNK))
            child.tell("open")
            child.wait_for("deleted")
            for i in range(5):
                commit(store, f"from/{os.getpid()}", contents(100 + i + os.getpid(), 2 * CHUNK))

    with children(work, work) as workers:
        for worker in workers:
            worker.wait_for("open")
        shutil.rmtree(root / "index")
        for worker in workers:
            worker.tell("deleted")
        for worker in workers:
            worker.result()
    assert_nothing_lost(root)


def test_deleting_it_while_threads_write_loses_nothing(root: Path) -> None:
    errors: list[BaseException] = []

    def work(store: Store, seed: int) -> None:
        try:
            for i in range(6):
                commit(store, f"t/{seed}", contents(seed * 100 + i, CHUNK + i))
        except BaseException as error:
            errors.append(error)

    with open_store(root) as store:
        threads = [threading.Thread(target=work, args=(store, seed)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            shutil.rmtree(root / "index", ignore_errors=True)
        for thread in threads:
            thread.join()
        assert not errors
        assert_sound(store)
    assert_nothing_lost(root)


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_flipped_bits_anywhere_in_it_lose_nothing_and_crash_nothing(root: Path, count: int) -> None:
    """Each in a child of its own: a crash of the process is what is looked for."""
    index = root / "index"
    good = {path.name: path.read_bytes() for path in index.iterdir()}
    dice = random.Random(count)
    for _ in range(count):
        for name, data in good.items():
            (index / name).write_bytes(data)
        name = dice.choice(["data.mdb", "data.mdb", "data.mdb", "lock.mdb"])
        for _ in range(dice.choice([1, 1, 8])):
            flip_bit(index / name, dice.randrange(len(good[name])), dice.randrange(8))

        def use() -> None:
            with open_store(root) as store:
                store.context.index.read()
                commit(store, "more", contents(30, CHUNK))
                for name, data in DATA.items():
                    (path,) = store.assemble(name, root.parent / "out")
                    assert path.read_bytes() == data
                collect(store)
                stats(store)
                assert_sound(store)

        forked(use)
    assert_nothing_lost(root)


def test_an_index_that_counts_wrongly_is_rebuilt(root: Path) -> None:
    with open_store(root) as store, store.context.index.write() as txn:
        txn.put(Digest.of(b"no such file"), Entry(5, 0, 0))
        txn._delta = [0, 0]  # as if the counter had been lost
    (root / "index" / "stamp").unlink()
    assert_nothing_lost(root)


def test_damage_that_only_shows_in_use_has_it_rebuilt_at_the_next_use(root: Path) -> None:
    with open_store(root) as store:
        with pytest.raises(CasError, match="rebuilt"), store.context.index.read():
            raise lmdb.CorruptedError("a page is not what it should be")
        with store.context.index.read() as txn:
            assert txn.totals()[0] == len(chunk_files(store))
    assert_nothing_lost(root)


def test_an_index_of_another_version_is_rebuilt(root: Path) -> None:
    shutil.rmtree(root / "index")
    (root / "index").mkdir()
    with lmdb.open(str(root / "index"), max_dbs=2) as old, old.begin(write=True) as txn:
        old.open_db(b"chunks", txn=txn)
        txn.put(b"schema", b"1", db=old.open_db(b"meta", txn=txn))
    assert_nothing_lost(root)
    with open_store(root) as store:
        assert stats(store).garbage_bytes == 0


def test_counts_of_a_wrong_shape_are_as_good_as_none(root: Path) -> None:
    with open_store(root) as store:
        expected = stats(store)
        with store.context.index.write() as txn:
            for table in (txn._uses, txn._counted):
                keys = [key for key, _ in txn._txn.cursor(db=table)]
                for key in keys[::2]:
                    txn._txn.put(key, b"short", db=table)
                txn._txn.put(b"odd", b"key", db=table)
            txn._txn.put(b"used", b"", db=txn._meta)
        for _ in range(2):
            assert stats(store).logical_bytes == expected.logical_bytes
        store.remove("model/1")
        assert stats(store).garbage_bytes >= 0
        assert collect(store).freed_bytes == len(DATA["model/1"])
    assert {path.name for path in root.glob("refs/*")} == {"model%2F2", "model%2F3"}


# --- entries ------------------------------------------------------------------------------------


def test_totals_follow_every_change(root: Path) -> None:
    with open_store(root) as store:
        index = store.context.index
        with index.read() as txn:
            count, size = txn.totals()
        digest = Digest.of(b"x")
        with index.write() as txn:
            txn.put(digest, Entry(10, 1, 2))
            txn.put(digest, Entry(4, 3, 4))
            assert txn.totals() == (count + 1, size + 4)
        with index.read() as txn:
            assert txn.totals() == (count + 1, size + 4)
            assert txn.get(digest) == Entry(4, 3, 4)
        with index.write() as txn:
            txn.delete(digest)
            txn.delete(digest)
        with index.read() as txn:
            assert txn.totals() == (count, size)
            assert txn.get(digest) is None


def test_a_transaction_that_fails_changes_nothing(root: Path) -> None:
    with open_store(root) as store:
        index = store.context.index
        with index.read() as txn:
            before = txn.totals()
        with pytest.raises(ZeroDivisionError), index.write() as txn:
            txn.put(Digest.of(b"x"), Entry(1, 1, 1))
            1 / 0  # noqa: B018
        with index.read() as txn:
            assert txn.totals() == before
            assert txn.get(Digest.of(b"x")) is None


def test_a_rebuilt_index_equals_the_files(root: Path) -> None:
    with open_store(root) as store:
        store.context.index.rebuild()
        with store.context.index.read() as txn:
            entries = {digest.hex(): entry for digest, entry in txn.items()}
        assert {name: e.size for name, e in entries.items()} == {
            path.name: path.stat().st_size for path in chunk_files(store)
        }
        assert all(entry.last_verified == 0 for entry in entries.values())


def test_entries_of_vanished_files_are_forgotten(root: Path) -> None:
    with open_store(root) as store:
        victim = chunk_files(store)[0]
        victim.unlink()
        assert store.context.index.reconcile() == 1
        assert store.context.index.reconcile() == 0
        with store.context.index.read() as txn:
            assert txn.totals()[0] == len(chunk_files(store))


def test_transactions_of_one_thread_do_not_nest(root: Path) -> None:
    with open_store(root) as store:
        index = store.context.index
        with index.write(), pytest.raises(RuntimeError, match="nest"):
            index.read().__enter__()


# --- processes ----------------------------------------------------------------------------------


def test_one_process_may_open_a_store_many_times(root: Path) -> None:
    with open_store(root) as first, open_store(root) as second:
        commit(first, "a", b"1")
        commit(second, "a", b"2")
        assert first.context.index is second.context.index
        first.close()
        assert commit(second, "a", b"3").ref.generation == 3
    assert_nothing_lost(root)


def test_a_store_opened_before_fork_is_refused_in_the_child_by_both_ways(root: Path) -> None:
    with open_store(root) as store:
        commit(store, "a", b"1")

        def use_old(_: Child) -> None:
            with pytest.raises(Refused, match=r"fork\(\)"):
                commit(store, "b", b"2")
            store.close()

        def open_again(_: Child) -> None:
            with pytest.raises(Refused, match=r"fork\(\)"), open_store(root) as again:
                commit(again, "b", b"2")

        inode = (root / "index" / "data.mdb").stat().st_ino
        Child(use_old).result()
        Child(open_again).result()
        assert (root / "index" / "data.mdb").stat().st_ino == inode, "the child replaced it"
        commit(store, "a", b"3")
        assert [str(ref) for ref in store.refs()][:2] == ["a@1", "a@2"]
    assert_nothing_lost(root)


def test_a_fork_takes_nothing_from_a_parent_in_the_middle_of_a_transaction(root: Path) -> None:
    with open_store(root) as store:
        with store.context.index.read() as txn:
            before = list(txn.items())
            Child(lambda _: store.close()).result()
            assert list(txn.items()) == before
        with store.writer() as writer:
            recipe = writer.put(contents(50, CHUNK))

            def leave_the_block(_: Child) -> None:
                writer.close()
                with pytest.raises(CasError):
                    writer.commit("child", {"f": recipe})

            Child(leave_the_block).result()
            writer.commit("parent", {"f": recipe})
        assert_sound(store)


def test_after_closing_it_may_be_opened_in_a_child(root: Path) -> None:
    with open_store(root) as store:
        commit(store, "a", b"1")

    def work() -> int:
        with open_store(root) as store:
            return commit(store, "a", b"2").ref.generation

    assert forked(work) == 2


def test_readers_that_were_killed_use_up_nothing(root: Path) -> None:
    def read(child: Child) -> None:
        with open_store(root) as store, store.context.index.read() as txn:
            list(txn.items())
            child.tell("reading")
            child.wait_for("never")

    for _ in range(12):
        with children(read) as (reader,):
            reader.wait_for("reading")
    with open_store(root) as store:
        with store.context.index.read():
            assert store.context.index._database is not None
            readers = store.context.index._database.env.readers()
        assert len(readers.strip().splitlines()) <= 2, readers
    assert_nothing_lost(root)


def test_a_writer_killed_inside_a_transaction_blocks_nobody(root: Path) -> None:
    def write(child: Child) -> None:
        with open_store(root) as store, store.context.index.write() as txn:
            txn.put(Digest.of(b"x"), Entry(1, 1, 1))
            child.tell("inside")
            child.wait_for("never")

    with children(write) as (writer,):
        writer.wait_for("inside")
    assert_nothing_lost(root)


def limit_address_space() -> None:
    """Too little for the map that LMDB gets first; what is taken already is not counted."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = taken + (8 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def test_a_small_address_space_is_enough(root: Path) -> None:
    def work() -> None:
        limit_address_space()
        with open_store(root) as store:
            commit(store, "a", contents(1, CHUNK))
            assert_sound(store)

    with open_store(root) as store:
        commit(store, "a", b"1")
    forked(work)
    assert_nothing_lost(root)


def test_processes_with_maps_of_different_sizes_work_together(root: Path) -> None:
    def work(child: Child) -> None:
        limit_address_space()
        with open_store(root) as store:
            commit(store, "small", contents(1, CHUNK))
            child.tell("open")
            child.wait_for("written")
            commit(store, "small", contents(2, CHUNK))

    with children(work) as (small,):
        small.wait_for("open")
        with open_store(root) as store:
            for i in range(10):
                commit(store, "large", contents(60 + i, CHUNK))
            small.tell("written")
            small.result()
    assert_nothing_lost(root)


def test_a_clean_close_spares_the_next_open_the_check(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []

    def check(path: Path) -> str | None:
        checked.append(path)
        return find_damage(path)

    monkeypatch.setattr("cas.index.find_damage", check)
    with open_store(root) as store:
        commit(store, "a", b"1")
    assert not checked

    def die() -> None:
        with open_store(root) as store:
            commit(store, "a", b"2")
            os._exit(9)

    assert Child(lambda _: die()).wait() == 9
    with open_store(root) as store:
        commit(store, "a", b"3")
    assert len(checked) == 1


def test_while_another_process_has_it_open_the_check_is_spared_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold up everybody, at each start of a process beside a long export."""

    def hold(child: Child) -> None:
        with open_store(root) as store:
            commit(store, "held", b"1")
            child.tell("open")
            child.wait_for("done")

    with children(hold) as (holder,):
        holder.wait_for("open")
        monkeypatch.setattr("cas.index.find_damage", lambda path: pytest.fail("checked"))
        with open_store(root) as store:
            commit(store, "a", b"2")
        holder.tell("done")
        holder.result()
    monkeypatch.undo()
    assert_nothing_lost(root)


def test_a_process_that_starts_beside_busy_writers_is_not_kept_waiting(root: Path) -> None:
    """Nor does one of the busy ones wait while the others go round and round."""

    def work(child: Child) -> None:
        with open_store(root) as store:
            child.tell("open")
            rounds = 0
            while not child.has_news(0):
                with store.context.index.write():
                    time.sleep(0.001)
                rounds += 1
                if rounds == 10:
                    child.tell("gets its turn")

    def start(_: Child) -> None:
        with open_store(root) as store, store.context.index.write():
            pass

    with children(work, work, work, work) as workers:
        for worker in workers:
            worker.wait_for("open")
        with children(start) as (starting,):
            # A moment, usually. It would be for ever, for there always is one who has the lock.
            assert starting.has_news(120), "it is kept waiting"
            starting.result()
        for worker in workers:
            assert worker.has_news(120), "one of them never gets its turn"
            worker.wait_for("gets its turn")
        for worker in workers:
            worker.tell("enough")
        for worker in workers:
            worker.result()


def test_files_of_the_index_have_the_stores_modes() -> None:
    with scratch() as path, open_store(path / "s", umask=0o002) as store:
        commit(store, "a", b"1")
        modes = {p.name: p.stat().st_mode & 0o777 for p in store.context.layout.index.iterdir()}
        assert set(modes.values()) == {0o664}


def test_handles_are_counted_and_forgotten(root: Path) -> None:
    before = len(Index._open)
    stores = [open_store(root) for _ in range(3)]
    for store in stores:
        commit(store, "a", b"1")
    assert len(Index._open) == before + 1
    for store in stores:
        store.close()
        store.close()
    assert len(Index._open) == before


def test_a_store_made_anew_in_the_same_place_is_not_mixed_up_with_the_old_one(root: Path) -> None:
    with open_store(root) as old:
        commit(old, "a", b"1")
        shutil.rmtree(root)
        with open_store(root) as new:
            commit(new, "b", contents(1, CHUNK))
            assert [str(ref) for ref in new.refs()] == ["b@1"]
            assert_sound(new)


def test_damage_done_under_an_open_index_is_not_certified_by_its_close(root: Path) -> None:
    with open_store(root / "s") as store:
        commit(store, "a", contents(1, 40 * CHUNK))
        data = store.context.layout.index / "data.mdb"
        whole = data.stat().st_size
        with open(data, "r+b") as file:
            file.seek(2 * 4096)
            file.write(contents(9, whole - 2 * 4096))
    for _ in range(2):  # at the latest the second use finds it rebuilt
        with open_store(root / "s") as store, contextlib.suppress(StoreDamaged):
            commit(store, "b", contents(2, 3 * CHUNK))
    with open_store(root / "s") as store:
        assert store.assemble("a", root / "out")[0].read_bytes() == contents(1, 40 * CHUNK)
        assert_sound(store)
