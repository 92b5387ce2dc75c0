"""`cas rm`: forget artifacts."""

from __future__ import annotations

import click

from cas_cli import completion, options
from cas_cli.app import current


@options.command(short_help="Remove artifacts, or single generations of them.")
@click.argument("names", metavar="NAME[@GEN]...", nargs=-1, shell_complete=completion.artifacts)
@click.option(
    "--action",
    "actions",
    metavar="KEY",
    multiple=True,
    shell_complete=completion.actions,
    help="Forget an action, by the first digits of its key; may be repeated.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Only tell what would be removed.")
def command(names: tuple[str, ...], actions: tuple[str, ...], dry_run: bool) -> None:
    """Remove all generations of NAME, or its generation GEN.

    This removes names only, and deletes no bytes: `cas gc` does, where nothing else needs them.
    All names are looked up before the first is removed.
    """
    if not names and not actions:
        raise click.UsageError("give the names of artifacts, or --action")
    app = current()
    with app.store(write=not dry_run) as store:
        selected = {ref: None for name in names for ref in store.select(name)}
        keys = {store.actions.resolve(text): None for text in actions}
        if not dry_run:
            for ref in selected:
                store.remove(str(ref))
            for key in keys:
                store.actions.drop(key)
    removed = [str(ref) for ref in selected]
    forgotten = [key.hex() for key in keys]

    def show() -> None:
        for name in (*removed, *(f"action {key[:12]}" for key in forgotten)):
            click.echo(f"{'would remove' if dry_run else 'removed'} {name}")

    app.report({"dry_run": dry_run, "removed": removed, "actions": forgotten}, show)
