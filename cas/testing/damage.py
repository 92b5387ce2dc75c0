"""Ways in which disks and hands spoil files, and small disks to fill."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cas import filesystems


def writable(path: Path) -> None:
    """Make a read-only data file editable, as somebody with a hex editor would."""
    path.chmod(path.stat().st_mode | 0o200)


def flip_bit(path: Path, offset: int = 0, bit: int = 0) -> None:
    """Flip one bit in place."""
    writable(path)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def truncate(path: Path, size: int) -> None:
    writable(path)
    os.truncate(path, size)


@contextlib.contextmanager
def mounted_tmpfs(point: Path, size: int) -> Iterator[Path]:
    """A memory filesystem of ``size`` bytes at ``point``.

    Raises:
        PermissionError: this process may not mount.
    """
    point.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(point))
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@contextlib.contextmanager
def mounted_read_only(path: Path) -> Iterator[Path]:
    """``path`` read-only, even for root.

    Raises:
        PermissionError: this process may not mount.
    """
    _mount("--bind", str(path), str(path))
    try:
        _mount("-o", "remount,bind,ro", str(path))
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _mount(*arguments: str) -> None:
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise PermissionError("there is no mount command") from None
    except subprocess.CalledProcessError as error:
        raise PermissionError(f"mounting is not permitted: {error.stderr.strip()}") from None


def fill_disk(directory: Path, leave: int = 0) -> Path:
    """Write a file until at most ``leave`` bytes are free; delete it to have the space back."""
    ballast = directory / "ballast-of-a-test"
    with open(ballast, "ab", buffering=0) as file:
        while (free := filesystems.free_bytes(directory)) > leave:
            try:
                file.write(bytes(min(free - leave, 1 << 20)))
            except OSError:  # the filesystem counts metadata that it did not count as free
                break
    return ballast
