"""Exports the cases that it is told to, with whole exports out of the store.

python whole_replay.py STORE OUT CASE...    ->  OUT/<case>/*, and outcomes by case on stdout
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import cas
from cas.executorch import capture
from cas.executorch.actions.outcomes import ActionOptions

WHOLE = ActionOptions(whole=True)


def export_cases(store: cas.Store, out: Path, names: list[str]) -> dict[str, list[list[str]]]:
    """Save each case, and give the kind and outcome of each action."""
    from export_cases import CASES

    found = {}
    for name in names:
        with capture(store, name, threshold=1, map_threshold=1, actions=WHOLE) as captured:
            captured.save(CASES[name]().program, out / name)
        found[name] = [[event.kind, event.outcome] for event in captured.outcomes.events]
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with cas.Store.open(sys.argv[1], create=False) as opened:
        json.dump(export_cases(opened, Path(sys.argv[2]), sys.argv[3:]), sys.stdout)
