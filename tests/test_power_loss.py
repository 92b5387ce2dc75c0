"""A power cut loses nothing that was committed, and leaves nothing half done.

``bench/power_loss.py`` does the same for as long as you like.
"""

from __future__ import annotations

import random

import pytest

from cas.testing import disks
from cas.testing.power import Machine, image_directory

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
@pytest.mark.parametrize("with_gc", [False, True], ids=["writer", "writer+gc"])
def test_power_cuts_lose_nothing_and_need_no_repair(fstype: str, with_gc: bool, seed: int) -> None:
    if reason := disks.why_no_power_cuts(fstype):
        pytest.skip(reason)
    chooser = random.Random(seed)
    with image_directory() as directory:
        try:
            machine = Machine(directory, fstype, seed=chooser.randrange(1, 40_000), with_gc=with_gc)
            for _ in range(5):
                machine.cut(after=chooser.uniform(0, 0.6))
        except PermissionError as error:
            pytest.skip(str(error))
        print(machine.totals)
        assert machine.totals.cuts == 5
