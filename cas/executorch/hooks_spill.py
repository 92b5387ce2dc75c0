"""Hook: the model itself, which is moved into the store when it is exported."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch.export import ExportedProgram

from cas.executorch.intake import CaptureWriter
from cas.executorch.patches import Patches
from cas.executorch.seams import EXPORT
from cas.torch.mapping import Mapper
from cas.torch.spill import Spilled, spill


def install(patches: Patches, writer: CaptureWriter, mapper: Mapper) -> None:
    """Spill each module that `torch.export.export` is given, before it traces anything."""
    trace = importlib.import_module(EXPORT)
    original = trace._export

    @functools.wraps(original)
    def export(mod: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(mod, torch.nn.Module):
            spill(mod, writer, min_size=mapper.min_size, mapper=mapper)
        return original(mod, *args, **kwargs)

    patches.set(trace, "_export", export)


def spill_target(target: Any, writer: CaptureWriter, mapper: Mapper) -> Spilled:
    """Spill a module, the weights of an exported program, or the tensors given."""
    if isinstance(target, ExportedProgram):
        target = [*target.state_dict.values(), *target.constants.values()]
    return spill(target, writer, min_size=mapper.min_size, mapper=mapper)
