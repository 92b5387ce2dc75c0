"""The documentation's code runs, and prints what it says it prints.

Per page, in order, in an empty directory, with a store of its own:

* a ``python`` block is executed, all blocks of a page in one namespace;
* a ``python`` block after ``<!-- file: NAME -->`` is written to that file instead;
* in a ``console`` block each ``$ cas ...`` line is run, and the lines below it are compared with
  what it printed, where ``...`` stands for anything; ``# exit N`` at its end expects that code;
* ``<!-- no-test: REASON -->`` before a block leaves it out.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[a-z-]+): (?P<text>[^\n]*?) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>python|console)\b[^\n]*\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    note: str | None
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    source = page.read_text("utf-8")
    for match in _BLOCK.finditer(source):
        line = source.count("\n", 0, match.start("code")) + 1
        yield Block(
            page, line, match["language"], match["code"], match["note"], match["text"] or ""
        )


def run_python(block: Block, namespace: dict[str, object]) -> None:
    # Blank lines in front, so that a traceback shows the line of the page.
    source = "\n" * (block.line - 1) + block.code
    exec(compile(source, str(block.page), "exec"), namespace)


def run_console(block: Block) -> None:
    from cas_cli.main import cli

    steps = re.split(r"^\$ ", block.code, flags=re.MULTILINE)
    assert not steps[0].strip(), f"{block.where}: a console block begins with '$ '"
    for step in steps[1:]:
        command, _, expected = step.partition("\n")
        command, _, comment = command.partition("  #")
        program, *args = shlex.split(command)
        assert program == "cas", f"{block.where}: only `cas` is run, not {program}"
        code = int(comment.split()[1]) if comment.strip().startswith("exit ") else 0
        result = CliRunner().invoke(cli, args, prog_name="cas")
        assert result.exit_code == code, f"{block.where}: $ {command}\n{result.output}"
        if expected.strip():
            pattern = re.escape(expected.strip()).replace(r"\.\.\.", ".*")
            assert re.fullmatch(pattern, result.output.strip(), re.DOTALL), (
                f"{block.where}: $ {command}\n--- expected\n{expected}\n--- got\n{result.output}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runnable = [block for block in blocks(page) if block.note != "no-test"]
    if not runnable:
        return
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CAS_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "100")
    # `cas run` leaves the process to the script that it ran.
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in runnable:
        if block.note == "file":
            (work / block.text).write_text(block.code, "utf-8")
        elif block.language == "python":
            run_python(block, namespace)
        else:
            run_console(block)


def test_every_opt_out_gives_a_reason() -> None:
    notes = [b for page in PAGES for b in blocks(page) if b.note is not None]
    assert [b.where for b in notes if b.note not in ("file", "no-test")] == []
    assert [b.where for b in notes if b.note == "no-test" and len(b.text) < 10] == []


def test_exit_codes_are_documented_as_the_program_knows_them() -> None:
    from cas_cli.failures import EXIT_CODES

    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \|$", page, flags=re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES


def test_every_command_and_setting_is_documented() -> None:
    from cas_cli.main import SECTIONS
    from cas_cli.settings import SETTINGS

    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    commands = [name for section in SECTIONS.values() for name in section]
    assert [name for name in commands if f"## cas {name}\n" not in page] == []
    assert [s.name for s in SETTINGS if f"| `{s.name}` |" not in page] == []
    assert [s.env for s in SETTINGS if f"`{s.env}`" not in page] == []
