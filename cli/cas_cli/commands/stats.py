"""`cas stats`: how much a store holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cas_cli import options
from cas_cli.app import current
from cas_cli.render import pairs, size

if TYPE_CHECKING:
    from cas.stats import Stats

KEYS = (
    "store",
    "refs",
    "generations",
    "manifests",
    "chunks",
    "logical_bytes",
    "physical_bytes",
    "garbage_bytes",
    "staged_bytes",
    "orphaned_bytes",
    "quarantined_bytes",
)


@options.command(short_help="Show what the store holds, and how much of it is garbage.")
def command() -> None:
    """Show what the store holds, and how much of it is garbage.

    Logical bytes are what the files of all artifacts hold; physical bytes what their chunks
    occupy, each once; garbage is what the next `cas gc` may delete.
    """
    from cas.stats import stats

    app = current()
    with app.store() as store:
        found = stats(store)
    document = {key: getattr(found, key) for key in KEYS}
    document["problems"] = list(found.problems)

    def show() -> None:
        pairs(_rows(found))

    app.report(document, show)
    for problem in found.problems:
        click.echo(f"cas: {problem}", err=True)


def _rows(found: Stats) -> list[tuple[str, str]]:
    logical, physical = found.logical_bytes, found.physical_bytes
    times = f"  ({logical / physical:.2f} x physical)" if physical and logical else ""
    rows = [
        ("store", found.store),
        ("artifacts", f"{found.refs}, in {found.generations} generations"),
        ("chunks", str(found.chunks)),
        ("logical", size(logical) + times),
        ("physical", size(physical)),
        ("garbage", size(found.garbage_bytes)),
    ]
    if found.staged_bytes:
        rows.append(
            ("staged", f"{size(found.staged_bytes)}, {size(found.orphaned_bytes)} by dead writers")
        )
    if found.quarantined_bytes:
        rows.append(("quarantined", f"{size(found.quarantined_bytes)} of damaged chunks"))
    return rows
