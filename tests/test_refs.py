"""Refs: generations that only grow, and files that are whole or named in an error."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas import Store, fsio, refs
from cas.digest import Digest
from cas.errors import InvalidName, RefDamaged, RefNotFound, Refused
from cas.layout import Layout
from cas.refs import RefId
from cas.testing.damage import truncate, writable
from cas.testing.stores import assert_sound, collect, commit, contents, open_store, scratch
from cas.testing.strategies import no_deadlines

no_deadlines()


def test_generations_rise_and_the_highest_is_current(store: Store) -> None:
    for i in range(3):
        assert commit(store, "a/b", bytes([i + 1])).ref.generation == i + 1
    assert store.resolve("a/b").generation == 3
    assert store.resolve("a/b@2").generation == 2
    assert list(store.refs()) == [RefId("a/b", g) for g in (1, 2, 3)]


def test_removing_the_current_generation_makes_the_one_before_it_current(store: Store) -> None:
    commit(store, "a", b"1")
    commit(store, "a", b"2")
    assert [str(ref) for ref in store.remove("a@2")] == ["a@2"]
    assert store.resolve("a").generation == 1


def test_removing_a_name_removes_all_of_it(store: Store) -> None:
    commit(store, "a", b"1")
    commit(store, "a", b"2")
    commit(store, "a/b", b"3")
    assert len(store.remove("a")) == 2
    assert [str(ref) for ref in store.refs()] == ["a/b@1"]
    with pytest.raises(RefNotFound):
        store.remove("a")


@pytest.mark.parametrize("name", ["nothing", "mobilenet@7", "mobilenet/x"])
def test_an_unknown_ref_is_reported_with_what_there_is(store: Store, name: str) -> None:
    commit(store, "mobilenet", b"1")
    with pytest.raises(RefNotFound) as caught:
        store.resolve(name)
    assert caught.value.exit_code == 3
    if name != "nothing":
        assert "mobilenet" in str(caught.value).split("; ")[1]


def test_two_names_that_differ_only_by_case_cannot_both_exist(store: Store) -> None:
    commit(store, "Model", b"1")
    with store.writer() as writer, pytest.raises(InvalidName, match="only by case"):
        writer.commit("model", {"f": writer.put(b"2")})
    commit(store, "Model", b"3")


@given(st.binary(max_size=130))
def test_no_content_of_a_ref_file_is_taken_for_a_digest_that_it_is_not(data: bytes) -> None:
    with scratch() as path:
        layout = open_small(path)
        layout.ref_dir("a").mkdir()
        layout.ref("a", 1).write_bytes(data)
        try:
            found = refs.read(layout, RefId("a", 1))
        except RefDamaged as error:
            assert str(layout.ref("a", 1)) in str(error)
        else:
            assert f"{found.manifest}\n".encode() == data


def open_small(path: object) -> refs.Layout:
    layout = refs.Layout(path)  # type: ignore[arg-type]
    layout.refs.mkdir()
    return layout


@pytest.mark.parametrize("size", [0, 1, 40, 71])
def test_a_truncated_ref_is_damaged_not_missing(store: Store, size: int) -> None:
    ref = commit(store, "a", b"1").ref
    truncate(store.context.layout.ref("a", 1), size)
    with pytest.raises(RefDamaged) as caught:
        store.resolve("a")
    assert caught.value.exit_code == 4
    assert store.remove("a") == [ref.id]  # it can still be removed


def test_a_ref_that_names_a_path_is_refused(store: Store) -> None:
    commit(store, "a", b"1")
    path = store.context.layout.ref("a", 1)
    writable(path)
    path.write_text("blake3:../../../../etc/passwd\n")
    with pytest.raises(RefDamaged):
        store.resolve("a")


def test_what_is_not_ours_in_the_directory_is_ignored_by_everything(store: Store) -> None:
    commit(store, "a", b"1")
    layout = store.context.layout
    (layout.refs / "README").write_text("hello")
    (layout.refs / ".DS_Store").write_text("")
    (layout.refs / "bad name").mkdir()
    (layout.refs / "%2e%2e").mkdir()
    (layout.ref_dir("a") / "00000002.bak").write_text("")
    (layout.ref_dir("a") / "2").write_text("")
    assert [str(ref) for ref in store.refs()] == ["a@1"]
    collect(store)
    assert_sound(store)
    assert store.resolve("a").generation == 1
    assert (layout.refs / "README").exists()


def test_a_ref_that_is_a_directory_is_damaged(store: Store) -> None:
    commit(store, "a", b"1")
    store.context.layout.ref("a", 2).mkdir()
    with pytest.raises(RefDamaged):
        store.resolve("a")
    plan_problems = collect(store).problems
    assert len(plan_problems) == 1


def test_a_name_that_is_free_again_starts_anew(store: Store) -> None:
    commit(store, "a", contents(1, 100))
    store.remove("a")
    assert not store.context.layout.ref_dir("a").exists()
    assert commit(store, "a", contents(2, 100)).ref.generation == 1


def entries(store: Store, name: str = "a") -> set[str]:
    return {path.name for path in store.context.layout.ref_dir(name).iterdir()}


def fill(store: Store, count: int, name: str = "a") -> None:
    for number in range(count):
        commit(store, name, contents(number, 100))


def test_the_number_of_a_removed_generation_is_not_used_again(store: Store) -> None:
    fill(store, 3)
    assert [str(ref) for ref in store.remove("a@3")] == ["a@3"]
    assert [str(ref) for ref in store.refs()] == ["a@1", "a@2"]
    assert store.resolve("a").generation == 2
    with pytest.raises(RefNotFound):
        store.remove("a@3")
    assert collect(store).dead_chunks == 1
    assert commit(store, "a", b"new").ref.generation == 4
    assert_sound(store)


def test_of_a_name_no_more_than_one_removed_number_is_kept(store: Store) -> None:
    fill(store, 4)
    for number, left in ((4, 4), (2, 4), (3, 4)):
        store.remove(f"a@{number}")
        assert [name for name in entries(store) if "gone" in name] == [f"{left:08d}.gone"]
    fill(store, 1)
    assert entries(store) == {"00000001", "00000004.gone", "00000005"}
    store.remove("a@5")
    assert entries(store) == {"00000001", "00000005.gone"}


def test_a_name_without_generations_keeps_no_number(store: Store) -> None:
    fill(store, 3)
    for number in (3, 1, 2):
        store.remove(f"a@{number}")
    assert not store.context.layout.ref_dir("a").exists()
    assert commit(store, "A", b"another").ref.generation == 1


def test_what_a_kill_leaves_of_a_removed_name_is_gcs_and_in_nobodys_way(store: Store) -> None:
    fill(store, 2)
    store.remove("a@2")
    store.context.layout.ref("a", 1).unlink()  # killed before it removed the rest
    assert list(store.refs()) == []
    commit(store, "A", b"differs only by case")
    store.remove("A")
    collect(store)
    assert not store.context.layout.ref_dir("a").exists()


def test_a_generation_is_removed_with_one_look_at_its_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More would count: of a name with thousands, thousands may go at once."""
    fill(store, 3)
    looked: list[str] = []
    real = refs._entries

    def entries_of(layout: Layout, name: str) -> list[str]:
        looked.append(name)
        return real(layout, name)

    monkeypatch.setattr(refs, "_entries", entries_of)
    for number in (3, 1, 2):
        looked.clear()
        assert refs.remove(store.context.layout, RefId("a", number))
        assert len(looked) == 1


def test_a_name_that_is_a_link_to_an_empty_directory_is_left_alone_by_gc(
    store: Store, tmp_path: Path
) -> None:
    link = store.context.layout.ref_dir("elsewhere")
    link.symlink_to(tmp_path, target_is_directory=True)
    commit(store, "a", b"1")
    assert collect(store).problems == ()
    assert link.is_symlink() and [str(ref) for ref in store.refs()] == ["a@1"]


def test_a_generation_that_cannot_be_renamed_on_a_full_disk_is_removed_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 3)

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(fsio, "rename", full)
    store.remove("a@3")
    assert entries(store) == {"00000001", "00000002"}


def test_the_largest_number_is_free_again_when_it_is_removed(store: Store) -> None:
    fill(store, 1)
    last = store.context.layout.ref("a", refs.MAX_GENERATION)
    last.write_bytes(store.context.layout.ref("a", 1).read_bytes())
    with pytest.raises(Refused, match="no generation left"):
        fill(store, 1)
    store.remove(f"a@{refs.MAX_GENERATION}")
    fill(store, 1)
    assert store.resolve("a").generation == 2


def test_names_that_only_resemble_a_removed_generation_are_ignored(store: Store) -> None:
    fill(store, 1)
    directory = store.context.layout.ref_dir("a")
    for name in ("7.gone", "x.gone", "00000007.gone.gone", "00000000.gone", ".gone"):
        (directory / name).touch()
    fill(store, 1)
    assert store.resolve("a").generation == 2


def test_an_unreadable_digest_is_not_resolved_to_another(store: Store) -> None:
    commit(store, "a", b"1")
    path = store.context.layout.ref("a", 1)
    writable(path)
    path.write_text(f"{Digest.of(b'nothing')}\n")
    with pytest.raises(Exception, match="is missing"):
        store.manifest("a")


def test_a_commit_that_failed_does_not_take_its_name(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        (store.context.layout.refs / "Model").mkdir()  # what a kill before the link leaves
        assert commit(store, "model", b"x").ref.generation == 1
