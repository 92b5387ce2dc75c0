"""`cas ls`: the artifacts of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from cas.errors import Damaged
from cas_cli import options
from cas_cli.app import current
from cas_cli.render import size, table

if TYPE_CHECKING:
    from cas.refs import RefId
    from cas.store import Store


@options.command(short_help="List artifacts.")
@click.argument("prefix", default="")
@click.option(
    "-a",
    "--all",
    "all_generations",
    is_flag=True,
    help="Every generation, not only the current one of each name.",
)
def command(prefix: str, all_generations: bool) -> None:
    """List the artifacts whose names start with PREFIX, or all."""
    app = current()
    with app.store() as store:
        refs = (ref for ref in store.refs() if ref.name.startswith(prefix))
        rows = [_row(store, ref, newest) for ref, newest in _chosen(refs, all_generations)]

    def show() -> None:
        if not rows:
            click.echo("nothing here" if not prefix else f"no name starts with {prefix}", err=True)
            return
        table(
            ("NAME", ">GEN", ">FILES", ">SIZE", "MANIFEST"),
            [
                (
                    row["name"],
                    str(row["generation"]),
                    "?" if row["files"] is None else str(row["files"]),
                    "damaged" if row["logical_bytes"] is None else size(row["logical_bytes"]),
                    (row["manifest"] or "?").removeprefix("blake3:")[:12],
                )
                for row in rows
            ],
        )

    app.report({"store": str(app.path), "refs": rows}, show)


def _chosen(refs: Iterable[RefId], all_generations: bool) -> Iterator[tuple[RefId, bool]]:
    ordered = sorted(refs, key=lambda ref: (ref.name, ref.generation))
    for _, group in groupby(ordered, key=lambda ref: ref.name):
        generations = list(group)
        for ref in generations if all_generations else generations[-1:]:
            yield ref, ref is generations[-1]


def _row(store: Store, ref: RefId, newest: bool) -> dict[str, Any]:
    """One artifact; one that cannot be read must not hide the others."""
    row: dict[str, Any] = {
        "name": ref.name,
        "generation": ref.generation,
        "current": newest,
        "manifest": None,
        "files": None,
        "logical_bytes": None,
    }
    try:
        found = store.read_ref(ref)
        row["manifest"] = str(found.manifest)
        files = store.manifest(found).files
    except Damaged:
        return row
    return {**row, "files": len(files), "logical_bytes": sum(file.size for file in files)}
