"""`cas rm`: forget artifacts."""

from __future__ import annotations

import click

from cas_cli import options
from cas_cli.app import current


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
        selected = {ref: None for name in names for ref in store.select(name)}
        if not dry_run:
            for ref in selected:
                store.remove(str(ref))
    removed = [str(ref) for ref in selected]

    def show() -> None:
        for ref in removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {ref}")

    app.report({"dry_run": dry_run, "removed": removed}, show)
