"""`cas verify`: are the bytes what their names say, and can what is lost be brought back?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cas.config import parse_duration
from cas_cli import options
from cas_cli.app import App, current
from cas_cli.failures import DAMAGED
from cas_cli.render import count, printable, size

if TYPE_CHECKING:
    from collections.abc import Collection

    from cas.digest import Digest
    from cas.quarantine import Plan
    from cas.repair import Repair
    from cas.store import Store
    from cas.verify import Report


@dataclass(frozen=True, slots=True)
class Request:
    """The options, checked against each other."""

    max_duration: int | None
    rebuild_index: bool
    repair: bool
    sources: tuple[Path, ...]
    drop: bool
    force: bool
    dry_run: bool

    @property
    def writes(self) -> bool:
        """Whether the command makes no sense on a store that cannot be written."""
        return not self.dry_run and (self.rebuild_index or self.repair or self.drop)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found and done."""

    report: Report
    repair: Repair | None
    quarantine: Plan | None

    @property
    def clean(self) -> bool:
        """Whether nothing is damaged or missing, or not any more."""
        if self.repair is None:
            return self.report.clean
        return not (self.repair.missing or self.repair.affected_refs or self.repair.problems)


@options.command(short_help="Check that every byte is what its name says.")
@click.option(
    "--max-duration",
    metavar="TIME",
    type=options.Parsed("time", parse_duration),
    help="Stop after TIME; the next run goes on with what was not checked for longest.",
)
@click.option("--rebuild-index", is_flag=True, help="First rebuild the index from the files.")
@click.option("--repair", is_flag=True, help="Bring back what is damaged or missing; see --from.")
@click.option(
    "--from",
    "sources",
    metavar="PATH",
    multiple=True,
    type=click.Path(path_type=Path),
    help="With --repair: a file, or a directory of files, in which the bytes may be.",
)
@click.option(
    "--drop-quarantine",
    "drop",
    is_flag=True,
    help="Delete damaged chunks that were set aside and are not needed any more.",
)
@click.option("--force", is_flag=True, help="With --drop-quarantine: delete the others as well.")
@click.option("-n", "--dry-run", is_flag=True, help="Change nothing; only tell what would be done.")
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Read every chunk and manifest and compare it with its name.

    Damaged chunks are set aside, so that the next export which produces the bytes restores them.
    A store that cannot be written is checked too; what is damaged stays where it is then.
    Exits with 4 if anything is damaged or missing, and was not repaired.
    """
    wanted = _request(**given)
    app = current()
    with app.store() as store:
        if wanted.writes:
            store.context.require_writable("rebuild, repair or delete anything")
        outcome = _run(app, store, wanted)
    app.report(_document(wanted, outcome), lambda: _show(wanted, outcome))
    if not outcome.clean:
        ctx.exit(DAMAGED)


def _request(**given: Any) -> Request:
    wanted = Request(**given)
    if wanted.sources and not wanted.repair:
        raise click.UsageError("--from says where to look with --repair; give that too")
    if wanted.force and not wanted.drop:
        raise click.UsageError("--force goes with --drop-quarantine")
    if wanted.rebuild_index and wanted.dry_run:
        raise click.UsageError("--rebuild-index cannot be tried without doing it")
    return wanted


def _run(app: App, store: Store, wanted: Request) -> Outcome:
    from cas import quarantine
    from cas.repair import repair
    from cas.searching import source_files
    from cas.verify import verify

    source_files(wanted.sources)  # a mistyped path is told before the long work
    with app.progress() as progress:
        if wanted.rebuild_index:
            store.context.index.rebuild()
        report = verify(
            store,
            max_duration=wanted.max_duration,
            report_only=wanted.dry_run,
            progress=progress,
        )
        repaired = plan = None
        if wanted.repair:
            repaired = repair(
                store, report, wanted.sources, dry_run=wanted.dry_run, progress=progress
            )
        if wanted.drop:
            plan = quarantine.plan(store, force=wanted.force)
            if not wanted.dry_run:
                plan = quarantine.execute(store, plan)
    return Outcome(report, repaired, plan)


def _document(wanted: Request, outcome: Outcome) -> dict[str, Any]:
    report, repaired, plan = outcome.report, outcome.repair, outcome.quarantine
    missing = report.missing if repaired is None else [need.digest for need in repaired.missing]
    affected = report.affected_refs if repaired is None else repaired.affected_refs
    return {
        "dry_run": wanted.dry_run,
        "checked_chunks": report.checked_chunks,
        "checked_bytes": report.checked_bytes,
        "damaged": [str(item) for item in report.damaged],
        "missing": [str(item) for item in report.missing],
        "affected_refs": list(report.affected_refs),
        "repaired": [] if repaired is None else [str(item) for item in repaired.repaired],
        "still_missing": [str(item) for item in missing],
        "still_affected_refs": list(affected),
        "checked_records": report.checked_records,
        "damaged_records": [item.hex() for item in report.damaged_records],
        "damaged_manifests": {
            str(digest): list(refs) for digest, refs in report.damaged_manifests.items()
        },
        "repaired_manifests": [] if repaired is None else [str(d) for d in repaired.manifests],
        "problems": list(report.problems),
        "complete": report.complete,
        "dropped": [] if plan is None else [item.name for item in plan.drop],
        "dropped_bytes": 0 if plan is None else plan.dropped_bytes,
    }


# --- for people ---------------------------------------------------------------------------------


def _show(wanted: Request, outcome: Outcome) -> None:
    report = outcome.report
    click.echo(f"checked {count(report.checked_chunks, 'chunk')}, {size(report.checked_bytes)}")
    for item in report.damaged:
        click.echo(f"damaged {item}")
    for key in report.damaged_records:
        click.echo(f"damaged action record {key.hex()}")
    for problem in report.problems:
        click.echo(printable(problem))
    if outcome.repair is None:
        for item in report.missing:
            click.echo(f"missing {item}")
        _show_affected(report, report.affected_refs)
    else:
        _show_repair(wanted, report, outcome.repair)
    if outcome.quarantine is not None:
        _show_quarantine(wanted, outcome.quarantine)
    if report.clean:
        rest = "" if report.complete else " so far; run it again for the rest"
        click.echo(f"no damage found{rest}")
    elif report.damaged and report.report_only:
        click.echo("cas: what is damaged was left where it is", err=True)


def _show_affected(
    report: Report, affected: tuple[str, ...], *, without: Collection[Digest] = ()
) -> None:
    """What cannot be assembled, and what to do: ``without`` are manifests that are back."""
    for ref in affected:
        click.echo(f"cannot be assembled: {ref}")
    lost = {
        ref
        for digest, needed in report.damaged_manifests.items()
        if digest not in without
        for ref in needed
    }
    if lost:
        click.echo(
            "cas: a manifest comes back only from a copy of the store: `cas verify --repair --from "
            "COPY/manifests`. An export of the artifact makes a new generation; what has no "
            f"manifest is then removed by `cas rm {' '.join(sorted(lost))}`, and until then gc "
            "deletes nothing",
            err=True,
        )
    told = tuple(f"{ref}: " for ref in lost)
    unreadable = {text.split(": ")[0] for text in report.problems if not text.startswith(told)}
    if set(affected) - lost - unreadable:
        click.echo(
            "cas: `cas verify --repair --from PATH` looks for the bytes in a file of the artifact, "
            "or in a checkpoint with its weights; exporting the artifact again restores them too; "
            "`cas rm` gives it up",
            err=True,
        )


def _show_repair(wanted: Request, report: Report, repaired: Repair) -> None:
    for digest in repaired.manifests:
        click.echo(f"{'could be repaired' if wanted.dry_run else 'repaired'} manifest {digest}")
    for item in repaired.repaired:
        click.echo(f"{'could be repaired' if wanted.dry_run else 'repaired'} {item}")
    for need in repaired.missing:
        click.echo(f"still missing {printable(str(need))}")
    verb = "would be whole again" if wanted.dry_run else "whole again"
    for ref in report.affected_refs:
        if ref not in repaired.affected_refs:
            click.echo(f"{verb}: {ref}")
    _show_affected(report, repaired.affected_refs, without=repaired.manifests)


def _show_quarantine(wanted: Request, plan: Plan) -> None:
    verb = "would delete" if wanted.dry_run else "deleted"
    dropped = count(len(plan.drop), "file")
    click.echo(f"{verb} {dropped} in quarantine, {size(plan.dropped_bytes)}")
    for item in plan.keep:
        click.echo(f"kept {item.name}: {printable(item.reason)}")
