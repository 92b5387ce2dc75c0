"""Hook: copies of where a node came from (`torch.fx.traceback.NodeSource`).

Every pass makes a node's history one link longer, and copies all of it for each node. The standard
`copy.deepcopy` takes a dozen steps per link, and asks for the ``id()`` of an object in each: nearly
two million times when four layers of a transformer are lowered. Python tells audit hooks of each
``id()``, and never removes one: so in a process that has watched a compile
(`cas.executorch.actions.observer`) these copies alone would make an export slower by some percent.
The same copies are made here in a fraction of the steps.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any, Final, TypeAlias

from cas.executorch.patches import Patches
from cas.executorch.seams import FX_TRACEBACK

Memo: TypeAlias = "dict[int, Any]"

#: What `copy.deepcopy` gives back as it is.
_ATOMS: Final = frozenset({bool, int, str, type(None)})


def install(patches: Patches) -> None:
    module: Any = importlib.import_module(FX_TRACEBACK)
    copier = _Copier(module.NodeSource, module.NodeSource.NodeInfo, module.NodeSourceAction)

    def deepcopy(self: Any, memo: Memo) -> Any:
        return copier.attributes(self, memo)

    patches.set(module.NodeSource, "__deepcopy__", deepcopy)


class _Copier:
    """`copy.deepcopy` for what histories consist of; anything else in them is left to it."""

    def __init__(self, source: type, info: type, action: type) -> None:
        self._objects = frozenset({source, info})
        self._atoms = _ATOMS | {action}

    def attributes(self, value: Any, memo: Memo) -> Any:
        """A new object of the same class, whose attributes are copies."""
        made = memo[id(value)] = object.__new__(type(value))
        state = vars(made)
        for name, held in vars(value).items():
            state[name] = held if type(held) in self._atoms else self._copy(held, memo)
        return made

    def _copy(self, value: Any, memo: Memo) -> Any:
        kind = type(value)
        if kind is not list and kind not in self._objects:
            return copy.deepcopy(value, memo)
        known = memo.get(id(value))
        if known is not None:
            return known
        if kind is not list:
            return self.attributes(value, memo)
        made = memo[id(value)] = []
        for item in value:
            made.append(item if type(item) in self._atoms else self._copy(item, memo))
        return made
