"""Every operation on a filesystem with nothing left, or too little: it works, or fails clearly.

A failure is `NoSpace`, loses nothing that was committed, and leaves nothing behind that is in the
way later. gc always works, and frees space.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from cas import Store, gc, ingest, repair, verify
from cas.digest import Digest
from cas.errors import NoSpace
from cas.filesystems import free_bytes
from cas.journal import Event
from cas.retention import Policy
from cas.stats import stats
from cas.testing.damage import fill_disk, mounted_tmpfs
from cas.testing.disks import make_image, mounted_image
from cas.testing.steps import recorded_steps, step_hook
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

KEPT = {"kept/one": contents(1, 15 * CHUNK + 5), "kept/two": contents(2, CHUNK) + b"tail"}
GARBAGE = contents(3, 4 * CHUNK)
NEW = contents(4, 15 * CHUNK + 77)
#: Actions that gave what is in ``kept/one``, and new data.
RECORDED, ACTION = Digest.of(b"recorded"), Digest.of(b"action")
DISK = 32 << 20
#: What an index takes that had to be made anew.
INDEX_BYTES = 160 << 10


# --- disks and stores ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tmpfs", pytest.param("ext4", marks=pytest.mark.slow)])
def disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The mount point of a small filesystem."""
    with tempfile.TemporaryDirectory(prefix="cas-full-") as name, contextlib.ExitStack() as stack:
        point = Path(name) / "disk"
        try:
            if request.param == "tmpfs":
                stack.enter_context(mounted_tmpfs(point, DISK))
            else:
                make_image(Path(name) / "image", request.param, DISK)
                stack.enter_context(mounted_image(Path(name) / "image", point))
        except PermissionError as error:
            pytest.skip(str(error))
        yield point


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    with scratch() as directory:
        with open_store(directory / "store") as store:
            for name, data in KEPT.items():
                commit(store, name, data)
            commit(store, "lost", GARBAGE)
            commit(store, "doomed", KEPT["kept/two"])
            commit(store, "old", contents(50, CHUNK))
            commit(store, "old", contents(51, CHUNK))
            store.remove("lost")
            with store.writer() as writer:
                recipe = writer.put(KEPT["kept/one"])
                writer.put_action(
                    RECORDED, kind="test", factors={}, result=0, recipes=[recipe], seconds=0
                )
        yield directory


@pytest.fixture
def root(disk: Path, template: Path) -> Iterator[Path]:
    """A directory on the small disk, with a store in it: two artifacts to keep, some garbage."""
    copy = disk / "root"
    shutil.copytree(template, copy, symlinks=True)
    with open_store(copy / "store") as store, store.context.index.read():
        pass  # the index is checked, and gets a stamp that fits the copy
    yield copy
    for path in disk.iterdir():
        if path.name != "lost+found":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def full(root: Path, leave: int = 0) -> Iterator[None]:
    """Nothing but ``leave`` bytes free for the length of the block."""
    ballast = fill_disk(root.parent, leave)
    try:
        yield
    finally:
        ballast.unlink()


# --- operations ---------------------------------------------------------------------------------


def put(root: Path) -> None:
    with open_store(root / "store") as store, store.writer() as writer:
        recipe = writer.put(NEW)
        writer.barrier()
        assert writer.read(recipe) == NEW


def commit_known(root: Path) -> None:
    with open_store(root / "store") as store:
        assert commit(store, "again", KEPT["kept/one"]).new_bytes == 0
        assert_assembles(store, "again", KEPT["kept/one"])


def commit_new(root: Path) -> None:
    with open_store(root / "store") as store:
        commit(store, "new", NEW)
        assert_assembles(store, "new", NEW)


def record(root: Path) -> None:
    with open_store(root / "store") as store, store.writer() as writer:
        with store.actions.flight(ACTION) as mine:
            assert mine
            recipe = writer.put(NEW)
            writer.put_action(
                ACTION, kind="test", factors={}, result=0, recipes=[recipe], seconds=0
            )
        store.actions.note([Event("miss", "test")])  # never fails for want of space


def replay(root: Path) -> None:
    with open_store(root / "store") as store, store.writer() as writer:
        found = writer.find_action(RECORDED).record
        assert found is not None and writer.read(found.recipes[0]) == KEPT["kept/one"]


def look_up(root: Path) -> None:
    with open_store(root / "store") as store:
        assert store.actions.get(RECORDED) is not None
        store.actions.note([Event("hit", "test")])


def assemble(root: Path) -> None:
    with open_store(root / "store") as store:
        try:
            (path,) = store.assemble("kept/one", root / "out")
        except NoSpace:
            assert not (root / "out").exists() or not any((root / "out").iterdir())
            raise
        assert path.read_bytes() == KEPT["kept/one"]


def collect_garbage(root: Path) -> None:
    with open_store(root / "store") as store:
        collect(store)
        assert stats(store).garbage_bytes == 0


def drop_old(root: Path) -> None:
    with open_store(root / "store") as store:
        stats(store)
        gc.collect(store, policy=Policy(keep_last=1))
        assert [str(ref) for ref in store.refs() if ref.name == "old"] == ["old@2"]
        assert stats(store).garbage_bytes == 0


def remove(root: Path) -> None:
    with open_store(root / "store") as store:
        if "doomed" in {ref.name for ref in store.refs()}:
            store.remove("doomed")
        assert "doomed" not in {ref.name for ref in store.refs()}


def verify_all(root: Path) -> None:
    with open_store(root / "store") as store:
        report = verify.verify(store)
        assert report.clean and report.complete


def rebuild(root: Path) -> None:
    with open_store(root / "store") as store:
        store.context.index.rebuild()


def open_clean(root: Path) -> None:
    with open_store(root / "store") as store:
        assert stats(store).chunks == len(chunk_files(store))


def open_after_kill(root: Path) -> None:
    (root / "store" / "index" / "stamp").unlink(missing_ok=True)
    open_clean(root)


def create(root: Path) -> None:
    with open_store(root / "another") as store:
        commit(store, "a", b"b")


@dataclass(frozen=True)
class Operation:
    """``needs``: bytes it writes, about. ``works``: there is no excuse on a full disk."""

    run: Callable[[Path], None]
    needs: int
    works: bool = False
    is_large: bool = False


OPERATIONS = {
    "put": Operation(put, len(NEW), is_large=True),
    "commit-known": Operation(commit_known, 16 << 10),
    "commit-new": Operation(commit_new, len(NEW), is_large=True),
    "record": Operation(record, len(NEW), is_large=True),
    "replay": Operation(replay, 8 << 10),
    "look-up": Operation(look_up, 8 << 10, works=True),
    "assemble": Operation(assemble, len(KEPT["kept/one"]), is_large=True),
    "gc": Operation(collect_garbage, 16 << 10, works=True),
    "gc-by-policy": Operation(drop_old, 16 << 10, works=True),
    "rm": Operation(remove, 4 << 10, works=True),
    "verify": Operation(verify_all, 16 << 10),
    "rebuild": Operation(rebuild, 128 << 10),
    "open": Operation(open_clean, 4 << 10, works=True),
    "open-after-kill": Operation(open_after_kill, 4 << 10, works=True),
    "create": Operation(create, 2 << 20),
}


# --- what must hold -----------------------------------------------------------------------------


def assert_assembles(store: Store, name: str, data: bytes) -> None:
    with scratch() as directory:
        (path,) = store.assemble(name, directory)
        assert path.read_bytes() == data


def assert_nothing_lost(root: Path) -> None:
    """As a reader sees it that writes nothing; and no half file has a final name."""
    with open_store(root / "store", read_only=True) as store:
        for name, data in KEPT.items():
            assert_assembles(store, name, data)
        assert store.actions.get(RECORDED) is not None
        for path in chunk_files(store):
            assert Digest.of(path.read_bytes()).hex() == path.name


def assert_gc_works(root: Path) -> None:
    with open_store(root / "store") as store:
        freed = collect(store).freed_bytes
        again = collect(store)
        assert again.freed_bytes == again.dead_chunks == 0
        layout = store.context.layout
        assert not [*layout.tmp.iterdir(), *layout.leases.iterdir()]
    assert freed == 0 or free_bytes(root) >= freed - INDEX_BYTES


def assert_all_is_well(root: Path) -> None:
    with open_store(root / "store") as store:
        assert_sound(store)
        for name, data in KEPT.items():
            assert_assembles(store, name, data)


@pytest.mark.parametrize("free", ["nothing", "one chunk", "half"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_it_works_or_fails_clearly_and_loses_nothing(root: Path, name: str, free: str) -> None:
    operation = OPERATIONS[name]
    leave = {"nothing": 0, "one chunk": CHUNK, "half": operation.needs // 2}[free]
    with full(root, leave):
        error = None
        try:
            operation.run(root)
        except NoSpace as raised:
            error = raised
            assert "no space left" in str(error) and "cas gc" in str(error)
        assert not (operation.works and error), f"{name} must work on a full disk"
        assert error or not operation.is_large, f"{name} cannot have worked"
        assert_nothing_lost(root)
        fill_disk(root.parent)  # what a failed operation gave back
        assert_gc_works(root)
        assert_nothing_lost(root)
    assert_all_is_well(root)
    operation.run(root)
    assert_all_is_well(root)


def test_what_cannot_fit_is_refused_before_the_first_chunk_is_written(root: Path) -> None:
    """Of what is put, three chunks are known, one is all zeros, and two are the same."""
    known, fresh = KEPT["kept/one"][: 3 * CHUNK], contents(6, 16 * CHUNK)
    data = known + fresh + bytes(CHUNK) + fresh[:CHUNK]
    with open_store(root / "store") as store, store.writer() as writer:
        writer.put(b"opens what a writer opens")
        with full(root, len(fresh) - CHUNK):
            with recorded_steps() as steps, pytest.raises(NoSpace) as caught:
                writer.put(data)
            assert caught.value.needed == len(fresh)
            assert caught.value.free is not None and caught.value.free < len(fresh)
            assert steps == [], "something was begun"
        assert writer.read(writer.put(data)) == data
    assert_all_is_well(root)


def test_what_is_known_or_staged_is_put_again_however_little_is_free(root: Path) -> None:
    with open_store(root / "store") as store, store.writer() as writer:
        writer.put(NEW)
        with full(root, 4 * CHUNK):
            assert writer.read(writer.put(NEW)) == NEW
            assert writer.read(writer.put(KEPT["kept/one"])) == KEPT["kept/one"]


def test_an_output_that_cannot_fit_is_refused_before_it_is_begun(root: Path) -> None:
    size = len(KEPT["kept/one"])
    with open_store(root / "store") as store, full(root, size - CHUNK):
        with recorded_steps() as steps, pytest.raises(NoSpace) as caught:
            store.assemble("kept/one", root / "out")
        assert caught.value.needed == size
        created = [path for operation, path in steps if operation == "create" and "/out/" in path]
        assert all("/.cas-" in path for path in created), "only whether it can be written is tried"
        assert not list((root / "out").iterdir())


@contextlib.contextmanager
def filling_up(root: Path, operation: str, part: str, leave: int, after: int = 1) -> Iterator[None]:
    """The disk is full before the ``after``-th ``operation`` on a path that has ``part`` in it."""
    seen: list[Path | str] = []

    def hook(name: str, path: Path | str) -> None:
        if name == operation and part in str(path):
            seen.append(path)
            if len(seen) == after:
                fill_disk(root.parent, leave)

    with step_hook(hook):
        yield
    assert len(seen) >= after, "it never came to that"


def test_a_disk_that_fills_up_while_chunks_are_written_says_what_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread, so that what is written when the ninth chunk finds no room is known."""
    monkeypatch.setattr(ingest, "BARRIER_BYTES", 3 * CHUNK)
    with open_store(root / "store", workers=1) as store:
        before = len(chunk_files(store))
        with (
            filling_up(root, "create", "/store/tmp/", CHUNK // 2, after=9),
            pytest.raises(NoSpace) as caught,
            store.writer() as writer,
        ):
            writer.put(NEW)
        error = caught.value
        published = (len(chunk_files(store)) - before) * CHUNK
    assert error.needed == CHUNK and error.free is not None and error.free < CHUNK
    assert error.remaining is not None and CHUNK <= error.remaining < len(NEW)
    assert published == 6 * CHUNK
    for fact in (
        error.needed,
        error.free,
        error.remaining,
        published,
        "nothing committed",
        "cas gc",
    ):
        assert str(fact) in str(error)
    (root.parent / "ballast-of-a-test").unlink()
    assert_nothing_lost(root)
    put(root)


def test_a_disk_that_fills_up_under_an_output_says_what_all_of_it_needs(root: Path) -> None:
    size = len(KEPT["kept/one"])
    with (
        open_store(root / "store") as store,
        filling_up(root, "create", ".f.", 3 * CHUNK),
        pytest.raises(NoSpace) as caught,
    ):
        store.assemble("kept/one", root / "out")
    error = caught.value
    assert error.needed == size and error.free is not None
    assert 2 * CHUNK <= error.free < size, "without what was begun"
    assert f"no file in {root / 'out'} was changed" in str(error) and "cas gc" in str(error)
    assert not list((root / "out").iterdir())


def test_an_output_on_another_disk_is_not_helped_by_gc(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "store", tmp_path / "store")
    with (
        open_store(tmp_path / "store") as store,
        filling_up(root, "create", ".f.", 3 * CHUNK),
        pytest.raises(NoSpace) as caught,
    ):
        store.assemble("kept/one", root / "out")
    assert "another output directory" in str(caught.value)
    assert "cas gc" not in str(caught.value)


def test_a_commit_that_finds_no_room_for_its_manifest_says_so(root: Path) -> None:
    with open_store(root / "store") as store:
        with pytest.raises(NoSpace) as caught, store.writer() as writer:
            recipe = writer.put(NEW)
            writer.barrier()
            with filling_up(root, "create", "/manifest", 0):
                writer.commit("new", {"f": recipe})
        assert "new" not in {ref.name for ref in store.refs()}
    error = caught.value
    assert error.needed is not None and 500 < error.needed < 10_000
    assert error.free is not None and error.free < 4096
    assert f"{len(NEW)} bytes are in the store already" in str(error)


def test_repair_fails_clearly_and_works_as_soon_as_there_is_room(root: Path) -> None:
    data = KEPT["kept/one"]
    (root / "copy").write_bytes(data)
    with open_store(root / "store") as store:
        lost = store.context.layout.chunk(Digest.of(data[:CHUNK]))
        lost.unlink()
        with full(root):
            report = verify.verify(store, report_only=True)
            assert report.affected_refs == ("kept/one@1",)
            with pytest.raises(NoSpace):
                repair.repair(store, report, [root / "copy"])
            assert not lost.exists()
        assert len(repair.repair(store, report, [root / "copy"]).repaired) == 1
    assert_all_is_well(root)


def test_gc_removes_one_tiny_chunk_with_an_index_that_has_no_spare_page(root: Path) -> None:
    """Nothing it frees is enough for the index's own pages."""
    with open_store(root / "store") as store:
        collect(store)
        commit(store, "tiny", b"x")
        store.remove("tiny")
        collect_manifests_only(store)
        store.context.index.rebuild()
    with full(root):
        with open_store(root / "store") as store:
            report = collect(store)
            assert (report.dead_chunks, report.freed_bytes) == (1, 1)
        assert_nothing_lost(root)
    with open_store(root / "store") as store:
        collect(store)  # which also sweeps an entry that had to stay
    assert_all_is_well(root)


def collect_manifests_only(store: Store) -> None:
    """What a gc leaves that was killed after its manifests: chunks alone."""
    kept = {store.read_ref(ref).manifest.hex() for ref in store.refs()}
    for path in store.context.layout.manifests.glob("*/*"):
        if path.name not in kept:
            path.unlink()


@pytest.mark.parametrize("lost", ["index", "index/data.mdb", "index/lock.mdb"])
def test_gc_works_when_the_index_is_gone_too(root: Path, lost: str) -> None:
    gone = root / "store" / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with full(root):
        remove(root)
        assert_gc_works(root)
        assert_nothing_lost(root)
    assert_all_is_well(root)


def test_gc_works_when_the_index_is_damaged(root: Path) -> None:
    data = root / "store" / "index" / "data.mdb"
    data.write_bytes(b"\xff" * data.stat().st_size)
    with full(root):
        assert_gc_works(root)
        assert_nothing_lost(root)
    assert_all_is_well(root)


def test_the_command_line_exits_with_6_or_does_it(root: Path) -> None:
    from cas_cli.main import cli

    def run(*arguments: str) -> int:
        command = ["--store", str(root / "store"), *arguments]
        result = CliRunner().invoke(cli, command, prog_name="cas")
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code

    with full(root):
        assert run("assemble", "kept/one", "-o", str(root / "out")) == 6
        assert run("ls") == run("show", "kept/one") == run("stats") == 0
        assert run("verify") in (0, 6)
        assert run("rm", "doomed") == 0
        assert run("gc") == 0
    assert run("assemble", "kept/one", "-o", str(root / "out")) == 0
    assert run("verify") == 0
