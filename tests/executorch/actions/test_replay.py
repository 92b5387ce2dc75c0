"""Records of delegates: what goes in comes out, and nothing in them is believed."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
from executorch.exir._serialize.data_serializer import DataEntry
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.scalar_type import ScalarType
from executorch.exir.tensor_layout import TensorLayout

import cas
from cas.errors import CasError, UsageError
from cas.executorch.actions.compare import differences
from cas.executorch.actions.errors import Unrecordable
from cas.executorch.actions.replay import Freezer, Thawer
from cas.executorch.blob import StoredBytes
from cas.executorch.intake import Intake
from cas.executorch.labels import Label, label_named, named_labels
from cas.records import ActionRecord

KEY = cas.Digest.of(b"key")


def result(blob: bytes = b"blob", **changes: Any) -> PreprocessResult:
    layout = TensorLayout(ScalarType.FLOAT, [2, 3], [1, 0])
    store = NamedDataStoreOutput(
        [b"s" * 5, bytes(range(256)) * 600],
        {"one": DataEntry(0, 16, None), "two": DataEntry(1, 32, layout)},
        {"tag": {"three": DataEntry(1, 1, None)}},
    )
    label_named(store, "two", Label("a.weight", "float32", (2, 3)))
    label_named(store, "two", Label("b.weight"))
    label_named(store, "three", Label("a_weight_fused_bn", "int8", ()))
    label_named(store, "three", Label("a.weight.scale", "float32", (3,)))
    fields = {"debug_handle_map": {1: (2, 3)}, "data_store_output": store, **changes}
    return PreprocessResult(blob, **fields)


def frozen(intake: Intake, *results: Any, constants: Any = None) -> ActionRecord:
    freezer = Freezer(intake, constants)
    document = freezer.freeze(results, [4, 5])
    return ActionRecord(KEY, "delegate", {}, document, tuple(freezer.recipes))


@pytest.mark.parametrize(
    "handles", [None, {}, {1: (2,)}, {"a": [1, 2], "b": []}, {3: 4}, {0: (), 1: (5, 5)}]
)
@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 200_000])
def test_results_come_back_as_they_were(intake: Intake, handles: Any, size: int) -> None:
    given = [result(b"b" * size, debug_handle_map=handles), result(data_store_output=None)]
    original, record = given[0], frozen(intake, *given)
    parsed = ActionRecord.parse(record.encode(), KEY)
    thawer = Thawer(intake, parsed)
    first, second = thawer.thaw()
    assert thawer.handles() == (4, 5)
    assert (
        differences([original, result(data_store_output=None)], [first, second], exact=True) == []
    )
    assert first.debug_handle_map == handles
    assert repr(first.debug_handle_map) == repr(handles)
    assert isinstance(first.processed_bytes, StoredBytes) is (size >= 4096)
    assert first.data_store_output.pte_data == original.data_store_output.pte_data
    assert first.data_store_output.external_data == original.data_store_output.external_data
    assert second.data_store_output is None


def test_large_data_stays_in_the_store_and_knows_its_sha256(
    intake: Intake, store: cas.Store
) -> None:
    blob = b"b" * 70_000
    record = frozen(intake, result(blob))
    intake.writer.barrier()  # type: ignore[attr-defined]
    with store.writer() as writer:
        other = Intake(writer)  # of another process
        (thawed,) = Thawer(other, record).thaw()
        small, large = thawed.data_store_output.buffers
        assert (type(small), type(large)) == (bytes, StoredBytes)
        assert large.to_bytes() == bytes(range(256)) * 600
        assert large.sha256() == hashlib.sha256(bytes(range(256)) * 600).digest()
        known = other.source.known_sha256(thawed.processed_bytes.recipe)
        assert known == hashlib.sha256(blob).digest()


def test_file_backed_data_is_streamed_into_the_record(intake: Intake, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"f" * 70_000)
    data = FileBackedData(str(tmp_path / "file"), cleanup=False)
    digest = data.sha256()
    store = NamedDataStoreOutput([data], {"k": DataEntry(0, 1, None)}, {})
    (thawed,) = Thawer(intake, frozen(intake, result(data_store_output=store))).thaw()
    assert thawed.data_store_output.buffers[0].to_bytes() == b"f" * 70_000
    assert intake.source.known_sha256(thawed.data_store_output.buffers[0].recipe) == digest


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"_delegate_info_meta": object()}, "live objects"),
        ({"debug_handle_map": [1]}, "type list"),
        ({"debug_handle_map": {1.5: (1,)}}, "other keys"),
        ({"debug_handle_map": {1: {2}}}, "other keys or values"),
        ({"debug_handle_map": {1: ("x",)}}, "other values"),
        ({"debug_handle_map": {1: (True,)}}, "other values"),
        ({"processed_bytes": "text"}, "type str"),
    ],
)
def test_what_is_no_bytes_numbers_or_names_is_refused(
    intake: Intake, changes: dict[str, Any], reason: str
) -> None:
    broken = result()
    for name, value in changes.items():
        setattr(broken, name, value)
    with pytest.raises(Unrecordable, match=reason):
        frozen(intake, broken)


# --- labels -------------------------------------------------------------------------------------


def test_labels_come_back_as_they_were(intake: Intake) -> None:
    given = result()
    (thawed,) = Thawer(intake, frozen(intake, given)).thaw()
    assert named_labels(thawed.data_store_output) == named_labels(given.data_store_output)
    assert len(named_labels(given.data_store_output)) == 2


def test_where_names_are_in_no_key_labels_get_those_of_the_program_that_asks(
    intake: Intake,
) -> None:
    given = result()
    label_named(given.data_store_output, "one", Label("made_up"))
    record = frozen(intake, given, constants=("a.weight", "b.weight", "a.w"))
    (thawed,) = Thawer(intake, record, ("x.y.kernel", "other", "x.k")).thaw()
    assert named_labels(thawed.data_store_output) == {
        "two": {Label("x.y.kernel", "float32", (2, 3)): None, Label("other"): None},
        "three": {
            Label("x_y_kernel_fused_bn", "int8", ()): None,
            Label("x.y.kernel.scale", "float32", (3,)): None,
        },
    }


@pytest.mark.parametrize("position", [-1, 2, True, "0", None])
def test_a_label_of_a_constant_that_the_program_has_not_is_refused(
    intake: Intake, position: Any
) -> None:
    record = frozen(intake, result(), constants=("a.weight", "b.weight"))
    document = copy.deepcopy(record.result)
    set_at(("stores", 0, "labels", 0, 1, 0, 0, 0), position)(document)
    with pytest.raises(UsageError):
        Thawer(intake, replace(record, result=document), ("a.weight", "b.weight")).thaw()


def test_a_record_of_before_there_were_labels_is_read(intake: Intake) -> None:
    record = frozen(intake, result())
    document: Any = copy.deepcopy(record.result)
    document["version"] = 1
    del document["stores"][0]["labels"]
    (thawed,) = Thawer(intake, replace(record, result=document), ("a.weight",)).thaw()
    assert differences([result()], [thawed], exact=True) == []
    assert named_labels(thawed.data_store_output) == {}


# --- hostile records ----------------------------------------------------------------------------


def set_at(path: tuple[Any, ...], value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return change


HOSTILE = {
    "version": set_at(("version",), 3),
    "no results": set_at(("results",), None),
    "blob out of range": set_at(("results", 0, "blob"), 99),
    "blob negative": set_at(("results", 0, "blob"), -1),
    "blob a bool": set_at(("results", 0, "blob"), True),
    "blob a name": set_at(("results", 0, "blob"), "/etc/passwd"),
    "digest of another length": set_at(("results", 0, "blob_sha256"), "00"),
    "digest no hex": set_at(("results", 0, "blob_sha256"), "zz" * 32),
    "store out of range": set_at(("results", 0, "store"), 1),
    "handles of a set": set_at(("results", 0, "debug_handles"), [[1, "set", [2]]]),
    "handles negative": set_at(("results", 0, "debug_handles"), [[1, "tuple", [-2]]]),
    "handles by null": set_at(("results", 0, "debug_handles"), [[None, "tuple", [2]]]),
    "buffer out of range": set_at(("stores", 0, "pte", 0, 1), 2),
    "alignment 0": set_at(("stores", 0, "pte", 0, 2), 0),
    "layout of another type": set_at(("stores", 0, "pte", 1, 3), [999, [2], [0]]),
    "dim order that is none": set_at(("stores", 0, "pte", 1, 3), [6, [2, 3], [0, 0]]),
    "extra key": set_at(("stores", 0, "code"), "import os"),
    "no handles": set_at(("handles",), {}),
    "labels of an older record": set_at(("version",), 1),
    "labels by name": set_at(("stores", 0, "labels"), {"two": []}),
    "label of no key": set_at(("stores", 0, "labels", 0, 0), 2),
    "label without a type": set_at(("stores", 0, "labels", 0, 1, 0), ["weight", [2, 3]]),
    "label of no type": set_at(("stores", 0, "labels", 0, 1, 0, 1), "os.system"),
    "label of a list of types": set_at(("stores", 0, "labels", 0, 1, 0, 1), ["float32"]),
    "shape that is none": set_at(("stores", 0, "labels", 0, 1, 0, 2), [2, -3]),
    "shape of many sizes": set_at(("stores", 0, "labels", 0, 1, 0, 2), [1] * 65),
    "name of a number": set_at(("stores", 0, "labels", 0, 1, 0, 0), 1),
    "name without end": set_at(("stores", 0, "labels", 0, 1, 0, 0), "n" * 5000),
    "position in place of a name": set_at(("stores", 0, "labels", 0, 1, 0, 0), [0, False, ""]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_is_refused(intake: Intake, name: str) -> None:
    record = frozen(intake, result())
    document = copy.deepcopy(record.result)
    HOSTILE[name](document)
    hostile = ActionRecord(KEY, "delegate", {}, document, record.recipes)
    with pytest.raises(UsageError):
        thawer = Thawer(intake, hostile)
        thawer.handles()
        thawer.thaw()


def test_random_damage_gives_results_or_a_refusal(intake: Intake) -> None:
    record, chance = frozen(intake, result()), random.Random(1)
    values: list[Any] = [None, -1, 0, 1, 2**40, "x", [], {}, [[]], True]
    outcomes = set()
    for _ in range(400):
        document: Any = copy.deepcopy(record.result)
        spot, keys = document, list(document)
        while keys and chance.random() < 0.8:
            key = chance.choice(keys)
            inner = spot[key]
            if not isinstance(inner, (dict, list)) or not inner:
                break
            spot = inner
            keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
        spot[chance.choice(keys)] = chance.choice(values)
        try:
            Thawer(intake, ActionRecord(KEY, "delegate", {}, document, record.recipes)).thaw()
            outcomes.add("results")
        except CasError:
            outcomes.add("refusal")
    assert outcomes == {"results", "refusal"}


# --- comparing ----------------------------------------------------------------------------------


def test_every_difference_is_named() -> None:
    def names(other: PreprocessResult, exact: bool = True) -> list[str]:
        return differences([result()], [other], exact=exact)

    assert names(result()) == []
    assert names(result(b"other")) == ["the delegate's blob"]
    assert names(result(debug_handle_map={1: (2,)})) == ["the debug handles"]
    assert names(result(data_store_output=None)) == ["the presence of named data"]
    changed = result()
    changed.data_store_output.buffers[0] = b"t" * 5
    assert names(changed) == ["the named data"]
    renamed = result()
    renamed.data_store_output.pte_data["other"] = renamed.data_store_output.pte_data.pop("one")
    assert names(renamed) == ["the names, alignments or layouts of named data"]
    assert differences([result()], [], exact=True) == ["the number of results"]
    assert differences([result()] * 2, [result(), result(b"x")], exact=True) == [
        "the delegate's blob of partition 1"
    ]


def test_what_is_tuned_is_compared_by_its_interface() -> None:
    def tuned(digest: str, tag: str = "tag") -> PreprocessResult:
        store = NamedDataStoreOutput(
            [digest.encode()], {f"{digest * 64}_so_blob": DataEntry(0, 1, None)}, {tag: {}}
        )
        return PreprocessResult(digest.encode(), {}, store)

    assert differences([tuned("a")], [tuned("b")], exact=False) == []
    assert differences([tuned("a")], [tuned("b")], exact=True) != []
    assert differences([tuned("a")], [tuned("b", "other")], exact=False) != []
