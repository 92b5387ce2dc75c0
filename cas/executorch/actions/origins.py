"""Whose code is it: known packages, installed ones, the user's; and what code refers to by name."""

from __future__ import annotations

import dis
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cas.executorch.actions import places
from cas.executorch.actions.encoder import KNOWN_PACKAGES
from cas.executorch.actions.sources import is_settled


def name_of(module: str | None) -> str:
    """The name of a module; of the script that runs, the one by which another could import it."""
    if module != "__main__":
        return str(module)
    file = getattr(sys.modules.get(module), "__file__", None)
    return module if file is None else Path(file).stem


def names_in(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
    return found


def imported_by(code: types.CodeType, scope: Mapping[str, Any]) -> Iterator[types.ModuleType]:
    """The modules that code imports while it runs, if they are loaded."""
    steps = list(dis.get_instructions(code))
    for position, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level = steps[position - 2].argval
            dots = "." * level if isinstance(level, int) else ""
            try:
                name = importlib.util.resolve_name(dots + step.argval, scope.get("__package__"))
            except ImportError:
                continue
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                module = sys.modules.get(".".join(parts[:end]))
                if module is not None:
                    yield module
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from imported_by(constant, scope)


def is_users(module: types.ModuleType) -> bool:
    name = module.__name__
    return not (is_known(name) or is_installed(name))


def is_known(module: str) -> bool:
    top = module.split(".", 1)[0]
    return top in KNOWN_PACKAGES or (is_settled(module) and top != "cas")


def is_foreign(function: types.FunctionType) -> bool:
    """Whether it was put into a known package from elsewhere."""
    return not is_known(str(function.__globals__.get("__name__", "")) or "builtins")


def stock(function: types.FunctionType) -> types.FunctionType:
    """What stands there outside of a capture, which puts functions of its own before others."""
    while str(function.__globals__.get("__name__")).startswith("cas."):
        inner = getattr(function, "__wrapped__", None)
        if not isinstance(inner, types.FunctionType):
            break
        function = inner
    return function


def is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and places.portable(file).startswith("{site}")


def is_python(kind: type) -> bool:
    """Whether a class is written in Python, so that what its objects know is to be seen.

    Some of C say that they are of a module in Python, as ``operator.itemgetter`` does; but their
    objects are larger than others, and have neither slots nor a dictionary.
    """
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if not (file or "").endswith(".py") or not kind.__flags__ & (1 << 9):
        return False
    shown = "__slots__" in vars(kind) or any("__dict__" in vars(base) for base in kind.__mro__)
    return shown or kind.__basicsize__ <= object.__basicsize__


def is_of_python(value: Any) -> bool:
    """Whether an attribute of a class is one of those that Python makes, to find others by."""
    return type(value).__module__ in ("builtins", "_collections") and (
        inspect.isdatadescriptor(value) or inspect.ismethoddescriptor(value)
    )


def is_of_users_class(value: Any) -> bool:
    module = type(value).__module__
    return module != "builtins" and not is_known(module)
