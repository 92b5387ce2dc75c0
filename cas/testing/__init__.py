"""What tests of a store reuse: kills at every step, forked processes, damage, small disks.

Nothing here is imported by the rest of the library. `cas.testing.strategies` needs hypothesis.
"""

from cas.testing.killing import KillMatrix, Outcome
from cas.testing.processes import Child, forked
from cas.testing.steps import Interleaving, KillAt, recorded_steps, step_hook

__all__ = [
    "Child",
    "Interleaving",
    "KillAt",
    "KillMatrix",
    "Outcome",
    "forked",
    "recorded_steps",
    "step_hook",
]
