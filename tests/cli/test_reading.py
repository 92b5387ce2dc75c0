"""`ls`, `show`, `stats` and `assemble`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cas import ActionRecord, Digest, Store
from cas.testing.stores import open_store
from cas_cli.render import aligned, moment

from .conftest import CHUNK, Filled, Run


def test_ls_shows_the_current_generation_of_each_name(run: Run, filled: Filled) -> None:
    lines = run("ls").out.splitlines()
    assert lines[0].split() == ["NAME", "GEN", "FILES", "SIZE", "MANIFEST"]
    assert [line.split()[:2] for line in lines[1:]] == [["models/one", "2"], ["other", "1"]]


def test_ls_all_shows_every_generation_and_says_which_is_current(run: Run, filled: Filled) -> None:
    refs = run("ls", "--all", "--json").json["refs"]
    assert [(r["name"], r["generation"], r["current"]) for r in refs] == [
        ("models/one", 1, False),
        ("models/one", 2, True),
        ("other", 1, True),
    ]
    assert {r["logical_bytes"] for r in refs} == {3 * CHUNK + 17}


def test_ls_takes_a_prefix(run: Run, filled: Filled) -> None:
    assert [r["name"] for r in run("ls", "mod", "--json").json["refs"]] == ["models/one"]
    nothing = run("ls", "zzz")
    assert (nothing.code, nothing.out) == (0, "")
    assert "no name starts with zzz" in nothing.err


def test_ls_in_a_pipe_is_never_cut(run: Run, store_dir: Path) -> None:
    name = "a" * 190
    with Store.open(store_dir) as store, store.writer() as writer:
        writer.commit(name, files={"f": writer.put(b"x")})
    assert name in run("ls", env={"COLUMNS": "40"}).out


ROWS = (("a-long-name", "12", "the last column"), ("b", "3", "\N{CJK UNIFIED IDEOGRAPH-6F22}"))


def test_columns_are_aligned_and_lines_are_cut_at_the_right_edge() -> None:
    columns = ("NAME", ">N", "LAST")
    whole = aligned(columns, ROWS)
    assert whole == [
        "NAME          N  LAST",
        "a-long-name  12  the last column",
        "b             3  \N{CJK UNIFIED IDEOGRAPH-6F22}",
    ]
    assert aligned(columns, ROWS, 32) == whole
    cut = ["NAME          N  LAST", "a-long-name  12  the\N{HORIZONTAL ELLIPSIS}", whole[2]]
    assert aligned(columns, ROWS, 21) == cut
    assert aligned(columns, (), 20) == ["NAME  N  LAST"]


def test_what_could_drive_a_terminal_is_shown_as_text() -> None:
    assert aligned(("A",), [("x\x1b[31m\ny",)])[1] == "x\\x1b[31m\\ny"


def test_a_damaged_artifact_does_not_hide_the_others(run: Run, filled: Filled) -> None:
    digest = run("ls", "other", "--json").json["refs"][0]["manifest"].removeprefix("blake3:")
    next((filled.path / "manifests").rglob(digest)).unlink()
    outcome = run("ls")
    assert outcome.code == 0
    assert "models/one" in outcome.out
    assert "damaged" in outcome.out


def test_ls_lists_actions_by_their_last_use(run: Run, filled: Filled) -> None:
    first, second = (
        ActionRecord(Digest.of(bytes([i])), "delegate", {}, None, label=f"number {i}")
        for i in range(2)
    )
    assert "no recorded actions in this store" in run("ls", "--actions").err
    with open_store(filled.path) as store, store.writer() as writer:
        recipe = writer.put(b"compiled")
        writer.put_actions([replace(first, recipes=(recipe,), microseconds=2_500_000), second])
        os.utime(store.context.layout.action(first.key), (2e9, 2e9))
    lines = run("ls", "--actions").out.splitlines()
    assert lines[0].split() == ["KEY", "KIND", "LABEL", "TOOK", "SIZE", "LAST", "USED"]
    assert lines[1].split()[:7] == [first.short, "delegate", "number", "0", "2.5", "s", "8"]
    assert lines[2].split()[0] == second.short
    (row,) = run("ls", "--actions", "number 0", "--json").json["actions"]
    assert (row["key"], row["bytes"], row["last_used"]) == (first.key.hex(), 8, 2_000_000_000)
    assert run("rm", "--action", lines[2].split()[0]).code == 0
    assert "no label starts with other" in run("ls", "--actions", "other").err
    assert run("ls", "--actions", "--all").code == 2


def test_a_damaged_action_does_not_hide_the_others(run: Run, filled: Filled) -> None:
    records = [ActionRecord(Digest.of(bytes([i])), "delegate", {}, None) for i in range(2)]
    with open_store(filled.path) as store, store.writer() as writer:
        writer.put_actions(records)
        path = store.context.layout.action(records[0].key)
    path.chmod(0o600)
    path.write_bytes(b"rotten")
    os.utime(path, (2e9, 2e9))
    outcome = run("ls", "--actions")
    assert outcome.code == 0 and outcome.out.count("delegate") == 1
    assert outcome.out.splitlines()[1].split()[:4] == [records[0].short, "damaged", "?", "?"]


def test_a_time_that_no_calendar_has_is_shown_as_unknown() -> None:
    assert moment(0).startswith(("1969-12-31 ", "1970-01-01 "))
    assert moment(1e18) == "?"


def test_show_tells_files_tensors_and_origin(run: Run, filled: Filled) -> None:
    outcome = run("show", "models/one")
    assert "models/one@2" in outcome.out
    assert Digest.of(filled.new).hex() in outcome.out
    assert "a test" in outcome.out
    document = run("show", "models/one@1", "--json").json
    assert document["generation"] == 1
    assert document["files"] == [
        {
            "path": "weights.bin",
            "size": len(filled.old),
            "blake3": Digest.of(filled.old).hex(),
            "parts": 4,
        }
    ]
    assert document["tensors"][0]["shape"] == [len(filled.old)]
    assert document["provenance"]["source"] == "a test"


def test_show_can_be_limited(run: Run, filled: Filled) -> None:
    files = run("show", "other", "--files").out
    assert files.startswith("FILE")
    assert "TENSOR" not in files
    tensors = run("show", "other", "--tensors").out
    assert tensors.startswith("TENSOR")
    assert "uint8" in tensors


def test_what_an_artifact_says_cannot_drive_the_terminal(run: Run, store_dir: Path) -> None:
    with Store.open(store_dir) as store, store.writer() as writer:
        provenance = {"note": "\x1b]0;title\x07", "\x1b[2Jkey": "v"}
        writer.commit("a", files={"f": writer.put(b"x")}, provenance=provenance)
    outcome = run("show", "a")
    assert outcome.code == 0
    assert "\x1b" not in outcome.out
    assert "\x07" not in outcome.out


def test_stats_tells_the_kinds_of_bytes_apart(run: Run, filled: Filled) -> None:
    run("rm", "models/one@1")
    one = 3 * CHUNK + 17
    found = run("stats", "--json").json
    assert found["store"] == str(filled.path)
    assert (found["refs"], found["generations"]) == (2, 2)
    assert found["logical_bytes"] == 2 * one
    assert found["physical_bytes"] == 3 * one
    assert found["garbage_bytes"] == one
    assert (found["staged_bytes"], found["quarantined_bytes"]) == (0, 0)
    assert "garbage" in run("stats").out
    assert found["max_bytes"] is None
    assert run("stats", "--json", env={"CAS_MAX_SIZE": "5k"}).json["max_bytes"] == 5000
    assert " of 4.88 KiB" in run("stats", env={"CAS_MAX_SIZE": "5k"}).out


def test_assemble_writes_the_bytes_of_the_generation(
    run: Run, filled: Filled, tmp_path: Path
) -> None:
    current = run("assemble", "models/one", "-o", tmp_path / "current", "--json")
    assert (tmp_path / "current" / "weights.bin").read_bytes() == filled.new
    assert current.json["ref"] == "models/one@2"
    assert current.json["files"] == [
        {
            "path": str(tmp_path / "current" / "weights.bin"),
            "size": len(filled.new),
            "blake3": Digest.of(filled.new).hex(),
        }
    ]
    assert run("assemble", "models/one@1", "-o", tmp_path / "old").code == 0
    assert (tmp_path / "old" / "weights.bin").read_bytes() == filled.old


def test_assemble_replaces_files_and_leaves_strangers(
    run: Run, filled: Filled, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights.bin").write_bytes(b"before")
    (tmp_path / "out" / "mine").write_bytes(b"mine")
    assert run("assemble", "other", "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "weights.bin").read_bytes() == filled.other
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["mine", "weights.bin"]


def test_assemble_without_verification_gives_the_same_bytes(
    run: Run, filled: Filled, tmp_path: Path
) -> None:
    outcome = run("assemble", "other", "-o", tmp_path / "out", "--no-verify", "--json")
    assert outcome.json["verified"] is False
    assert (tmp_path / "out" / "weights.bin").read_bytes() == filled.other


@pytest.mark.parametrize("index", ["missing", "garbage"])
def test_losing_the_index_needs_no_hand(
    run: Run, filled: Filled, tmp_path: Path, index: str
) -> None:
    import shutil

    if index == "missing":
        shutil.rmtree(filled.path / "index")
    else:
        for file in (filled.path / "index").iterdir():
            file.write_bytes(b"\xff" * 8192)
    assert run("assemble", "other", "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "weights.bin").read_bytes() == filled.other
    assert run("verify").code == 0
    assert run("stats", "--json").json["physical_bytes"] == 3 * (3 * CHUNK + 17)
