"""`cas config`: the effective settings, and where each comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cas.errors import UsageError
from cas_cli import completion, options
from cas_cli.app import App, current
from cas_cli.render import table
from cas_cli.settings import BY_NAME

if TYPE_CHECKING:
    from cas_cli.settings import Effective


class Settings(options.Group):
    """`cas config`, whose words are taken for names of settings at first."""

    def hint(self, ctx: click.Context, name: str) -> str:
        if name in BY_NAME:
            return f"; `cas config get {name}` shows the setting, `set` changes it"
        return super().hint(ctx, name)


@click.group(
    cls=Settings,
    invoke_without_command=True,
    short_help="Show or change settings, and where each comes from.",
)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show every setting: its effective value, and where that comes from.

    A flag beats the environment, which beats the store's config.toml, which beats the default.
    """
    if ctx.invoked_subcommand is not None:
        return
    app = current()
    settings = app.all_effective()

    def show() -> None:
        table(
            ("SETTING", "VALUE", "FROM", "FLAG", "VARIABLE", "MEANING"),
            [
                (e.setting.name, e.shown(), e.origin, e.setting.flag, e.setting.env, e.setting.help)
                for e in settings
            ],
        )

    app.report({"settings": {e.setting.name: _document(e) for e in settings}}, show)


@command.command(name="get", short_help="Print one setting's effective value.")
@click.argument("key", shell_complete=completion.settings)
def get(key: str) -> None:
    """Print the effective value of KEY."""
    app = current()
    effective = app.effective(_known(key))
    app.report(_document(effective), lambda: click.echo(effective.shown()))


@command.command(name="set", short_help="Write a setting to the store's config.toml.")
@click.argument("key", shell_complete=completion.settings)
@click.argument("value")
def set_(key: str, value: str) -> None:
    """Set KEY to VALUE in the store's config.toml, for everybody who uses the store."""
    app = current()
    _check_stored(key)
    with app.store(create=True, write=True, command="config set") as store:
        store.set_config(key, value)
    _tell(app, key)


@command.command(name="unset", short_help="Take a setting out of the store's config.toml.")
@click.argument("key", shell_complete=completion.settings)
def unset(key: str) -> None:
    """Take KEY out of the store's config.toml, so that its default counts again."""
    app = current()
    _check_stored(key)
    with app.store(write=True, command="config unset") as store:
        store.set_config(key, None)
    _tell(app, key)


def _check_stored(key: str) -> None:
    setting = BY_NAME[_known(key)]
    if not setting.stored:
        raise UsageError(f"{key} is not kept in a store; give {setting.flag}, or set {setting.env}")


def _tell(app: App, key: str) -> None:
    effective = app.effective(key)
    if effective.from_outside:
        click.echo(f"cas: note: {effective.origin} still decides here", err=True)
    app.report(
        _document(effective),
        lambda: click.echo(f"{key} = {effective.shown()} ({effective.origin})"),
    )


def _known(key: str) -> str:
    if key not in BY_NAME:
        raise UsageError(f"unknown setting {key!r}; settings are {', '.join(BY_NAME)}")
    return key


def _document(effective: Effective) -> dict[str, Any]:
    value = effective.value
    plain = value if isinstance(value, (bool, int, float)) or value is None else str(value)
    return {
        "key": effective.setting.name,
        "value": effective.shown()
        if effective.setting.name == "umask" and value is not None
        else plain,
        "origin": effective.origin,
    }
