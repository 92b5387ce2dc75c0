"""`cas run`: an existing export script, unchanged, under the store."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cas.errors import CasError, ReadOnlyStore
from cas.layout import check_ref_name
from cas.running import RunOptions, RunResult, run
from cas.scripts import Script, execute
from cas.strictjson import Json
from cas_cli import completion, options
from cas_cli.app import App, current
from cas_cli.commands.export import MissingExtra
from cas_cli.failures import Unhandled
from cas_cli.render import printable, ratio, size

if TYPE_CHECKING:
    from cas.executorch.running import Recorded


@options.command(
    short_help="Run an export script under the store, unchanged.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--name", metavar="NAME", help="The artifact's name; made from the output file's by default."
)
@click.option(
    "-m",
    "is_module",
    is_flag=True,
    help="Run a module, as `python -m` does; what follows is its name and its arguments.",
)
@click.option(
    "--spill",
    is_flag=True,
    help="Move models from memory into the store when they are exported.",
)
@options.action_options
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write what was recorded to FILE, as JSON.",
)
@click.option("-q", "--quiet", is_flag=True, help="Do not say at the end what was recorded.")
@click.argument("script", shell_complete=completion.files)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=completion.files)
def command(
    name: str | None,
    is_module: bool,
    spill: bool,
    no_actions: bool,
    recheck: str | None,
    report: Path | None,
    quiet: bool,
    script: str,
    arguments: tuple[str, ...],
) -> Callable[[], int]:
    """Run SCRIPT with ARGUMENTS as Python would, and record what it exports.

    \b
    SCRIPT is one of
      FILE.py         a script
      DIR, FILE.zip   with a __main__.py
      -m MODULE       a module
    Options of cas stand before it; everything after it is the script's own.

    What the script exports with ExecuTorch keeps its weights in the store, and the
    files of each program that it writes are recorded as one artifact: NAME, or the
    name of the .pte file. Several programs become NAME, NAME-2 and so on. If the
    script fails, nothing is recorded.

    The exit code is the script's, and so are stdin and stdout. The summary at the
    end goes to stderr; with --json as JSON.
    """
    app = current()
    if name is not None:
        check_ref_name(name)
    wanted = Script(script, arguments, is_module)
    wanted.check()
    if importlib.util.find_spec("executorch") is None:
        raise MissingExtra("executorch")
    if (asked := app.effective("read_only")).value:
        raise ReadOnlyStore(app.path, "run", asked.decided_by)
    target = None if report is None else _checked_report(report)
    # Run once click is done: the script may use it too, and then finds it as it is at the start.
    reuse, share = app.actions(no_actions, recheck)
    found = RunOptions(name, _provenance(wanted), spill, reuse, share)
    return _Run(app, wanted, found, target, quiet)


def _provenance(script: Script) -> dict[str, Json]:
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"script": script.text, "command": ["cas", *sys.argv[1:]], "created": created}


def _checked_report(path: Path) -> Path:
    """Where the report goes, wherever the script changes to; found out before a long run."""
    absolute = Path(os.path.abspath(path))
    if absolute.is_dir() or not os.access(absolute.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{path} cannot be written", param_hint="'--report'")
    return absolute


@dataclass(frozen=True, slots=True)
class _Run:
    """The script, ready to be run."""

    app: App
    script: Script
    options: RunOptions
    report: Path | None
    quiet: bool

    def __call__(self) -> int:
        if self.app.effective("disable").value:
            result = RunResult(execute(self.script))
        else:
            with self.app.store(create=True, write=True, command="run") as store:
                result = run(store, self.script, self.options)
            if not result.in_child:
                self._tell(result)
        error = result.outcome.error
        if error is None:
            return 0
        if isinstance(error, CasError):
            raise error
        raise Unhandled(error)

    def _tell(self, result: RunResult) -> None:
        document = _document(self.script, result)
        if self.report is not None:
            self.report.write_text(_json(document), "utf-8")
        if self.app.given.json:
            click.echo(_json(document), err=True, nl=False)
        elif not self.quiet:
            for line in _summary(result):
                click.echo(f"cas: {line}", err=True)


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _document(script: Script, result: RunResult) -> dict[str, Any]:
    return {
        "script": script.text,
        "exit_code": result.outcome.exit_code,
        "artifacts": [_artifact(recorded) for recorded in result.artifacts],
        "unwritten": result.unwritten,
        "actions": {
            "hits": result.actions.hits,
            "misses": result.actions.misses,
            "uncacheable": result.actions.uncacheable,
            "seconds_saved": round(result.actions.seconds_saved, 3),
        },
        "seconds": round(result.seconds, 3),
    }


def _artifact(recorded: Recorded) -> dict[str, Any]:
    commit = recorded.commit
    return {
        "ref": str(commit.ref),
        "manifest": str(commit.ref.manifest),
        "files": [
            {
                # A file that was completed from memory lies nowhere.
                "path": str(recorded.paths.get(file.name, file.name)),
                "size": file.size,
                "blake3": file.digest.hex(),
            }
            for file in commit.files
        ],
        "logical_bytes": commit.logical_bytes,
        "new_bytes": recorded.new_bytes,
        "chunks": commit.chunks,
        "new_chunks": recorded.new_chunks,
    }


def _summary(result: RunResult) -> list[str]:
    if not result.outcome.succeeded:
        return ["nothing is recorded, because the script failed"]
    lines = [_line(recorded) for recorded in result.artifacts]
    if result.actions.hits:
        lines.append(
            f"{result.actions.hits} of {result.actions.total} computations came out of the store, "
            f"and had taken {result.actions.seconds_saved:.1f} s"
        )
    if result.unwritten:
        lines.append(
            f"not recorded, because they were only taken as bytes (`.buffer`): {result.unwritten} "
            "program(s); `write_to_file` to an open file, or `save`, records them"
        )
    return lines or ["nothing is recorded: the script wrote no ExecuTorch program"]


def _line(recorded: Recorded) -> str:
    commit = recorded.commit
    files = ", ".join(printable(file.name) for file in commit.files)
    return (
        f"recorded {files} as {commit.ref}: {size(commit.logical_bytes)}, "
        f"{size(recorded.new_bytes)} new in the store "
        f"({ratio(recorded.new_bytes, commit.logical_bytes)})"
    )
