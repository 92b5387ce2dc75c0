"""Real filesystems in files: loop mounts to fill, and to take the power from."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

#: What mkfs needs for small images; root's reserve and lazy writes would blur what "full" means.
_MAKE = {
    "ext4": ["mkfs.ext4", "-qF", "-b4096", "-m0", "-N16384", "-Elazy_itable_init=0"],
    "xfs": ["mkfs.xfs", "-qf"],
}
#: The smallest image, in bytes, that mkfs makes without complaint.
SMALLEST = {"ext4": 24 << 20, "xfs": 300 << 20}


def make_image(image: Path, fstype: str, size: int) -> None:
    """An empty filesystem of ``size`` bytes in a sparse file.

    Raises:
        PermissionError: there is no mkfs for it.
    """
    with open(image, "wb") as file:
        file.truncate(size)
    _run(*_MAKE[fstype], str(image))


def mount_image(image: Path, point: Path) -> None:
    """Mount ``image`` on the directory ``point``; journal recovery happens here.

    Raises:
        PermissionError: this process may not mount.
    """
    point.mkdir(parents=True, exist_ok=True)
    _run("mount", "-o", "loop", str(image), str(point))


def unmount(point: Path) -> None:
    """Unmount for good: whoever still uses a file there is an error."""
    subprocess.run(["umount", str(point)], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def mounted_image(image: Path, point: Path) -> Iterator[Path]:
    """`mount_image` for the length of the block."""
    mount_image(image, point)
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def cut_power(point: Path) -> None:
    """Stop all writing to a mounted filesystem at once, in the middle of whatever it is doing.

    What was not synced is lost, and the journal is not flushed: on the next mount the filesystem
    is as a power cut would have left it.
    """
    subprocess.run(
        ["xfs_io", "-x", "-c", "shutdown", str(point)], check=True, capture_output=True, text=True
    )


def why_no_power_cuts(fstype: str) -> str | None:
    """What this machine lacks for `cut_power`, or None; mounting itself is found out by trying."""
    for tool in (_MAKE[fstype][0], "xfs_io", "mount"):
        if shutil.which(tool, path=f"{os.defpath}:/sbin:/usr/sbin") is None:
            return f"there is no {tool}"
    return None


def _run(*arguments: str) -> None:
    try:
        subprocess.run(arguments, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise PermissionError(f"there is no {arguments[0]}") from None
    except subprocess.CalledProcessError as error:
        raise PermissionError(f"{arguments[0]} failed: {error.stderr.strip()}") from None
