"""Leases: they hold while the process lives, and not a moment longer."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas import leases, locks
from cas.digest import Digest
from cas.layout import Layout
from cas.leases import Lease, Leased
from cas.locks import FileLock
from cas.modes import Modes
from cas.testing import Child, Interleaving, forked, step_hook
from cas.testing.processes import children
from cas.testing.stores import open_store, scratch
from cas.testing.strategies import no_deadlines

no_deadlines()

MODES = Modes(0o022)
A, B, C = (Digest.of(text) for text in (b"a", b"b", b"c"))


@pytest.fixture
def layout() -> Iterator[Layout]:
    with scratch() as path:
        open_store(path / "s").close()
        yield Layout(path / "s")


def test_what_is_leased_is_seen_until_it_is_closed(layout: Layout) -> None:
    lease = Lease(layout, MODES)
    lease.add_chunks([A, B])
    lease.add_manifest(C)
    lease.add_chunks([A])
    found = leases.read_live(layout)
    assert (found.chunks, found.manifests) == ({A, B}, {C})
    assert leases.is_live(layout, lease.id)
    assert layout.lease(lease.id).stat().st_size == 3 * 33
    lease.close()
    lease.close()
    assert leases.read_live(layout) == Leased()
    assert not leases.is_live(layout, lease.id)
    assert list(layout.leases.iterdir()) == []


def hold(layout: Layout, child: Child) -> None:
    lease = Lease(layout, MODES)
    lease.add_chunks([A])
    child.tell("held")
    child.wait_for("never")


def test_a_lease_of_another_process_holds_until_it_is_killed(layout: Layout) -> None:
    with children(lambda child: hold(layout, child)) as (holder,):
        holder.wait_for("held")
        assert leases.read_live(layout).chunks == {A}
        (writer,) = os.listdir(layout.leases)
        assert not leases.remove_dead(layout, writer, lambda: pytest.fail("it lives"))
        holder.kill()
        assert leases.read_live(layout).chunks == set()
        assert not leases.is_live(layout, writer)
        cleaned: list[bool] = []
        assert leases.remove_dead(layout, writer, lambda: cleaned.append(True))
        assert cleaned
        assert os.listdir(layout.leases) == []


def test_a_forked_child_neither_ends_nor_needs_its_parents_lease(layout: Layout) -> None:
    lease = Lease(layout, MODES)
    lease.add_chunks([A])
    Child(lambda _: lease.close()).result()
    assert leases.read_live(layout).chunks == {A}
    lease.close()


def test_a_torn_last_record_is_no_record(layout: Layout) -> None:
    lease = Lease(layout, MODES)
    lease.add_chunks([A])
    with open(layout.lease(lease.id), "ab") as file:
        file.write(b"c" + B[:20])
    assert leases.read_live(layout).chunks == {A}
    lease.add_chunks([C])  # over the torn one, not after it
    assert {A, C} <= leases.read_live(layout).chunks
    assert layout.lease(lease.id).stat().st_size == 2 * 33
    lease.close()


def test_a_record_cut_short_by_a_full_disk_does_not_spoil_the_next(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(layout, MODES)
    real = os.pwrite

    def half(fd: int, data: bytes, offset: int) -> int:
        real(fd, bytes(data)[:10], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", half)
        with pytest.raises(Exception, match="no space left"):
            lease.add_chunks([A])
    lease.add_chunks([B])
    lease.add_chunks([A])
    assert leases.read_live(layout).chunks == {A, B}
    lease.close()


@given(st.binary(max_size=200))
def test_no_content_of_a_lease_file_is_an_error(data: bytes) -> None:
    leased = Leased()
    leased.add_records(data)
    assert len(leased.chunks) + len(leased.manifests) <= len(data) // 33


@given(st.integers(0, 7))
def test_a_damaged_kind_still_protects(bit: int) -> None:
    leased = Leased()
    leased.add_records(bytes([ord("m") ^ (1 << bit)]) + A)
    assert leased.chunks == {A}


def test_a_lease_is_held_from_the_moment_that_it_can_be_seen(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = locks._link_unnamed

    def look(fd: int, path: Path) -> bool:
        done = real(fd, path)
        assert leases.is_live(layout, path.name)
        assert path.stat().st_mode & 0o777 == 0o644
        return done

    monkeypatch.setattr(locks, "_link_unnamed", look)
    old = os.umask(0o077)
    try:
        Lease(layout, MODES).close()
    finally:
        os.umask(old)


def test_a_gc_that_takes_a_lease_for_dead_before_it_is_locked_costs_only_the_name(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On filesystems without unnamed files the lease is seen before it is locked."""
    monkeypatch.setattr(locks, "_open_unnamed", lambda directory: None)

    def gc_comes() -> None:  # between the file's creation and its lock
        for name in os.listdir(layout.leases):
            leases.remove_dead(layout, name, lambda: None)

    real = FileLock.try_exclusive
    calls: list[int] = []

    def late(lock: FileLock) -> bool:
        calls.append(1)
        if len(calls) == 1:
            gc_comes()
        return real(lock)

    FileLock.try_exclusive = late  # type: ignore[method-assign]
    try:
        lease = Lease(layout, MODES)
    finally:
        FileLock.try_exclusive = real  # type: ignore[method-assign]
    assert calls and lease.id
    lease.add_chunks([A])
    assert leases.read_live(layout).chunks == {A}
    assert os.listdir(layout.leases) == [lease.id]
    lease.close()


def test_a_lease_of_any_length_is_read_in_little_memory(layout: Layout) -> None:
    lease = Lease(layout, MODES)
    lease.add_chunks([A])
    os.truncate(layout.lease(lease.id), 300 << 20)  # a hole, read as nine million equal records

    def read() -> int:
        limit = 64 << 20
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = leases.read_live(layout)
        assert found.chunks == {A, Digest(bytes(32))}
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < limit

    assert forked(read)
    lease.close()


def test_the_staging_of_a_writer_that_starts_while_it_is_taken_for_dead_survives(
    layout: Layout,
) -> None:
    """While a dead lease is being cleaned its lock is held, so no writer can take that name."""
    layout.lease("0" * 32).write_bytes(b"")

    def clean() -> None:
        lock = FileLock.open(layout.lease("0" * 32), 0o666)
        assert not lock.try_exclusive()
        lock.close()

    assert leases.remove_dead(layout, "0" * 32, clean)


def test_a_lease_that_vanishes_while_it_is_read_is_no_error(layout: Layout) -> None:
    first, second = Lease(layout, MODES), Lease(layout, MODES)
    second.add_chunks([B])
    real = os.listdir
    names = real(layout.leases)
    first.close()
    os.listdir = lambda path: names  # type: ignore[assignment]
    try:
        assert leases.read_live(layout).chunks == {B}
    finally:
        os.listdir = real
    second.close()


def test_other_files_in_the_directory_are_left_alone(layout: Layout) -> None:
    (layout.leases / "README").write_text("not a lease")
    assert leases.read_live(layout) == Leased()
    assert (layout.leases / "README").exists()


def test_what_has_a_leases_name_and_is_no_file_is_no_lease(layout: Layout) -> None:
    directory, pipe = layout.lease("a" * 32), layout.lease("b" * 32)
    directory.mkdir()
    os.mkfifo(pipe)  # an open would wait for who writes to it
    cleaned = []
    assert leases.read_live(layout) == Leased()
    for writer in ("a" * 32, "b" * 32):
        assert not leases.is_live(layout, writer)
        assert leases.remove_dead(layout, writer, lambda: cleaned.append(1))
    assert directory.is_dir() and pipe.exists() and len(cleaned) == 2


def test_a_lease_is_announced_as_a_step(layout: Layout) -> None:
    lease = Lease(layout, MODES)
    hook = Interleaving(lambda operation, path: operation == "lease", lambda: None)
    with step_hook(hook):
        lease.add_chunks([A])
    assert hook.happened
    lease.close()


def test_files_are_private_or_shared_as_the_umask_says(layout: Layout) -> None:
    lease = Lease(layout, Modes(0o002))
    assert Path(layout.lease(lease.id)).stat().st_mode & 0o777 == 0o664
    lease.close()
