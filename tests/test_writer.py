"""Putting and committing: every byte comes back, known bytes cost nothing, nothing is lost."""

from __future__ import annotations

import errno
import gc
import io
import mmap
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas import Recipe, Store, TensorEntry, fsio, ingest
from cas.digest import Digest
from cas.errors import (
    ChunkDamaged,
    ChunkMissing,
    Damaged,
    InvalidName,
    NoSpace,
    SourceChanged,
    UsageError,
)
from cas.manifest import ChunkPart, ZeroPart
from cas.progress import Silent
from cas.testing import recorded_steps, step_hook
from cas.testing.damage import flip_bit, truncate
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
from cas.testing.strategies import no_deadlines

no_deadlines()

SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 9 * CHUNK + 13]


class Trickle(io.RawIOBase):
    """A stream that never gives more than ``most`` bytes at a time."""

    def __init__(self, data: bytes, most: int) -> None:
        self.left = memoryview(data)
        self.most = most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        count = min(len(view), self.most, len(self.left))
        view[:count] = self.left[:count]
        self.left = self.left[count:]
        return count


# --- bytes come back ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_what_was_put_comes_back(store: Store, root: Path, size: int) -> None:
    data = contents(size, size)
    with store.writer() as writer:
        recipe = writer.put(data)
        assert writer.read(recipe) == data
        done = writer.commit("a", {"f": recipe})
    assert done.logical_bytes == done.new_bytes == size
    assert done.files[0].digest == Digest.of(data)
    (path,) = store.assemble("a", root / "out")
    assert path.read_bytes() == data
    assert_sound(store)


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_gives_the_same_recipe_as_a_buffer(store: Store, size: int) -> None:
    data = contents(size, size)
    with store.writer() as writer:
        whole = writer.put(data)
        assert writer.put_stream(io.BytesIO(data)) == whole
        assert writer.put_stream(Trickle(data, 1000 if size > 5000 else 1)) == whole
        assert writer.counters.logical_bytes == 3 * size
        assert writer.counters.new_bytes == size


@given(st.data())
@settings(max_examples=25)
def test_any_range_can_be_read_before_and_after_publishing(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 3 * CHUNK))
    whole = contents(size, size)
    with scratch() as path, open_store(path / "s") as store, store.writer() as writer:
        recipe = Recipe.concat([writer.put(whole), Recipe.literal(b"tail"), writer.put(bytes(99))])
        whole += b"tail" + bytes(99)
        offset = data.draw(st.integers(0, len(whole)))
        length = data.draw(st.integers(0, len(whole) - offset))
        assert writer.read(recipe, offset, length) == whole[offset : offset + length]
        writer.barrier()
        assert writer.read(recipe, offset, length) == whole[offset : offset + length]
        assert b"".join(bytes(piece) for piece in writer.stream(recipe)) == whole
        if length < len(whole) - offset:
            with pytest.raises(UsageError):
                writer.read(recipe, offset, len(whole) + 1)


def test_the_source_may_change_as_soon_as_put_returns(store: Store) -> None:
    source = bytearray(contents(1, 3 * CHUNK + 7))
    expected = bytes(source)
    with store.writer() as writer:
        recipe = writer.put(source)
        source[:] = bytes(len(source))
        assert writer.read(recipe) == expected


def test_every_kind_of_contiguous_buffer_is_taken_as_it_is(store: Store, root: Path) -> None:
    data = contents(2, CHUNK + 5)
    (root / "f").write_bytes(data)
    with open(root / "f", "rb") as file, store.writer() as writer:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        expected = writer.put(data)
        assert writer.put(bytearray(data)) == expected
        assert writer.put(memoryview(data)) == expected
        assert writer.put(mapped) == expected
        words = memoryview(bytearray(data[: len(data) // 8 * 8])).cast("q")
        assert writer.put(words).size == words.nbytes
        assert writer.put(memoryview(b"")) == writer.put(b"") == Recipe()
        mapped.close()


def test_a_buffer_with_gaps_is_refused(store: Store) -> None:
    with store.writer() as writer:
        with pytest.raises(UsageError, match="contiguous"):
            writer.put(memoryview(bytes(100))[::2])
        with pytest.raises(UsageError):
            writer.put("text")  # type: ignore[arg-type]


def test_zeros_cost_nothing(store: Store, root: Path) -> None:
    size = 5 * CHUNK + 3
    with store.writer() as writer:
        recipe = writer.put(bytes(size))
        assert recipe.parts == (ZeroPart(size),)
        assert writer.put_stream(io.BytesIO(bytes(size))) == recipe
        almost = writer.put(bytes(CHUNK - 1) + b"\1")
        done = writer.commit("a", {"zeros": recipe, "almost": almost})
    assert done.new_bytes == CHUNK
    assert len(chunk_files(store)) == 1
    almost_path, zeros = store.assemble("a", root / "out")
    assert zeros.read_bytes() == bytes(size)
    assert almost_path.read_bytes() == bytes(CHUNK - 1) + b"\1"


def test_a_stream_takes_bounded_memory(root: Path) -> None:
    class Noise(io.RawIOBase):
        left = 48 << 20

        def readinto(self, buffer: object) -> int:
            view = memoryview(buffer)  # type: ignore[arg-type]
            count = min(len(view), self.left)
            view[:count:4096] = bytes((self.left + i) & 255 for i in range(0, count, 4096))
            view[:8] = self.left.to_bytes(8, "little")
            self.left -= count
            return count

    with (
        Store.open(root / "s", chunk_size=1 << 20, buffer_bytes=4 << 20, workers=2) as store,
        store.writer() as writer,
    ):
        writer.put_stream(io.BytesIO(b"warm"))
        tracemalloc.start()
        recipe = writer.put_stream(Noise())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert recipe.size == 48 << 20
        assert peak < 12 << 20, f"{peak >> 20} MiB for a ring of 4 MiB"


def test_a_stream_that_fails_fails_the_put_and_nothing_else(store: Store) -> None:
    class Broken(Trickle):
        def readinto(self, buffer: object) -> int:
            if not self.left:
                raise OSError(5, "Input/output error")
            return super().readinto(buffer)

    with store.writer() as writer:
        with pytest.raises(OSError, match="Input/output"):
            writer.put_stream(Broken(contents(1, 5 * CHUNK), CHUNK))
        writer.commit("a", {"f": writer.put(b"fine")})
    collect(store)
    assert len(chunk_files(store)) == 1


def test_a_stream_with_nothing_to_give_now_is_not_taken_for_its_end(store: Store) -> None:
    class Waiting(Trickle):
        def readinto(self, buffer: object) -> int:
            count = super().readinto(buffer)
            return count if self.left else None  # type: ignore[return-value]

    with store.writer() as writer, pytest.raises(UsageError):
        writer.put_stream(Waiting(contents(1, 3 * CHUNK), CHUNK))


# --- known bytes --------------------------------------------------------------------------------


def test_known_chunks_write_nothing(store: Store) -> None:
    data = contents(3, 6 * CHUNK)
    commit(store, "a", data)
    with recorded_steps() as steps, store.writer() as writer:
        writer.put(data)
        writer.barrier()
        written = [path for operation, path in steps if operation in ("create", "rename")]
        assert [path for path in written if "/leases/" not in path] == []
        assert writer.counters.new_chunks == writer.counters.new_bytes == 0
        assert writer.counters.chunks == 6


def test_equal_tensors_share_chunks_wherever_they_lie(store: Store) -> None:
    tensor = contents(4, 2 * CHUNK + 9)
    with store.writer() as writer:
        first = Recipe.concat([writer.put(b"header"), writer.put(tensor)])
        second = Recipe.concat([writer.put(b"a longer header"), writer.put(tensor)])
        assert first.parts[1:] == second.parts[1:]
        done = writer.commit("a", {"x": first, "y": second})
    assert done.new_bytes == len(tensor) + 6 + 15


def test_many_threads_may_put_the_same_and_other_bytes_at_once(store: Store, root: Path) -> None:
    shared = contents(5, 3 * CHUNK + 1)
    recipes: dict[int, tuple[Recipe, Recipe]] = {}
    with store.writer() as writer:

        def work(number: int) -> None:
            own = contents(100 + number, CHUNK + number)
            recipes[number] = (writer.put(shared), writer.put_stream(io.BytesIO(own)))
            if number % 3 == 0:
                writer.barrier()
            assert writer.read(recipes[number][0]) == shared

        threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(recipes) == 12
        assert len({shared_recipe for shared_recipe, _ in recipes.values()}) == 1
        assert writer.counters.new_bytes == len(shared) + sum(CHUNK + n for n in range(12))
        writer.commit("a", {f"f{n}": Recipe.concat(pair) for n, pair in recipes.items()})
    for path in store.assemble("a", root / "out"):
        number = int(path.name[1:])
        assert path.read_bytes() == shared + contents(100 + number, CHUNK + number)
    assert_sound(store)


# --- damage behind the store's back -------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "truncated", "grown"])
def test_the_next_put_of_the_same_bytes_heals_a_chunk_that_a_hand_removed(
    store: Store, root: Path, how: str
) -> None:
    data = contents(6, 3 * CHUNK)
    commit(store, "a", data)
    victim = chunk_files(store)[1]
    if how == "deleted":
        victim.unlink()
    else:
        truncate(victim, 100 if how == "truncated" else CHUNK + 1)
    with pytest.raises(Damaged):
        store.assemble("a", root / "out")
    done = commit(store, "b", data)
    assert (done.new_chunks, done.new_bytes) == (1, CHUNK)
    (path,) = store.assemble("a", root / "out")
    assert path.read_bytes() == data
    assert_sound(store)


def test_a_chunk_removed_between_put_and_commit_fails_the_commit(store: Store) -> None:
    with store.writer() as writer:
        recipe = writer.put(contents(7, 2 * CHUNK))
        writer.barrier()
        victim = chunk_files(store)[0]
        saved = victim.read_bytes()
        victim.unlink()
        with pytest.raises(ChunkMissing) as caught:
            writer.commit("a", {"f": recipe})
        assert victim.name in caught.value.digest
        assert list(store.refs()) == []
        victim.write_bytes(saved)
        writer.commit("a", {"f": recipe})
    assert_sound(store)


def test_a_chunk_damaged_before_the_commit_is_never_recorded(store: Store) -> None:
    with store.writer() as writer:
        recipe = writer.put(contents(8, 2 * CHUNK))
        writer.barrier()
        flip_bit(chunk_files(store)[0], 1000)
        with pytest.raises(ChunkDamaged):
            writer.commit("a", {"f": recipe})
    assert list(store.refs()) == []


def test_a_damaged_chunk_that_is_read_is_set_aside_and_written_by_the_next_put(
    store: Store, root: Path
) -> None:
    data = contents(1, 3 * CHUNK)
    commit(store, "m", data)
    (hurt, *_) = chunk_files(store)
    flip_bit(hurt, 1000)
    with store.writer() as writer:
        recipe = writer.put(data)  # all of it is known
        with pytest.raises(ChunkDamaged):
            writer.read(recipe)
        assert (store.context.layout.quarantine / hurt.name).exists() and not hurt.exists()
        assert writer.put(data) == recipe and writer.read(recipe) == data
        writer.commit("again", {"f": recipe})
    flip_bit(hurt, 1000)
    with store.writer() as writer:
        with pytest.raises(ChunkDamaged):
            writer.commit("again", {"f": writer.put(data)}, directory=root / "out")
        writer.commit("again", {"f": writer.put(data)}, directory=root / "out")
    assert_sound(store)


def test_a_chunk_that_is_good_after_all_stays(store: Store) -> None:
    data = contents(1, CHUNK)
    with store.writer() as writer:
        (part,) = writer.put(data).chunks()
        writer.barrier()
        wrong = Recipe((ChunkPart.whole(part.digest, CHUNK - 1),))  # the size is
        with pytest.raises(ChunkDamaged):
            writer.read(wrong)
    assert len(chunk_files(store)) == 1 and not any(store.context.layout.quarantine.iterdir())


def test_a_damaged_manifest_is_written_afresh_by_the_same_commit(store: Store, root: Path) -> None:
    data = contents(9, CHUNK)
    digest = commit(store, "a", data).ref.manifest
    flip_bit(store.context.layout.manifest(digest), 20)
    with pytest.raises(Damaged):
        store.assemble("a", root / "out")
    commit(store, "a", data)
    for ref in store.refs():
        (path,) = store.assemble(str(ref), root / "out")
        assert path.read_bytes() == data
    assert_sound(store)


# --- committing ---------------------------------------------------------------------------------


def test_a_commit_records_what_it_was_given(store: Store) -> None:
    with store.writer() as writer:
        recipe = writer.put(contents(1, 100))
        tensor = TensorEntry("w", "b.bin", 4, 8, "float32", (2,))
        done = writer.commit(
            "a", {"b.bin": recipe, "a.bin": writer.put(b"")}, [tensor], {"n": [1, None, "x"]}
        )
    manifest = store.manifest(done.ref)
    assert [entry.name for entry in manifest.files] == ["a.bin", "b.bin"]
    assert manifest.tensors == (tensor,)
    assert manifest.provenance == {"n": [1, None, "x"]}
    assert manifest.files == done.files


def test_the_same_content_has_one_manifest(store: Store) -> None:
    first = commit(store, "a", b"same")
    second = commit(store, "b", b"same")
    assert first.ref.manifest == second.ref.manifest
    assert second.new_bytes == 0


@pytest.mark.parametrize("name", ["../x", "", "/abs", "a\nb", "x" * 300, "caf\u00e9"])
def test_a_bad_name_is_refused_before_anything_is_written(store: Store, name: str) -> None:
    with store.writer() as writer:
        recipe = writer.put(contents(1, 10))
        with recorded_steps() as steps:
            with pytest.raises(InvalidName):
                writer.commit(name, {"f": recipe})
            with pytest.raises(InvalidName):
                writer.commit("fine", {"../" + name: recipe})
        assert steps == []
    assert list(store.refs()) == []


def test_two_files_that_differ_only_by_case_are_refused(store: Store) -> None:
    with store.writer() as writer, pytest.raises(UsageError, match="case"):
        writer.commit("a", {"F": writer.put(b"1"), "f": writer.put(b"2")})
    assert list(store.refs()) == []


@pytest.mark.parametrize(
    "tensor",
    [
        TensorEntry("t", "other", 0, 1),
        TensorEntry("t", "f", 0, 99),
        TensorEntry("t", "f", -1, 1),
        TensorEntry("t" * 5000, "f", 0, 1),
    ],
)
def test_a_manifest_that_no_reader_would_accept_is_not_written(
    store: Store, tensor: TensorEntry
) -> None:
    with store.writer() as writer, pytest.raises((UsageError, Damaged)):
        writer.commit("a", {"f": writer.put(b"12345")}, [tensor])
    assert list(store.refs()) == []
    collect(store)
    assert chunk_files(store) == []


def test_floats_are_no_provenance(store: Store) -> None:
    with store.writer() as writer, pytest.raises(UsageError):
        writer.commit("a", {"f": writer.put(b"1")}, provenance={"x": 0.5})  # type: ignore[dict-item]


def test_one_writer_may_commit_many_times(store: Store, root: Path) -> None:
    with store.writer() as writer:
        for i in range(3):
            recipe = writer.put(contents(i, CHUNK + i))
            assert writer.commit("a", {"f": recipe}).ref.generation == i + 1
    for i in range(3):
        (path,) = store.assemble(f"a@{i + 1}", root / "out")
        assert path.read_bytes() == contents(i, CHUNK + i)


def test_an_artifact_may_have_no_files_or_empty_ones(store: Store, root: Path) -> None:
    with store.writer() as writer:
        writer.commit("none", {})
        writer.commit("empty", {"f": writer.put(b"")})
    assert store.assemble("none", root / "out") == []
    (path,) = store.assemble("empty", root / "out")
    assert path.read_bytes() == b""
    assert_sound(store)


# --- the end of a writer ------------------------------------------------------------------------


def test_a_closed_writer_refuses_to_work(store: Store) -> None:
    with store.writer() as writer:
        recipe = writer.put(b"x" * CHUNK)
    for operation in (
        lambda: writer.put(b"x"),
        lambda: writer.put_stream(io.BytesIO(b"x")),
        lambda: writer.read(recipe),
        lambda: writer.barrier(),
        lambda: writer.commit("a", {"f": recipe}),
        lambda: writer.open_chunk(Digest.of(b"x" * CHUNK)),
    ):
        with pytest.raises(UsageError, match="closed"):
            operation()


def test_an_abandoned_writer_leaves_only_garbage(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.writer() as writer:
        writer.put(contents(1, 3 * CHUNK))
        writer.barrier()
        writer.put(contents(2, CHUNK))
        raise ZeroDivisionError
    layout = store.context.layout
    assert list(layout.tmp.iterdir()) == list(layout.leases.iterdir()) == []
    assert len(chunk_files(store)) == 3
    assert_sound(store)
    assert collect(store).freed_bytes == 3 * CHUNK
    assert chunk_files(store) == []


def test_an_open_chunk_stays_readable(store: Store) -> None:
    import os

    data = contents(3, CHUNK)
    with store.writer() as writer:
        writer.put(data)
        staged = writer.open_chunk(Digest.of(data))
        writer.barrier()
        published = writer.open_chunk(Digest.of(data))
        with pytest.raises(ChunkMissing):
            writer.open_chunk(Digest.of(b"other"))
    for fd in (staged, published):
        assert os.pread(fd, CHUNK + 1, 0) == data
        os.close(fd)


def test_chunks_are_read_only_files(store: Store) -> None:
    commit(store, "a", contents(1, CHUNK))
    (path,) = chunk_files(store)
    assert path.stat().st_mode & 0o222 == 0


def test_a_source_that_changes_while_it_is_read_is_refused_and_poisons_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = contents(77, CHUNK)
    source = bytearray(right)
    real = ingest.Ingest._copy_and_write

    def meanwhile(self: ingest.Ingest, *args: object) -> None:
        source[5] ^= 1  # after the hash, before the write
        real(self, *args)  # type: ignore[arg-type]

    with store.writer() as writer:
        monkeypatch.setattr(ingest.Ingest, "_copy_and_write", meanwhile)
        with pytest.raises(SourceChanged):
            writer.put(source)
        monkeypatch.undo()
        writer.commit("right", {"f": writer.put(right)})
    assert_sound(store)


def test_where_new_chunks_are_expected_they_are_copied_and_then_hashed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = contents(78, CHUNK)
    source = bytearray(right)
    real = ingest.Ingest._take

    def meanwhile(self: ingest.Ingest, *args: Any) -> Any:
        source[5] ^= 1  # between the copy and the hash
        return real(self, *args)

    with store.writer() as writer:
        writer.put(contents(79, CHUNK))  # new, so the next is expected to be
        monkeypatch.setattr(ingest.Ingest, "_take", meanwhile)
        recipe = writer.put(source)
        monkeypatch.undo()
        assert writer.read(recipe) == right
        assert writer.put(right) == recipe
        writer.commit("right", {"f": recipe})
    assert_sound(store)


def open_files() -> set[str]:
    """Descriptors of this process, without those that only garbage holds."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def test_a_failed_sync_is_not_tried_again_and_believed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "lost", str(path))

    with store.writer() as writer:
        writer.put(b"small, so that it is synced at the barrier")
        monkeypatch.setattr(fsio, "sync_path", fail)
        with pytest.raises(OSError, match="lost"):
            writer.barrier()
        monkeypatch.undo()
        with pytest.raises(OSError, match="lost"):
            writer.barrier()
    assert chunk_files(store) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_chunk_that_could_not_be_written_out_ends_all_publishing(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(ingest, "WRITE_OUT_EACH", 1)
    with store.context.index.write():
        pass  # now it is open
    before = open_files()

    def fail(fd: int) -> None:
        raise OSError(number, "lost")

    with store.writer() as writer:
        writer.put(contents(1, CHUNK))
        with monkeypatch.context() as patch:
            patch.setattr(fsio, "end_write_out", fail)
            with pytest.raises((OSError, NoSpace)):
                writer.barrier()
        opened = open_files()
        for seed in (2, 3):
            with pytest.raises((OSError, NoSpace)):
                writer.put(contents(seed, CHUNK))
        assert open_files() == opened
        with pytest.raises((OSError, NoSpace)):
            writer.barrier()
    assert chunk_files(store) == []
    assert open_files() == before


def test_a_write_out_that_cannot_begin_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(fsio, "begin_write_out", fail)
    before = open_files()
    with pytest.raises(OSError, match="full"):
        fsio.create_begun(tmp_path / "f", b"x", mode=0o600)
    assert open_files() == before and not list(tmp_path.iterdir())


def test_another_try_to_publish_makes_the_names_of_the_first_durable(store: Store) -> None:
    def full(operation: str, path: Path | str) -> None:
        if operation == "rename":
            renamed.append(Path(path))
            if len(renamed) == 2:
                raise OSError(errno.ENOSPC, "full")

    renamed: list[Path] = []
    with store.writer() as writer:
        recipe = writer.put(contents(1, 3 * CHUNK))
        with step_hook(full), pytest.raises(NoSpace):
            writer.barrier()
        with recorded_steps() as steps:
            writer.commit("m", {"f": recipe})
    assert ("sync", str(renamed[0].parent)) in steps
    linked = [operation for operation, _ in steps].index("link")
    assert steps.index(("sync", str(renamed[0].parent))) < linked
    assert_sound(store)


def test_what_the_disk_lost_since_a_writer_began_is_reported_to_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports it to who had the filesystem open before: so open it, and keep it."""
    opened: list[Path] = []
    synced: list[str] = []
    monkeypatch.setattr(ingest, "SYNCFS_FILES", 1)
    real = fsio.FilesystemSync.__init__

    def begin(self: fsio.FilesystemSync, path: Path) -> None:
        opened.append(path)
        real(self, path)

    def note(operation: str, path: Path | str) -> None:
        if operation == "syncfs":
            synced.append(str(path))

    monkeypatch.setattr(fsio.FilesystemSync, "__init__", begin)
    with store.writer() as writer, step_hook(note):
        for seed in range(3):
            writer.put(contents(seed, CHUNK))
            writer.barrier()
    tmp = store.context.layout.tmp
    assert opened[0] == tmp and opened.count(tmp) == 1 and synced.count(str(tmp)) == 3
    assert_sound(store)


def test_a_progress_may_ask_the_writer_how_far_it_is(store: Store) -> None:
    class Curious(Silent):
        def advance(self, nbytes: int) -> None:
            seen.append(writer.counters.chunks)

    seen: list[int] = []
    with store.writer(Curious()) as writer:
        writer.put(contents(1, 4 * CHUNK))
    assert len(seen) == 4
