"""`cas gc`: delete what nothing needs any more."""

from __future__ import annotations

from typing import Any

import click

from cas.config import parse_duration
from cas_cli import options
from cas_cli.app import current
from cas_cli.render import size


@options.command(short_help="Delete what no artifact needs any more.")
@click.option("-n", "--dry-run", is_flag=True, help="Only tell what would be deleted.")
@click.option(
    "--grace",
    metavar="AGE",
    type=options.Parsed("age", parse_duration),
    help="Spare what was used within AGE: 90s, 15m, 2h, 7d, 4w (CAS_GRACE).",
)
def command(dry_run: bool, grace: int | None) -> None:
    """Delete chunks and manifests that no artifact and no running export needs.

    Exports may run at the same time.
    """
    from cas.gc import execute, plan

    app = current()
    if grace is not None:
        app.flags["grace"] = grace
    with app.store(write=not dry_run) as store:
        planned = plan(store, grace=app.effective("grace").value)
        report = None if dry_run else execute(store, planned)
    document: dict[str, Any] = {
        "dry_run": dry_run,
        "dead_chunks": planned.dead_chunks,
        "dead_bytes": planned.dead_bytes,
        "freed_bytes": 0 if report is None else report.freed_bytes,
        "spared": planned.spared if report is None else report.spared,
        "dropped_refs": [],
    }

    def show() -> None:
        what = f"{planned.dead_chunks} chunks, {size(planned.dead_bytes)}"
        if report is None:
            click.echo(f"would delete {what}")
        else:
            click.echo(f"deleted {what}; freed {size(report.freed_bytes)}")
        if document["spared"]:
            click.echo(f"spared {document['spared']} that are young or in use")

    app.report(document, show)
