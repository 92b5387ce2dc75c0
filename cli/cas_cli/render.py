"""Data on stdout: JSON, tables, sizes. What is said on the side goes to stderr by `click.echo`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import click


def print_json(document: Any) -> None:
    """One JSON document, indented, with its keys in the order given."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def size(nbytes: int) -> str:
    """A size in IEC units with three significant digits: ``17 B``, ``1.50 KiB``, ``90.4 MiB``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 1023.5 or unit == "PiB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def count(number: int, thing: str) -> str:
    """A number of things, whose plural ends in s: ``1 chunk``, ``2 chunks``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def moment(seconds: float) -> str:
    """A time since the epoch, as the clock here shows it: ``2026-11-30 10:12:07``."""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # times come from files, and can be any number
        return "?"


def ratio(new: int, logical: int) -> str:
    """How much of what was put was new."""
    return "0 %" if not logical else f"{100 * new / logical:.3g} %"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Aligned columns. A column whose title starts with ``>`` is right-aligned.

    Lines are cut to the terminal's width, but never when the output goes to a file or a pipe.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        grid.add_column(
            column.lstrip(">"),
            justify="right" if right else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    terminal = sys.stdout.isatty()
    console = Console(
        file=sys.stdout, width=None if terminal else 10_000, highlight=False, soft_wrap=False
    )
    with console.capture() as captured:
        console.print(grid)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Labels and values, the values aligned."""
    listed = list(rows)
    width = max((len(label) for label, _ in listed), default=0)
    for label, value in listed:
        click.echo(f"{label:<{width}}  {printable(value)}".rstrip())


def printable(text: str) -> str:
    """The text without what could drive a terminal: names and provenance come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
