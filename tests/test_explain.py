"""`cas.explain`: the part of a key that differs is named as a person would name it."""

from __future__ import annotations

from typing import Any

import pytest

from cas import ActionRecord, Digest, Store
from cas.errors import ActionNotFound, NotFound, RefNotFound, UsageError
from cas.explain import ABSENT, compare, explain, explain_last
from cas.journal import Event
from cas.strictjson import Json

KEY = Digest.of(b"key")
SOME = Digest.of(b"some bytes").hex()
OTHER = Digest.of(b"other bytes").hex()
FACTORS: dict[str, Any] = {
    "action": {
        "backend": "XnnpackBackend",
        "policy": "canonical",
        "graph digest": SOME,
        "weights digest": SOME,
        "options digest": SOME,
        "environment digest": SOME,
    },
    "options": {"force_fp32": "0"},
    "weights": {"layer.0.weight": SOME, "layer.1.weight": SOME},
    "environment": {
        "version: torch": "2.13.0",
        "variable: CC": "gcc",
        "sources: executorch/exir": SOME,
        "torch: default dtype": "torch.float32",
        "inductor: max_autotune": "False",
    },
}


def made(
    changes: dict[str, dict[str, Json]] | None = None,
    key: Digest = KEY,
    label: str = "XnnpackBackend of forward",
    depends: dict[str, Json] | None = None,
) -> ActionRecord:
    """A record of which some parts are changed; None removes one."""
    factors: dict[str, Json] = {}
    for section in [*FACTORS, *(s for s in changes or {} if s not in FACTORS)]:
        merged = {**FACTORS.get(section, {}), **(changes or {}).get(section, {})}
        factors[section] = {name: value for name, value in merged.items() if value is not None}
    return ActionRecord(key, "delegate", factors, None, (), depends or {}, label, 1_000_000, 5)


CHANGES: dict[str, tuple[dict[str, dict[str, Json]], str]] = {
    "a weight": (
        {"weights": {"layer.1.weight": OTHER}, "action": {"weights digest": OTHER}},
        "the weight layer.1.weight: another content",
    ),
    "a weight without a name": (
        {"action": {"weights digest": OTHER}},
        "the weights: their contents, or which of them share memory: another content",
    ),
    "an option": (
        {"options": {"force_fp32": "1"}, "action": {"options digest": OTHER}},
        "the option force_fp32: 0 -> 1",
    ),
    "a new option": (
        {"options": {"dq_linear": "1"}, "action": {"options digest": OTHER}},
        "the option dq_linear: none -> 1",
    ),
    "a version": (
        {"environment": {"version: torch": "2.14.0"}, "action": {"environment digest": OTHER}},
        "the version of torch: 2.13.0 -> 2.14.0",
    ),
    "an environment variable": (
        {"environment": {"variable: CC": "clang"}, "action": {"environment digest": OTHER}},
        "the environment variable CC: gcc -> clang",
    ),
    "a variable that is gone": (
        {"environment": {"variable: CC": None}, "action": {"environment digest": OTHER}},
        "the environment variable CC: gcc -> none",
    ),
    "a source file": (
        {"environment": {"sources: executorch/exir": OTHER}},
        "the source files of executorch/exir: another content",
    ),
    "a setting of torch": (
        {"environment": {"torch: default dtype": "torch.float16"}},
        "torch's default dtype: torch.float32 -> torch.float16",
    ),
    "an Inductor setting": (
        {"environment": {"inductor: max_autotune": "True"}},
        "the Inductor setting max_autotune: False -> True",
    ),
    "the program": (
        {"action": {"graph digest": OTHER}},
        "the program: its operators, their arguments, shapes or names: another content",
    ),
    "the backend": (
        {"action": {"backend": "CudaBackend"}},
        "the backend: XnnpackBackend -> CudaBackend",
    ),
    "a section that is not known": (
        {"passes": {"Fuse": {"level": 2}}},
        "passes: Fuse.level: none -> 2",
    ),
}


@pytest.mark.parametrize(("changes", "text"), CHANGES.values(), ids=CHANGES)
def test_the_one_thing_that_differs_is_named_and_nothing_else(
    changes: dict[str, dict[str, Json]], text: str
) -> None:
    (difference,) = compare(made(), made(changes, Digest.of(b"2")))
    assert difference.text() == text


def test_what_the_computation_read_is_compared_too() -> None:
    before = made(depends={"files": {"{site}/flatc": SOME}, "variables": {"SECRET": "not set"}})
    after = made(depends={"files": {"{site}/flatc": OTHER}, "variables": {"SECRET": SOME}})
    assert [difference.text() for difference in compare(before, after)] == [
        "the file {site}/flatc, which the computation read: another content",
        "the environment variable SECRET, which the computation read: another content",
    ]


def test_what_is_read_because_something_else_differs_is_not_told() -> None:
    before = made(depends={"files": {"a": SOME, "c": SOME}})
    after = made({"options": {"new": "1"}}, depends={"files": {"b": SOME, "c": OTHER}})
    assert [difference.text() for difference in compare(before, after)] == [
        "the option new: none -> 1",
        "the file c, which the computation read: another content",
    ]
    without = made(depends={"files": {"b": SOME, "c": SOME}})
    assert [difference.name for difference in compare(before, without)] == ["a", "b"]


def test_equal_records_do_not_differ_and_the_telling_parts_come_first() -> None:
    assert compare(made(), made()) == []
    changes: dict[str, dict[str, Json]] = {
        "zeta": {"x": 1},
        "environment": {"version: torch": "3"},
        "weights": {"layer.0.weight": None},
        "options": {"a": "1"},
    }
    sections = [difference.section for difference in compare(made(), made(changes))]
    assert sections == ["options", "weights", "environment", "zeta"]
    gone = compare(made(), made(changes))[1]
    assert gone.after is ABSENT and gone.text().endswith("only in the first")


# --- in a store ---------------------------------------------------------------------------------


def put(store: Store, *records: ActionRecord) -> None:
    with store.writer() as writer:
        writer.put_actions(records)


def miss(record: ActionRecord, **fields: Any) -> Event:
    return Event(
        "miss", "delegate", record.label, **{"reason": "absent", "key": record.key, **fields}
    )


def test_two_actions_by_the_first_digits_of_their_keys(store: Store) -> None:
    first, second = made(), made({"options": {"force_fp32": "1"}}, Digest.of(b"2"))
    put(store, first, second)
    found = explain(store, first.short, second.key.hex())
    assert found.same == 0
    assert [d.text() for d in found.pairs[0].differences] == ["the option force_fp32: 0 -> 1"]
    assert explain(store, first.short, first.short).pairs == ()


def test_the_last_run_is_compared_with_the_nearest_record_of_an_earlier_one(store: Store) -> None:
    far = made(
        {"options": {"force_fp32": "9"}, "weights": {"layer.0.weight": OTHER}}, Digest.of(b"f")
    )
    near = made({"weights": {"layer.1.weight": OTHER}}, Digest.of(b"n"))
    elsewhere = made(key=Digest.of(b"e"), label="XnnpackBackend of decode")
    put(store, far, near, elsewhere)
    store.actions.note([miss(far), miss(near), miss(elsewhere)])
    new, twin = made(), made({"weights": {"layer.0.weight": "7"}}, Digest.of(b"t"))
    put(store, new, twin)
    store.actions.note([Event("hit", "delegate"), miss(new), miss(twin)])
    store.actions.note([Event("hit", "delegate")])
    run = explain_last(store)
    assert run.hits == 1 and len(run.misses) == 2 and run.later == 1
    # Not its twin, which the same run made, and not the one of another method.
    assert run.misses[0].nearest == near
    assert [d.text() for d in run.misses[0].differences] == [
        "the weight layer.1.weight: another content"
    ]


def test_a_stale_record_is_explained_by_what_was_noted(store: Store) -> None:
    put(store, made())
    store.actions.note([miss(made(), reason="stale", detail="the file flatc")])
    (missed,) = explain_last(store).misses
    assert missed.nearest is None and missed.event.detail == "the file flatc"


def test_an_uncacheable_action_is_told_with_its_reason(store: Store) -> None:
    store.actions.note([Event("uncacheable", "delegate", "forward", "a user's function")])
    run = explain_last(store)
    assert run.misses == () and [event.reason for event in run.uncacheable] == ["a user's function"]


def test_without_a_miss_there_is_nothing_to_explain(store: Store) -> None:
    with pytest.raises(NotFound, match="stats -v"):
        explain_last(store)


def commit(store: Store, name: str, *records: ActionRecord, **origin: Json) -> None:
    keys: list[Json] = [record.key.hex() for record in records]
    with store.writer() as writer:
        writer.put_actions(records)
        writer.commit(
            name, {"f": writer.put(name.encode())}, provenance={**origin, "actions": keys}
        )


def test_two_artifacts_are_compared_by_their_actions(store: Store) -> None:
    shared = made(key=Digest.of(b"shared"), label="decode")
    first, second = made(), made({"weights": {"layer.0.weight": OTHER}}, Digest.of(b"2"))
    added = made(key=Digest.of(b"3"), label="a new method")
    lost = made(key=Digest.of(b"lost"))
    commit(store, "m", shared, first, lost, versions={"torch": "1"}, created="then")
    commit(store, "m", shared, second, added, versions={"torch": "2"}, created="now")
    store.actions.drop(lost.key)
    found = explain(store, "m@1", "m")
    assert (found.before, found.after, found.same) == ("m@1", "m@2", 1)
    assert [(pair.before, pair.after) for pair in found.pairs] == [(first, second), (None, added)]
    assert [d.text() for d in found.pairs[0].differences] == [
        "the weight layer.0.weight: another content"
    ]
    assert [d.text() for d in found.origin] == ["the version of torch: 1 -> 2"]
    assert found.lost == (lost.key,)


@pytest.mark.parametrize("listed", [None, 7, ["../x", 3, {"a": 1}], {"a": 1}])
def test_provenance_is_not_believed(store: Store, listed: Json) -> None:
    with store.writer() as writer:
        writer.commit("m", {"f": writer.put(b"x")}, provenance={"actions": listed})
    assert explain(store, "m", "m@1").pairs == ()


def test_what_is_not_there_is_named(store: Store) -> None:
    commit(store, "m", made())
    with pytest.raises(RefNotFound, match="nothing"):
        explain(store, "nothing", "m")
    with pytest.raises(UsageError, match="one of each kind"):
        explain(store, "m", made().short)
    with pytest.raises((RefNotFound, ActionNotFound), match="deadbeef"):
        explain(store, "deadbeef", made().short)
