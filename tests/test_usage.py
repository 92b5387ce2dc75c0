"""What the artifacts need, counted in the index: right whatever came between, and never trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cas import Digest, Store, gc, usage
from cas.errors import NoSpace
from cas.stats import stats
from cas.testing import Child, KillAt, step_hook
from cas.testing.damage import flip_bit
from cas.testing.processes import children
from cas.testing.stores import CHUNK, collect, commit, contents, open_store, scratch


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    """Three artifacts that share chunks: four chunks in all, nine uses."""
    with open_store(root / "s") as opened:
        for number in range(1, 4):
            commit(opened, f"a{number}", contents(0, 2 * CHUNK) + contents(number, CHUNK))
        yield opened


def manifests(store: Store) -> set[Digest]:
    return {store.read_ref(ref).manifest for ref in store.refs()}


def measured(store: Store) -> usage.Usage:
    return usage.measure(store.context, manifests(store))


def counted(store: Store) -> tuple[set[Digest], dict[bytes, int], int]:
    """What the index says: manifests, uses of each chunk, bytes."""
    with store.context.index.read() as txn:
        known = txn.counted()
        chunks = {chunk for digest in known for chunk in store.context.load_closure(digest).chunks}
        return set(known), {chunk: txn.use(chunk).count for chunk in chunks}, txn.used_bytes()


def assert_counts_are_right(store: Store) -> None:
    """As if counted anew from the files."""
    found, uses, used = counted(store)
    expected: Counter[bytes] = Counter()
    sizes: dict[bytes, int] = {}
    for digest in manifests(store):
        closure = store.context.load_closure(digest)
        expected.update(closure.chunks.keys())
        sizes |= closure.chunks
    assert (found, uses) == (manifests(store), dict(expected))
    assert used == sum(sizes.values())


class Loads:
    """Counts how many manifests are read."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = type(store.context).load_closure

        def load(context: Any, digest: Digest) -> Any:
            self.count += 1
            return real(context, digest)

        monkeypatch.setattr(type(store.context), "load_closure", load)


def test_each_chunk_counts_once(store: Store) -> None:
    found = measured(store)
    assert found.chunk_bytes == 5 * CHUNK
    assert set(found.sizes.values()) == {3 * CHUNK}
    assert_counts_are_right(store)


def test_only_what_is_new_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Loads(store, monkeypatch)
    measured(store)
    assert loads.count == 3
    measured(store)
    assert loads.count == 3
    commit(store, "new", contents(0, CHUNK) + contents(9, CHUNK))
    assert measured(store).chunk_bytes == 6 * CHUNK
    assert loads.count == 4
    assert_counts_are_right(store)


def test_what_was_removed_is_taken_out_while_its_manifest_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(store)
    loads = Loads(store, monkeypatch)
    store.remove("a1")
    assert measured(store).chunk_bytes == 4 * CHUNK
    assert loads.count == 1
    assert_counts_are_right(store)


def test_gc_takes_out_what_it_deletes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(store)
    store.remove("a1")
    collect(store)
    loads = Loads(store, monkeypatch)
    assert measured(store).chunk_bytes == 4 * CHUNK
    assert loads.count == 0
    assert_counts_are_right(store)


def test_a_manifest_that_went_otherwise_has_all_counted_anew(store: Store) -> None:
    measured(store)
    manifest = store.context.layout.manifest(store.resolve("a1").manifest)
    store.remove("a1")
    manifest.unlink()
    assert measured(store).chunk_bytes == 4 * CHUNK
    assert_counts_are_right(store)


def test_many_changes_at_once_are_counted_anew(store: Store) -> None:
    for number in range(20, 45):
        commit(store, f"b{number}", contents(number, 100))
    measured(store)
    for number in range(20, 45):
        store.remove(f"b{number}")
    assert measured(store).chunk_bytes == 5 * CHUNK
    assert_counts_are_right(store)


def test_a_new_index_starts_to_count_again(store: Store, root: Path) -> None:
    measured(store)
    store.context.index.rebuild()
    assert counted(store)[0] == set()
    assert measured(store).chunk_bytes == 5 * CHUNK
    assert_counts_are_right(store)


def test_counts_that_contradict_each_other_are_thrown_away(store: Store) -> None:
    measured(store)
    with store.context.index.write() as txn:
        known = txn.counted()
        txn.recount(known, ())  # as if the uses had been lost
    store.remove("a1")
    assert measured(store).chunk_bytes == 4 * CHUNK
    assert_counts_are_right(store)


def test_what_cannot_be_read_is_left_out_and_told(store: Store) -> None:
    victim = store.resolve("a1").manifest
    flip_bit(store.context.layout.manifest(victim), 20)
    for _ in range(2):
        found = measured(store)
        assert found.chunk_bytes == 4 * CHUNK
        assert list(found.unreadable) == [victim]
        assert "does not match" in found.unreadable[victim]


def test_other_chunks_are_told_apart(store: Store) -> None:
    known, unknown = Digest.of(contents(1, CHUNK)), Digest.of(b"?")
    with Store.open(store.path, read_only=True) as reader:
        for view in (store, reader):
            found = usage.measure(view.context, manifests(store), [known, unknown])
            assert found.unnamed == {unknown}


def test_without_room_it_is_counted_in_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise NoSpace(store.path)

    monkeypatch.setattr(usage, "_apply", full)
    assert measured(store).chunk_bytes == 5 * CHUNK
    usage.forget(store.context, manifests(store))
    assert counted(store)[0] == set()


def test_gc_does_not_believe_the_counts(store: Store, root: Path) -> None:
    measured(store)
    with store.context.index.write() as txn:
        txn.recount(dict.fromkeys(manifests(store), 0), ())
    assert collect(store).dead_chunks == 0
    assert store.assemble("a1", root / "out")


def test_two_who_count_at_once_count_each_manifest_once(store: Store, root: Path) -> None:
    store.close()

    def count(child: Child) -> None:
        child.wait_for("go")
        with open_store(root / "s") as mine:
            for number in range(5):
                commit(mine, f"p{child_number(child)}", contents(number, CHUNK))
                stats(mine)

    def child_number(child: Child) -> int:
        return id(child) % 7

    with children(count, count, count) as started:
        for child in started:
            child.tell("go")
        for child in started:
            child.result()
    with open_store(root / "s") as mine:
        measured(mine)
        assert_counts_are_right(mine)


class Counting(RuleBasedStateMachine):
    """Any sequence of commits, removals, gcs, looks, and deaths in the middle of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = scratch()
        self.root = self.scratch.__enter__()
        self.store = open_store(self.root / "s")

    def teardown(self) -> None:
        self.store.close()
        self.scratch.__exit__(None, None, None)

    @rule(name=st.sampled_from("ab"), seeds=st.lists(st.integers(1, 4), max_size=3))
    def commit(self, name: str, seeds: list[int]) -> None:
        commit(self.store, name, b"".join(contents(seed, CHUNK) for seed in seeds))

    @rule(name=st.sampled_from("ab"))
    def remove(self, name: str) -> None:
        if any(ref.name == name for ref in self.store.refs()):
            self.store.remove(name)

    @rule()
    def collect(self) -> None:
        collect(self.store)

    @rule()
    def look(self) -> None:
        stats(self.store)

    @rule(step=st.integers(1, 25), what=st.sampled_from([stats, collect]))
    def die(self, step: int, what: Any) -> None:
        self.store.close()

        def work(_: Child) -> None:
            with step_hook(KillAt(step)), open_store(self.root / "s") as mine:
                what(mine)

        Child(work).wait()
        self.store = open_store(self.root / "s")
        self.store.context.index.reconcile()  # of chunks, the index counts what a dead gc deleted

    @invariant()
    def the_statistics_are_what_the_files_say(self) -> None:
        """Without the index's help first, for that changes nothing."""
        with Store.open(self.store.path, read_only=True) as reader:
            expected = stats(reader)
            assert expected.garbage_bytes == gc.plan(reader).dead_bytes
        if expected.generations % 2:  # or the counts are behind by several changes
            found = stats(self.store)
            assert found.garbage_bytes == expected.garbage_bytes
            assert found.logical_bytes == expected.logical_bytes
            assert found.physical_bytes == expected.physical_bytes
            assert_counts_are_right(self.store)


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Counting,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_statistics_are_right_after_any_sequence_of_changes() -> None:
    run(examples=6, steps=12)


@pytest.mark.slow
def test_statistics_are_right_after_any_long_sequence_of_changes() -> None:
    run(examples=20, steps=30)
