"""A store written by version 0.1.0 stays readable. The fixture is committed, never regenerated."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cas import Digest, Store, gc
from cas.retention import Policy
from cas.stats import stats
from cas.testing.stores import assert_sound

GOLDEN = Path(__file__).parent / "golden" / "format-1"
TEXT = b"".join(b"line %d of a golden store\n" % i for i in range(3000))
SMALL = b"shared between artifacts"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(GOLDEN, tmp_path / "store", copy_function=shutil.copyfile)
    with Store.open(tmp_path / "store", create=False) as opened:
        yield opened


def test_every_artifact_of_a_golden_store_assembles_as_it_was(store: Store, tmp_path: Path) -> None:
    assert [str(ref) for ref in store.refs()] == ["mixed@1", "mixed@2", "plain/one@1"]
    expected = {
        "plain/one": {"w.bin": TEXT},
        "mixed@1": {
            "a.bin": b"header" + SMALL + bytes(200_000) + TEXT[1000:71000],
            "b.bin": SMALL,
            "empty.bin": b"",
        },
        "mixed": {"b.bin": SMALL},
    }
    for name, files in expected.items():
        paths = store.assemble(name, tmp_path / name)
        assert {path.name: path.read_bytes() for path in paths} == files


def test_its_manifests_read_as_they_did(store: Store) -> None:
    manifest = store.manifest("mixed@1")
    assert manifest.provenance == {"n": 1, "list": ["x", None, True]}
    assert [(t.name, t.file, t.offset, t.nbytes, t.dtype, t.shape) for t in manifest.tensors] == [
        ("t", "a.bin", 6, 24, "uint8", (24,)),
        ("u", "b.bin", 0, 24, None, None),
    ]
    assert store.manifest("plain/one").files[0].digest == Digest.of(TEXT)


def test_its_manifests_are_written_today_as_they_were_then(store: Store) -> None:
    for path in GOLDEN.glob("manifests/*/*"):
        digest = Digest(bytes.fromhex(path.name))
        assert store.manifest(digest).encode() == path.read_bytes()


def test_the_same_bytes_give_the_same_chunks_today(store: Store) -> None:
    with store.writer() as writer:
        writer.put(TEXT)
        writer.put(SMALL)
        assert writer.counters.new_chunks == 0


def test_it_is_sound_after_the_index_and_empty_directories_were_left_out(store: Store) -> None:
    assert not (GOLDEN / "index").exists() and len(os.listdir(GOLDEN / "chunks")) < 256
    assert_sound(store)


ACTIONS = Path(__file__).parent / "golden" / "format-1-actions"
KEY = Digest.of(b"a golden action")


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Store]:
    shutil.copytree(ACTIONS, tmp_path / "store", copy_function=shutil.copyfile)
    with Store.open(tmp_path / "store", create=False) as opened:
        yield opened


def test_its_action_records_are_hits_as_they_were(recorded: Store) -> None:
    with recorded.writer() as writer:
        found = writer.find_action(KEY).record
        assert found is not None
        assert [writer.read(recipe) for recipe in found.recipes] == [
            TEXT,
            b"a delegate's small buffer" + b"end",
        ]
    assert (found.kind, found.label, found.seconds) == (
        "delegate",
        "XnnpackBackend of forward",
        1.25,
    )
    assert found.result == {
        "results": [{"blob": 0, "handles": [["int", 1, [2, 3]]]}],
        "stores": [[1, None, True]],
    }
    assert found.factors["options"] == {"force_fp32": "0"}
    assert found.dependencies["variables"] == {"CC": "not set"}
    other = recorded.actions.get(Digest.of(b"without bytes"))
    assert other is not None and (other.kind, other.result) == ("whole-export", None)
    assert_sound(recorded)


def test_its_action_records_are_written_today_as_they_were_then(recorded: Store) -> None:
    for path in ACTIONS.glob("actions/*/*"):
        record = recorded.actions.read(Digest(bytes.fromhex(path.name)))
        assert record.encode() == path.read_bytes()


def test_its_counters_and_events_read_as_they_did(recorded: Store) -> None:
    tally = recorded.actions.tally()
    assert (tally.hits, dict(tally.misses), tally.saved_microseconds) == (1, {"stale": 1}, 1250000)
    assert [(event.outcome, event.detail) for event in recorded.actions.events()] == [
        ("hit", ""),
        ("miss", "the file {site}/flatc has changed"),
    ]


def test_a_copy_without_empty_directories_can_be_looked_at_without_writing(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "store", copy_function=shutil.copyfile)
    before = sorted(tmp_path.rglob("*"))
    with Store.open(tmp_path / "store", read_only=True) as store:
        assert (stats(store).generations, stats(store).garbage_bytes) == (3, 0)
        plan = gc.plan(store, policy=Policy(keep_last=1))
        assert [str(root) for root in plan.drops] == ["mixed@1"]
        assert not plan.problems
    assert sorted(tmp_path.rglob("*")) == before
