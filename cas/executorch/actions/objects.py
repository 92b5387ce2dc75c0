"""Partitioners, passes, configurations and functions as bytes: what an export was asked for.

An object is its class and its state; a class or function of the user's is its code, with all that
the code refers to. Whatever keeps its state where Python does not see it (a file, a lock, an
object of a C library) is refused with `Unkeyable`.
"""

from __future__ import annotations

import enum
import functools
import logging
import pathlib
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import executorch
import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir.lowered_backend_module import LoweredBackendModule

from cas.digest import Digest
from cas.executorch.actions import places
from cas.executorch.actions.encoder import KNOWN_PACKAGES, type_name
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.operators import operator_text
from cas.executorch.actions.policy import WHOLE_EXPORT
from cas.executorch.actions.programs import ProgramEncoder
from cas.executorch.actions.sources import code_digest, module_digest, tree_digest
from cas.executorch.actions.weights import StorageDigests

#: An option that refers to more than this is no option, but an application.
MAX_OBJECTS: Final = 20_000

#: State that an export overwrites before it reads it, by the class that has it.
_OVERWRITTEN: Final = {
    "executorch.backends.xnnpack.partition.config.gemm_configs.AddmmConfig": frozenset(
        {"src_partitions"}
    ),
    "executorch.exir.passes.memory_planning_pass.MemoryPlanningPass": frozenset(
        {"enable_non_cpu_memory_planning", "state"}
    ),
}

#: Of classes: what Python itself keeps there, other than ``__init__`` and the like.
_BOOKKEEPING: Final = frozenset(
    {
        "_abc_impl",
        "__abstractmethods__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__static_attributes__",
        "__weakref__",
    }
)


class ObjectEncoder(ProgramEncoder):
    """An encoder for everything that is handed to an export."""

    def __init__(self, digests: StorageDigests | None = None) -> None:
        super().__init__(WHOLE_EXPORT, digests)
        self._known: dict[int, Digest] = {}
        self._kept: list[Any] = []
        self._open: set[int] = set()
        self._trees: dict[Path, Digest] = {}

    def put(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._once(value, self._put_function)
        elif isinstance(value, type):
            self._once(value, self._put_class)
        elif isinstance(value, enum.Enum) and not _is_known(type(value).__module__):
            self.put(type(value))
            self.stream.put_text(b"en", value.name)
        elif isinstance(value, EdgeCompileConfig):
            self._once(value, self._put_edge_config)
        else:
            super().put(value)

    def put_other(self, value: Any) -> None:
        if isinstance(value, (LoweredBackendModule, torch.fx.GraphModule)):
            super().put_other(value)
            return
        for kind, encode in _OTHERS:
            if isinstance(value, kind):
                encode(self, value)
                return
        self._once(value, self._put_object)

    def _once(self, value: Any, encode: Callable[[Any], None]) -> None:
        """Encode ``value`` aside, by its digest; one that contains itself is named there."""
        known = self._known.get(id(value))
        if known is None:
            if id(value) in self._open:
                self.stream.put_text(b"cy", type_name(type(value)))
                return
            if len(self._known) >= MAX_OBJECTS:
                raise Unkeyable(f"more than {MAX_OBJECTS} objects and functions")
            self._open.add(id(value))
            outer = self.aside()
            try:
                encode(value)
                known = self.stream.digest()
            finally:
                self.stream = outer
                self._open.discard(id(value))
            self._known[id(value)] = known
            self._kept.append(value)  # or its id could be taken by another object
        self.stream.put(b"ob", known)

    # --- objects --------------------------------------------------------------------------------

    def _put_object(self, value: Any) -> None:
        kind = type(value)
        for base in kind.__mro__[:-1]:
            if not _is_python(base):
                raise Unkeyable(f"a value of type {type_name(kind)}")
        self.put(kind)
        self._put_state(value)

    def _put_state(self, value: Any) -> None:
        kind = type(value)
        skipped = {name for base in kind.__mro__ for name in _OVERWRITTEN.get(type_name(base), ())}
        state = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in skipped}
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    state[name] = getattr(value, name)
        self.put_mapping(state)

    def _put_edge_config(self, value: Any) -> None:
        """Lowering adds to one of its lists, in an order that is another one in each process."""
        exceptions = "_core_aten_ops_exception_list"
        self.put(type(value))
        self.put_mapping({k: v for k, v in vars(value).items() if k != exceptions})
        self.put(sorted(operator_text(op) for op in getattr(value, exceptions)))

    # --- code -----------------------------------------------------------------------------------

    def _put_class(self, kind: type) -> None:
        self.stream.put_text(b"cl", type_name(kind))
        if self._put_package(kind.__module__):
            self._put_methods(kind)
            return
        for base in kind.__mro__[1:-1]:
            self.put(base)
        for name, value in vars(kind).items():
            if name in _BOOKKEEPING:
                continue
            self.stream.put_text(b"ca", name)
            self._put_member(value)

    def _put_member(self, value: Any) -> None:
        """An attribute of a user's class."""
        if isinstance(value, (staticmethod, classmethod)):
            self.put(value.__func__)
        elif isinstance(value, property):
            self.put([value.fget, value.fset, value.fdel])
        elif isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            self.stream.put(b"sl")
        else:
            self.put(value)

    def _put_methods(self, kind: type) -> None:
        """The methods that a class of a known package has now: replaced ones count."""
        for name, value in sorted(vars(kind).items()):
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                self.stream.put_text(b"mn", name)
                self.stream.put(b"mc", code_digest(function))

    def _put_function(self, function: types.FunctionType) -> None:
        name = f"{function.__module__}.{function.__qualname__}"
        self.stream.put_text(b"fu", name)
        if "<" not in function.__qualname__ and self._put_package(function.__module__):
            self.stream.put(b"mc", code_digest(function))
            return
        self._put_code(function.__code__)
        self.put([function.__defaults__, function.__kwdefaults__])
        for cell in function.__closure__ or ():
            try:
                self.put(cell.cell_contents)
            except ValueError:  # not assigned yet
                self.stream.put(b"na")
        self.put_mapping(vars(function))
        self._put_globals(function)

    def _put_code(self, code: types.CodeType) -> None:
        self.stream.put(b"co", code.co_code)
        self.stream.put(b"ce", getattr(code, "co_exceptiontable", b""))
        shape = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        self.put([*shape, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars])
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._put_code(constant)
            else:
                self.put(constant)

    def _put_globals(self, function: types.FunctionType) -> None:
        """The values of all global names in the code; some may be names of attributes only."""
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                self.stream.put_text(b"gl", name)
                self.put(function.__globals__[name])

    def _put_module(self, module: types.ModuleType) -> None:
        self.stream.put_text(b"mo", module.__name__)
        if not self._put_package(module.__name__):
            self.stream.put(b"md", module_digest(module.__name__))

    def _put_package(self, module: str) -> bool:
        """Whether a module belongs to a package that is known by its version, or its sources.

        Code of other installed packages is taken as it is in the files, and not followed: it could
        lead anywhere.
        """
        if not _is_known(module):
            installed = _is_installed(module)
            if installed:
                self.stream.put(b"md", module_digest(module))
            return installed
        parts = module.split(".")
        if parts[0] == "executorch" and len(parts) > 1:
            part = parts[1:3] if parts[1] == "backends" else parts[1:2]
            root = Path(next(iter(executorch.__path__)), *part)
            if root.is_dir():
                if root not in self._trees:
                    self._trees[root] = tree_digest(root, (".py",))
                self.stream.put(b"tr", self._trees[root])
        return True


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _is_known(module: str) -> bool:
    top = module.split(".", 1)[0]
    return top in KNOWN_PACKAGES or (top in sys.stdlib_module_names and top != "__main__")


def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and places.portable(file).startswith("{site}")


def _is_python(kind: type) -> bool:
    """Whether a class is written in Python, so that what its objects know is to be seen."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return (file or "").endswith(".py") and bool(kind.__flags__ & (1 << 9))


def _put_dict(encoder: ObjectEncoder, value: Any) -> None:
    """Of a class of its own, such as an OrderedDict."""
    encoder.put(type(value))
    encoder.put_mapping(dict(value))
    encoder.put(getattr(value, "default_factory", None))


def _put_partial(encoder: ObjectEncoder, value: functools.partial[Any]) -> None:
    encoder.put([value.func, list(value.args), value.keywords])


def _put_method(encoder: ObjectEncoder, value: types.MethodType) -> None:
    encoder.put([value.__func__, value.__self__])


def _put_graph(encoder: ObjectEncoder, value: torch.fx.Graph) -> None:
    """A pass has an empty one to trace into; any other is part of a module."""
    if len(value.nodes):
        raise Unkeyable("a graph without a module")
    encoder.stream.put(b"eg")


#: Tried in order, before an object's own state is looked at.
_OTHERS: Final[tuple[tuple[Any, Callable[[Any, Any], None]], ...]] = (
    (torch.fx.Graph, _put_graph),
    (types.MethodType, _put_method),
    (types.ModuleType, ObjectEncoder._put_module),
    (functools.partial, _put_partial),
    (logging.Logger, lambda e, v: e.stream.put_text(b"lo", v.name)),
    (pathlib.PurePath, lambda e, v: e.stream.put_text(b"pa", str(v))),
    (re.Pattern, lambda e, v: e.put([v.pattern, v.flags])),
    (torch._ops.OpOverloadPacket, lambda e, v: e.stream.put_text(b"pk", v._qualified_op_name)),
    (dict, _put_dict),
    ((types.MappingProxyType, Mapping), lambda e, v: e.put_mapping(dict(v))),
    ((list, deque), lambda e, v: e.put([type(v), list(v)])),
)
