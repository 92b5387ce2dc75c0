"""The global options, which every command takes too: `cas --json stats` and `cas stats --json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click


@dataclass(slots=True)
class Given:
    """The global options as given on the command line; None and False where they were not."""

    store: str | None = None
    read_only: bool | None = None
    umask: str | None = None
    json: bool = False
    verbose: bool = False
    no_progress: bool = False


def _record(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    assert param.name is not None
    if ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE:
        setattr(ctx.ensure_object(Given), param.name, value)


def global_options() -> list[click.Parameter]:
    """Fresh instances for one command. They record themselves, and no command receives them."""

    def option(*names: str, **settings: Any) -> click.Option:
        return click.Option(names, expose_value=False, is_eager=True, callback=_record, **settings)

    return [
        option("--store", metavar="DIR", help="The store's directory (CAS_STORE)."),
        option(
            "--read-only",
            is_flag=True,
            default=None,
            help="Write nothing to the store (CAS_READONLY).",
        ),
        option("--umask", metavar="OCTAL", help="Permissions withheld from new files (CAS_UMASK)."),
        option("--json", is_flag=True, help="Print one JSON document on stdout."),
        option("-v", "--verbose", is_flag=True, help="Tell more; show tracebacks."),
        option("--no-progress", is_flag=True, help="No progress display."),
    ]


class Command(click.Command):
    """A command that also takes the global options, and lists them apart in its help."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.global_params = global_options()
        self.params = [*self.params, *self.global_params]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        shared: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                (shared if param in self.global_params else own).append(record)
        for title, rows in (("Options", own), ("Global options", shared)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Group(click.Group):
    """A group of commands, such as `cas config`, whose own level takes the global options too."""

    command_class = Command

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params = [*self.params, *global_options()]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(ctx):
            ctx.fail(f"there is no command {name!r}{self.hint(ctx, name)}")
        return super().resolve_command(ctx, args)

    def hint(self, ctx: click.Context, name: str) -> str:
        """What to say after the name of a command that does not exist."""
        import difflib

        close = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
        return f"; did you mean {close[0]!r}?" if close else ""


def command(**settings: Any) -> Callable[[Callable[..., Any]], Command]:
    """`click.command` for a command with the global options."""
    return click.command(cls=Command, **settings)


def action_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options about computations that were done before: `App.actions` takes their values."""
    for decorate in (
        click.option(
            "--recheck",
            metavar="SHARE",
            help="Compute this share of what was done before again, and compare (CAS_RECHECK).",
        ),
        click.option(
            "--no-actions", is_flag=True, help="Compute everything, even if it was done before."
        ),
    ):
        function = decorate(function)
    return function


class Parsed(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A parameter type from a function of the library that raises `UsageError`."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        from cas.errors import UsageError

        try:
            return self.parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


def wants_json(args: Sequence[str]) -> bool:
    """Whether ``--json`` stands among the arguments: known even when parsing them fails."""
    before = args[: args.index("--")] if "--" in args else args
    return "--json" in before
