"""Which tensor the bytes of a program came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

#: What `dtype_name` can give.
NAMES_OF_TYPES: Final = frozenset(
    str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if type(value) is torch.dtype
)


@dataclass(frozen=True, slots=True)
class Label:
    """A tensor's name and layout; ``dtype`` is torch's name without ``torch.``."""

    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


class Labels:
    """Labels of byte objects, by identity: equal bytes may belong to several tensors."""

    def __init__(self) -> None:
        # The object is kept beside its label, so that its id cannot be taken by another one.
        self._by_id: dict[int, tuple[Any, Label]] = {}

    def add(self, data: Any, label: Label) -> None:
        # CPython shares the objects of empty and one-byte bytes; they identify nothing.
        if len(data) > 1:
            self._by_id[id(data)] = (data, label)

    def get(self, data: Any) -> Label | None:
        entry = self._by_id.get(id(data))
        return None if entry is None else entry[1]


# --- named data -------------------------------------------------------------------------------

#: Labels of named data by its key, in order (the dicts are sets): equal weights share a key.
LabelTable: TypeAlias = "dict[str, dict[Label, None]]"

#: Where a store of named data, or what came out of it, keeps its labels: they go where it goes,
#: since the same key can stand for other tensors in another program.
_ATTRIBUTE: Final = "_cas_labels"


def named_labels(store: Any) -> LabelTable:
    """The labels of a store of named data, or of its output."""
    table: LabelTable = vars(store).get(_ATTRIBUTE, {})
    return table


def label_named(store: Any, key: str, label: Label) -> None:
    """Note which tensor the data under ``key`` came from."""
    vars(store).setdefault(_ATTRIBUTE, {}).setdefault(key, {})[label] = None


def merge_labels(store: Any, table: Mapping[str, Mapping[Label, None]]) -> None:
    """Add labels to those of a store of named data, or of its output."""
    for key, labels in table.items():
        for label in labels:
            label_named(store, key, label)


# --- constants of a program ---------------------------------------------------------------------


def label_of_constant(emitter: Any, spec: Any) -> Label | None:
    """The label of the constant that an emitter is about to save, from its graph signature."""
    name = _name_of_spec(spec) or _name_of_node(emitter)
    if name is None:
        return None
    return Label(name, dtype_name(spec.scalar_type), shape_of(spec.shape))


def dtype_name(dtype: Any) -> str | None:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else None


def shape_of(sizes: Any) -> tuple[int, ...] | None:
    """``sizes`` as plain integers, or None where one is symbolic."""
    shape = tuple(sizes)
    return shape if all(type(size) is int and size >= 0 for size in shape) else None


def _name_of_spec(spec: Any) -> str | None:
    info = getattr(spec, "extra_tensor_info", None)
    name = getattr(info, "fully_qualified_name", None)
    return name if isinstance(name, str) and name else None


def _name_of_node(emitter: Any) -> str | None:
    target = getattr(getattr(emitter, "node", None), "target", None)
    if not isinstance(target, str):
        return None
    return name_of_input(getattr(emitter, "exported_program", None), target) or target


def name_of_input(program: Any, placeholder: str) -> str | None:
    """What a program calls the constant that one of its inputs is; None for other inputs."""
    signature = getattr(program, "graph_signature", None)
    for table in ("inputs_to_parameters", "inputs_to_buffers", "inputs_to_lifted_tensor_constants"):
        name = getattr(signature, table, {}).get(placeholder)
        if isinstance(name, str):
            return name
    return None
