"""`StoredBytes` behaves like the bytes it stands for, and owns nothing."""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import pickle
import warnings
from pathlib import Path

import pytest
from executorch.exir._serialize._cord import Cord, FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStore

import cas
from cas.errors import UsageError
from cas.executorch import CaptureEnded, LargeReadWarning, StoredBytes, blob, capture
from cas.executorch.intake import Intake
from cas.writer import Writer

DATA = bytes(range(256)) * 1000


@pytest.fixture
def stored(intake: Intake) -> StoredBytes:
    kept = intake.keep(DATA)
    assert isinstance(kept, StoredBytes)
    return kept


def test_has_the_bytes(stored: StoredBytes) -> None:
    sink = io.BytesIO()
    stored.write_to_file(sink)
    assert sink.getvalue() == stored.to_bytes() == bytes(stored) == DATA
    assert len(stored) == len(DATA)
    assert stored.sha256() == hashlib.sha256(DATA).digest()


@pytest.mark.parametrize("size", [0, 1, 32, 33, 70_000, len(DATA), len(DATA) + 1])
def test_prefix_is_the_start_of_the_bytes(size: int, stored: StoredBytes) -> None:
    assert stored.prefix(size) == DATA[:size]


def test_prefix_of_short_data(store: cas.Store) -> None:
    with store.writer() as writer:
        short = Intake(writer, threshold=1).keep(b"abc")
        assert isinstance(short, StoredBytes)
        assert short.prefix(32) == b"abc"
        assert Intake(writer, threshold=1).keep(b"") == b""


def test_short_data_stays_plain(intake: Intake) -> None:
    short = bytes(intake.threshold - 1)
    assert intake.keep(short) is short
    assert intake.keep(memoryview(short)) == short
    assert type(intake.keep(memoryview(short))) is bytes


def test_copies_are_the_object_itself(stored: StoredBytes) -> None:
    assert copy.copy(stored) is stored
    assert copy.deepcopy({"x": [stored]})["x"][0] is stored


def test_equal_by_content(intake: Intake, stored: StoredBytes) -> None:
    same, other = intake.keep(memoryview(DATA)), intake.keep(DATA[::-1])
    assert same is not stored
    assert same == stored
    assert hash(same) == hash(stored)
    assert other != stored
    assert stored != DATA
    assert {stored: 1}[same] == 1  # type: ignore[index]


def test_losing_one_changes_nothing(intake: Intake, stored: StoredBytes) -> None:
    lost = intake.keep(DATA)
    lost.close()  # type: ignore[union-attr]
    with stored:
        del lost
    gc.collect()
    assert stored.to_bytes() == DATA


def test_cannot_be_pickled(stored: StoredBytes) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(UsageError, match="cannot be pickled"):
            pickle.dumps(stored, protocol)


def test_takes_over_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        StoredBytes.move_from(str(tmp_path / "x"))


def test_reading_much_of_it_warns(stored: StoredBytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored.to_bytes()
    monkeypatch.setattr(blob, "LARGE_READ", len(DATA) - 1)
    with pytest.warns(LargeReadWarning, match=str(len(DATA))):
        bytes(stored)
    with pytest.warns(LargeReadWarning):
        bytes(Cord(stored))


def test_a_known_digest_is_not_computed_again(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(DATA).digest()
    kept = intake.keep(DATA, digest)
    assert isinstance(kept, StoredBytes)
    monkeypatch.setattr(type(intake.writer), "stream", None)
    assert kept.sha256() == digest


def test_what_was_hashed_ahead_is_kept_once(intake: Intake, writer: Writer) -> None:
    digest = intake.sha256_while_putting(memoryview(DATA))
    assert digest == hashlib.sha256(DATA).digest()
    assert writer.counters.logical_bytes == len(DATA)
    kept = intake.keep(DATA, digest)
    assert isinstance(kept, StoredBytes)
    assert kept.to_bytes() == DATA
    assert writer.counters.logical_bytes == len(DATA)


@pytest.mark.parametrize("digest", [None, hashlib.sha256(DATA[1:]).digest()])
def test_what_was_hashed_ahead_is_not_taken_for_something_else(
    digest: bytes | None, intake: Intake
) -> None:
    ahead = intake.sha256_while_putting(memoryview(DATA))
    kept = [intake.keep(DATA[1:], digest), intake.keep(DATA, ahead)]
    assert [bytes(one) for one in kept] == [DATA[1:], DATA]


def test_ends_with_the_capture(store: cas.Store) -> None:
    named = NamedDataStore()
    with capture(store):
        named.add_named_data("key", DATA)
        (held,) = named.buffers
        assert isinstance(held, StoredBytes)
    for use in (held.to_bytes, held.sha256, lambda: held.write_to_file(io.BytesIO())):
        with pytest.raises(CaptureEnded):
            use()
    assert held.prefix(4) == DATA[:4]
    assert len(held) == len(DATA)


# --- inside ExecuTorch's own containers -----------------------------------------------------------


def test_named_data_store_treats_it_as_the_bytes(store: cas.Store, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(DATA)
    before = NamedDataStore()
    before.add_named_data("plain", DATA)  # as bytes, before the capture
    with capture(store):
        before.add_named_data("plain", DATA)
        before.add_named_data("again", DATA)
        before.add_named_data("file", FileBackedData(str(tmp_path / "f")))
        assert before.buffers == [DATA]
        with pytest.raises(ValueError, match="Duplicate key"):
            before.add_named_data("plain", DATA[:-1] + b"?")
        before.add_named_data("other", DATA[:-1] + b"?")
        assert [type(held) for held in before.buffers] == [bytes, StoredBytes]
        with pytest.raises(TypeError):
            before.add_named_data("wrong", [1, 2])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="Alignment"):
            before.add_named_data("bad", DATA, alignment=0)


def test_a_file_may_be_added_twice(store: cas.Store, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(DATA)
    data = FileBackedData(str(path), cleanup=True)
    named = NamedDataStore()
    with capture(store) as cap:
        named.add_named_data("one", data)
        named.add_named_data("two", data)
        taken = cap.counters.logical_bytes
        assert len(named.buffers) == 1
        assert taken == len(DATA)
        assert path.exists()
        del data
        gc.collect()
        assert not path.exists()
        assert named.buffers[0].to_bytes() == DATA  # type: ignore[union-attr]
