"""Hook: data that backends add under a name (`NamedDataStore.add_named_data`)."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from executorch.exir.tensor_layout import TensorLayout

from cas.executorch.intake import Intake
from cas.executorch.patches import Patches
from cas.executorch.seams import NAMED_DATA


def install(patches: Patches, intake: Intake) -> None:
    """Wrap the method, so that keys, duplicates, alignment and tags stay ExecuTorch's business."""
    store_class: Any = importlib.import_module(NAMED_DATA).NamedDataStore
    original = store_class.add_named_data

    @functools.wraps(original)
    def add_named_data(
        self: Any,
        key: str,
        data: Any,
        alignment: int | None = 1,
        external_tag: str | None = None,
        tensor_layout: Any = None,
    ) -> None:
        if isinstance(data, torch.Tensor):
            data, tensor_layout = _take_tensor(intake, data, tensor_layout)
        else:
            data = intake.keep_any(data)
        original(self, key, data, alignment, external_tag, tensor_layout)

    patches.set(store_class, "add_named_data", add_named_data)


def _take_tensor(intake: Intake, tensor: torch.Tensor, layout: Any) -> tuple[Any, Any]:
    """The tensor's bytes and layout; the tensor itself wherever ExecuTorch would raise."""
    try:
        found = TensorLayout.from_tensor(tensor)
    except (ValueError, KeyError):
        return tensor, layout
    if layout is not None and found != layout:
        return tensor, layout
    kept = intake.keep_tensor(tensor)
    return (tensor, layout) if kept is None else (kept, found)
