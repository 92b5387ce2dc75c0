"""Exports the cases that it is told to, under capture, and says what became of their actions.

python action_replay.py STORE OUT CASE...    ->  OUT/<case>/*, and JSON by case on stdout
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import cas
from cas.executorch import capture
from cas.executorch.actions.outcomes import ActionOptions


def export_case(store: cas.Store, case: str, built: Any, directory: Path) -> dict[str, Any]:
    """Everything through the store; the counts, and the maps that debuggers use."""
    delegates = ActionOptions(whole=False)
    with capture(store, case, threshold=1, map_threshold=1, actions=delegates) as captured:
        program = built().program
        captured.save(program, directory)
        emitted = program._emitter_output
        maps = [emitted.debug_handle_map, emitted.method_to_delegate_debug_id_map]
    outcomes = captured.outcomes
    return {
        "hits": outcomes.hits,
        "misses": dict(outcomes.misses),
        "uncacheable": dict(outcomes.uncacheable),
        "keys": outcomes.keys(),
        "notes": outcomes.notes(),
        "maps": json.loads(json.dumps(maps)),
    }


def main(store: str, out: str, names: list[str]) -> None:
    from export_cases import CASES

    with cas.Store.open(store, create=False) as opened:
        found = {name: export_case(opened, name, CASES[name], Path(out, name)) for name in names}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
