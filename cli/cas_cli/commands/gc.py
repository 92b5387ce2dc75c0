"""`cas gc`: delete what nothing needs any more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cas.config import Size, parse_age, parse_count, parse_duration, parse_size
from cas_cli import options
from cas_cli.app import App, current
from cas_cli.failures import DAMAGED
from cas_cli.render import count, size

if TYPE_CHECKING:
    from cas.gc import Plan, Report
    from cas.retention import Policy, Root

#: The options that make a policy.
POLICY = ("keep_last", "older_than", "max_size")


@options.command(short_help="Delete what no artifact needs any more.")
@click.option("-n", "--dry-run", is_flag=True, help="Only tell what would be deleted.")
@click.option(
    "--keep-last",
    metavar="N",
    type=options.Parsed("count", parse_count),
    help="Drop all generations of an artifact but the N newest (CAS_KEEP_LAST).",
)
@click.option(
    "--older-than",
    metavar="AGE",
    type=options.Parsed("age", parse_age),
    help="Drop only what was not used for AGE: 12h, 30d, 2w (CAS_OLDER_THAN).",
)
@click.option(
    "--max-size",
    metavar="SIZE",
    type=options.Parsed("size", parse_size),
    help="Drop what was not used for longest, until the chunks take no more than SIZE: "
    "200G, 200GiB, 10% (CAS_MAX_SIZE).",
)
@click.option(
    "--include-current", is_flag=True, help="Let current generations be dropped like old ones."
)
@click.option(
    "--grace",
    metavar="AGE",
    type=options.Parsed("age", parse_duration),
    help="Spare chunks that were used within AGE: 90s, 15m, 2h, 7d, 4w (CAS_GRACE).",
)
@click.pass_context
def command(
    ctx: click.Context, /, dry_run: bool, include_current: bool, grace: int | None, **given: Any
) -> None:
    """Delete chunks and manifests that no artifact and no running export needs.

    Exports may run at the same time. Artifacts go only if a policy says so: the options
    --keep-last, --older-than and --max-size, or, without any of them, the settings of these names.
    The current generation of an artifact stays unless --include-current is given.
    """
    from cas.gc import execute, plan

    app = current()
    if grace is not None:
        app.flags["grace"] = grace
    values = given if _is_any_given(ctx) else {name: app.effective(name).value for name in POLICY}
    with app.store(write=not dry_run) as store, app.progress() as progress:
        policy = _policy(values, include_current, store.path)
        planned = plan(store, grace=app.effective("grace").value, policy=policy)
        report = None if dry_run else execute(store, planned, progress)
    _report(app, planned, report)
    if planned.problems or (report is not None and report.problems):
        ctx.exit(DAMAGED)


def _is_any_given(ctx: click.Context) -> bool:
    commandline = click.core.ParameterSource.COMMANDLINE
    return any(ctx.get_parameter_source(name) is commandline for name in POLICY)


def _policy(values: dict[str, Any], include_current: bool, path: Path) -> Policy:
    from cas.retention import Policy

    limit: Size | None = values["max_size"]
    return Policy(
        keep_last=values["keep_last"],
        older_than=values["older_than"],
        max_bytes=None if limit is None else limit.on(path),
        include_current=include_current,
    )


def _report(app: App, planned: Plan, report: Report | None) -> None:
    freed = 0 if report is None else report.freed_bytes
    spared = planned.spared if report is None else report.spared
    problems = planned.problems if report is None else report.problems
    generations, records = _told_apart(planned.drops if report is None else report.dropped)
    document: dict[str, Any] = {
        "dry_run": report is None,
        "dead_chunks": len(planned.chunks),
        "dead_bytes": planned.dead_bytes,
        "freed_bytes": freed,
        "spared": spared,
        "dropped_refs": generations,
        "dropped_actions": records,
        "dead_manifests": len(planned.manifests),
        "staged_bytes": planned.staged_bytes,
        "max_bytes": planned.policy.max_bytes,
        "over_bytes": planned.over_bytes,
        "problems": list(problems),
    }

    def show() -> None:
        would = "would drop" if report is None else "dropped"
        for name in generations:
            click.echo(f"{would} {name}")
        if records:
            click.echo(f"{would} {count(len(records), 'action record')}")
        what = f"{count(len(planned.chunks), 'chunk')}, {size(planned.dead_bytes)}"
        if planned.staged_bytes:
            what += f", and {size(planned.staged_bytes)} that dead processes left"
        click.echo(
            f"would delete {what}" if report is None else f"found {what}; freed {size(freed)}"
        )
        if spared:
            click.echo(f"spared {count(spared, 'chunk')}: young, or in use again")

    app.report(document, show)
    if planned.over_bytes:
        click.echo(
            f"cas: {size(planned.over_bytes)} more than the limit remain: current generations, "
            "what is in use, and what --keep-last and --older-than protect",
            err=True,
        )
    for problem in problems:
        click.echo(f"cas: {problem}", err=True)
    if problems:
        click.echo(
            "cas: chunks and manifests were left alone, since what cannot be read may need them; "
            "repair or remove it first",
            err=True,
        )


def _told_apart(roots: tuple[Root, ...]) -> tuple[list[str], list[str]]:
    """(names of generations, keys of action records)."""
    from cas.retention import Generation

    generations = [str(root) for root in roots if isinstance(root, Generation)]
    return generations, [str(root) for root in roots if not isinstance(root, Generation)]
