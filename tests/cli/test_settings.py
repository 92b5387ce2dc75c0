"""Where a setting's value comes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from cas_cli.main import cli
from cas_cli.settings import SETTINGS, show_duration

from .conftest import Filled, Run, commit


def origin(outcome_json: dict, key: str) -> tuple[object, str]:
    found = outcome_json["settings"][key]
    return found["value"], found["origin"]


def test_defaults_come_from_nowhere_else(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["config", "--json"])
    assert result.exit_code == 0
    import json

    settings = json.loads(result.stdout)
    assert set(settings["settings"]) == {s.name for s in SETTINGS}
    assert origin(settings, "store") == (str(tmp_path / "xdg-cache" / "cas"), "default")
    assert origin(settings, "read_only") == (False, "default")
    assert origin(settings, "umask") == (None, "default")
    assert origin(settings, "grace") == (0, "default")
    assert origin(settings, "recheck") == (0, "default")
    for key in ("keep_last", "older_than", "max_size"):
        assert origin(settings, key) == (None, "default")


def test_flag_beats_environment_beats_store_beats_default(run: Run, filled: Filled) -> None:
    assert run("config", "set", "umask", "0027").code == 0
    assert origin(run("config", "--json").json, "umask") == ("0027", "store's config.toml")
    env = {"CAS_UMASK": "0007"}
    assert origin(run("config", "--json", env=env).json, "umask") == (
        "0007",
        "environment CAS_UMASK",
    )
    by_flag = run("config", "--json", "--umask", "0002", env=env).json
    assert origin(by_flag, "umask") == ("0002", "flag --umask")


def test_the_store_comes_from_the_flag_or_the_environment(filled: Filled) -> None:
    env = {"CAS_STORE": str(filled.path)}
    assert CliRunner().invoke(cli, ["ls"], env=env).exit_code == 0
    missing = ["ls", "--store", str(filled.path) + "-none"]
    assert CliRunner().invoke(cli, missing, env=env).exit_code == 3


def test_a_malformed_value_names_the_place_where_it_stands(run: Run, filled: Filled) -> None:
    outcome = run("config", env={"CAS_UMASK": "banana"})
    assert outcome.code == 2
    assert "CAS_UMASK: umask 'banana' is not an octal number" in outcome.err
    outcome = run("ls", "--umask", "9")
    assert outcome.code == 2
    assert "--umask" in outcome.err
    outcome = run("ls", env={"CAS_READONLY": "perhaps"})
    assert outcome.code == 2
    assert "CAS_READONLY" in outcome.err


@pytest.mark.parametrize("age", ["x", "-1s", "1.5h", "", "9y"])
def test_a_malformed_age_is_a_usage_error(run: Run, filled: Filled, age: str) -> None:
    outcome = run("gc", f"--grace={age}")
    assert outcome.code == 2
    assert "--grace" in outcome.err


def test_set_and_get_go_together(run: Run, filled: Filled) -> None:
    assert run("config", "set", "grace", "2h").out == "grace = 2h (store's config.toml)\n"
    assert run("config", "get", "grace").out == "2h\n"
    assert run("config", "get", "grace", "--json").json == {
        "key": "grace",
        "value": 7200,
        "origin": "store's config.toml",
    }


@pytest.mark.parametrize(
    ("key", "text", "shown", "value"),
    [
        ("keep_last", "3", "3", 3),
        ("older_than", "30d", "30d", 30 * 86400),
        ("max_size", "200GiB", "200GiB", "200GiB"),
        ("max_size", "10%", "10%", "10%"),
        ("max_size", "0", "none", None),
        ("keep_last", "none", "none", None),
    ],
)
def test_a_policy_is_shown_as_it_was_given(
    run: Run, filled: Filled, key: str, text: str, shown: str, value: object
) -> None:
    assert run("config", "set", key, text).code == 0
    assert run("config", "get", key).out == f"{shown}\n"
    assert run("config", "get", key, "--json").json["value"] == value
    env = {f"CAS_{key.upper()}": text}
    assert run("config", "get", key, env=env).out == f"{shown}\n"


def test_a_malformed_policy_of_the_environment_is_named(run: Run, filled: Filled) -> None:
    outcome = run("stats", env={"CAS_MAX_SIZE": "lots"})
    assert outcome.code == 2
    assert "CAS_MAX_SIZE: 'lots' is not a size such as 200G" in outcome.err


@pytest.mark.parametrize(
    ("key", "text"),
    [("umask", "0027"), ("grace", "2h"), ("keep_last", "3"), ("max_size", "1G")],
)
def test_unset_takes_a_setting_back(run: Run, filled: Filled, key: str, text: str) -> None:
    before = run("config", "get", key).out
    assert run("config", "set", key, text).code == 0
    outcome = run("config", "unset", key)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"{key} = {before.rstrip()} (default)\n"
    assert (filled.path / "config.toml").read_text() == ""


def test_unset_makes_no_store(run: Run, store_dir: Path) -> None:
    assert run("config", "unset", "grace").code == 3
    assert not store_dir.exists()


def test_a_policy_that_is_set_to_none_is_not_said_to_be_decided_elsewhere(
    run: Run, filled: Filled
) -> None:
    outcome = run("config", "set", "older_than", "none")
    assert (outcome.out, outcome.err) == ("older_than = none (default)\n", "")


def test_set_tells_when_something_else_still_decides(run: Run, filled: Filled) -> None:
    outcome = run("config", "set", "grace", "2h", env={"CAS_GRACE": "1d"})
    assert outcome.code == 0
    assert "environment CAS_GRACE still decides" in outcome.err


def test_what_a_store_does_not_hold_cannot_be_set_there(run: Run, filled: Filled) -> None:
    outcome = run("config", "set", "store", "/elsewhere")
    assert outcome.code == 2
    assert "CAS_STORE" in outcome.err


def test_unknown_settings_are_refused_with_the_known_ones(run: Run, filled: Filled) -> None:
    for words in (("get", "colour"), ("set", "colour", "red"), ("unset", "colour")):
        outcome = run("config", *words)
        assert outcome.code == 2
        assert "umask, grace" in outcome.err


def test_a_setting_in_the_place_of_a_command_is_explained(run: Run, filled: Filled) -> None:
    outcome = run("config", "grace")
    assert outcome.code == 2
    assert "`cas config get grace` shows the setting" in outcome.err
    assert "did you mean 'unset'" in run("config", "unst", "grace").err


def test_a_config_file_of_garbage_is_damage_and_named(run: Run, filled: Filled) -> None:
    (filled.path / "config.toml").write_text("umask = [")
    outcome = run("ls")
    assert outcome.code == 4
    assert "config.toml" in outcome.err


def test_read_only_forbids_what_writes_and_allows_what_reads(run: Run, filled: Filled) -> None:
    env = {"CAS_READONLY": "1"}
    for reading in (("ls",), ("show", "other"), ("stats",)):
        assert run(*reading, env=env).code == 0, reading
    for writing in (("rm", "other"), ("gc",), ("config", "set", "grace", "1h")):
        outcome = run(*writing, env=env)
        assert outcome.code == 5, writing
        assert "read-only because of CAS_READONLY; leave that out" in outcome.err
    assert "because of --read-only;" in run("rm", "other", "--read-only").err
    assert run("show", "other").code == 0


def test_umask_decides_who_can_read_what_is_written(run: Run, store_dir: Path) -> None:
    import cas

    assert run("--umask", "0027", "config", "set", "umask", "0027").code == 0
    with cas.Store.open(store_dir) as store:
        commit(store, "a", os.urandom(100_000))
    chunks = [path for path in (store_dir / "chunks").rglob("*") if path.is_file()]
    assert chunks
    assert {path.stat().st_mode & 0o777 for path in chunks} == {0o440}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (90, "90s"), (120, "2m"), (7200, "2h"), (86400, "1d"), (1209600, "2w")],
)
def test_durations_are_shown_as_they_are_written(seconds: int, text: str) -> None:
    assert show_duration(seconds) == text
