"""Output directories, checked before the long work and not after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from cas.errors import PermissionRefused, Refused


class OutputDirectory(click.Path):
    """A directory as a Path. An empty word is refused: it would mean the current directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the directory is empty; for the current one write `.`", param, ctx)
        return super().convert(value, param, ctx)


def require_directory(path: Path, store: Path) -> None:
    """Refuse what can be told to fail: an output that is a file, or lies where nothing can go.

    Nothing is created: a command that fails later leaves no empty directory.

    Raises:
        Refused: it is a file, or lies below one, or in the store, where only chunks belong.
        PermissionRefused: it cannot be written.
    """
    root = store.resolve()
    if root == path.resolve() or root in path.resolve().parents:
        raise Refused(f"the output directory {path} is inside the store {store}; choose another")
    existing = path
    while not existing.exists() and not existing.is_symlink() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise Refused(f"the output directory {path} is a file, or lies below one; choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionRefused(path, "write to output directory", "permission denied")
