"""`cas ls`: the artifacts of a store, or its action records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from cas.errors import ActionDamaged, ActionNotFound, Damaged
from cas_cli import completion, options
from cas_cli.app import App, current
from cas_cli.render import moment, printable, size, table

if TYPE_CHECKING:
    from cas.actions import RecordFile
    from cas.refs import RefId
    from cas.store import Store


@options.command(short_help="List artifacts.")
@click.argument("prefix", default="", shell_complete=completion.artifacts)
@click.option(
    "-a",
    "--all",
    "all_generations",
    is_flag=True,
    help="Every generation, not only the current one of each name.",
)
@click.option(
    "--actions",
    "list_actions",
    is_flag=True,
    help="The recorded actions instead, with their keys; what was used last comes first.",
)
def command(prefix: str, all_generations: bool, list_actions: bool) -> None:
    """List the artifacts whose names start with PREFIX, or all.

    With --actions, list the recorded computations whose labels start with PREFIX. `cas explain`
    and `cas rm --action` take the keys.
    """
    app = current()
    if list_actions:
        if all_generations:
            raise click.UsageError("--all is about artifacts; leave it out with --actions")
        _list_actions(app, prefix)
    else:
        _list_artifacts(app, prefix, all_generations)


def _say_none(what: str, prefix: str) -> None:
    where = f"starts with {printable(prefix)}" if prefix else "in this store"
    click.echo(f"cas: no {what} {where}", err=True)


# --- artifacts ----------------------------------------------------------------------------------


def _list_artifacts(app: App, prefix: str, all_generations: bool) -> None:
    with app.store() as store:
        refs = (ref for ref in store.refs() if ref.name.startswith(prefix))
        rows = [_row(store, ref, newest) for ref, newest in _chosen(refs, all_generations)]

    def show() -> None:
        if not rows:
            _say_none("name" if prefix else "artifacts", prefix)
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


# --- actions ------------------------------------------------------------------------------------


def _list_actions(app: App, prefix: str) -> None:
    with app.store() as store:
        entries = sorted(store.actions.entries(), key=lambda entry: -entry.last_used)
        found = [row for entry in entries if (row := _action(store, entry)) is not None]
    rows = [row for row in found if not prefix or (row["label"] or "").startswith(prefix)]

    def show() -> None:
        if not rows:
            _say_none("label" if prefix else "recorded actions", prefix)
            return
        table(
            ("KEY", "KIND", "LABEL", ">TOOK", ">SIZE", "LAST USED"),
            [
                (
                    row["key"][:12],
                    row["kind"] or "damaged",
                    row["label"] or "",
                    "?" if row["seconds"] is None else f"{row['seconds']:.1f} s",
                    "?" if row["bytes"] is None else size(row["bytes"]),
                    moment(row["last_used"]),
                )
                for row in rows
            ],
        )

    app.report({"store": str(app.path), "actions": rows}, show)


def _action(store: Store, entry: RecordFile) -> dict[str, Any] | None:
    """One record, or None if gc has just dropped it; one that cannot be read hides no other."""
    row: dict[str, Any] = {
        "key": entry.key.hex(),
        "kind": None,
        "label": None,
        "seconds": None,
        "created": None,
        "last_used": int(entry.last_used),
        "bytes": None,
    }
    try:
        record = store.actions.read(entry.key)
    except ActionNotFound:
        return None
    except ActionDamaged:
        return row
    return {
        **row,
        "kind": record.kind,
        "label": record.label,
        "seconds": record.seconds,
        "created": record.created,
        "bytes": sum(record.chunks().values()),
    }
