"""`cas rm`: forget artifacts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cas_cli import options
from cas_cli.app import current

if TYPE_CHECKING:
    from cas.store import Store

    from cas.refs import Ref


@options.command(short_help="Remove artifacts, or single generations of them.")
@click.argument("names", metavar="NAME[@GEN]...", nargs=-1, required=True)
@click.option("-n", "--dry-run", is_flag=True, help="Only tell what would be removed.")
def command(names: tuple[str, ...], dry_run: bool) -> None:
    """Remove all generations of NAME, or its generation GEN.

    This removes names only, and deletes no bytes: `cas gc` does, where nothing else needs them.
    All names are looked up before the first is removed.
    """
    app = current()
    with app.store(write=not dry_run) as store:
        for name in names:
            store.resolve(name)
        refs = [ref for name in names for ref in _selected(store, name)]
        if not dry_run:
            for name in dict.fromkeys(names):
                store.remove(name)
    removed = list(dict.fromkeys(refs))

    def show() -> None:
        for ref in removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {ref}")

    app.report({"dry_run": dry_run, "removed": [str(ref) for ref in removed]}, show)


def _selected(store: Store, name: str) -> list[Ref]:
    if "@" in name:
        return [store.resolve(name)]
    return [ref for ref in store.refs() if ref.name == name]
