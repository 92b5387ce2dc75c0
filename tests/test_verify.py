"""Verify: every kind of damage is found, set aside, told, and healed by the next put."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cas import Digest, Store, damage, refs, stats, verify
from cas.context import Context
from cas.errors import CasError, ChunkDamaged
from cas.index import Entry
from cas.manifest import Manifest
from cas.testing import forked
from cas.testing.damage import flip_bit, truncate, writable
from cas.testing.stores import (
    CHUNK,
    assert_sound,
    chunk_files,
    collect,
    commit,
    contents,
    open_store,
)

ONE = contents(1, 3 * CHUNK)
TWO = contents(1, CHUNK) + contents(2, 100)  # shares a chunk with ONE


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.step = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(root: Path, clock: Clock) -> Iterator[Store]:
    with open_store(root / "s", clock=clock) as opened:
        commit(opened, "one", ONE)
        commit(opened, "two", TWO)
        commit(opened, "three", contents(3, 100))
        yield opened


def shared_chunk(store: Store) -> Path:
    return store.context.layout.chunk(Digest.of(ONE[:CHUNK]))


def test_a_sound_store_is_clean(store: Store) -> None:
    report = verify.verify(store)
    assert report.clean and report.complete
    assert (report.checked_chunks, report.checked_bytes) == (5, 3 * CHUNK + 200)


def spoil(path: Path, how: str) -> None:
    if how == "one bit":
        flip_bit(path, 777, 5)
    elif how == "zeros":
        writable(path)
        path.write_bytes(bytes(path.stat().st_size))
    else:
        truncate(path, {"cut": 100, "emptied": 0, "grown": CHUNK + 1, "huge": 1 << 40}[how])


@pytest.mark.parametrize("how", ["one bit", "zeros", "cut", "emptied", "grown", "huge"])
def test_a_damaged_chunk_is_set_aside_and_its_artifacts_named(
    store: Store, root: Path, how: str
) -> None:
    victim = shared_chunk(store)
    digest = Digest(bytes.fromhex(victim.name))
    spoil(victim, how)
    report = verify.verify(store)
    assert report.damaged == report.missing == (digest,)
    assert report.affected_refs == ("one@1", "two@1")
    assert not report.problems and not report.clean
    assert not victim.exists()
    assert [p.name for p in store.context.layout.quarantine.iterdir()] == [victim.name]
    assert stats.stats(store).quarantined_bytes == (
        store.context.layout.quarantined(digest).stat().st_size
    )
    # Healed by the next export that produces the bytes.
    assert commit(store, "again", ONE).new_chunks == 1
    for name, data in (("one", ONE), ("two", TWO)):
        (path,) = store.assemble(name, root / "out")
        assert path.read_bytes() == data
    assert_sound(store)


def test_a_missing_chunk_is_named_with_its_artifacts(store: Store) -> None:
    victim = shared_chunk(store)
    victim.unlink()
    report = verify.verify(store)
    assert report.missing == (Digest(bytes.fromhex(victim.name)),)
    assert report.damaged == ()
    assert report.affected_refs == ("one@1", "two@1")
    commit(store, "again", ONE)
    assert_sound(store)


def tree(store: Store) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_mtime_ns, path.stat().st_size)
        for path in store.path.rglob("*")
        if path.is_file() and path.parent.name != "index"
    }


@pytest.mark.parametrize("how", ["report_only", "read_only"])
def test_a_report_names_the_same_and_changes_nothing(store: Store, how: str) -> None:
    damaged, missing = shared_chunk(store), store.context.layout.chunk(Digest.of(ONE[-CHUNK:]))
    flip_bit(damaged, 11)
    missing.unlink()
    before = tree(store)
    with Store.open(store.path, read_only=how == "read_only") as reader:
        report = verify.verify(reader, report_only=how == "report_only")
    assert tree(store) == before
    assert report.report_only and not report.clean
    assert report.damaged == (Digest(bytes.fromhex(damaged.name)),)
    assert {digest.hex() for digest in report.missing} == {damaged.name, missing.name}
    assert report.affected_refs == ("one@1", "two@1")
    found = verify.verify(store)
    assert (found.damaged, found.missing) == (report.damaged, report.missing)
    assert (found.affected_refs, found.checked_chunks) == (
        report.affected_refs,
        report.checked_chunks,
    )


def test_bounded_reports_come_to_see_every_chunk(store: Store, clock: Clock) -> None:
    """What was verified when is not known without an index, so each takes another part."""
    flip_bit(shared_chunk(store))
    clock.step = 1
    with Store.open(store.path, read_only=True, clock=clock, workers=1) as reader:
        reports = [verify.verify(reader, max_duration=3) for _ in range(60)]
    assert all(0 < report.checked_chunks < 5 and not report.complete for report in reports)
    assert {len(report.damaged) for report in reports} == {0, 1}


def test_damaged_garbage_affects_nobody(store: Store) -> None:
    store.remove("three")
    flip_bit(store.context.layout.chunk(Digest.of(contents(3, 100))))
    report = verify.verify(store)
    assert len(report.damaged) == 1
    assert (report.missing, report.affected_refs) == ((), ())
    collect(store)
    assert_sound(store)


def test_unreadable_refs_and_manifests_are_problems_and_named(store: Store) -> None:
    flip_bit(store.context.layout.manifest(store.resolve("one").manifest), 50)
    truncate(store.context.layout.ref("two", 1), 3)
    report = verify.verify(store)
    assert report.affected_refs == ("one@1", "two@1")
    assert len(report.problems) == 2
    assert not report.damaged
    store.remove("one")
    store.remove("two")
    collect(store)
    assert_sound(store)


def test_a_chunk_in_the_wrong_place_is_damaged(store: Store) -> None:
    one, *_, last = chunk_files(store)
    writable(one)
    one.write_bytes(last.read_bytes())
    assert verify.verify(store).damaged == (Digest(bytes.fromhex(one.name)),)


def test_files_that_are_no_chunks_are_left_alone(store: Store) -> None:
    stray = store.context.layout.chunks / "00" / "README"
    stray.write_text("mine")
    misplaced = store.context.layout.chunks / "00" / ("ff" * 32)
    misplaced.write_text("mine too")
    assert verify.verify(store).clean
    collect(store)
    assert stray.exists() and misplaced.exists()


def test_wrong_entries_are_put_right_and_no_chunk_is_blamed(store: Store) -> None:
    digest = Digest.of(ONE[:CHUNK])
    with store.context.index.write() as txn:
        txn.put(digest, Entry(2**50, 0, 0))
        txn.put(Digest.of(b"vanished"), Entry(10, 0, 0))
    assert verify.verify(store).clean
    assert_sound(store)


def test_the_least_recently_verified_come_first(store: Store, clock: Clock) -> None:
    verify.verify(store)
    clock.now += 100
    commit(store, "new", contents(9, 50))
    seen: list[int] = []
    real = damage.find

    def check(context: object, digest: Digest, size: int) -> object:
        seen.append(size)
        return real(context, digest, size)  # type: ignore[arg-type]

    damage.find = check  # type: ignore[assignment]
    try:
        verify.verify(store)
    finally:
        damage.find = real
    assert seen[0] == 50


def test_a_bounded_run_stops_and_the_next_goes_on_where_it_stopped(root: Path) -> None:
    clock = Clock()
    data = contents(4, 30 * CHUNK)
    with open_store(root / "s", clock=clock, workers=1) as store:
        commit(store, "a", data)
        clock.step = 1
        checked: set[Digest] = set()
        for _ in range(40):
            clock.now += 60
            report = verify.verify(store, max_duration=8)
            assert report.clean
            assert report.checked_chunks >= 1
            with store.context.index.read() as txn:
                done = {d for d, entry in txn.items() if entry.last_verified}
            assert checked < done or report.complete
            checked = done
            if len(checked) == 30:
                break
        assert len(checked) == 30
        assert not verify.verify(store, max_duration=3).complete
        assert verify.verify(store).complete


def test_no_time_at_all_checks_no_chunk_but_still_the_refs(store: Store) -> None:
    shared_chunk(store).unlink()
    report = verify.verify(store, max_duration=0)
    assert (report.checked_chunks, report.complete) == (0, False)
    assert report.affected_refs == ("one@1", "two@1")


def test_a_removal_and_gc_during_verify_are_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = list(refs.ids(store.context.layout))
    store.remove("one")
    collect(store)
    monkeypatch.setattr(refs, "ids", lambda layout: iter(listed))
    assert verify.verify(store).clean


@pytest.mark.parametrize("when", ["before the manifest is read", "after"])
def test_a_name_that_was_removed_and_committed_anew_during_verify_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    old = store.resolve("three").manifest
    real = Context.load_manifest

    def load(self: Context, digest: Digest) -> Manifest:
        if digest != old:
            return real(self, digest)
        found = real(self, digest)
        monkeypatch.undo()
        store.remove("three")
        collect(store)
        assert str(commit(store, "three", contents(4, 100)).ref) == "three@1"
        return found if when == "after" else real(self, digest)

    monkeypatch.setattr(Context, "load_manifest", load)
    # Its chunk was in the list that verify made before.
    monkeypatch.setattr(verify, "_sizes", lambda context: {})
    report = verify.verify(store)
    assert report.clean and report.damaged_manifests == {}


@pytest.mark.parametrize("how", ["a flipped bit", "cut short", "gone", "another manifest"])
def test_all_refs_that_need_a_damaged_manifest_are_named(store: Store, how: str) -> None:
    for name in ("again", "one"):
        commit(store, name, ONE)
    digest = store.resolve("one").manifest
    path = store.context.layout.manifest(digest)
    if how == "a flipped bit":
        flip_bit(path, 20)
    elif how == "cut short":
        truncate(path, 20)
    elif how == "gone":
        path.unlink()
    else:
        writable(path)
        path.write_bytes(store.context.layout.manifest(store.resolve("two").manifest).read_bytes())
    report = verify.verify(store)
    named = ("again@1", "one@1", "one@2")
    assert report.affected_refs == named and report.damaged_manifests == {digest: named}
    (problem,) = report.problems
    assert problem.startswith(f"again@1: manifest {digest}") and "--from COPY" in problem
    assert not report.missing


def test_a_damaged_ref_says_which_command_removes_it(store: Store) -> None:
    truncate(store.context.layout.ref("one", 1), 30)
    report = verify.verify(store)
    assert report.affected_refs == ("one@1",) and report.damaged_manifests == {}
    assert "`cas rm one@1`" in report.problems[0]
    store.remove("one@1")
    assert verify.verify(store).clean


def test_a_chunk_replaced_while_it_is_being_checked_is_not_set_aside(store: Store) -> None:
    victim = shared_chunk(store)
    good = victim.read_bytes()
    flip_bit(victim)
    real = damage.find

    def check(context: object, digest: Digest, size: int) -> object:
        found = real(context, digest, size)  # type: ignore[arg-type]
        if isinstance(found, ChunkDamaged):
            victim.write_bytes(good)  # a writer that just stored it afresh
        return found

    damage.find = check  # type: ignore[assignment]
    try:
        report = verify.verify(store)
    finally:
        damage.find = real
    assert report.clean and victim.exists()


@pytest.mark.parametrize("count", [50, pytest.param(150, marks=pytest.mark.slow)])
def test_one_flipped_bit_anywhere_is_found_or_harmless(root: Path, count: int) -> None:
    """Over chunks, manifests, refs, leases, config and header; never a wrong output file."""
    with open_store(root / "s") as store:
        commit(store, "one", ONE)
        commit(store, "two", TWO)
        store.set_config("grace", "1h")
        layout = store.context.layout
    (layout.leases / ("a" * 32)).write_bytes(b"c" + bytes(32))
    files = [
        path
        for path in sorted((root / "s").rglob("*"))
        if path.is_file() and path.stat().st_size and path.parent != layout.index
    ]
    dice = random.Random(count)

    def use() -> None:
        try:
            with open_store(root / "s") as store:
                for name, data in (("one", ONE), ("two", TWO)):
                    try:
                        (path,) = store.assemble(name, root / "out")
                        assert path.read_bytes() == data
                    except CasError:
                        assert not verify.verify(store).clean
                        return
        except CasError:
            return  # the store did not open: said so

    for _ in range(count):
        victim = dice.choice(files)
        offset, bit = dice.randrange(victim.stat().st_size), dice.randrange(8)
        flip_bit(victim, offset, bit)
        forked(use)
        if victim.exists():
            flip_bit(victim, offset, bit)
        else:  # in quarantine
            (layout.quarantine / victim.name).rename(victim)
            flip_bit(victim, offset, bit)
    with open_store(root / "s") as store:
        assert_sound(store)
