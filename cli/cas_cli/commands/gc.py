"""`cas gc`: delete what nothing needs any more."""

from __future__ import annotations

from typing import Any

import click

from cas.config import parse_duration
from cas_cli import options
from cas_cli.app import current
from cas_cli.failures import DAMAGED
from cas_cli.render import size


@options.command(short_help="Delete what no artifact needs any more.")
@click.option("-n", "--dry-run", is_flag=True, help="Only tell what would be deleted.")
@click.option(
    "--grace",
    metavar="AGE",
    type=options.Parsed("age", parse_duration),
    help="Spare what was used within AGE: 90s, 15m, 2h, 7d, 4w (CAS_GRACE).",
)
@click.pass_context
def command(ctx: click.Context, dry_run: bool, grace: int | None) -> None:
    """Delete chunks and manifests that no artifact and no running export needs.

    Exports may run at the same time.
    """
    from cas.gc import execute, plan

    app = current()
    if grace is not None:
        app.flags["grace"] = grace
    with app.store(write=not dry_run) as store, app.progress() as progress:
        planned = plan(store, grace=app.effective("grace").value)
        report = None if dry_run else execute(store, planned, progress)
    freed = 0 if report is None else report.freed_bytes
    spared = planned.spared if report is None else report.spared
    problems = planned.problems if report is None else report.problems
    document: dict[str, Any] = {
        "dry_run": dry_run,
        "dead_chunks": len(planned.chunks),
        "dead_bytes": planned.dead_bytes,
        "freed_bytes": freed,
        "spared": spared,
        "dropped_refs": [],
        "dead_manifests": len(planned.manifests),
        "staged_bytes": planned.staged_bytes,
        "problems": list(problems),
    }

    def show() -> None:
        what = f"{len(planned.chunks)} chunks, {size(planned.dead_bytes)}"
        if planned.staged_bytes:
            what += f", and {size(planned.staged_bytes)} that dead processes left"
        click.echo(f"would delete {what}" if dry_run else f"found {what}; freed {size(freed)}")
        if spared:
            click.echo(f"spared {spared} chunks that are young or in use again")

    app.report(document, show)
    if problems:
        for problem in problems:
            click.echo(f"cas: {problem}", err=True)
        click.echo(
            "cas: chunks and manifests were left alone, since what cannot be read may need them; "
            "repair or remove it first",
            err=True,
        )
        ctx.exit(DAMAGED)
