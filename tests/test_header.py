"""Creating and opening: what is a store, what is not, and who may touch it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from cas import Store, filesystems, stats
from cas.errors import (
    CasError,
    NetworkFilesystem,
    NotAStore,
    ReadOnlyStore,
    StoreNotFound,
    UnknownFormat,
    UsageError,
)
from cas.layout import FANOUT
from cas.testing import Child, Interleaving, step_hook
from cas.testing.damage import mounted_read_only, writable
from cas.testing.processes import can_become, children
from cas.testing.stores import CHUNK, assert_sound, commit, contents, open_store
from cas.verify import verify


def test_a_store_is_created_at_first_use_with_its_parents(root: Path) -> None:
    with open_store(root / "a" / "b") as store:
        assert store.chunk_size == CHUNK
        commit(store, "x", b"1")
    document = json.loads((root / "a" / "b" / "cas.json").read_bytes())
    assert document == {"format": 1, "chunk_size": CHUNK, "id": document["id"]}


def test_the_chunk_size_is_fixed_at_creation(root: Path) -> None:
    open_store(root / "s").close()
    with Store.open(root / "s", chunk_size=4 << 20) as store:
        assert store.chunk_size == CHUNK


def test_an_unsuitable_chunk_size_leaves_nothing_behind(root: Path) -> None:
    with pytest.raises(UsageError):
        Store.open(root / "s", chunk_size=12345)
    assert not (root / "s").exists()


@pytest.mark.parametrize("options", [{"create": False}, {"read_only": True}])
def test_nothing_is_created_unless_asked(root: Path, options: dict[str, bool]) -> None:
    with pytest.raises(StoreNotFound) as caught:
        Store.open(root / "s", **options)  # type: ignore[arg-type]
    assert caught.value.exit_code == 3
    assert not (root / "s").exists()


def test_an_empty_directory_becomes_a_store(root: Path) -> None:
    (root / "s").mkdir()
    open_store(root / "s").close()


@pytest.mark.parametrize("name", ["notes.txt", "chunks/mine.bin", "refs/x/1", "tmp/writer/file"])
def test_a_directory_with_other_files_is_refused_and_left_as_it_is(root: Path, name: str) -> None:
    path = root / "s" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(NotAStore) as caught:
        open_store(root / "s")
    assert caught.value.exit_code == 5
    assert [p for p in (root / "s").rglob("*") if p.is_file()] == [path]


@pytest.mark.parametrize("below", [False, True])
def test_a_file_where_the_store_should_be_is_refused(root: Path, below: bool) -> None:
    (root / "s").write_text("a file")
    with pytest.raises(NotAStore, match="file"):
        open_store(root / "s" / "deeper" if below else root / "s")
    assert (root / "s").read_text() == "a file"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"format":1}',
        '{"format":1,"chunk_size":"65536","id":"x"}',
        '{"format":1,"chunk_size":12345,"id":"x"}',
        '{"format":1,"chunk_size":65536,"id":"x","more":1}',
        '{"format":1,"format":1,"chunk_size":65536,"id":"x"}',
        "[" * 100_000,
        "\x00\x01",
    ],
    ids=range(11),
)
def test_a_header_that_is_none_is_refused(root: Path, text: str) -> None:
    (root / "s").mkdir()
    (root / "s" / "cas.json").write_text(text)
    with pytest.raises(NotAStore):
        open_store(root / "s")
    assert len(list((root / "s").iterdir())) == 1


def test_a_header_that_is_a_directory_is_refused(root: Path) -> None:
    (root / "s" / "cas.json").mkdir(parents=True)
    with pytest.raises(NotAStore):
        open_store(root / "s")


@pytest.mark.parametrize("found", [0, 2, 999, "1", None])
def test_an_unknown_format_is_refused_by_name(root: Path, found: object) -> None:
    open_store(root / "s").close()
    header = root / "s" / "cas.json"
    writable(header)
    header.write_text(json.dumps({"format": found, "whatever": []}))
    with pytest.raises(UnknownFormat) as caught:
        open_store(root / "s")
    assert caught.value.found == found
    assert caught.value.exit_code == 5


def test_a_network_filesystem_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "type_of", lambda path: "nfs4")
    with pytest.raises(NetworkFilesystem, match="nfs4") as caught:
        open_store(root / "s")
    assert caught.value.exit_code == 5
    assert not (root / "s").exists()


def test_a_home_directory_is_expanded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root))
    with open_store(Path("~/s")) as store:
        assert store.path == root / "s"


# --- creation, interrupted and at once ----------------------------------------------------------


def test_two_processes_that_create_it_at_once_make_one_store(root: Path) -> None:
    def create(size: int) -> object:
        def run(child: Child) -> tuple[int, str]:
            child.tell("ready")
            child.wait_for("go")
            with Store.open(root / "s", chunk_size=size) as store:
                commit(store, f"from/{size}", contents(size, 200_000))
                return store.chunk_size, store.context.header.id

        return run

    with children(create(CHUNK), create(2 * CHUNK), create(4 * CHUNK)) as creators:  # type: ignore[arg-type]
        for creator in creators:
            creator.wait_for("ready")
        for creator in creators:
            creator.tell("go")
        assert len({creator.result() for creator in creators}) == 1
    with open_store(root / "s") as store:
        assert len(list(store.refs())) == 3
        assert_sound(store)


def test_who_is_second_by_a_hair_uses_what_the_first_made(root: Path) -> None:
    def first(_: Child) -> None:
        Store.open(root / "s", chunk_size=2 * CHUNK).close()

    hook = Interleaving(lambda operation, path: operation == "link", lambda: Child(first).result())
    with step_hook(hook), open_store(root / "s") as store:
        assert hook.happened
        assert store.chunk_size == 2 * CHUNK
        assert list(store.context.layout.tmp.iterdir()) == []


def test_a_half_made_store_is_finished(root: Path) -> None:
    (root / "s" / "chunks" / "00").mkdir(parents=True)
    (root / "s" / "tmp").mkdir()
    (root / "s" / "tmp" / "header-0123").write_bytes(b"torn")
    with open_store(root / "s") as store:
        commit(store, "a", contents(1, CHUNK))
        assert_sound(store)


@pytest.mark.parametrize("gone", ["tmp", "leases", "quarantine", "locks", "chunks/ab", "empty"])
def test_directories_that_a_copy_or_a_hand_lost_are_made_again(root: Path, gone: str) -> None:
    with open_store(root / "s") as store:
        commit(store, "a", contents(1, 5 * CHUNK))
    if gone == "empty":
        for path in sorted((root / "s").rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
    else:
        shutil.rmtree(root / "s" / gone)
    with open_store(root / "s") as store:
        assert not store.read_only
        commit(store, "b", contents(2, 300 * 1024))
        commit(store, "a", contents(1, 5 * CHUNK))
        assert_sound(store)
        assert len(list(store.context.layout.chunks.iterdir())) == len(FANOUT)


# --- read-only ----------------------------------------------------------------------------------


def use_read_only(store: Store, out: Path) -> None:
    assert store.read_only
    (path,) = store.assemble("a", out)
    assert path.read_bytes() == contents(1, 3 * CHUNK)
    found = stats.stats(store)
    assert (found.chunks, found.generations) == (3, 1)
    report = verify(store)
    assert report.clean and report.complete and report.checked_chunks == 3
    for operation in (
        lambda: store.writer().__enter__(),
        lambda: store.remove("a"),
        lambda: store.set_config("grace", "1h"),
        lambda: store.context.index.rebuild(),
    ):
        with pytest.raises(ReadOnlyStore) as caught:
            operation()
        assert caught.value.exit_code == 5


def test_a_store_opened_read_only_reads_and_refuses_to_write(root: Path) -> None:
    with open_store(root / "s") as store:
        commit(store, "a", contents(1, 3 * CHUNK))
    before = {p: p.stat().st_mtime_ns for p in (root / "s").rglob("*")}
    with Store.open(root / "s", read_only=True) as store:
        use_read_only(store, root / "out")
    assert {p: p.stat().st_mtime_ns for p in (root / "s").rglob("*")} == before


def test_a_store_on_a_read_only_mount_works_for_readers(root: Path) -> None:
    with open_store(root / "s") as store, store.writer() as writer:
        writer.commit("a", {"f": writer.put(contents(1, 3 * CHUNK))})
        # A lease of a process that lives is in the way of nobody.
        try:
            with mounted_read_only(root / "s"):
                store_again = Store.open(root / "s")
                use_read_only(store_again, root / "out")
        except PermissionError as error:
            pytest.skip(str(error))


def test_as_an_ordinary_user_without_permission_it_is_read_only(root: Path) -> None:
    if not can_become(65534):
        pytest.skip("only root can become somebody else")
    with open_store(root / "s") as store:
        commit(store, "a", contents(1, 3 * CHUNK))
    root.chmod(0o755)
    (root / "out").mkdir()
    (root / "out").chmod(0o777)

    def as_nobody(_: Child) -> None:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with Store.open(root / "s") as store:
            use_read_only(store, root / "out")
        with pytest.raises(CasError) as caught:
            Store.open("/root-of-nobody/s")
        assert caught.value.exit_code == 5

    Child(as_nobody).result()


def test_the_root_of_a_shared_store_is_open_to_the_group_too(root: Path) -> None:
    old = os.umask(0o022)
    try:
        open_store(root / "new" / "s", umask=0o002).close()
    finally:
        os.umask(old)
    assert (root / "new" / "s").stat().st_mode & 0o777 == 0o775
    assert (root / "new").stat().st_mode & 0o777 == 0o755


def test_a_closed_store_does_not_come_back_to_life(root: Path) -> None:
    store = open_store(root / "s")
    store.close()
    with pytest.raises(UsageError, match="closed"), store.writer() as writer:
        writer.put(b"x")
