"""`rm`, `gc` and `verify`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import cas
from cas.testing.damage import flip_bit, truncate

from .conftest import CHUNK, Filled, Run, commit

ONE = 3 * CHUNK + 17


def refs(run: Run) -> list[str]:
    return [f"{r['name']}@{r['generation']}" for r in run("ls", "--all", "--json").json["refs"]]


def test_rm_removes_one_generation_or_all(run: Run, filled: Filled) -> None:
    assert run("rm", "models/one@1").out == "removed models/one@1\n"
    assert refs(run) == ["models/one@2", "other@1"]
    assert run("rm", "models/one", "other", "--json").json == {
        "dry_run": False,
        "removed": ["models/one@2", "other@1"],
        "actions": [],
    }
    assert refs(run) == []


def test_rm_of_a_name_and_its_generation_removes_each_once(run: Run, filled: Filled) -> None:
    outcome = run("rm", "models/one@2", "models/one", "--json")
    assert outcome.json["removed"] == ["models/one@2", "models/one@1"]


def test_rm_dry_run_removes_nothing(run: Run, filled: Filled) -> None:
    before = refs(run)
    assert run("rm", "models/one", "-n").out == (
        "would remove models/one@1\nwould remove models/one@2\n"
    )
    assert refs(run) == before


def test_rm_with_one_unknown_name_removes_nothing(run: Run, filled: Filled) -> None:
    before = refs(run)
    assert run("rm", "other", "unknown").code == 3
    assert refs(run) == before


def test_rm_without_a_name_is_a_usage_error(run: Run, filled: Filled) -> None:
    assert run("rm").code == 2


def test_gc_deletes_what_rm_left_and_nothing_else(run: Run, filled: Filled, tmp_path: Path) -> None:
    run("rm", "models/one@1")
    planned = run("gc", "--dry-run", "--json").json
    assert planned == {
        "dry_run": True,
        "dead_chunks": 4,
        "dead_bytes": ONE,
        "freed_bytes": 0,
        "spared": 0,
        "dropped_refs": [],
        "dropped_actions": [],
        "dead_manifests": 1,
        "staged_bytes": 0,
        "max_bytes": None,
        "over_bytes": 0,
        "problems": [],
    }
    assert len(filled.chunk_files()) == 12
    done = run("gc", "--json").json
    assert (done["dry_run"], done["freed_bytes"]) == (False, ONE)
    assert len(filled.chunk_files()) == 8
    assert run("assemble", "models/one", "-o", tmp_path / "out").code == 0
    assert run("verify").code == 0
    assert run("gc", "--json").json["dead_chunks"] == 0


def test_grace_spares_what_is_young(run: Run, filled: Filled) -> None:
    run("rm", "other")
    assert run("gc", "--grace", "1h", "--json").json["spared"] == 4
    assert run("gc", "--json", env={"CAS_GRACE": "1h"}).json["dead_chunks"] == 0
    run("config", "set", "grace", "1h")
    assert run("gc", "--json").json["dead_chunks"] == 0
    assert run("gc", "--grace", "0s", "--json").json["dead_chunks"] == 4


def test_gc_keep_last_drops_old_generations(run: Run, filled: Filled, tmp_path: Path) -> None:
    before = refs(run)
    planned = run("gc", "--keep-last", "1", "--dry-run")
    assert planned.out.splitlines()[0] == "would drop models/one@1"
    assert refs(run) == before
    done = run("gc", "--keep-last", "1", "--json").json
    assert (done["dropped_refs"], done["freed_bytes"]) == (["models/one@1"], ONE)
    assert refs(run) == ["models/one@2", "other@1"]
    assert run("assemble", "models/one", "-o", tmp_path / "out").code == 0
    assert run("gc", "--keep-last", "1").out.startswith("found 0 chunks")


def test_gc_older_than_goes_by_the_last_use(run: Run, filled: Filled, tmp_path: Path) -> None:
    assert run("gc", "--older-than", "1d", "--json").json["dropped_refs"] == []
    for path in (filled.path / "refs").rglob("0*"):
        os.utime(path, (1e9, 1e9))
    assert run("assemble", "models/one@1", "-o", tmp_path / "out").code == 0
    assert run("gc", "--older-than", "1d", "--json").json["dropped_refs"] == []
    for path in (filled.path / "refs").rglob("0*"):
        os.utime(path, (1e9, 1e9))
    assert run("gc", "--older-than", "1d", "--json").json["dropped_refs"] == ["models/one@1"]
    done = run("gc", "--older-than", "1d", "--include-current", "--json").json
    assert done["dropped_refs"] == ["models/one@2", "other@1"]
    assert (refs(run), filled.chunk_files()) == ([], [])


def test_gc_max_size_drops_until_it_fits(run: Run, filled: Filled) -> None:
    assert run("gc", "--max-size", "1G", "--json").json["dropped_refs"] == []
    done = run("gc", "--max-size", f"{2 * ONE}", "--json").json
    assert (done["dropped_refs"], done["max_bytes"], done["over_bytes"]) == (
        ["models/one@1"],
        2 * ONE,
        0,
    )
    outcome = run("gc", "--max-size", "1k", "--json")
    assert outcome.code == 0
    assert (outcome.json["dropped_refs"], outcome.json["over_bytes"]) == ([], 2 * ONE - 1000)
    assert "more than the limit remain" in outcome.err


def test_gc_goes_by_the_settings_unless_options_say_otherwise(run: Run, filled: Filled) -> None:
    assert run("gc", "--dry-run", "--json").json["dropped_refs"] == []
    one = ["models/one@1"]
    keep = {"CAS_KEEP_LAST": "1"}
    assert run("gc", "--dry-run", "--json", env=keep).json["dropped_refs"] == one
    assert run("config", "set", "keep_last", "2").code == 0
    assert run("gc", "--dry-run", "--json").json["dropped_refs"] == []
    assert run("gc", "--dry-run", "--json", env=keep).json["dropped_refs"] == one
    assert run("config", "set", "max_size", "1k").out == "max_size = 1k (store's config.toml)\n"
    document = run("gc", "--dry-run", "--json").json
    assert (document["dropped_refs"], document["max_bytes"]) == ([], 1000), "both are protected"
    document = run("gc", "--dry-run", "--keep-last", "1", "--json").json
    assert (document["dropped_refs"], document["max_bytes"]) == (one, None)
    document = run("gc", "--dry-run", "--max-size", "1k", "--json").json
    assert (document["dropped_refs"], document["max_bytes"]) == (one, 1000)
    assert run("gc", "--dry-run", "--max-size", "none", "--json").json["dropped_refs"] == []


@pytest.mark.parametrize(
    ("option", "value"),
    [("--keep-last", "0"), ("--keep-last", "x"), ("--older-than", "1y"), ("--max-size", "many")],
)
def test_a_malformed_policy_is_a_usage_error(
    run: Run, filled: Filled, option: str, value: str
) -> None:
    outcome = run("gc", option, value)
    assert outcome.code == 2
    assert option in outcome.err and value in outcome.err
    assert len(filled.chunk_files()) == 12


def test_gc_dry_run_needs_no_right_to_write(run: Run, filled: Filled) -> None:
    run("rm", "other")
    expected = run("gc", "--dry-run", "--keep-last", "1", "--json").json
    assert (expected["dead_chunks"], expected["dropped_refs"]) == (8, ["models/one@1"])
    env = {"CAS_READONLY": "1"}
    assert run("gc", "--dry-run", "--keep-last", "1", "--json", env=env).json == expected
    assert run("gc", "--keep-last", "1", env=env).code == 5
    assert refs(run) == ["models/one@1", "models/one@2"]


def test_the_largest_size_of_the_environment_is_kept_by_what_writes(
    run: Run, filled: Filled
) -> None:
    from cas_cli.app import App
    from cas_cli.options import Given

    app = App(Given(store=str(filled.path)), {"CAS_MAX_SIZE": str(2 * ONE)})
    with app.store(write=True) as store:
        commit(store, "other", filled.other)
    assert refs(run) == ["models/one@2", "other@1", "other@2"]


def test_gc_leaves_everything_when_a_manifest_cannot_be_read(run: Run, filled: Filled) -> None:
    digest = run("ls", "other", "--json").json["refs"][0]["manifest"].removeprefix("blake3:")
    manifest = next((filled.path / "manifests").rglob(digest))
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    run("rm", "models/one")
    outcome = run("gc", "--json")
    assert outcome.code == 4
    assert outcome.json["dead_chunks"] == 0
    assert digest in outcome.json["problems"][0]
    assert len(filled.chunk_files()) == 12


def test_verify_of_a_whole_store_finds_nothing(run: Run, filled: Filled) -> None:
    outcome = run("verify", "--json")
    assert outcome.code == 0
    assert outcome.json == {
        "checked_chunks": 12,
        "checked_bytes": 3 * ONE,
        "damaged": [],
        "missing": [],
        "affected_refs": [],
        "repaired": [],
        "still_missing": [],
        "still_affected_refs": [],
        "checked_records": 0,
        "damaged_records": [],
        "damaged_manifests": {},
        "repaired_manifests": [],
        "problems": [],
        "complete": True,
        "dry_run": False,
        "dropped": [],
        "dropped_bytes": 0,
    }
    assert "no damage found" in run("verify").out


def damage(path: Path, how: str) -> None:
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        truncate(path, path.stat().st_size - 1)
    else:
        flip_bit(path, path.stat().st_size // 2)


DAMAGES = ["deleted", "truncated", "one bit flipped"]


@pytest.mark.parametrize("how", DAMAGES)
def test_verify_finds_damage_and_names_what_is_affected(run: Run, filled: Filled, how: str) -> None:
    chunk = filled.chunk_of(filled.other)
    damage(chunk, how)
    outcome = run("verify", "--json")
    assert outcome.code == 4
    assert outcome.json["affected_refs"] == ["other@1"]
    assert outcome.json["missing"] == [f"blake3:{chunk.name}"]
    assert outcome.json["damaged"] == ([] if how == "deleted" else [f"blake3:{chunk.name}"])
    shown = run("verify")
    assert shown.code == 4
    assert "cannot be assembled: other@1" in shown.out


@pytest.mark.parametrize("how", DAMAGES)
def test_assemble_refuses_damage_names_it_and_leaves_no_file(
    run: Run, filled: Filled, tmp_path: Path, how: str
) -> None:
    chunk = filled.chunk_of(filled.other)
    damage(chunk, how)
    outcome = run("assemble", "other", "-o", tmp_path / "out")
    assert outcome.code == 4
    assert f"blake3:{chunk.name}" in outcome.err
    assert "weights.bin" in outcome.err
    assert f"0..{CHUNK}" in outcome.err
    assert "cas verify" in outcome.err
    assert list((tmp_path / "out").iterdir()) == []
    assert run("assemble", "models/one", "-o", tmp_path / "out").code == 0


def test_putting_the_same_bytes_again_heals(run: Run, filled: Filled, tmp_path: Path) -> None:
    damage(filled.chunk_of(filled.other), "one bit flipped")
    assert run("verify").code == 4
    with cas.Store.open(filled.path) as store:
        commit(store, "other", filled.other)
    assert run("verify").code == 0
    assert run("assemble", "other@1", "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "weights.bin").read_bytes() == filled.other


@pytest.mark.parametrize("how", DAMAGES)
def test_verify_repairs_from_a_file_of_the_artifact(
    run: Run, filled: Filled, tmp_path: Path, how: str
) -> None:
    (tmp_path / "copy.bin").write_bytes(filled.other)
    chunk = filled.chunk_of(filled.other)
    damage(chunk, how)
    lost = f"blake3:{chunk.name}"
    tried = run("verify", "--repair", "--from", tmp_path, "--dry-run", "--json")
    assert (tried.code, tried.json["repaired"]) == (0, [lost])
    assert f"could be repaired {lost}" in run("verify", "-n", "--repair", "--from", tmp_path).out
    assert run("verify", "-n", "--json").json["missing"] == [lost], "trying it changes nothing"
    done = run("verify", "--repair", "--from", tmp_path / "copy.bin", "--json")
    assert done.code == 0
    assert done.json["repaired"] == done.json["missing"] == [lost]
    assert (done.json["affected_refs"], done.json["still_affected_refs"]) == (["other@1"], [])
    assert run("verify").code == 0
    assert run("assemble", "other", "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "weights.bin").read_bytes() == filled.other


def test_verify_tells_what_it_could_not_repair_and_what_helps(
    run: Run, filled: Filled, tmp_path: Path
) -> None:
    (tmp_path / "half.bin").write_bytes(filled.other[:CHUNK] + bytes(2 * CHUNK + 17))
    first, second = filled.chunk_of(filled.other), filled.chunk_of(filled.other[CHUNK:])
    damage(first, "deleted")
    damage(second, "one bit flipped")
    outcome = run("verify", "--repair", "--from", tmp_path / "half.bin")
    assert outcome.code == 4
    assert f"repaired blake3:{first.name}" in outcome.out
    where = f"bytes {CHUNK}..{2 * CHUNK} of weights.bin of other@1"
    assert f"still missing blake3:{second.name} ({where})" in outcome.out
    assert "cannot be assembled: other@1" in outcome.out
    assert "cas verify --repair --from PATH" in outcome.err
    found = run("verify", "--repair", "--json")
    assert found.code == 4
    assert found.json["still_missing"] == [f"blake3:{second.name}"]
    assert found.json["still_affected_refs"] == ["other@1"]


def test_verify_says_what_to_run_for_a_damaged_manifest(
    run: Run, filled: Filled, tmp_path: Path
) -> None:
    digest = run("ls", "other", "--json").json["refs"][0]["manifest"].removeprefix("blake3:")
    manifest = next((filled.path / "manifests").rglob(digest))
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / digest).write_bytes(manifest.read_bytes())
    truncate(manifest, 50)
    found = run("verify")
    assert found.code == 4 and "cannot be assembled: other@1" in found.out
    assert "`cas rm other@1`" in found.err and "--from COPY/manifests`" in found.err
    assert "checkpoint" not in found.err, "no checkpoint has a manifest"
    tried = run("verify", "--repair", "--from", tmp_path / "copy", "-n", "--json")
    assert (tried.code, tried.json["repaired_manifests"]) == (0, [f"blake3:{digest}"])
    assert tried.json["damaged_manifests"] == {f"blake3:{digest}": ["other@1"]}
    done = run("verify", "--repair", "--from", tmp_path / "copy")
    assert (done.code, done.err) == (0, "")
    assert f"repaired manifest blake3:{digest}" in done.out
    assert run("verify").code == 0


def test_the_command_that_verify_names_removes_what_has_no_manifest(
    run: Run, filled: Filled
) -> None:
    digest = run("ls", "other", "--json").json["refs"][0]["manifest"].removeprefix("blake3:")
    next((filled.path / "manifests").rglob(digest)).unlink()
    assert run("gc").code == 4
    assert run("rm", "other@1").code == 0
    assert (run("gc").code, run("verify").code) == (0, 0)


def test_the_quarantine_can_be_emptied(run: Run, filled: Filled) -> None:
    chunk = filled.chunk_of(filled.other)
    damage(chunk, "one bit flipped")
    assert run("verify").code == 4
    kept = run("verify", "--drop-quarantine")
    assert f"kept {chunk.name}: other@1 needs it" in kept.out
    with cas.Store.open(filled.path) as store:
        commit(store, "other", filled.other)
    tried = run("verify", "--drop-quarantine", "--dry-run", "--json").json
    assert (tried["dropped"], tried["dropped_bytes"]) == ([chunk.name], CHUNK)
    assert run("stats", "--json").json["quarantined_bytes"] == CHUNK
    outcome = run("verify", "--drop-quarantine")
    assert outcome.code == 0
    assert "deleted 1 file in quarantine, 64.0 KiB" in outcome.out
    assert run("stats", "--json").json["quarantined_bytes"] == 0


def test_the_quarantine_can_be_emptied_by_force(run: Run, filled: Filled) -> None:
    damage(filled.chunk_of(filled.other), "one bit flipped")
    assert run("verify").code == 4
    assert len(run("verify", "--drop-quarantine", "--force", "--json").json["dropped"]) == 1


@pytest.mark.parametrize(
    "arguments", [("--from", "x"), ("--force",), ("--rebuild-index", "--dry-run")], ids=" ".join
)
def test_options_of_verify_that_make_no_sense_alone(
    run: Run, filled: Filled, arguments: tuple[str, ...]
) -> None:
    assert run("verify", *arguments).code == 2


def test_a_file_to_repair_from_that_does_not_exist(run: Run, filled: Filled) -> None:
    outcome = run("verify", "--repair", "--from", "nowhere.bin")
    assert outcome.code == 3
    assert "there is no nowhere.bin to repair from" in outcome.err


def test_consumers_verify_and_are_told_that_nothing_was_set_aside(
    run: Run, filled: Filled, tmp_path: Path
) -> None:
    chunk = filled.chunk_of(filled.other)
    damage(chunk, "one bit flipped")
    outcome = run("verify", env={"CAS_READONLY": "1"})
    assert outcome.code == 4
    assert f"damaged blake3:{chunk.name}" in outcome.out
    assert "left where it is" in outcome.err
    assert chunk.exists()
    assert run("--read-only", "assemble", "models/one", "-o", tmp_path / "out").code == 0


def test_verify_can_stop_and_go_on(run: Run, filled: Filled) -> None:
    stopped = run("verify", "--max-duration", "0s", "--json").json
    assert (stopped["checked_chunks"], stopped["complete"]) == (0, False)
    assert run("verify", "--max-duration", "1h", "--json").json["complete"] is True


def test_the_index_can_be_rebuilt_on_request(run: Run, filled: Filled) -> None:
    outcome = run("verify", "--rebuild-index", "--json")
    assert outcome.code == 0
    assert outcome.json["checked_chunks"] == 12
