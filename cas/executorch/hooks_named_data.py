"""Hooks: data that backends add under a name, and which tensors it came from."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from executorch.exir.tensor_layout import TensorLayout

from cas.executorch.intake import Intake
from cas.executorch.labels import merge_labels, named_labels
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
    _install_labels(patches, store_class)


def _install_labels(patches: Patches, store_class: Any) -> None:
    """Let labels go with the data, from a backend's store to that of a whole program."""
    merge, output = store_class.merge_named_data_store, store_class.get_named_data_store_output

    @functools.wraps(merge)
    def merge_named_data_store(self: Any, other: Any) -> None:
        merge(self, other)
        merge_labels(self, named_labels(other))

    @functools.wraps(output)
    def get_named_data_store_output(self: Any) -> Any:
        made = output(self)
        merge_labels(made, named_labels(self))
        return made

    patches.set(store_class, "merge_named_data_store", merge_named_data_store)
    patches.set(store_class, "get_named_data_store_output", get_named_data_store_output)


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
