"""`cas explain`: text for people, JSON for programs, one line for mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas import ActionRecord, Digest
from cas.explain import ABSENT, Difference
from cas.journal import Event
from cas.testing.stores import open_store

from .conftest import Run

BEFORE = ActionRecord(
    Digest.of(b"1"),
    "delegate",
    {"options": {"a": "1"}, "weights": {f"w{i}": str(Digest.of(b"%d" % i)) for i in range(20)}},
    None,
    label="XnnpackBackend of forward",
)
AFTER = ActionRecord(
    Digest.of(b"2"),
    "delegate",
    {"options": {"a": "2"}, "weights": {f"w{i}": str(Digest.of(b"-%d" % i)) for i in range(20)}},
    None,
    label="XnnpackBackend of forward",
)


@pytest.fixture
def recorded(store_dir: Path) -> Path:
    with open_store(store_dir) as store, store.writer() as writer:
        for record in (BEFORE, AFTER):
            writer.put_actions([record])
            event = Event("miss", "delegate", record.label, "absent", key=record.key)
            store.actions.note([event, Event("uncacheable", "delegate", "decode", "a tensor")])
            writer.commit("m", {"f": writer.put(b"x")}, provenance={"actions": [record.key.hex()]})
    return store_dir


@pytest.mark.usefixtures("recorded")
def test_two_actions_or_artifacts_are_told_apart(run: Run) -> None:
    for names in ((BEFORE.short, AFTER.short), ("m@1", "m")):
        outcome = run("explain", *names)
        assert outcome.code == 0, outcome.err
        assert "the option a: 1 -> 2" in outcome.out
        assert "and 11 more; -v shows them" in outcome.out
        assert "more;" not in run("explain", *names, "-v").out
    assert "1 action is the same, 0 not" in run("explain", "m@1", "m@1").out


def test_a_value_that_reads_like_its_absence_is_told_apart() -> None:
    there = Difference("options", "a", "the option a", "none", ABSENT)
    assert there.text() == "the option a: only in the first"
    long = Difference("options", "a", "the option a", "x" * 100 + "1", "x" * 100 + "2")
    assert long.text() == "the option a: another content"


@pytest.mark.usefixtures("recorded")
def test_the_last_run_is_explained(run: Run) -> None:
    outcome = run("explain", "--last")
    assert outcome.code == 0, outcome.err
    assert "0 out of the store, 1 computed, 1 not cacheable" in outcome.out
    assert f"the nearest, {BEFORE.short}, differs in" in outcome.out
    assert "decode: not cacheable: a tensor" in outcome.out


@pytest.mark.usefixtures("recorded")
def test_json_has_every_difference(run: Run) -> None:
    found = run("explain", "m@1", "m@2", "--json").json
    (pair,) = found["different_actions"]
    assert pair["before"]["key"] == BEFORE.key.hex() and len(pair["differences"]) == 21
    assert pair["differences"][0] == {
        "section": "options",
        "name": "a",
        "words": "the option a",
        "before": "1",
        "after": "2",
        "only": None,
    }
    (miss,) = run("explain", "--last", "--json").json["misses"]
    assert miss["key"] == AFTER.key.hex() and miss["nearest"]["key"] == BEFORE.key.hex()


@pytest.mark.usefixtures("recorded")
def test_mistakes_are_one_line(run: Run) -> None:
    for arguments, code in (
        ((), 2),
        (("m",), 2),
        (("m", "m@2", "--last"), 2),
        (("m", "other"), 3),
        (("m", BEFORE.short), 2),
    ):
        outcome = run("explain", *arguments)
        assert outcome.code == code and "Traceback" not in outcome.err, arguments


@pytest.mark.usefixtures("recorded")
def test_stats_count_what_became_of_actions(run: Run) -> None:
    assert "action hits" not in run("stats").out
    shown = run("stats", "-v").out
    assert "action misses  2" in shown and "2 absent" in shown and "2 a tensor" in shown
    found = run("stats", "--json").json
    assert found["actions"] == 2 and found["action_counters"]["misses"] == {"absent": 2}


@pytest.mark.usefixtures("recorded")
def test_an_action_is_forgotten_by_its_key(run: Run) -> None:
    assert run("rm", "--action", BEFORE.short, "--dry-run").out.startswith("would remove action")
    found = run("rm", "m@1", "--action", BEFORE.short, "--json").json
    assert found == {"dry_run": False, "removed": ["m@1"], "actions": [BEFORE.key.hex()]}
    assert run("rm", "--action", BEFORE.short).code == 3
    assert run("rm").code == 2
    assert run("stats", "--json").json["actions"] == 1
