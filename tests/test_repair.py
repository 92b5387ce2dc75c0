"""Repair: what is lost comes back from any file that has the bytes, and from nothing else."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cas import Digest, Recipe, Store, verify
from cas.errors import ReadOnlyStore, UsageError
from cas.repair import Repair, repair
from cas.searching import SourceMissing
from cas.testing.damage import flip_bit, writable
from cas.testing.stores import CHUNK, assert_sound, chunk_files, commit, contents, open_store

#: Two tensors, of several chunks and of less than one; the program around them is literals.
BIG = contents(1, 3 * CHUNK + 777)
SMALL = contents(2, 5000)
HEAD, PADDING, TAIL = contents(3, 300), bytes(4096 - 300), contents(4, 99)
FILE = HEAD + PADDING + BIG + PADDING + SMALL + TAIL
PIECES = [BIG[o : o + CHUNK] for o in range(0, len(BIG), CHUNK)]


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    """One artifact of a program with weights, and another that nothing happens to."""
    with open_store(root / "s") as opened:
        with opened.writer() as writer:
            parts = [writer.put(BIG), Recipe.literal(PADDING), writer.put(SMALL)]
            whole = [Recipe.literal(HEAD + PADDING), *parts, Recipe.literal(TAIL)]
            writer.commit("model", {"model.pte": Recipe.concat(whole)})
        commit(opened, "other", contents(9, 100))
        yield opened


def lose(store: Store, *data: bytes) -> set[Digest]:
    """Remove chunks by hand."""
    lost = {Digest.of(piece) for piece in data}
    for digest in lost:
        store.context.layout.chunk(digest).unlink()
    return lost


def mend(store: Store, *sources: Path, dry_run: bool = False) -> Repair:
    return repair(store, verify.verify(store), sources, dry_run=dry_run)


def assert_whole(store: Store, root: Path) -> None:
    assert_sound(store)
    (path,) = store.assemble("model", root / "out")
    assert path.read_bytes() == FILE


# --- where the bytes may be ---------------------------------------------------------------------


def safetensors(tensors: dict[str, bytes]) -> bytes:
    """https://huggingface.co/docs/safetensors, in order, with a header of any length."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, data in tensors.items():
        offsets = [at, at + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": offsets}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def as_file(path: Path) -> None:
    path.write_bytes(FILE)


def as_checkpoint(path: Path) -> None:
    path.write_bytes(safetensors({"x": b"abc", "small": SMALL, "big": BIG}))


def as_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"not loaded")
        archive.writestr("archive/data/0", SMALL)
        archive.writestr("archive/data/1", BIG)


def as_raw_tensors_in_a_directory(path: Path) -> None:
    (path / "below").mkdir(parents=True)
    (path / "below" / "big.bin").write_bytes(BIG)
    (path / "small.bin").write_bytes(SMALL)


SOURCES: dict[str, Callable[[Path], None]] = {
    "the artifact's file": as_file,
    "a safetensors checkpoint": as_checkpoint,
    "a zip archive": as_zip,
    "a directory of tensors": as_raw_tensors_in_a_directory,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_chunk_comes_back_from_any_file_that_has_its_tensor(
    store: Store, root: Path, kind: str
) -> None:
    SOURCES[kind](root / "source")
    lost = lose(store, *PIECES, SMALL)
    done = mend(store, root / "source")
    assert set(done.repaired) == lost
    assert (done.missing, done.affected_refs) == ((), ())
    assert_whole(store, root)


@pytest.mark.parametrize("gone", [[0], [1], [3], [0, 1], [1, 2, 3], [0, 2]], ids=str)
def test_neighbours_show_where_chunks_are_in_a_file_of_an_unknown_kind(
    store: Store, root: Path, gone: list[int]
) -> None:
    """The same tensor somewhere in a file that nobody described, at an odd place."""
    (root / "source").write_bytes(contents(50, 12_345) + BIG + contents(51, 10))
    lost = lose(store, *(PIECES[i] for i in gone))
    assert set(mend(store, root / "source").repaired) == lost
    assert_whole(store, root)


def test_a_neighbour_that_occurs_in_many_places_is_tried_in_all_of_them(
    store: Store, root: Path
) -> None:
    (root / "source").write_bytes(b"x" + (PIECES[0] + b"wrong") * 3 + BIG)
    lost = lose(store, PIECES[1])
    assert set(mend(store, root / "source").repaired) == lost


def test_a_chunk_of_which_files_hold_only_slices_is_put_together(root: Path) -> None:
    data = contents(7, CHUNK)
    with open_store(root / "s") as store:
        with store.writer() as writer:
            recipe = writer.put(data)
            parts = [recipe.slice(40_000, CHUNK - 40_000), recipe.slice(0, 40_100)]
            writer.commit("swapped", {"f": Recipe.concat(parts)})
        (root / "source").write_bytes(data[40_000:] + data[:40_100])
        lost = lose(store, data)
        assert set(mend(store, root / "source").repaired) == lost
        assert_sound(store)


def test_what_only_could_not_be_read_for_a_moment_comes_back_from_the_quarantine(
    store: Store, root: Path
) -> None:
    victim = store.context.layout.chunk(Digest.of(PIECES[2]))
    flip_bit(victim, 5)
    report = verify.verify(store)
    aside = store.context.layout.quarantined(Digest.of(PIECES[2]))
    flip_bit(aside, 5)
    done = repair(store, report)
    assert done.repaired == report.damaged
    assert_whole(store, root)


# --- what is not believed -----------------------------------------------------------------------


def test_a_damaged_source_gives_what_is_good_of_it_and_the_rest_is_named(
    store: Store, root: Path
) -> None:
    as_file(root / "source")
    flip_bit(root / "source", len(HEAD + PADDING) + CHUNK + 100)
    lost = lose(store, *PIECES, SMALL)
    done = mend(store, root / "source")
    bad = Digest.of(PIECES[1])
    assert set(done.repaired) == lost - {bad}
    (need,) = done.missing
    assert (need.digest, need.ref, need.file) == (bad, "model@1", "model.pte")
    assert FILE[need.offset : need.offset + need.length] == PIECES[1]
    assert done.affected_refs == ("model@1",)
    assert verify.verify(store).missing == (bad,)


def test_two_sources_that_each_have_a_part_repair_it_together(store: Store, root: Path) -> None:
    (root / "one").write_bytes(safetensors({"big": BIG[:CHUNK] + bytes(len(BIG) - CHUNK)}))
    (root / "two").write_bytes(contents(8, 77) + BIG[CHUNK:])
    lost = lose(store, *PIECES[:2])
    assert set(mend(store, root / "one", root / "two").repaired) == lost
    assert_whole(store, root)


def headed(text: bytes, length: int | None = None) -> bytes:
    """A safetensors file of a header only."""
    return struct.pack("<Q", len(text) if length is None else length) + text


HOSTILE = {
    "empty": b"",
    "short": b"abc",
    "a header as long as memory": headed(b"{}", 2**63),
    "a header past the end": headed(b"{}", 100),
    "no JSON": headed(b"{]"),
    "a list": headed(b"[]"),
    "nested": headed(b"[" * 200_000),
    "offsets before and behind": headed(
        b'{"a":{"data_offsets":[-5,9]},"b":{"data_offsets":[0,99]}}'
    ),
    "offsets the wrong way round": headed(b'{"a":{"data_offsets":[9,5]}}'),
    "offsets of another type": headed(b'{"a":{"data_offsets":["0","1"]},"b":{"data_offsets":[]}}'),
    "offsets beyond any disk": headed(b'{"a":{"data_offsets":[0,99999999999999999999999]}}'),
    "a zip that is none": b"PK\3\4" + bytes(100),
    "a zip with a huge directory": b"PK\3\4" + b"PK\5\6" + b"\xff" * 18,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_source_that_lies_about_itself_gives_nothing_and_breaks_nothing(
    store: Store, root: Path, kind: str
) -> None:
    (root / "source").write_bytes(HOSTILE[kind])
    lose(store, PIECES[1])
    done = mend(store, root / "source")
    assert done.repaired == () and len(done.missing) == 1


def test_a_checkpoint_that_claims_the_same_bytes_a_thousand_times_is_not_hashed_as_often(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = contents(60, 2 * CHUNK)
    entries = {str(i): {"data_offsets": [i, CHUNK + i]} for i in range(1000)}
    text = json.dumps(entries).encode()
    (root / "source").write_bytes(struct.pack("<Q", len(text)) + text + data)
    lose(store, PIECES[1])
    hashed: list[int] = []
    real = Digest.of

    def count(data: bytes) -> Digest:
        hashed.append(len(data))
        return real(data)

    report = verify.verify(store)
    monkeypatch.setattr(Digest, "of", count)
    assert repair(store, report, [root / "source"]).repaired == ()
    assert sum(hashed) < 8 * (root / "source").stat().st_size


@pytest.mark.parametrize("name", ["nothing", "nothing/below"])
def test_a_source_that_is_not_there_is_told(store: Store, root: Path, name: str) -> None:
    with pytest.raises(SourceMissing, match="nothing") as caught:
        mend(store, root / name)
    assert caught.value.exit_code == 3


def test_a_device_is_no_source(store: Store) -> None:
    with pytest.raises(UsageError, match="neither a file nor a directory"):
        mend(store, Path("/dev/zero"))


def test_links_in_a_directory_are_not_followed(store: Store, root: Path) -> None:
    as_file(root / "elsewhere")
    (root / "source").mkdir()
    (root / "source" / "link").symlink_to(root / "elsewhere")
    lose(store, PIECES[0])
    assert mend(store, root / "source").repaired == ()


# --- what it changes ----------------------------------------------------------------------------


def test_a_dry_run_tells_the_same_and_changes_nothing(store: Store, root: Path) -> None:
    as_file(root / "source")
    flip_bit(store.context.layout.chunk(Digest.of(PIECES[0])), 9)
    lost = lose(store, SMALL) | {Digest.of(PIECES[0])}
    before = {path: path.stat().st_mtime_ns for path in chunk_files(store)}
    report = verify.verify(store, report_only=True)
    assert set(report.missing) == lost
    planned = repair(store, report, [root / "source"], dry_run=True)
    assert {path: path.stat().st_mtime_ns for path in chunk_files(store)} == before
    done = mend(store, root / "source")
    assert planned == done and set(done.repaired) == lost
    assert_whole(store, root)


def test_a_read_only_store_is_not_repaired(store: Store, root: Path) -> None:
    lose(store, SMALL)
    with Store.open(store.path, read_only=True) as reader:
        report = verify.verify(reader)
        assert report.missing == (Digest.of(SMALL),)
        with pytest.raises(ReadOnlyStore, match="repair"):
            repair(reader, report)


def test_an_artifact_removed_since_it_was_checked_is_passed_over(store: Store, root: Path) -> None:
    as_file(root / "source")
    lose(store, SMALL)
    report = verify.verify(store)
    store.remove("model")
    assert repair(store, report, [root / "source"]).repaired == ()


def test_an_unreadable_manifest_cannot_be_repaired_and_stays_affected(
    store: Store, root: Path
) -> None:
    as_file(root / "source")
    path = store.context.layout.manifest(store.resolve("model").manifest)
    writable(path)
    path.write_bytes(b"{}")
    done = mend(store, root / "source")
    assert (done.repaired, done.missing, done.affected_refs) == ((), (), ("model@1",))


@pytest.mark.parametrize("how", ["removed by hand", "in quarantine"])
def test_the_next_export_repairs_without_being_asked(store: Store, root: Path, how: str) -> None:
    if how == "in quarantine":
        flip_bit(store.context.layout.chunk(Digest.of(PIECES[1])), 1)
        verify.verify(store)
    else:
        lose(store, PIECES[1])
    with store.writer() as writer:
        recipe = writer.put(BIG)
        assert writer.counters.new_chunks == 1
        writer.commit("again", {"f": recipe})
    assert_whole(store, root)


# --- manifests ----------------------------------------------------------------------------------


def spoil_manifest(store: Store, *, gone: bool = False) -> Digest:
    digest = store.resolve("model").manifest
    path = store.context.layout.manifest(digest)
    path.unlink() if gone else flip_bit(path, 30)
    return digest


@pytest.mark.parametrize("gone", [False, True])
def test_a_manifest_comes_back_from_a_copy_of_the_store(
    store: Store, root: Path, gone: bool
) -> None:
    shutil.copytree(store.path / "manifests", root / "copy")
    digest = spoil_manifest(store, gone=gone)
    before = verify.verify(store)
    tried = repair(store, before, [root / "copy"], dry_run=True)
    assert (tried.manifests, tried.problems, tried.affected_refs) == ((digest,), (), ())
    assert verify.verify(store) == before, "trying it changes nothing"
    done = repair(store, before, [root / "copy"])
    assert done == tried
    assert_whole(store, root)


def test_so_do_the_chunks_that_only_it_names(store: Store, root: Path) -> None:
    """Verify could not know that they are missing."""
    manifest = store.context.layout.manifest(store.resolve("model").manifest)
    (root / "copy.json").write_bytes(manifest.read_bytes())
    (root / "model.pte").write_bytes(FILE)
    digest, lost = spoil_manifest(store), lose(store, PIECES[1], SMALL)
    report = verify.verify(store)
    assert report.missing == ()
    half = repair(store, report, [root / "copy.json"], dry_run=True)
    assert {need.digest for need in half.missing} == lost and half.affected_refs == ("model@1",)
    done = repair(store, report, [root / "copy.json", root / "model.pte"])
    assert (done.manifests, set(done.repaired), done.missing) == ((digest,), lost, ())
    assert_whole(store, root)


def test_nothing_but_the_same_bytes_is_taken_for_a_manifest(store: Store, root: Path) -> None:
    digest = spoil_manifest(store)
    path = store.context.layout.manifest(digest)
    other = store.context.layout.manifest(store.resolve("other").manifest).read_bytes()
    source = root / "source"
    source.mkdir()
    for number, data in enumerate((path.read_bytes(), other, other[:9], b"")):
        (source / f"{digest.hex()}.{number}").write_bytes(data)
    report = verify.verify(store)
    done = repair(store, report, [source])
    assert done.manifests == () and done.problems == report.problems
    assert done.affected_refs == ("model@1",)
