"""Names of tensors in records: by position where a key leaves names out.

Two programs that differ only in what their weights are called have one record. The labels in it
must then name the weights of the program that asks, so they say which constant of the program it
was, and what the backend made of its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from cas.errors import UsageError
from cas.executorch.labels import NAMES_OF_TYPES, Label, LabelTable
from cas.manifest import MAX_TENSOR_DIMS
from cas.strictjson import MAX_NAME_CHARS, Json, as_int, as_list, as_text

#: The names of a program's constants in the order of its inputs; None if names are in its key.
Constants: TypeAlias = "Sequence[str] | None"

#: What comes after a weight's name in that of something made of it, such as ``_fused_bn``.
_JOINTS: Final = ("", ".", "_")


def freeze_labels(table: LabelTable, constants: Constants) -> list[Json]:
    """The labels of a store of named data as JSON; those that no other program has are left out."""
    frozen: list[Json] = []
    for key, labels in table.items():
        known = [entry for label in labels for entry in _freeze(label, constants)]
        if known:
            frozen.append([key, known])
    return frozen


def _freeze(label: Label, constants: Constants) -> list[Json]:
    name: Json = label.name if constants is None else _place(label.name, constants)
    if name is None or len(label.name) > MAX_NAME_CHARS:
        return []
    shape: Json = None if label.shape is None else [*label.shape]
    return [[name, label.dtype, shape]]


def _place(name: str, constants: Sequence[str]) -> Json:
    """Position, whether dots became underscores, and the rest; None if it comes from no constant.

    The longest name counts: ``a.b_c`` may be made of ``a.b``, but is ``a.b_c`` if there is one.
    """
    best: tuple[int, int, bool] | None = None
    for position, constant in enumerate(constants):
        for flat, start in ((False, constant), (True, constant.replace(".", "_"))):
            if name.startswith(start) and name[len(start) : len(start) + 1] in _JOINTS:
                best = max(best or (-1, 0, False), (len(start), -position, not flat))
    if best is None:
        return None
    length, position, exact = best
    return [-position, not exact, name[length:]]


def thaw_labels(value: Any, constants: Constants) -> LabelTable:
    """What `freeze_labels` wrote, with the names of ``constants``.

    Raises:
        UsageError: it is something else, or of a program with other constants.
    """
    table: LabelTable = {}
    for item in as_list(value, "labels"):
        key, labels = _fields(item, 2)
        known = [_thaw(entry, constants) for entry in as_list(labels, "labels")]
        table[as_text(key, "a key of named data")] = dict.fromkeys(known)
    return table


def _thaw(value: Any, constants: Constants) -> Label:
    name, dtype, shape = _fields(value, 3)
    if dtype is not None and as_text(dtype, "a dtype") not in NAMES_OF_TYPES:
        raise UsageError("a tensor has elements of an unknown type")
    label = Label(_thaw_name(name, constants), dtype)
    if shape is None:
        return label
    sizes = as_list(shape, "a shape")
    if len(sizes) > MAX_TENSOR_DIMS:
        raise UsageError("a shape has too many dimensions")
    return replace(label, shape=tuple(as_int(size, "a size") for size in sizes))


def _thaw_name(value: Any, constants: Constants) -> str:
    if constants is None:
        return as_text(value, "a tensor's name")
    position, flat, rest = _fields(value, 3)
    constant = constants[as_int(position, "a constant", 0, len(constants) - 1)]
    if type(flat) is not bool:
        raise UsageError("a tensor's name has another form")
    return (constant.replace(".", "_") if flat else constant) + as_text(rest, "a tensor's name")


def _fields(value: Any, count: int) -> list[Any]:
    fields = as_list(value, "a label")
    if len(fields) != count:
        raise UsageError("a label has another form")
    return fields
