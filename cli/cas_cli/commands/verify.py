"""`cas verify`: are the bytes what their names say?"""

from __future__ import annotations

from typing import Any

import click

from cas.config import parse_duration
from cas_cli import options
from cas_cli.app import current
from cas_cli.failures import DAMAGED
from cas_cli.render import printable, size


@options.command(short_help="Check that every byte is what its name says.")
@click.option(
    "--max-duration",
    metavar="TIME",
    type=options.Parsed("time", parse_duration),
    help="Stop after TIME; the next run goes on with what was not checked for longest.",
)
@click.option("--rebuild-index", is_flag=True, help="First rebuild the index from the files.")
@click.pass_context
def command(ctx: click.Context, max_duration: int | None, rebuild_index: bool) -> None:
    """Read every chunk and manifest and compare it with its name.

    Damaged chunks are set aside, so that the next export which produces the bytes restores them.
    Exits with 4 if anything is damaged or missing.
    """
    from cas.verify import verify

    app = current()
    with app.store() as store, app.progress() as progress:
        if rebuild_index:
            store.context.index.rebuild()
        report = verify(store, max_duration=max_duration, progress=progress)
    document: dict[str, Any] = {
        "checked_chunks": report.checked_chunks,
        "checked_bytes": report.checked_bytes,
        "damaged": [str(item) for item in report.damaged],
        "missing": [str(item) for item in report.missing],
        "affected_refs": [str(ref) for ref in report.affected_refs],
        "repaired": [],
        "problems": list(report.problems),
        "complete": report.complete,
    }

    def show() -> None:
        click.echo(f"checked {report.checked_chunks} chunks, {size(report.checked_bytes)}")
        for label, key in (("damaged", "damaged"), ("missing", "missing")):
            for item in document[key]:
                click.echo(f"{label} {item}")
        for item in report.problems:
            click.echo(printable(item))
        for ref in report.affected_refs:
            click.echo(f"cannot be assembled: {ref}")
        if report.clean:
            rest = "" if report.complete else " so far; run it again for the rest"
            click.echo(f"no damage found{rest}")
        else:
            click.echo("export the affected artifacts again to restore them", err=True)

    app.report(document, show)
    if not report.clean:
        ctx.exit(DAMAGED)
