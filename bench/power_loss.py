"""Take the power from a store's filesystem, many times, and count what was lost.

    python bench/power_loss.py [--cuts 200] [--seed 0] [--fs ext4] [--fs xfs]

Needs the right to mount, xfsprogs and e2fsprogs. A child commits artifacts in a loop (in every
second image beside another that removes them and collects garbage) on a loop mount; at a random
moment the filesystem is shut down without flushing its journal, the children are killed, and the
image is mounted again. Then every artifact whose commit had returned must assemble byte for byte,
every file with a final name must have its content, and verify must be clean without any repair.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

from cas.testing import disks
from cas.testing.power import Machine, image_directory

#: An image is used for as many cuts, so that what one leaves is there for the next.
CUTS_PER_IMAGE = 10
LONGEST = 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=200, help="for each filesystem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fs", action="append", choices=["ext4", "xfs"])
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # "rebuilding the index" is what is wanted here
    losses = 0
    for fstype in arguments.fs or ["ext4", "xfs"]:
        reason = disks.why_no_power_cuts(fstype)
        if reason is not None:
            print(f"{fstype}: {reason}")
            return 2
        losses += run(fstype, arguments.cuts, arguments.seed)
    return 1 if losses else 0


def run(fstype: str, cuts: int, seed: int) -> int:
    """Cut ``cuts`` times, print the counts, return the number of failed checks."""
    chooser = random.Random(seed)
    sums: dict[str, int] = {}
    losses = 0
    began = time.monotonic()
    for image, first in enumerate(range(0, cuts, CUTS_PER_IMAGE)):
        with image_directory() as directory:
            machine = Machine(directory, fstype, seed=seed + image + 1, with_gc=image % 2 == 1)
            losses += not survives(machine, min(CUTS_PER_IMAGE, cuts - first), chooser)
            for key, value in asdict(machine.totals).items():
                sums[key] = sums.get(key, 0) + value
    seconds = time.monotonic() - began
    figures = ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in sums.items())
    print(f"{fstype}: {figures}; {losses} failed; {seconds:.0f} s", flush=True)
    return losses


def survives(machine: Machine, cuts: int, chooser: random.Random) -> bool:
    try:
        for _ in range(cuts):
            machine.cut(after=chooser.uniform(0, LONGEST))
    except AssertionError as error:
        print(f"{Path(machine.image).name}: {error}", flush=True)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
