"""Assembling: the right bytes under the final name, or an error and everything as it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cas import Recipe, Store, fsio
from cas.digest import Digest
from cas.errors import (
    Busy,
    CasError,
    ChunkDamaged,
    ChunkError,
    ChunkMissing,
    ManifestDamaged,
    NoSpace,
    PermissionRefused,
    RefNotFound,
    Refused,
)
from cas.leases import Lease
from cas.testing import forked
from cas.testing.damage import flip_bit, truncate
from cas.testing.processes import can_become
from cas.testing.stores import CHUNK, collect, commit, contents, open_store

FILES = {
    "a.bin": contents(1, 3 * CHUNK + 5),
    "b.bin": contents(2, CHUNK),
    "c.bin": bytes(40 * CHUNK) + b"x" + bytes(CHUNK),
}


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with open_store(root / "s") as opened:
        with opened.writer() as writer:
            writer.commit("m", {name: writer.put(data) for name, data in FILES.items()})
        yield opened


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("verify", [True, False])
def test_files_come_back_byte_for_byte(store: Store, root: Path, verify: bool) -> None:
    paths = store.assemble("m", root / "new" / "out", verify=verify)
    assert [path.name for path in paths] == list(FILES)
    assert tree(root / "new" / "out") == FILES


@pytest.mark.parametrize("verify", [True, False])
def test_slices_literals_and_zeros_are_put_together(store: Store, root: Path, verify: bool) -> None:
    data = FILES["a.bin"]
    with store.writer() as writer:
        whole = writer.put(data)
        recipe = Recipe.concat(
            [
                whole.slice(CHUNK - 3, 10),
                Recipe.literal(b"between"),
                writer.put(bytes(70_000)),
                whole.slice(1, 3 * CHUNK),
            ]
        )
        writer.commit("cut", {"f": recipe})
    (path,) = store.assemble("cut", root / "out", verify=verify)
    expected = data[CHUNK - 3 : CHUNK + 7] + b"between" + bytes(70_000) + data[1 : 3 * CHUNK + 1]
    assert path.read_bytes() == expected


def test_old_outputs_are_replaced_and_others_left(store: Store, root: Path) -> None:
    (root / "out").mkdir()
    (root / "out" / "a.bin").write_bytes(b"old")
    (root / "out" / "mine.txt").write_bytes(b"mine")
    store.assemble("m", root / "out")
    assert tree(root / "out") == {**FILES, "mine.txt": b"mine"}


def test_an_output_is_a_file_of_its_own(store: Store, root: Path) -> None:
    (path, *_) = store.assemble("m", root / "out")
    path.write_bytes(b"edited by its owner")
    (again, *_) = store.assemble("m", root / "again")
    assert again.read_bytes() == FILES["a.bin"]


def test_outputs_have_the_permissions_of_ordinary_files(store: Store, root: Path) -> None:
    store.close()

    def work() -> int:
        os.umask(0o027)
        with open_store(root / "s") as again:
            (path, *_) = again.assemble("m", root / "out")
        return path.stat().st_mode & 0o777

    assert forked(work) == 0o640


def spoil(store: Store, how: str) -> Path:
    """Damage the chunk that holds the second 64 KiB of a.bin."""
    entry = next(e for e in store.manifest("m").files if e.name == "a.bin")
    path = store.context.layout.chunk(list(entry.recipe.chunks())[1].digest)
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        truncate(path, 1000)
    elif how == "grown":
        truncate(path, CHUNK + 1)
    elif how == "a directory":
        path.unlink()
        path.mkdir()
    else:
        flip_bit(path, 4321, 3)
    return path


@pytest.mark.parametrize("how", ["deleted", "truncated", "grown", "one bit", "a directory"])
def test_a_bad_chunk_is_named_with_file_and_range_and_changes_nothing(
    store: Store, root: Path, how: str
) -> None:
    victim = spoil(store, how)
    (root / "out").mkdir()
    (root / "out" / "a.bin").write_bytes(b"old a")
    (root / "out" / "b.bin").write_bytes(b"old b")
    with pytest.raises(ChunkError) as caught:
        store.assemble("m", root / "out")
    error = caught.value
    assert type(error) is (ChunkMissing if how == "deleted" else ChunkDamaged)
    assert error.exit_code == 4
    assert (error.file, error.offset, error.length) == ("a.bin", CHUNK, CHUNK)
    assert error.digest == "blake3:" + victim.name
    assert "cas verify" in str(error)
    assert tree(root / "out") == {"a.bin": b"old a", "b.bin": b"old b"}
    assert list(store.context.layout.leases.iterdir()) == []


@pytest.mark.parametrize("how", ["deleted", "truncated", "grown"])
def test_without_verify_sizes_are_still_checked(store: Store, root: Path, how: str) -> None:
    spoil(store, how)
    with pytest.raises(ChunkError):
        store.assemble("m", root / "out", verify=False)
    assert tree(root / "out") == {}


@pytest.mark.parametrize("below", [False, True])
def test_an_output_directory_that_is_a_file_is_refused(
    store: Store, root: Path, below: bool
) -> None:
    (root / "out").write_text("mine")
    with pytest.raises(Refused) as caught:
        store.assemble("m", root / "out" / "x" if below else root / "out")
    assert caught.value.exit_code == 5
    assert (root / "out").read_text() == "mine"


def test_a_directory_in_the_place_of_an_output_is_found_before_anything_is_replaced(
    store: Store, root: Path
) -> None:
    (root / "out" / "b.bin").mkdir(parents=True)
    (root / "out" / "a.bin").write_bytes(b"old")
    with pytest.raises(PermissionRefused, match="directory"):
        store.assemble("m", root / "out")
    assert (root / "out" / "a.bin").read_bytes() == b"old"
    assert sorted(path.name for path in (root / "out").iterdir()) == ["a.bin", "b.bin"]


def test_an_output_directory_that_may_not_be_written_is_refused(store: Store, root: Path) -> None:
    if not can_become(65534):
        pytest.skip("only root can become somebody else")
    store.close()
    (root / "out").mkdir(mode=0o755)
    root.chmod(0o755)

    def work() -> tuple[int, str]:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with open_store(root / "s") as again, pytest.raises(CasError) as caught:
            again.assemble("m", root / "out")
        return caught.value.exit_code, str(caught.value)

    code, text = forked(work)
    assert code == 5
    assert "Permission denied" in text


def test_a_symbolic_link_in_the_place_of_an_output_is_replaced_not_followed(
    store: Store, root: Path
) -> None:
    (root / "out").mkdir()
    (root / "precious").write_bytes(b"precious")
    (root / "out" / "a.bin").symlink_to(root / "precious")
    store.assemble("m", root / "out")
    assert (root / "precious").read_bytes() == b"precious"
    assert not (root / "out" / "a.bin").is_symlink()


def test_unknown_artifacts_and_damaged_manifests_leave_no_output(store: Store, root: Path) -> None:
    with pytest.raises(RefNotFound):
        store.assemble("other", root / "out")
    with pytest.raises(RefNotFound):
        store.assemble("m@9", root / "out")
    flip_bit(store.context.layout.manifest(store.resolve("m").manifest), 30)
    with pytest.raises(ManifestDamaged):
        store.assemble("m", root / "out")
    store.context.layout.manifest(store.resolve("m").manifest).unlink()
    with pytest.raises(ManifestDamaged, match="missing"):
        store.assemble("m", root / "out")
    assert not (root / "out").exists()


def test_long_zero_runs_take_no_space(store: Store, root: Path) -> None:
    commit(store, "sparse", bytes(64 << 20) + b"end")
    (path,) = store.assemble("sparse", root / "out")
    assert path.stat().st_size == (64 << 20) + 3
    assert path.stat().st_blocks * 512 < 1 << 20


def test_an_interrupt_leaves_nothing_behind(store: Store, root: Path) -> None:
    class Impatient:
        def start(self, label: str, total: int | None) -> None: ...

        def advance(self, nbytes: int) -> None:
            raise KeyboardInterrupt

        def finish(self) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        store.assemble("m", root / "out", progress=Impatient())
    assert tree(root / "out") == {}
    assert list(store.context.layout.leases.iterdir()) == []


def test_a_full_disk_between_two_names_says_that_one_of_them_was_given(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fsio.rename

    def rename(source: Path, target: Path) -> None:
        if target == root / "out" / "g":
            raise OSError(errno.ENOSPC, "no space", str(source))
        real(source, target)

    with store.writer() as writer:
        writer.commit("two", {"f": writer.put(b"one"), "g": writer.put(b"other")})
    monkeypatch.setattr(fsio, "rename", rename)
    with pytest.raises(NoSpace) as caught:
        store.assemble("two", root / "out")
    assert f"1 of 2 files in {root / 'out'} were changed" in str(caught.value)
    assert list(tree(root / "out")) == ["f"]


def test_progress_adds_up_to_the_size(store: Store, root: Path) -> None:
    seen: list[int] = []

    class Counting:
        total = None

        def start(self, label: str, total: int | None) -> None:
            self.total = total

        def advance(self, nbytes: int) -> None:
            seen.append(nbytes)

        def finish(self) -> None: ...

    counting = Counting()
    store.assemble("m", root / "out", progress=counting)
    assert sum(seen) == counting.total == sum(map(len, FILES.values()))


def test_a_commit_can_assemble_in_the_same_pass(store: Store, root: Path) -> None:
    with store.writer() as writer:
        recipes = {name: writer.put(data) for name, data in FILES.items()}
        done = writer.commit("again", recipes, directory=root / "out")
    assert tree(root / "out") == FILES
    assert [path.name for path in done.paths] == list(FILES)
    assert store.manifest("again").files == store.manifest("m").files


def test_a_full_store_can_still_be_read_to_another_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Lease, digest: Digest) -> None:
        raise NoSpace(self.layout.root)

    with open_store(root / "s") as store:
        commit(store, "a", contents(3, 2 * CHUNK))
        monkeypatch.setattr(Lease, "add_manifest", full)
        with store.protect(store.resolve("a").manifest), pytest.raises(Busy):
            collect(store)
        assert store.assemble("a", root / "out")[0].read_bytes() == contents(3, 2 * CHUNK)
