"""Action records in a store: found while all of it is there, a miss otherwise, computed once."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from cas import ActionRecord, Digest, Store, Writer, flights, gc, verify
from cas.errors import (
    ActionNotFound,
    ChunkDamaged,
    ChunkMissing,
    ReadOnlyStore,
    UsageError,
)
from cas.testing.damage import flip_bit
from cas.testing.processes import Child, children, until
from cas.testing.steps import Interleaving, step_hook
from cas.testing.stores import CHUNK, assert_sound, collect, contents, open_store

KEY = Digest.of(b"an action")
OTHER = Digest.of(b"another action")
DATA = contents(1, 2 * CHUNK + 17)


def record(store: Store, key: Digest = KEY, data: bytes = DATA, **fields: object) -> ActionRecord:
    with store.writer() as writer:
        return put(writer, key, data, **fields)


def put(writer: Writer, key: Digest, data: bytes, **fields: object) -> ActionRecord:
    arguments = {"kind": "delegate", "factors": {"options": {"n": 1}}, "seconds": 2.5, **fields}
    return writer.put_action(key, result={"blob": 0}, recipes=[writer.put(data)], **arguments)  # type: ignore[arg-type]


def lose_a_chunk(store: Store, found: ActionRecord) -> Path:
    path = store.context.layout.chunk(next(iter(found.chunks())))
    path.unlink()
    return path


def test_what_was_put_is_found_with_its_bytes(store: Store) -> None:
    put = record(store, dependencies={"variables": {"X": None}}, label="forward")
    found = store.actions.get(KEY)
    assert found == put and found.seconds == 2.5 and found.label == "forward"
    with store.writer() as writer:
        again = writer.find_action(KEY).record
        assert again == put and writer.read(again.recipes[0]) == DATA
        assert writer.counters.new_chunks == 0
    assert store.actions.find(OTHER).reason == "absent" and store.actions.get(OTHER) is None
    assert list(store.actions.list()) == [put]


def test_a_record_survives_a_new_process_and_the_loss_of_the_index(root: Path) -> None:
    with open_store(root / "s") as store:
        put = record(store)
        store.context.index.rebuild()
        assert store.actions.get(KEY) == put
    with open_store(root / "s") as store, store.writer() as writer:
        assert writer.find_action(KEY).record == put


def test_a_record_with_a_missing_chunk_is_a_miss_and_the_next_put_heals_it(store: Store) -> None:
    path = lose_a_chunk(store, record(store))
    assert store.actions.find(KEY).reason == "incomplete"
    with store.writer() as writer:
        assert writer.find_action(KEY).reason == "incomplete"
        put(writer, KEY, DATA)
    assert path.exists() and store.actions.get(KEY) is not None
    assert_sound(store)


def test_a_damaged_record_is_a_miss_and_the_next_put_heals_it(store: Store) -> None:
    put = record(store)
    path = store.context.layout.action(KEY)
    path.write_bytes(path.read_bytes().replace(b"delegate", b"delegatd"))
    assert store.actions.find(KEY).reason == "damaged"
    assert list(store.actions.list()) == []
    assert record(store).result == put.result
    assert store.actions.get(KEY) is not None


def test_a_record_is_never_published_without_its_chunks(store: Store) -> None:
    with store.writer() as writer:
        recipe = writer.put(DATA)
        writer.barrier()
        for part in recipe.chunks():
            store.context.layout.chunk(part.digest).unlink()
        with pytest.raises(ChunkMissing):
            writer.put_action(
                KEY, kind="delegate", factors={}, result=None, recipes=[recipe], seconds=0
            )
    assert store.actions.find(KEY).reason == "absent"
    assert list(store.context.layout.tmp.iterdir()) == []


def test_many_records_are_published_at_once(store: Store) -> None:
    keys = [Digest.of(b"%d" % number) for number in range(40)]
    with store.writer() as writer:
        recipe = writer.put(DATA)
        records = [
            ActionRecord(key, "delegate", {"n": i}, i, (recipe,)) for i, key in enumerate(keys)
        ]
        writer.put_actions(records)
        writer.put_actions([])
    assert {found.key: found for found in store.actions.list()} == {r.key: r for r in records}


def test_what_a_record_cannot_hold_leaves_nothing_behind(store: Store) -> None:
    with store.writer() as writer:
        with pytest.raises(UsageError, match="factors cannot hold a float"):
            put(writer, KEY, DATA, factors={"x": 0.5})
        with pytest.raises(UsageError, match="kind"):
            put(writer, KEY, DATA, kind="Not a kind")
        assert len(list(store.context.layout.tmp.glob("*/action-*"))) == 0
    assert store.actions.find(KEY).reason == "absent"


def test_records_keep_their_chunks_from_gc_until_they_are_dropped(store: Store) -> None:
    record(store)
    assert collect(store).dead_chunks == 0
    assert store.actions.get(KEY) is not None
    assert store.actions.drop(KEY) and not store.actions.drop(KEY)
    assert collect(store).dead_chunks == 3
    assert store.actions.find(KEY).reason == "absent"


def test_a_hit_is_protected_from_gc_for_the_writer_s_life(store: Store, root: Path) -> None:
    record(store)
    with store.writer() as writer:
        found = writer.find_action(KEY).record
        assert found is not None
        store.actions.drop(KEY)
        assert collect(store).freed_bytes == 0
        assert writer.read(found.recipes[0]) == DATA
        writer.commit("from-a-hit", {"f": found.recipes[0]})
    collect(store)
    (path,) = store.assemble("from-a-hit", root / "out")
    assert path.read_bytes() == DATA


def test_a_look_up_is_a_use_and_a_read_is_not(root: Path) -> None:
    now = 1000.0
    with open_store(root / "s", clock=lambda: now) as store:
        record(store)
        now = 5000.0
        store.actions.read(KEY)
        (entry,) = store.actions.entries()
        assert entry.last_used != 5000
        store.actions.get(KEY)
        (entry,) = store.actions.entries()
        assert entry.last_used == 5000
        now = 6000.0
        with store.writer() as writer:
            writer.find_action(KEY)
        (entry,) = store.actions.entries()
        assert entry.last_used == 6000


def test_a_record_used_since_the_plan_is_not_evicted(root: Path) -> None:
    from cas import actions

    now = 1000.0
    with open_store(root / "s", clock=lambda: now) as store:
        record(store)
        store.actions.get(KEY)
        (entry,) = store.actions.entries()
        now = 2000.0
        store.actions.get(KEY)
        assert not actions.evict(store.context.layout, entry)
        (entry,) = store.actions.entries()
        assert actions.evict(store.context.layout, entry)
        assert not actions.evict(store.context.layout, entry)


def test_a_key_is_found_by_its_first_digits(store: Store) -> None:
    record(store)
    record(store, OTHER)
    assert store.actions.resolve(KEY.hex()[:6]) == KEY
    assert store.actions.resolve(str(OTHER)) == OTHER
    with pytest.raises(ActionNotFound, match="deadbeef"):
        store.actions.resolve("deadbeef")
    for text in ("ab", "xyzw", "../..", KEY.hex() + "0", ""):
        with pytest.raises(UsageError):
            store.actions.resolve(text)


def test_a_read_only_store_gives_hits_and_takes_nothing(store: Store) -> None:
    record(store)
    with Store.open(store.path, read_only=True) as reader:
        before = store.context.layout.action(KEY).stat().st_mtime_ns
        assert reader.actions.get(KEY) is not None
        assert store.context.layout.action(KEY).stat().st_mtime_ns == before
        with reader.actions.flight(KEY) as mine:
            assert mine
        with pytest.raises(ReadOnlyStore):
            reader.actions.drop(KEY)
    assert not list(store.context.layout.flights.iterdir())


# --- gc in between ------------------------------------------------------------------------------


def forget_and_collect(store: Store) -> None:
    store.actions.drop(KEY)
    collect(store)


def test_a_record_evicted_after_it_was_read_is_a_miss(store: Store) -> None:
    record(store)
    hook = Interleaving(lambda step, _: step == "lease", lambda: forget_and_collect(store))
    with store.writer() as writer, step_hook(hook):
        assert writer.find_action(KEY).reason == "incomplete"
        put(writer, KEY, DATA)
    assert hook.happened and store.actions.get(KEY) is not None
    assert_sound(store)


def test_a_record_evicted_after_the_answer_keeps_its_bytes_for_the_asker(store: Store) -> None:
    record(store)
    hook = Interleaving(lambda step, _: step == "touch", lambda: forget_and_collect(store))
    with store.writer() as writer, step_hook(hook):
        found = writer.find_action(KEY).record
        assert found is not None and hook.happened
        assert writer.read(found.recipes[0]) == DATA
    assert store.actions.find(KEY).reason == "absent"


def test_gc_between_the_chunks_and_their_record_takes_neither(store: Store) -> None:
    def before_the_record(operation: str, path: str) -> bool:
        return operation == "create" and "/action-" in path

    hook = Interleaving(before_the_record, lambda: collect(store))
    with step_hook(hook):
        record(store)
    assert hook.happened and store.actions.get(KEY) is not None
    assert collect(store).dead_chunks == 0


def test_a_record_made_after_the_plan_keeps_its_chunks(store: Store) -> None:
    with store.writer() as writer:
        writer.put(DATA)
        writer.barrier()
    plan = gc.plan(store)
    assert len(plan.chunks) == 3
    record(store)
    gc.execute(store, plan)
    assert store.actions.get(KEY) is not None


def test_a_record_whose_chunk_has_rotted_is_whole_after_computing_again(store: Store) -> None:
    rotten = store.context.layout.chunk(next(iter(record(store).chunks())))
    flip_bit(rotten, 100)
    with store.writer() as writer:
        found = writer.find_action(KEY).record  # by their sizes, all of its chunks are there
        assert found is not None
        with pytest.raises(ChunkDamaged):
            writer.read(found.recipes[0])
        assert writer.find_action(KEY).reason == "incomplete"
        put(writer, KEY, DATA)
    with store.writer() as writer:
        found = writer.find_action(KEY).record
        assert found is not None and writer.read(found.recipes[0]) == DATA
    assert_sound(store)


# --- single flight ------------------------------------------------------------------------------


def test_a_lock_whose_file_cannot_be_removed_is_let_go(store: Store) -> None:
    def broken(operation: str, path: Path | str) -> None:
        if operation == "unlink" and str(path) == str(store.context.layout.flight(KEY)):
            raise OSError(errno.EIO, "broken")

    with step_hook(broken), pytest.raises(OSError, match="broken"), store.actions.flight(KEY):
        pass
    with store.actions.flight(KEY, wait=False) as mine:
        assert mine


def test_the_second_waits_for_the_first_and_then_finds_its_record(store: Store) -> None:
    computed: list[int] = []
    started = threading.Event()

    def compute(number: int) -> None:
        with store.actions.flight(KEY) as mine:
            assert mine
            started.set()
            if store.actions.get(KEY) is None:
                time.sleep(0.3)
                computed.append(number)
                record(store)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(computed) == 1
    assert not list(store.context.layout.flights.iterdir())


def test_four_processes_compute_it_once_although_the_first_is_killed(root: Path) -> None:
    with open_store(root / "s"):
        pass

    def begin(child: Child) -> None:
        with open_store(root / "s") as store, store.actions.flight(KEY):
            child.tell("computing")
            time.sleep(600)

    def compute(child: Child) -> tuple[bool, bytes]:
        with open_store(root / "s") as store, store.writer() as writer:
            child.tell("ready")
            with store.actions.flight(KEY):
                found = writer.find_action(KEY).record
                if found is not None:
                    return False, writer.read(found.recipes[0])
                time.sleep(0.3)
                return True, writer.read(put(writer, KEY, DATA).recipes[0])

    with children(begin) as (first,):
        first.wait_for("computing")
        with children(*[compute] * 4) as others:
            for other in others:
                other.wait_for("ready")
            first.kill()
            found = [child.result() for child in others]
    assert sum(computed for computed, _ in found) == 1
    assert {data for _, data in found} == {DATA}


def test_who_does_not_wait_is_told_at_once(store: Store) -> None:
    with store.actions.flight(KEY) as mine:
        assert mine
        with store.actions.flight(KEY, wait=False) as also:
            assert not also
        with store.actions.flight(OTHER, wait=False) as other:
            assert other
    with store.actions.flight(KEY, wait=False) as mine:
        assert mine


def test_waiting_is_told_to_the_progress(store: Store) -> None:
    told: list[str] = []

    class Told:
        def start(self, label: str, total: int | None) -> None:
            told.append(label)

        def advance(self, nbytes: int) -> None: ...

        def finish(self) -> None:
            told.append("finish")

    inside = threading.Event()

    def hold() -> None:
        with store.actions.flight(KEY):
            inside.set()
            until(lambda: bool(told))

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    with store.actions.flight(KEY, progress=Told()):
        assert told == ["waiting for the same work elsewhere", "finish"]
    thread.join()


def test_who_waits_for_long_is_told_why(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "PATIENCE", 0.05)
    inside = threading.Event()

    def hold() -> None:
        with store.actions.flight(KEY):
            inside.set()
            until(lambda: "waiting for another process" in caplog.text)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    with store.actions.flight(KEY):
        assert KEY.hex()[:12] in caplog.text
    thread.join()


def test_a_forked_child_that_leaves_the_block_takes_no_lock_away(root: Path) -> None:
    with open_store(root / "s"):
        pass

    def hold(child: Child) -> None:
        with open_store(root / "s") as store:
            with store.actions.flight(KEY):
                pid = os.fork()
                if pid:
                    assert os.waitpid(pid, 0)[1] == 0
                    assert store.context.layout.flight(KEY).exists()
            if not pid:
                os._exit(0)

    Child(hold).result()


def test_a_killed_holder_leaves_no_lock_that_needs_a_hand(root: Path) -> None:
    with open_store(root / "s"):
        pass

    def hold(child: Child) -> None:
        with open_store(root / "s") as store, store.actions.flight(KEY):
            child.tell("up")
            time.sleep(600)

    child = Child(hold)
    child.wait_for("up")
    with open_store(root / "s") as store:
        with store.actions.flight(KEY, wait=False) as mine:
            assert not mine
        child.kill()
        assert list(store.context.layout.flights.iterdir())
        with store.actions.flight(KEY) as mine:
            assert mine


def can_take_off(store: Store) -> bool:
    with store.actions.flight(KEY, wait=False) as mine:
        return mine


def test_a_child_of_a_killed_holder_does_not_hold_its_flight(root: Path) -> None:
    with open_store(root / "s"):
        pass

    def hold(child: Child) -> None:
        with open_store(root / "s") as store, store.actions.flight(KEY):
            grandchild = os.fork()
            if not grandchild:
                time.sleep(600)
            child.tell(str(grandchild))
            time.sleep(600)

    child = Child(hold)
    _, grandchild = child._receive()
    try:
        child.kill()
        with open_store(root / "s") as store:
            until(lambda: can_take_off(store))  # as soon as the grandchild has begun to run
    finally:
        os.kill(int(grandchild), signal.SIGKILL)


def test_gc_removes_what_killed_holders_left_and_no_lock_in_use(root: Path) -> None:
    with open_store(root / "s") as store:
        store.context.layout.flight(OTHER).touch()
        with store.actions.flight(KEY):
            collect(store)
            assert list(store.context.layout.flights.iterdir()) == [
                store.context.layout.flight(KEY)
            ]


def test_verify_sets_damaged_records_aside_and_leaves_misses(store: Store) -> None:
    lose_a_chunk(store, record(store))
    record(store, OTHER, contents(7, 100))
    path = store.context.layout.action(OTHER)
    path.write_bytes(path.read_bytes()[:-9])
    report = verify.verify(store)
    assert report.damaged_records == (OTHER,) and report.checked_records == 2
    assert not report.clean and not report.missing
    assert store.context.layout.quarantined_action(OTHER).exists()
    report = verify.verify(store)
    assert report.clean and report.checked_records == 1
    assert store.actions.find(OTHER).reason == "absent"
    assert store.actions.find(KEY).reason == "incomplete"
