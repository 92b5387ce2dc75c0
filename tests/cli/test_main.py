"""The command as a whole: help, global options, and what happens to errors."""

from __future__ import annotations

import errno
import importlib
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import cas.errors
from cas_cli.failures import EXIT_CODES, describe
from cas_cli.main import SECTIONS, cli

from .conftest import Filled, Run, command_line, environment

COMMANDS = {name: line for section in SECTIONS.values() for name, line in section.items()}


def test_without_arguments_it_says_what_it_is_and_where_to_start() -> None:
    result = CliRunner().invoke(cli, [], prog_name="cas")
    assert result.exit_code == 0
    assert "content-addressed store" in result.stdout
    for start in ("cas export", "cas ls", "cas assemble"):
        assert f"\n  {start} " in result.stdout
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_each_command_what_it_says_itself(name: str) -> None:
    command = importlib.import_module(f"cas_cli.commands.{name}").command
    assert command.short_help == COMMANDS[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_the_global_options(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"], prog_name="cas")
    assert result.exit_code == 0
    assert "--store DIR" in result.stdout
    assert "--json" in result.stdout


def test_an_unknown_command_is_a_usage_error_with_a_suggestion(run: Run) -> None:
    outcome = run("assmble")
    assert outcome.code == 2
    assert outcome.out == ""
    assert "there is no command 'assmble'; did you mean 'assemble'?" in outcome.err


def test_an_unknown_option_is_a_usage_error_of_one_line(run: Run) -> None:
    outcome = run("stats", "--colour")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "--colour" in outcome.err
    assert "cas stats --help" in outcome.err


def test_global_options_may_stand_before_or_after_the_command(filled: Filled) -> None:
    runner = CliRunner()
    before = runner.invoke(cli, ["--store", str(filled.path), "--json", "stats"])
    after = runner.invoke(cli, ["stats", "--json", "--store", str(filled.path)])
    assert before.exit_code == after.exit_code == 0
    assert before.stdout == after.stdout
    assert before.stdout.startswith("{")


def test_an_option_after_the_command_beats_the_one_before(filled: Filled, tmp_path: Path) -> None:
    args = ["--store", str(tmp_path / "none"), "stats", "--store", str(filled.path)]
    assert CliRunner().invoke(cli, args).exit_code == 0


def test_an_error_is_one_line_on_stderr_and_a_document_with_json(run: Run, filled: Filled) -> None:
    plain = run("show", "nothing")
    assert plain.code == 3
    assert plain.out == ""
    assert plain.err.startswith("cas: no artifact 'nothing'")
    assert plain.err.count("\n") == 1

    machine = run("show", "nothing", "--json")
    assert machine.code == 3
    assert machine.json == {
        "error": "RefNotFound",
        "message": plain.err.removeprefix("cas: ").rstrip("\n"),
        "exit_code": 3,
    }


def test_usage_errors_obey_json_too(run: Run) -> None:
    outcome = run("stats", "--json", "--colour")
    assert outcome.json["error"] == "UsageError"
    assert outcome.json["exit_code"] == outcome.code == 2


def test_verbose_shows_the_traceback_and_nothing_else_does(run: Run, filled: Filled) -> None:
    assert "Traceback" not in run("show", "nothing").err
    assert "Traceback" in run("-v", "show", "nothing").err


def test_a_bug_is_one_line_too(run: Run, filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a\nbug")

    monkeypatch.setattr("cas.stats.stats", broken)
    outcome = run("stats")
    assert outcome.code == 1
    assert outcome.err == (
        "cas: internal error: ZeroDivisionError: a bug; run with -v for the traceback\n"
    )


def error_classes(base: type[cas.errors.CasError]) -> list[type[cas.errors.CasError]]:
    below = [found for child in base.__subclasses__() for found in error_classes(child)]
    return [base, *below]


def test_every_error_of_the_library_has_a_documented_code() -> None:
    importlib.import_module("cas.exportspec")
    classes = error_classes(cas.errors.CasError)
    assert len(classes) > 15
    assert {error.exit_code for error in classes} <= set(EXIT_CODES)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.UsageError("x"), 2),
        (OSError(errno.ENOSPC, "No space left on device", "f"), 6),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "f"), 6),
        (PermissionError(errno.EACCES, "Permission denied", "f"), 5),
        (OSError(errno.EROFS, "Read-only file system", "f"), 5),
        (FileNotFoundError(errno.ENOENT, "No such file", "f"), 3),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "f"), 2),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141),
        (RuntimeError("x"), 1),
        (MemoryError(), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_of_the_system_map_to_the_documented_codes(error: BaseException, code: int) -> None:
    failure = describe(error)
    assert failure.exit_code == code
    assert "\n" not in failure.message


def test_an_error_of_the_system_names_the_path() -> None:
    assert describe(OSError(errno.ENOSPC, "No space left on device", "/a/b")).message == (
        "/a/b: no space left on device"
    )


def test_a_reader_that_goes_away_is_no_error_worth_words(filled: Filled) -> None:
    process = subprocess.Popen(
        command_line("--store", filled.path, "show", "other", "--json"),
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(500) == 141
    assert errors == b""
