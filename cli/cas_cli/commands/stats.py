"""`cas stats`: how much a store holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from cas_cli import options
from cas_cli.app import current
from cas_cli.render import count, pairs, size

if TYPE_CHECKING:
    from cas.journal import Tally
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
    "actions",
    "action_bytes",
)


@options.command(short_help="Show what the store holds, and how much of it is garbage.")
def command() -> None:
    """Show what the store holds, and how much of it is garbage.

    Logical bytes are what the files of all artifacts hold; physical bytes what their chunks
    occupy, each once; garbage is what the next `cas gc` may delete. With -v also
    how often compiled results came out of the store, and why not.
    """
    from cas.stats import stats

    app = current()
    limit = app.effective("max_size").value
    with app.store() as store:
        found = stats(store)
        tally = store.actions.tally()
        max_bytes = None if limit is None else limit.on(store.path)
    document: dict[str, Any] = {key: getattr(found, key) for key in KEYS}
    document["max_bytes"] = max_bytes
    document["action_counters"] = tally.document()
    document["problems"] = list(found.problems)

    def show() -> None:
        pairs(_rows(found, max_bytes) + (_counter_rows(tally) if app.given.verbose else []))

    app.report(document, show)
    for problem in found.problems:
        click.echo(f"cas: {problem}", err=True)


def _rows(found: Stats, max_bytes: int | None) -> list[tuple[str, str]]:
    logical, physical = found.logical_bytes, found.physical_bytes
    times = f"  ({logical / physical:.2f} x physical)" if physical and logical else ""
    rows = [
        ("store", found.store),
        ("artifacts", f"{found.refs}, in {count(found.generations, 'generation')}"),
        ("chunks", str(found.chunks)),
        ("logical", size(logical) + times),
        ("physical", size(physical) + ("" if max_bytes is None else f" of {size(max_bytes)}")),
        ("garbage", size(found.garbage_bytes)),
    ]
    if found.actions:
        rows.append(("actions", f"{found.actions}, {size(found.action_bytes)} only for them"))
    if found.staged_bytes:
        rows.append(
            ("staged", f"{size(found.staged_bytes)}, {size(found.orphaned_bytes)} by dead writers")
        )
    if found.quarantined_bytes:
        rows.append(("quarantined", f"{size(found.quarantined_bytes)} of damaged chunks"))
    return rows


def _counter_rows(tally: Tally) -> list[tuple[str, str]]:
    saved, computed = tally.saved_microseconds / 1e6, tally.computed_microseconds / 1e6
    rows = [
        ("action hits", f"{tally.hits}, {saved:.1f} s saved"),
        ("action misses", f"{sum(tally.misses.values())}, {computed:.1f} s computed"),
    ]
    rows += _reason_rows(tally.misses)
    rows.append(("uncacheable", str(sum(tally.uncacheable.values()))))
    rows += _reason_rows(tally.uncacheable)
    if tally.mismatches:
        rows.append(("mismatches", f"{tally.mismatches} found by CAS_RECHECK"))
    return rows


def _reason_rows(reasons: Mapping[str, int]) -> list[tuple[str, str]]:
    most = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return [("", f"{count} {reason}") for reason, count in most]
