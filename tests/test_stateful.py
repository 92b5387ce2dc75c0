"""Random sequences of everything that users do, against a model of what must exist."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cas import Digest, Store, Writer, actions, gc, verify
from cas.errors import CasError
from cas.retention import Policy
from cas.stats import stats
from cas.testing import Child, KillAt, step_hook
from cas.testing.stores import CHUNK, chunk_files, contents, open_store, scratch

NAMES = st.sampled_from(["a", "a/b", "c"])
#: Few different blobs, so that artifacts share chunks and dead chunks come to life again.
BLOBS = st.lists(st.integers(1, 5), min_size=0, max_size=3)


def blob(seeds: list[int]) -> bytes:
    """Whole chunks, a short one and zeros, as the seeds have it."""
    return b"".join(contents(s, CHUNK if s < 4 else 1000) if s < 5 else bytes(CHUNK) for s in seeds)


def key_of(number: int) -> Digest:
    return Digest.of(b"action %d" % number)


def record(writer: Writer, number: int, data: bytes) -> None:
    writer.put_action(
        key_of(number),
        kind="test",
        factors={},
        result=Digest.of(data).hex(),
        recipes=[writer.put(data)],
        seconds=0,
    )


class StoreMachine(RuleBasedStateMachine):
    """The model: name -> generation -> bytes, and action -> what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.root = self.stack.enter_context(scratch())
        self.now = 1e9
        self.committed: dict[str, dict[int, bytes]] = {}
        self.highest: dict[str, int] = {}
        self.recorded: dict[int, bytes] = {}
        self.store = self.open()

    def open(self) -> Store:
        return open_store(self.root / "s", clock=lambda: self.now)

    def teardown(self) -> None:
        self.store.close()
        self.stack.close()

    def next_generation(self, name: str) -> int:
        """After all that there were since the name had none."""
        return self.highest[name] + 1 if self.committed.get(name) else 1

    def remember(self, generation: int, name: str, data: bytes) -> None:
        self.committed.setdefault(name, {})[generation] = data
        self.highest[name] = generation

    # --- what users do --------------------------------------------------------------------------

    @rule(name=NAMES, seeds=BLOBS)
    def commit(self, name: str, seeds: list[int]) -> None:
        data = blob(seeds)
        with self.store.writer() as writer:
            done = writer.commit(name, {"f": writer.put(data)})
        assert done.ref.generation == self.next_generation(name)
        self.remember(done.ref.generation, name, data)

    @rule(seeds=BLOBS, publish=st.booleans())
    def abandon(self, seeds: list[int], publish: bool) -> None:
        with contextlib.suppress(ZeroDivisionError), self.store.writer() as writer:
            writer.put(blob(seeds))
            if publish:
                writer.barrier()
            raise ZeroDivisionError

    @rule(number=st.integers(0, 2), seeds=BLOBS)
    def compute(self, number: int, seeds: list[int]) -> None:
        with self.store.writer() as writer, self.store.actions.flight(key_of(number)):
            found = writer.find_action(key_of(number)).record
            assert (found is not None) == (number in self.recorded)
            if found is None:
                self.recorded[number] = blob(seeds)
                record(writer, number, blob(seeds))
            else:
                assert writer.read(found.recipes[0]) == self.recorded[number]

    @rule(number=st.integers(0, 2), evicted=st.booleans())
    def forget(self, number: int, evicted: bool) -> None:
        if not evicted:
            self.store.actions.drop(key_of(number))
        else:
            layout = self.store.context.layout
            with self.store.context.index.exclude():
                for entry in self.store.actions.entries():
                    if entry.key == key_of(number):
                        assert actions.evict(layout, entry)
        self.recorded.pop(number, None)

    @precondition(lambda self: any(self.committed.values()))
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, g in self.committed.items() if g)))
        generation = data.draw(st.none() | st.sampled_from(sorted(self.committed[name])))
        if generation is None:
            self.store.remove(name)
            self.committed[name] = {}
        else:
            self.store.remove(f"{name}@{generation}")
            del self.committed[name][generation]

    @rule(grace=st.sampled_from([0, 0, 100]))
    def collect(self, grace: int) -> None:
        report = gc.execute(self.store, gc.plan(self.store, grace=grace))
        assert not report.problems
        if grace == 0:
            live = {
                digest
                for ref in self.store.refs()
                for digest in self.store.manifest(self.store.read_ref(ref)).chunks()
            }
            live |= {d for found in self.store.actions.list() for d in found.chunks()}
            assert {path.name for path in chunk_files(self.store)} == {d.hex() for d in live}

    @rule(keep=st.integers(1, 3))
    def collect_by_policy(self, keep: int) -> None:
        report = gc.collect(self.store, policy=Policy(keep_last=keep))
        expected = set()
        for name, generations in self.committed.items():
            for old in sorted(generations)[:-keep]:
                expected.add(f"{name}@{old}")
                del generations[old]
        assert {str(root) for root in report.dropped} == expected

    @rule()
    def stats(self) -> None:
        found = stats(self.store)
        sizes = [len(data) for known in self.committed.values() for data in known.values()]
        assert (found.generations, found.logical_bytes) == (len(sizes), sum(sizes))
        assert found.garbage_bytes <= found.physical_bytes

    @rule()
    def plan_then_commit_then_execute(self) -> None:
        plan = gc.plan(self.store)
        self.commit("c", [1, 2])
        gc.execute(self.store, plan)

    @rule()
    def verify(self) -> None:
        report = verify.verify(self.store)
        assert report.clean and report.complete

    @rule(seconds=st.integers(-50, 500))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()

    @rule(how=st.sampled_from(["data.mdb", "lock.mdb", "stamp"]), running=st.booleans())
    def lose_a_file_of_the_index(self, how: str, running: bool) -> None:
        if not running:
            self.store.close()
        with contextlib.suppress(FileNotFoundError):
            (self.store.context.layout.index / how).unlink()
        if not running:
            self.store = self.open()

    @rule(seeds=BLOBS, step=st.integers(1, 40), what=st.sampled_from(["commit", "gc", "record"]))
    def die(self, seeds: list[int], step: int, what: str) -> None:
        """Another process is killed at some step of a commit, of a gc, or of an action."""
        self.store.close()
        before = self.committed.get("a", {})
        data = blob(seeds)

        def work(_: Child) -> None:
            with step_hook(KillAt(step)), self.open() as mine:
                if what == "gc":
                    gc.execute(mine, gc.plan(mine))
                    return
                with mine.writer() as writer:
                    if what == "record":
                        record(writer, 0, data)
                    else:
                        writer.commit("a", {"f": writer.put(data)})

        Child(work).wait()
        self.store = self.open()
        found = self.store.actions.get(key_of(0))
        assert found is not None or 0 not in self.recorded, "a kill has lost a record"
        if found is not None and found.result == Digest.of(data).hex() and what == "record":
            self.recorded[0] = data
        with contextlib.suppress(CasError):
            ref = self.store.resolve("a")
            if ref.generation not in before:  # it died after its commit point
                assert ref.generation == self.next_generation("a")
                self.remember(ref.generation, "a", data)

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def every_record_is_there_and_no_other(self) -> None:
        found = {record.key: record.result for record in self.store.actions.list()}
        expected = {key_of(n): Digest.of(data).hex() for n, data in self.recorded.items()}
        assert found == expected
        assert all(self.store.actions.get(key) for key in expected)

    @invariant()
    def every_artifact_is_there_and_no_other(self) -> None:
        expected = {
            f"{name}@{generation}": data
            for name, generations in self.committed.items()
            for generation, data in generations.items()
        }
        assert {str(ref) for ref in self.store.refs()} == set(expected)
        for ref, data in expected.items():
            (path,) = self.store.assemble(ref, self.root / "out")
            assert path.read_bytes() == data


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_no_sequence_of_operations_loses_or_invents_an_artifact() -> None:
    run(examples=8, steps=15)


@pytest.mark.slow
def test_no_long_sequence_of_operations_loses_or_invents_an_artifact() -> None:
    run(examples=30, steps=40)
