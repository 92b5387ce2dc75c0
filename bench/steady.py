"""What makes times of one run comparable on a virtual machine."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK = bytes(4 << 20)


def settle(directory: Path, nbytes: int) -> None:
    """Flush what earlier steps left, and have ``nbytes`` of page cache at hand.

    Hypervisors take free memory back, and give it again at the first touch: a step that writes
    into such memory takes several times as long, whatever program it is. So before each timed
    step as many pages are touched as it will fill: written to a file in ``directory`` that is
    removed before its pages reach the disk. The kernel hands them to the next who asks.
    """
    os.sync()
    path = directory / "settle"
    with open(path, "wb") as file:
        path.unlink()
        for _ in range(-(-nbytes // len(_BLOCK))):
            file.write(_BLOCK)
