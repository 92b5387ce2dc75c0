"""Data on stdout: JSON, tables, sizes. What is said on the side goes to stderr by `click.echo`."""

from __future__ import annotations

import json
import os
import shutil
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

    Lines are cut at the terminal's right edge, so that what names a row stays whole; never when
    the output goes to a file or a pipe.
    """
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    for number, line in enumerate(aligned(columns, rows, width)):
        bold = number == 0 and terminal and not os.environ.get("NO_COLOR")
        click.echo(click.style(line, bold=True) if bold else line)


def aligned(
    columns: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None
) -> list[str]:
    """The lines of `table`: no longer than ``width`` cells, if that is given."""
    from rich.cells import cell_len, set_cell_size

    titles = [column.lstrip(">") for column in columns]
    lines = [titles, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    shown = []
    for line in lines:
        cells = []
        for cell, size_, column in zip(line, widths, columns, strict=True):
            blank = " " * (size_ - cell_len(cell))
            cells.append(blank + cell if column.startswith(">") else cell + blank)
        text = "  ".join(cells).rstrip()
        if width is not None and cell_len(text) > width:
            text = set_cell_size(text, width - 1).rstrip() + "\N{HORIZONTAL ELLIPSIS}"
        shown.append(text)
    return shown


def pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Labels and values, the values aligned."""
    listed = list(rows)
    width = max((len(label) for label, _ in listed), default=0)
    for label, value in listed:
        click.echo(f"{label:<{width}}  {printable(value)}".rstrip())


def printable(text: str) -> str:
    """The text without what could drive a terminal: names and provenance come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
