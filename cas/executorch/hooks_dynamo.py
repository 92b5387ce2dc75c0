"""Hook: the clones of every weight that a strict export makes (Dynamo's ``_clone_input``)."""

from __future__ import annotations

import functools
import importlib
import threading
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cas.executorch.copies import PrivateCopies
from cas.executorch.patches import Patches
from cas.executorch.seams import DYNAMO, DYNAMO_UTILS, EXPORT


def install(patches: Patches, copies: PrivateCopies) -> None:
    exporting = _Exporting()
    _install_export(patches, exporting)
    builder = importlib.import_module(DYNAMO)
    original = builder._clone_input

    @functools.wraps(original)
    def clone_input(value: Any, fake_mode: Any) -> Any:
        clone = private_clone(value, copies) if id(value) in exporting.weights else None
        return original(value, fake_mode) if clone is None else clone

    patches.set(builder, "_clone_input", clone_input)


def _install_export(patches: Patches, exporting: _Exporting) -> None:
    """Know the weights of the module that is being exported.

    Dynamo clones inputs with the same function, and traces example inputs of its own (for fusion
    patterns) on the way. Those are no weights, and random ones would leave garbage in the store.
    """
    trace = importlib.import_module(EXPORT)
    original = trace._export

    @functools.wraps(original)
    def export(mod: Any, *args: Any, **kwargs: Any) -> Any:
        outer, exporting.weights = exporting.weights, _weights_of(mod)
        try:
            return original(mod, *args, **kwargs)
        finally:
            exporting.weights = outer

    patches.set(trace, "_export", export)


class _Exporting(threading.local):
    """The ids of the weights that this thread exports; the module keeps them alive meanwhile."""

    weights: frozenset[int] = frozenset()


def _weights_of(module: Any) -> frozenset[int]:
    if not isinstance(module, torch.nn.Module):
        return frozenset()
    return frozenset(id(tensor) for tensor in chain(module.parameters(), module.buffers()))


def private_clone(tensor: torch.Tensor, copies: PrivateCopies) -> torch.Tensor | None:
    """A plain tensor (never a parameter) with the same values, or None to let Dynamo clone it."""
    if is_traceable_wrapper_subclass(tensor):
        return _clone_subclass(tensor, copies)
    # A gradient would have to be cloned along; weights that are exported have none.
    if not tensor.is_leaf or tensor.grad is not None:
        return None
    private = copies.of_tensor(tensor.detach())
    if private is not None:
        private.requires_grad_(tensor.requires_grad)
        _copy_marks(tensor, private)
    return private


def _clone_subclass(tensor: Any, copies: PrivateCopies) -> torch.Tensor | None:
    """A wrapper such as a quantized weight of torchao: its payload tensors are cloned."""
    if tensor.is_nested or not tensor.is_leaf or tensor.grad is not None:
        return None
    names, context = tensor.__tensor_flatten__()
    payload = {name: getattr(tensor, name) for name in names}
    private = {name: private_clone(inner, copies) for name, inner in payload.items()}
    if all(clone is None for clone in private.values()):
        return None
    inner = {
        name: payload[name].detach().clone() if clone is None else clone
        for name, clone in private.items()
    }
    clone: torch.Tensor = type(tensor).__tensor_unflatten__(
        inner, context, tensor.size(), tensor.stride()
    )
    clone.requires_grad_(tensor.requires_grad)
    _copy_marks(tensor, clone)
    return clone


def _copy_marks(source: torch.Tensor, clone: torch.Tensor) -> None:
    """Marks such as ``mark_dynamic`` are attributes, and Dynamo's own clone has them too."""
    importlib.import_module(DYNAMO_UTILS).copy_dynamo_tensor_attributes(source, clone)
