"""A store for a group: what one member makes, or leaves behind when killed, the others can use.

With real users and groups, in children that stop being root. Every member's own umask is 077.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cas import Digest, Store, gc, quarantine, repair, sharing, stats, verify
from cas.errors import CasError, PermissionRefused
from cas.journal import Event
from cas.layout import Layout
from cas.modes import Modes
from cas.retention import Policy
from cas.testing import Child, KillAt, step_hook
from cas.testing.damage import flip_bit
from cas.testing.processes import ChildFailed
from cas.testing.stores import (
    CHUNK,
    assert_sound,
    collect,
    commit,
    contents,
    open_store,
)

TEAM = 54_320
ONE, TWO = contents(1, 3 * CHUNK + 5), contents(2, 2 * CHUNK)


@dataclass(frozen=True)
class User:
    uid: int
    gid: int
    groups: tuple[int, ...]

    def run(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` as this user, in a process of its own."""
        return self.start(lambda _: function()).result()

    def start(self, function: Callable[[Child], Any]) -> Child:
        def become(child: Child) -> Any:
            os.setgroups(self.groups)
            os.setgid(self.gid)
            os.setuid(self.uid)
            os.umask(0o077)
            return function(child)

        return Child(become)


ANN = User(54_321, 54_321, (TEAM,))
BEN = User(54_322, TEAM, ())
EVE = User(54_323, 54_323, ())


@pytest.fixture
def shared(root: Path) -> Path:
    """Where the team's store will be: a directory that its members may write to."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    root.chmod(0o755)
    path = root / "team"
    path.mkdir()
    try:
        os.chown(path, 0, TEAM)
        ANN.run(os.getuid)
    except (OSError, ChildFailed) as error:  # root of a container with few users
        pytest.skip(f"this root cannot become somebody else: {error}")
    path.chmod(0o2775)
    (root / "out").mkdir()
    (root / "out").chmod(0o1777)
    return path / "s"


def make(path: Path, umask: str = "0007") -> None:
    """As the documentation says it: the first member creates the store by setting the umask."""
    with open_store(path) as store:
        store.set_config("umask", umask)


def put(path: Path, name: str, data: bytes) -> int:
    with open_store(path) as store:
        assert not store.read_only
        return commit(store, name, data).ref.generation


def get(path: Path, name: str) -> bytes:
    with open_store(path) as store:
        target = path.parent.parent / "out" / f"{os.getuid()}-{os.getpid()}"
        (file,) = store.assemble(name, target)
        return file.read_bytes()


def assert_shared(path: Path, umask: int = 0o007) -> None:
    """Whatever lies in the store is the team's, and the team may do what its owner may."""
    for file in [path, *path.rglob("*")]:
        found = file.lstat()
        assert found.st_gid == TEAM, file
        mode = stat.S_IMODE(found.st_mode)
        assert (mode >> 3 & 7) == (mode >> 6 & 7), f"{file}: {mode:o}"
        assert mode & umask & 0o777 == 0, f"{file}: {mode:o}"
        assert not file.is_dir() or mode & 0o2000, file


# --- one after the other ------------------------------------------------------------------------


@pytest.mark.parametrize("first, second", [(ANN, BEN), (BEN, ANN)], ids=["ann", "ben"])
def test_members_write_read_collect_and_repair_what_the_others_made(
    shared: Path, first: User, second: User
) -> None:
    first.run(lambda: make(shared))
    assert_shared(shared)
    assert first.run(lambda: put(shared, "a", ONE)) == 1
    assert second.run(lambda: put(shared, "a", TWO)) == 2
    assert second.run(lambda: put(shared, "b", TWO)) == 1
    assert first.run(lambda: put(shared, "b", ONE)) == 2
    assert_shared(shared)
    for user in (first, second):
        assert user.run(lambda: get(shared, "a@1")) == ONE
        assert user.run(lambda: get(shared, "b@1")) == TWO
    second.run(lambda: remove_and_collect(shared, "a"))
    first.run(lambda: remove_and_collect(shared, "b"))
    assert_shared(shared)


def remove_and_collect(path: Path, name: str) -> None:
    with open_store(path) as store:
        store.remove(name)
        collect(store)
        assert_sound(store)
        assert not store.context.layout.ref_dir(name).exists()


def test_gc_frees_what_another_member_wrote(shared: Path) -> None:
    ANN.run(lambda: make(shared))
    ANN.run(lambda: put(shared, "a", ONE))

    def free() -> int:
        with open_store(shared) as store:
            store.remove("a")
            freed = collect(store).freed_bytes
            assert stats.stats(store).physical_bytes == 0
            return freed

    assert BEN.run(free) == len(ONE)


def test_members_set_aside_repair_and_delete_the_chunks_of_others(shared: Path) -> None:
    ANN.run(lambda: make(shared))
    ANN.run(lambda: put(shared, "a", ONE))
    chunk = Layout(shared).chunk(Digest.of(ONE[:CHUNK]))
    flip_bit(chunk)
    chunk.chmod(0o440)
    (shared.parent.parent / "copy").write_bytes(ONE)

    def mend() -> None:
        with open_store(shared) as store:
            report = verify.verify(store)
            assert len(report.damaged) == 1
            done = repair.repair(store, report, [shared.parent.parent / "copy"])
            assert done.repaired == report.damaged
            quarantine.execute(store, quarantine.plan(store))
            assert not list(store.context.layout.quarantine.iterdir())

    BEN.run(mend)
    assert_shared(shared)
    assert ANN.run(lambda: get(shared, "a")) == ONE


def test_members_rebuild_and_replace_the_index_of_others(shared: Path) -> None:
    ANN.run(lambda: make(shared))
    ANN.run(lambda: put(shared, "a", ONE))

    def rebuild() -> None:
        with open_store(shared) as store:
            store.context.index.rebuild()
            assert_sound(store)

    def lose() -> None:
        data = shared / "index" / "data.mdb"
        data.write_bytes(b"garbage" * 1000)
        put(shared, "a", ONE)

    BEN.run(rebuild)
    assert_shared(shared)
    ANN.run(lose)
    assert_shared(shared)
    BEN.run(lose)
    assert_shared(shared)
    assert ANN.run(lambda: put(shared, "a", TWO)) == 4


def test_members_use_replace_and_count_the_actions_of_others(shared: Path) -> None:
    key = Digest.of(b"action")

    def record(data: bytes) -> None:
        with open_store(shared) as store, store.writer() as writer, store.actions.flight(key):
            recipe = writer.put(data)
            writer.put_action(key, kind="test", factors={}, result=0, recipes=[recipe], seconds=0)

    def look() -> tuple[bytes, int]:
        with open_store(shared) as store, store.writer() as writer:
            found = writer.find_action(key).record
            assert found is not None
            store.actions.note([Event("hit", "test")])
            return writer.read(found.recipes[0]), store.actions.tally().hits

    def forget() -> bool:
        with open_store(shared) as store:
            return store.actions.drop(key)

    ANN.run(lambda: make(shared))
    ANN.run(lambda: record(ONE))
    assert_shared(shared)
    record_file = Layout(shared).action(key)
    os.utime(record_file, (5, 5))
    assert BEN.run(look) == (ONE, 1) and record_file.stat().st_mtime > 5
    assert ANN.run(look) == (ONE, 2)
    BEN.run(lambda: record(TWO))
    assert_shared(shared)
    assert ANN.run(look) == (TWO, 3)
    assert ANN.run(forget)


def test_a_setting_of_one_member_is_read_and_replaced_by_another(shared: Path) -> None:
    ANN.run(lambda: make(shared))

    def configure() -> None:
        with open_store(shared) as store:
            assert store.context.config.umask == 0o007
            store.set_config("grace", "1h")

    BEN.run(configure)
    ANN.run(configure)
    assert_shared(shared)


def test_a_directory_without_setgid_is_enough_where_the_team_is_the_first_members_group(
    shared: Path,
) -> None:
    shared.parent.chmod(0o0775)
    BEN.run(lambda: make(shared))
    ANN.run(lambda: put(shared, "a", ONE))
    BEN.run(lambda: put(shared, "a", TWO))
    assert_shared(shared)


# --- at once, and killed ------------------------------------------------------------------------


@pytest.mark.parametrize("first, second", [(ANN, BEN), (BEN, ANN)], ids=["ann", "ben"])
def test_what_a_killed_member_staged_is_collected_by_another(
    shared: Path, first: User, second: User
) -> None:
    first.run(lambda: make(shared))

    def stage(child: Child) -> None:
        with open_store(shared) as store, store.writer() as writer:
            writer.put(ONE)
            child.tell("staged")
            child.wait_for("never")

    def clean() -> tuple[int, int]:
        with open_store(shared) as store:
            plan = gc.plan(store)
            gc.execute(store, plan)
            layout = store.context.layout
            return plan.staged_bytes, len([*layout.tmp.iterdir(), *layout.leases.iterdir()])

    writer = first.start(stage)
    writer.wait_for("staged")
    assert second.run(clean) == (0, 2), "it lives"
    writer.kill()
    assert second.run(clean) == (len(ONE), 0)


def test_a_member_who_shares_nothing_stops_gc_instead_of_losing_what_is_leased(
    shared: Path,
) -> None:
    """An umask of one's own beats the store's; the lease then says to others nothing but `no`."""
    ANN.run(lambda: make(shared))
    ANN.run(lambda: put(shared, "a", ONE))

    def use(child: Child) -> None:
        with open_store(shared, umask=0o077) as store, store.writer() as writer:
            assert writer.put(ONE).size == len(ONE)
            child.tell("put")
            child.wait_for("go on")
            writer.commit("again", {"f": writer.put(ONE)})

    def try_gc() -> None:
        with open_store(shared) as store:
            store.remove("a")
            with pytest.raises(PermissionRefused, match="leases") as caught:
                collect(store)
            assert caught.value.exit_code == 5

    user = ANN.start(use)
    user.wait_for("put")
    BEN.run(try_gc)
    user.tell("go on")
    user.result()
    assert ANN.run(lambda: get(shared, "again")) == ONE


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_member_killed_at_any_step_is_in_no_other_members_way(shared: Path, stride: int) -> None:
    ANN.run(lambda: make(shared))
    ANN.run(lambda: put(shared, "kept", TWO))
    number, killed = 1, True
    while killed:
        name = f"new/{number}"

        def work(_: Child, number: int = number, name: str = name) -> None:
            with step_hook(KillAt(number)):
                put(shared, name, contents(number, CHUNK + number))
                remove_and_collect(shared, name)

        def go_on(number: int = number, name: str = name) -> None:
            with open_store(shared) as store:
                collect(store)
                assert commit(store, name, contents(number, CHUNK + number)).ref.generation <= 2
                assert commit(store, "shared", contents(number, 10)).ref.generation >= 1
                store.remove(name)
                collect(store)
                layout = store.context.layout
                assert not [*layout.tmp.iterdir(), *layout.leases.iterdir()]
                assert_sound(store)

        child = (ANN if number % 2 else BEN).start(work)
        try:
            child.result()
            killed = False
        except ChildFailed as error:
            assert child.wait() == -9, error
        (BEN if number % 2 else ANN).run(go_on)
        number += stride
    assert number > 40
    assert ANN.run(lambda: get(shared, "kept")) == TWO
    assert_shared(shared)


# --- outsiders ----------------------------------------------------------------------------------


def test_who_is_in_no_group_is_refused_by_a_private_store(shared: Path) -> None:
    ANN.run(lambda: make(shared))
    ANN.run(lambda: put(shared, "a", ONE))

    def look() -> None:
        with pytest.raises(PermissionRefused) as caught:
            open_store(shared)
        assert caught.value.exit_code == 5

    EVE.run(look)


def test_who_is_in_no_group_reads_a_public_store_and_writes_nothing(shared: Path) -> None:
    ANN.run(lambda: make(shared, "0002"))
    ANN.run(lambda: put(shared, "a", ONE))
    BEN.run(lambda: put(shared, "a", ONE))
    assert_shared(shared, 0o002)

    def read() -> None:
        with open_store(shared) as store:
            assert store.read_only
            assert verify.verify(store).clean
            assert stats.stats(store).generations == 2
            with pytest.raises(CasError) as caught:
                store.remove("a")
            assert caught.value.exit_code == 5
        assert get(shared, "a") == ONE

    EVE.run(read)


# --- a store that becomes shared ----------------------------------------------------------------


def test_a_private_store_becomes_the_teams_when_its_umask_is_set(shared: Path) -> None:
    def private() -> None:
        put(shared, "a", ONE)
        commit_and_die_later()

    def commit_and_die_later() -> None:
        (shared / "tmp" / ("d" * 32)).mkdir()
        (shared / "tmp" / ("d" * 32) / "half").write_bytes(b"half a chunk")

    ANN.run(private)
    assert (shared / "refs" / "a").stat().st_mode & 0o777 == 0o700

    def look() -> None:
        with pytest.raises(PermissionRefused):
            open_store(shared)

    BEN.run(look)
    ANN.run(lambda: make(shared))
    assert_shared(shared)
    assert BEN.run(lambda: put(shared, "a", TWO)) == 2
    BEN.run(lambda: remove_and_collect(shared, "a"))


def test_files_of_other_members_are_counted_where_only_they_can_change_them(shared: Path) -> None:
    ANN.run(lambda: make(shared))
    ANN.run(lambda: put(shared, "a", ONE))
    BEN.run(lambda: put(shared, "b", TWO))

    def widen() -> sharing.Adjusted:
        return sharing.adjust(Layout(shared), Modes(0o002))

    found = ANN.run(widen)
    assert found.changed > 500 and found.foreign >= 4
    rest = BEN.run(widen)
    assert rest.changed == found.foreign and rest.foreign == 0
    assert ANN.run(widen) == sharing.Adjusted(0, 0)
    assert_shared(shared, 0o002)


def test_links_out_of_the_store_are_not_followed(root: Path) -> None:
    open_store(root / "s").close()
    (root / "outside").mkdir(mode=0o700)
    (root / "outside" / "file").write_bytes(b"mine")
    before = (root / "outside" / "file").stat().st_mode
    (root / "s" / "refs" / "link").symlink_to(root / "outside")
    sharing.adjust(Layout(root / "s"), Modes(0o000))
    assert (root / "outside").stat().st_mode & 0o777 == 0o700
    assert (root / "outside" / "file").stat().st_mode == before


def test_an_open_store_gives_new_files_the_new_modes(root: Path) -> None:
    with open_store(root / "s") as store:
        commit(store, "a", ONE)
        store.set_config("umask", "0007")
        commit(store, "b", TWO)
        store.context.index.rebuild()
        assert isinstance(store, Store)
    for path in [root / "s", *(root / "s").rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode & 0o007 == 0 and (mode >> 3 & 7) == (mode >> 6 & 7), f"{path}: {mode:o}"


def test_what_one_member_uses_stays_though_another_committed_it(shared: Path) -> None:
    def fill() -> None:
        make(shared)
        for data in (ONE, TWO, ONE + TWO):
            put(shared, "a", data)
        for path in Layout(shared).ref_dir("a").iterdir():
            os.utime(path, (1e9, 1e9))

    def drop() -> list[str]:
        with open_store(shared) as store:
            policy = Policy(older_than=3600)
            return [str(root) for root in gc.collect(store, policy=policy).dropped]

    ANN.run(fill)
    assert BEN.run(lambda: get(shared, "a@1")) == ONE
    assert ANN.run(drop) == ["a@2"]
    assert BEN.run(lambda: get(shared, "a@1")) == ONE
