"""`cas explain`: why something was computed that seemed to be done already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from cas_cli import completion, options
from cas_cli.app import current
from cas_cli.render import count, moment, printable

if TYPE_CHECKING:
    from cas.explain import Difference, Explanation, LastRun, Miss
    from cas.records import ActionRecord

#: Differences shown of one action, without -v.
_SHOWN = 10


@options.command(short_help="Tell why two runs did not share their work.")
@click.argument("before", required=False, shell_complete=completion.artifacts)
@click.argument("after", required=False, shell_complete=completion.artifacts)
@click.option("--last", is_flag=True, help="Explain the last run that computed anything.")
def command(before: str | None, after: str | None, last: bool) -> None:
    """Tell why two runs did not share their work.

    BEFORE and AFTER are artifacts (NAME or NAME@GEN), or actions by the first digits of their
    keys. With --last, each action of the last run that had to compute any is compared with the
    record that differs least from it.
    """
    from cas.explain import explain, explain_last

    if last == (before is not None) or (not last and after is None):
        raise click.UsageError("give two artifacts or two actions, or --last and nothing else")
    app = current()
    with app.store() as store:
        if last:
            run = explain_last(store)
            app.report(_run_document(run), lambda: _show_run(run, app.given.verbose))
        else:
            assert before is not None and after is not None
            found = explain(store, before, after)
            app.report(_document(found), lambda: _show(found, app.given.verbose))


# --- documents ----------------------------------------------------------------------------------


def _difference(difference: Difference) -> dict[str, Any]:
    from cas.explain import ABSENT

    values = {"before": difference.before, "after": difference.after}
    return {
        "section": difference.section,
        "name": difference.name,
        "words": difference.words,
        **{side: None if value is ABSENT else value for side, value in values.items()},
        "only": next(
            (
                other
                for side, other in (("before", "after"), ("after", "before"))
                if values[side] is ABSENT
            ),
            None,
        ),
    }


def _action(record: ActionRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "key": record.key.hex(),
        "kind": record.kind,
        "label": record.label,
        "seconds": record.seconds,
        "created": record.created,
    }


def _document(found: Explanation) -> dict[str, Any]:
    return {
        "before": found.before,
        "after": found.after,
        "same_actions": found.same,
        "different_actions": [
            {
                "before": _action(pair.before),
                "after": _action(pair.after),
                "differences": [_difference(item) for item in pair.differences],
            }
            for pair in found.pairs
        ],
        "origin": [_difference(item) for item in found.origin],
        "lost_actions": [key.hex() for key in found.lost],
    }


def _run_document(run: LastRun) -> dict[str, Any]:
    return {
        "time": run.time,
        "later_runs": run.later,
        "hits": run.hits,
        "misses": [
            {
                "key": miss.event.key.hex() if miss.event.key else None,
                "kind": miss.event.kind,
                "label": miss.event.label,
                "reason": miss.event.reason,
                "detail": miss.event.detail,
                "seconds": miss.event.microseconds / 1e6,
                "nearest": _action(miss.nearest),
                "differences": [_difference(item) for item in miss.differences],
            }
            for miss in run.misses
        ],
        "uncacheable": [
            {"kind": event.kind, "label": event.label, "reason": event.reason}
            for event in run.uncacheable
        ],
    }


# --- for people ---------------------------------------------------------------------------------


def _show(found: Explanation, verbose: bool) -> None:
    _say(f"{found.before} -> {found.after}: {_count(found.same)} the same, {len(found.pairs)} not")
    for pair in found.pairs:
        if pair.before is None or pair.after is None:
            record = pair.after or pair.before
            assert record is not None
            _say(f"{_title(record)}: only in the {'second' if pair.after else 'first'}")
        else:
            _say(f"{_title(pair.after)} differs from {pair.before.short} in")
            _list(pair.differences, verbose)
    if found.origin:
        _say("how they came to be differs in")
        _list(found.origin, verbose)
    if found.lost:
        _say(f"{_count(len(found.lost))} not recorded any more, and not compared")


def _show_run(run: LastRun, verbose: bool) -> None:
    _say(
        f"run of {moment(run.time)}: {run.hits} out of the store, {len(run.misses)} computed, "
        f"{len(run.uncacheable)} not cacheable"
    )
    if run.later:
        _say(f"{count(run.later, 'later run')} found everything in the store")
    groups: dict[tuple[str, ...], list[Miss]] = {}
    for miss in run.misses:
        groups.setdefault((_why(miss), *(d.text() for d in miss.differences)), []).append(miss)
    for (why, *_), misses in groups.items():
        first = misses[0]
        more = f" and {len(misses) - 1} more" if len(misses) > 1 else ""
        key = f" ({first.event.key.hex()[:12]})" if first.event.key else ""
        _say(f"{first.event.label or first.event.kind}{key}{more}: {why}")
        _list(first.differences, verbose)
    for event in run.uncacheable:
        _say(f"{event.label or event.kind}: not cacheable: {event.reason}")


def _why(miss: Miss) -> str:
    about = f": {miss.event.detail}" if miss.event.detail else ""
    reasons = {
        "damaged": "its record could not be read",
        "incomplete": "chunks of its record are gone",
        "stale": "something that the recorded computation read has changed",
    }
    if miss.event.outcome == "mismatch":
        return f"computed again for CAS_RECHECK, and it came out otherwise{about}"
    if miss.event.reason != "absent":
        return reasons.get(miss.event.reason, miss.event.reason) + about
    if miss.nearest is None:
        return "nothing like it was recorded before"
    return f"not recorded before; the nearest, {miss.nearest.short}, differs in"


def _title(record: ActionRecord) -> str:
    return f"{record.label or record.kind} ({record.short})"


def _count(number: int) -> str:
    return f"{number} action is" if number == 1 else f"{number} actions are"


def _list(differences: Iterable[Difference], verbose: bool) -> None:
    listed = list(differences)
    shown = listed if verbose else listed[:_SHOWN]
    for difference in shown:
        _say(f"  {difference.text()}")
    if len(shown) < len(listed):
        _say(f"  and {len(listed) - len(shown)} more; -v shows them")


def _say(line: str) -> None:
    click.echo(printable(line))
