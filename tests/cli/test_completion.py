"""What the tab key offers, asked the way that the shell asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from cas import ActionRecord, Digest
from cas.testing.stores import open_store
from cas_cli.main import SECTIONS, cli
from cas_cli.options import Given

from .conftest import Filled

KEY = Digest.of(b"an action")


def offered(store: Path, *words: str) -> list[str]:
    """What may stand for the last of ``words``; a file of the shell's finding as ``<file>``."""
    *before, incomplete = words
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAS_STORE", str(store))
        asked = ShellComplete(cli, {"obj": Given()}, "cas", "_CAS_COMPLETE")
        found = asked.get_completions(before, incomplete)
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in found]


def test_commands_and_options_are_offered(filled: Filled) -> None:
    assert offered(filled.path, "") == [name for section in SECTIONS.values() for name in section]
    assert offered(filled.path, "as") == ["assemble"]
    assert "--max-size" in offered(filled.path, "gc", "--max")
    assert "--json" in offered(filled.path, "gc", "--j")


@pytest.mark.parametrize("command", ["show", "assemble", "rm", "ls", "explain"])
def test_names_and_generations_of_artifacts_are_offered(filled: Filled, command: str) -> None:
    assert offered(filled.path, command, "") == ["models/one", "other"]
    assert offered(filled.path, command, "mod") == ["models/one"]
    assert offered(filled.path, command, "models/one@") == ["models/one@1", "models/one@2"]


def test_the_store_of_the_command_line_counts(filled: Filled, tmp_path: Path) -> None:
    assert offered(tmp_path / "none", "--store", str(filled.path), "show", "o") == ["other"]
    assert offered(tmp_path / "none", "show", "--store", str(filled.path), "o") == ["other"]


def test_keys_backends_settings_and_files_are_offered(filled: Filled) -> None:
    with open_store(filled.path) as store, store.writer() as writer:
        writer.put_actions([ActionRecord(KEY, "delegate", {}, None)])
    assert offered(filled.path, "rm", "--action", KEY.hex()[:3]) == [KEY.hex()[:12]]
    assert offered(filled.path, "export", "--backend", "x") == ["xnnpack"]
    assert "store" in offered(filled.path, "config", "get", "")
    assert "store" not in offered(filled.path, "config", "set", "")
    assert offered(filled.path, "config", "unset", "gr") == ["grace"]
    for command in (("export",), ("run",), ("run", "script.py")):
        assert offered(filled.path, *command, "x") == ["<file>"]


def test_a_store_that_is_not_there_or_a_name_that_cannot_be_has_nothing_to_offer(
    filled: Filled, tmp_path: Path
) -> None:
    assert offered(tmp_path / "none", "show", "") == []
    assert offered(tmp_path / "none", "rm", "--action", "") == []
    assert offered(filled.path, "show", "../@") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_gets_its_script_and_then_the_words(filled: Filled, shell: str) -> None:
    runner = CliRunner()
    script = runner.invoke(cli, [], prog_name="cas", env={"_CAS_COMPLETE": f"{shell}_source"})
    assert script.exit_code == 0 and f"_CAS_COMPLETE={shell}_complete" in script.stdout
    asked = {
        "CAS_STORE": str(filled.path),
        "_CAS_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "cas show mod",
        "COMP_CWORD": "mod" if shell == "fish" else "2",
    }
    words = runner.invoke(cli, [], prog_name="cas", env=asked)
    assert words.exit_code == 0 and "models/one" in words.stdout
