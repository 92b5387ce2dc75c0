"""`docs/cli.md` and the command say the same: every option, and every key of the JSON."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click
import pytest

from cas import ActionRecord, Digest
from cas.journal import Event
from cas.testing.stores import open_store
from cas_cli.main import SECTIONS, cli
from cas_cli.options import global_options

from .conftest import ROOT, Filled, Run

PAGE = (ROOT / "docs" / "cli.md").read_text("utf-8")
COMMANDS = [name for section in SECTIONS.values() for name in section]
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def section(name: str) -> str:
    """What the page says under ``## cas NAME``."""
    _, _, rest = PAGE.partition(f"\n## cas {name}\n")
    return rest.partition("\n## ")[0]


def prose(text: str) -> str:
    """Without the blocks of code, whose options are tested by running them."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def flags(params: list[click.Parameter]) -> set[str]:
    options = [param for param in params if isinstance(param, click.Option)]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


GLOBAL = flags([*cli.params, *global_options()]) | {"--help", "-h"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented_and_every_documented_option_is_there(name: str) -> None:
    command = importlib.import_module(f"cas_cli.commands.{name}").command
    own = flags(command.params) - GLOBAL
    spans = re.findall(r"`([^`\n]+)`", prose(section(name)))
    # An option of another program stands behind that program's name, as in `python -m`.
    named = {
        f for span in spans if span.startswith(("-", f"cas {name} ")) for f in FLAG.findall(span)
    }
    assert own - named == set(), "the page lacks them"
    assert named - own - GLOBAL == set(), "the page makes them up"


def test_every_global_option_is_documented() -> None:
    page = prose(PAGE)
    assert [flag for flag in sorted(GLOBAL) if f"`{flag}" not in page] == []


def keys(text: str) -> set[str]:
    """The keys of the outermost object in a sketch such as ``{"a", "b": [{"c"}]}``."""
    found, depth = set(), 0
    for token in re.findall(r'[\[{}\]]|"\w+"', text):
        if token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
        elif depth == 1:
            found.add(token.strip('"'))
    return found


def sketches(name: str) -> list[set[str]]:
    joined = " ".join(section(name).split())
    return [keys(found) for found in re.findall(r"`(\{\"[^`]*\})`", joined)]


@pytest.fixture
def store(filled: Filled) -> Path:
    """A store with an artifact, an action record, and something to explain."""
    record = ActionRecord(Digest.of(b"1"), "delegate", {}, None, label="a delegate")
    with open_store(filled.path) as opened, opened.writer() as writer:
        writer.put_actions([record])
        opened.actions.note([Event("miss", "delegate", record.label, "absent", key=record.key)])
    return filled.path


@pytest.mark.parametrize(
    "line",
    [
        "ls",
        "ls --actions",
        "show other",
        "explain other models/one",
        "explain --last",
        "rm other --dry-run",
        "stats",
        "gc --dry-run",
        "verify",
        "config",
        "config get grace",
        "config set grace 1h",
        "config unset grace",
        "assemble other -o out",
    ],
)
def test_the_json_has_the_documented_keys(
    run: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(*line.split(), "--json")
    assert outcome.code == 0, outcome.err
    assert set(outcome.json) in sketches(line.split()[0])
