"""Output directories, checked before the long work and not after it."""

from __future__ import annotations

import os
from pathlib import Path

from cas.errors import PermissionRefused, Refused


def require_directory(path: Path) -> None:
    """Refuse what can be told to fail: an output that is a file, or lies where nothing can go.

    Nothing is created: a command that fails later leaves no empty directory.

    Raises:
        Refused: it is a file, or lies below one.
        PermissionRefused: it cannot be written.
    """
    existing = path
    while not existing.exists() and not existing.is_symlink() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise Refused(f"the output directory {path} is a file, or lies below one; choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionRefused(path, "write to output directory", "permission denied")
