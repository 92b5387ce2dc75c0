"""What the shell is offered when a person presses the tab key.

click prints the shell's script for ``_CAS_COMPLETE=bash_source cas`` and asks these functions for
the words. None of them fails: a store that is not there, or cannot be read, has no names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from cas_cli.options import Given
from cas_cli.settings import SETTINGS, store_path

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: Digits of an action's key that are offered: as many as `cas ls --actions` shows.
_DIGITS = 12


def artifacts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of artifacts, and behind an ``@`` their generations."""
    from cas import refs
    from cas.errors import CasError
    from cas.layout import Layout

    name, at, _ = incomplete.partition("@")
    try:
        layout = Layout(store_path(_given(ctx), os.environ))
        if at:
            return _fitting((f"{name}@{g}" for g in refs.generations(layout, name)), incomplete)
        return _fitting(refs.names(layout), incomplete)
    except (CasError, OSError):
        return []


def actions(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The first digits of the keys of recorded actions."""
    from cas.actions import entries
    from cas.errors import CasError
    from cas.layout import Layout

    try:
        layout = Layout(store_path(_given(ctx), os.environ))
        return _fitting((entry.key.hex()[:_DIGITS] for entry in entries(layout)), incomplete)
    except (CasError, OSError):
        return []


def settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The settings that there are; for commands that change a store, those that it can hold."""
    every = ctx.info_name == "get"
    return _fitting((s.name for s in SETTINGS if every or s.stored), incomplete)


def backends(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The backends that have a name of their own."""
    return _fitting(("portable", "xnnpack", "cuda"), incomplete)


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Whatever files the shell itself finds."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _given(ctx: click.Context) -> Given:
    return ctx.ensure_object(Given)


def _fitting(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
