"""`cas`: the group of commands, loaded one by one, and the mapping of errors to exits.

Nothing here imports the library, rich or torch: `cas --version` and `cas --help` start at once.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cas_cli.failures import Failure, OutputGone, Unhandled, describe
from cas_cli.options import Given, Group, wants_json

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: Section -> command -> one line for the list. A test keeps the lines equal to the commands' own.
SECTIONS = {
    "Artifacts": {
        "export": "Export a model with ExecuTorch through the store.",
        "run": "Run an export script under the store, unchanged.",
        "assemble": "Write the files of an artifact.",
        "ls": "List artifacts.",
        "show": "Show an artifact's files, tensors and origin.",
        "explain": "Tell why two runs did not share their work.",
        "rm": "Remove artifacts, or single generations of them.",
    },
    "Store": {
        "stats": "Show what the store holds, and how much of it is garbage.",
        "gc": "Delete what no artifact needs any more.",
        "verify": "Check that every byte is what its name says.",
        "config": "Show or change settings, and where each comes from.",
    },
}

INTRODUCTION = """\
cas keeps model weights in a content-addressed store, each once, and exports
models with ExecuTorch through it: the same files, without the copies in memory.

Start with:
  cas export model.py:make -o out/ --backend xnnpack   export, and record the result
  cas ls                                               what the store holds
  cas assemble NAME -o elsewhere/                      the same files again
"""


class Cas(Group):
    """The top group: lazy commands, and one way out for errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for commands in SECTIONS.values() for name in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"cas_cli.commands.{cmd_name}")
        loaded: click.Command = module.command
        return loaded

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands without importing every one of them for its line of help."""
        from click.shell_completion import CompletionItem

        lines = [line for commands in SECTIONS.values() for line in commands.items()]
        found = [CompletionItem(name, help=line) for name, line in lines]
        fitting = [item for item in found if item.value.startswith(incomplete)]
        return [*fitting, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("\n" + INTRODUCTION)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; pass on by other names what click would answer in its own way."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt as error:
            raise click.Abort from error
        except BrokenPipeError as error:
            raise OutputGone from error

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        """Run, and always exit: with the documented code, and one line about what failed."""
        args = list(sys.argv[1:] if args is None else args)
        given = Given()
        extra.update(standalone_mode=False, obj=given)
        unhandled = None
        try:
            code = super().main(args, *rest, **extra)
            if callable(code):  # a script to run, for which click must be out of the way
                code = code()
        except click.exceptions.Exit as done:
            code = done.exit_code
        except Unhandled as script:
            unhandled = script
        except (Exception, KeyboardInterrupt) as error:
            code = report(error, args, given)
        if unhandled is not None:
            unhandled.let_out()
        sys.exit(code if isinstance(code, int) else 0)


def report(error: BaseException, args: Sequence[str], given: Given) -> int:
    """Tell the user about an error, where they asked to be told."""
    failure = describe(error)
    if isinstance(error, (BrokenPipeError, OutputGone)):
        _abandon_stdout()
        return failure.exit_code
    # What follows the name of a script in `cas run` is the script's: only where the command line
    # could not be understood is it searched as a whole.
    unparsed = args if isinstance(error, click.UsageError) else ()
    if given.verbose or _is_verbose(unparsed):
        import traceback

        traceback.print_exception(error)
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"cas: {failure.message}", err=True)
    if given.json or wants_json(unparsed):
        _print_json(failure)
    return failure.exit_code


def _print_json(failure: Failure) -> None:
    from cas_cli.render import print_json

    try:
        print_json(
            {
                "error": failure.error,
                "message": failure.message,
                "exit_code": failure.exit_code,
            }
        )
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()


def _is_verbose(args: Sequence[str]) -> bool:
    before = args[: args.index("--")] if "--" in args else args
    return "-v" in before or "--verbose" in before


def _abandon_stdout() -> None:
    """Keep the interpreter from flushing, and failing again, at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_version() -> str:
    """`cas.__version__`, without importing the library, which takes longer than all the rest."""
    package = importlib.util.find_spec("cas")
    if package is None or not package.submodule_search_locations:
        raise ImportError("the package cas is not installed")
    path = os.path.join(package.submodule_search_locations[0], "version.py")
    spec = importlib.util.spec_from_file_location("cas_version", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"cas {read_version()}")
        ctx.exit()


@click.group(
    cls=Cas,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Keep model weights once, and export through the store."""
    ctx.ensure_object(Given)
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    """The console script."""
    cli.main(prog_name="cas")
