"""Partitioners, passes, configurations and functions as bytes: what an export was asked for.

An object is its class and its state; a class or function of the user's is its code, with all that
the code refers to. Whatever keeps its state where Python does not see it (a file, a lock, an
object of a C library) is refused with `Unkeyable`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import operator
import pathlib
import re
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import executorch
import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir.backend.partitioner import DelegationSpec
from executorch.exir.lowered_backend_module import LoweredBackendModule

from cas.digest import Digest
from cas.executorch.actions import origins
from cas.executorch.actions.encoder import type_name
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.operators import operator_text
from cas.executorch.actions.policy import WHOLE_EXPORT
from cas.executorch.actions.programs import ProgramEncoder
from cas.executorch.actions.sources import (
    code_digest,
    module_digest,
    tree_digest,
)
from cas.executorch.actions.weights import StorageDigests

#: An option that refers to more than this is no option, but an application.
MAX_OBJECTS: Final = 20_000

#: State that an export overwrites before it reads it, by the class that has it.
_OVERWRITTEN: Final = {
    "executorch.backends.xnnpack.partition.config.gemm_configs.AddmmConfig": frozenset(
        {"src_partitions"}
    ),
    "executorch.exir.pass_base._ExportPassBase": frozenset(
        {"fake_tensor_mode", "interpreter", "node_debug_str", "tracer"}
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


_OF_NAMED_TUPLES: Final = frozenset(
    {"__getnewargs__", "__new__", "__repr__", "__replace__", "_asdict", "_make", "_replace"}
)


class ObjectEncoder(ProgramEncoder):
    """An encoder for everything that is handed to an export."""

    def __init__(
        self, digests: StorageDigests | None = None, trees: dict[Path, Digest] | None = None
    ) -> None:
        """``trees`` are the digests of packages that were looked at before, and of further ones."""
        super().__init__(WHOLE_EXPORT, digests)
        #: The backends that were named in what was encoded.
        self.backends: set[str] = set()
        self._known: dict[int, Digest] = {}
        self._kept: list[Any] = []
        self._open: set[int] = set()
        self._trees = {} if trees is None else trees

    def put(self, value: Any) -> None:
        if isinstance(value, DelegationSpec):
            self.backends.add(value.backend_id)
        if isinstance(value, types.FunctionType):
            self._once(origins.stock(value), self._put_function)
        elif isinstance(value, type):
            self._once(value, self._put_class)
        elif isinstance(value, enum.Enum) and not origins.is_known(type(value).__module__):
            self.put(type(value))
            self.stream.put_text(b"en", value.name)
        elif isinstance(value, EdgeCompileConfig):
            self._once(value, self._put_edge_config)
        elif isinstance(value, (tuple, set, frozenset)) and origins.is_of_users_class(value):
            encode = self._put_methods_of_tuple if isinstance(value, tuple) else self._put_class
            self._once(type(value), encode)
            self._put_state(value)
            super().put(value)
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
            if not origins.is_python(base):
                raise Unkeyable(f"a value of type {type_name(kind)}")
        self.put(kind)
        self._put_state(value)

    def _put_state(self, value: Any) -> None:
        kind = type(value)
        skipped = {name for base in kind.__mro__ for name in _OVERWRITTEN.get(type_name(base), ())}
        state = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in skipped}
        for base in kind.__mro__:
            for name, slot in vars(base).items():
                if isinstance(slot, types.MemberDescriptorType):  # private names are mangled
                    with contextlib.suppress(AttributeError):  # not assigned yet
                        state[name] = slot.__get__(value)
        self.put_mapping(state)

    def _put_edge_config(self, value: Any) -> None:
        """Lowering adds to one of its lists, in an order that is another one in each process."""
        exceptions = "_core_aten_ops_exception_list"
        self.put(type(value))
        self.put_mapping({k: v for k, v in vars(value).items() if k != exceptions})
        self.put(sorted(operator_text(op) for op in getattr(value, exceptions)))

    # --- code -----------------------------------------------------------------------------------

    def _put_class(self, kind: type) -> None:
        self.stream.put_text(b"cl", f"{origins.name_of(kind.__module__)}.{kind.__qualname__}")
        known = self._put_package(kind.__module__)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            self.put([kind._fields, getattr(kind, "_field_defaults", {})])
            self._put_methods_of_tuple(kind)
            return
        if known:
            if not issubclass(kind, enum.Enum):  # which keeps what cannot be set in its attributes
                self.put_members(kind)
            return
        for base in kind.__mro__[1:-1]:
            self.put(base)
        for name, value in vars(kind).items():
            if name in _BOOKKEEPING:
                continue
            self.stream.put_text(b"ca", name)
            self._put_member(value)

    def _put_methods_of_tuple(self, kind: type) -> None:
        """Of a named tuple, what somebody wrote; the rest is made of its names."""
        self.stream.put_text(b"cl", f"{origins.name_of(kind.__module__)}.{kind.__qualname__}")
        for base in kind.__mro__[:-2]:
            for name, value in vars(base).items():
                written = isinstance(value, (types.FunctionType, property, classmethod))
                if written and name not in _OF_NAMED_TUPLES:
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

    def put_members(self, kind: type) -> None:
        """The methods and values that a class of a known package has now: others may be put there.

        Raises:
            Unkeyable
        """
        for name, value in sorted(vars(kind).items()):
            inner = getattr(value, "__func__", value)
            accessors = [inner.fget, inner.fset, inner.fdel] if type(inner) is property else [inner]
            for function in accessors:
                if isinstance(function, types.FunctionType):
                    self._put_method_of_known(name, origins.stock(function))
                elif not (
                    name.startswith("__") or name in _BOOKKEEPING or origins.is_of_python(value)
                ):
                    self.stream.put_text(b"an", name)
                    self.put(function)

    def _put_method_of_known(self, name: str, function: types.FunctionType) -> None:
        self.stream.put_text(b"mn", name)
        self.stream.put(b"mc", code_digest(function))
        if origins.is_foreign(function):
            self.put(function)  # with what it refers to

    def _put_function(self, function: types.FunctionType) -> None:
        name = f"{origins.name_of(function.__module__)}.{function.__qualname__}"
        self.stream.put_text(b"fu", name)
        # What a function says of itself may be copied from another one, by functools.wraps.
        written = str(function.__globals__.get("__name__", function.__module__))
        known = "<" not in function.__qualname__ and self._put_package(function.__module__)
        if known and self._put_package(written):
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
        """The values of all global names in the code; some may be names of attributes only.

        Of the user's modules, also of those imported inside of the function, what the code names.
        """
        names = origins.names_in(function.__code__)
        modules = list(origins.imported_by(function.__code__, function.__globals__))
        for name in sorted(names):
            if name in function.__globals__:
                value = function.__globals__[name]
                self.stream.put_text(b"gl", name)
                self.put(value)
                if isinstance(value, types.ModuleType):
                    modules.append(value)
        seen: set[str] = set()
        for module in modules:
            self._put_used(module, names, seen)

    def _put_used(self, module: types.ModuleType, names: set[str], seen: set[str]) -> None:
        """What ``names`` stand for in a module of the user's: it can change after the import."""
        if module.__name__ in seen or not origins.is_users(module):
            return
        seen.add(module.__name__)
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            self.stream.put_text(b"ga", name)
            self.put(value)
            if isinstance(value, types.ModuleType):
                self._put_used(value, names, seen)

    def _put_module(self, module: types.ModuleType) -> None:
        self.stream.put_text(b"mo", module.__name__)
        if not self._put_package(module.__name__):
            self.stream.put(b"md", module_digest(module.__name__))

    def _put_package(self, module: str) -> bool:
        """Whether a module belongs to a package that is known by its version, or its sources.

        Code of other installed packages is taken as it is in the files, and not followed: it could
        lead anywhere.
        """
        if not origins.is_known(module):
            installed = origins.is_installed(module)
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


def _put_dict(encoder: ObjectEncoder, value: Any) -> None:
    """Of a class of its own, such as an OrderedDict."""
    encoder.put(type(value))
    encoder.put_mapping(dict(value))
    encoder.put(getattr(value, "default_factory", None))
    encoder._put_state(value)


def _put_list(encoder: ObjectEncoder, value: Any) -> None:
    encoder.put([type(value), list(value), getattr(value, "maxlen", None)])
    encoder._put_state(value)


def _put_partial(encoder: ObjectEncoder, value: functools.partial[Any]) -> None:
    encoder.put([value.func, list(value.args), value.keywords])
    encoder.put_mapping(vars(value))


def _put_remembering(encoder: ObjectEncoder, value: Any) -> None:
    """A function with `functools.cache`: what it remembers is what it gives."""
    encoder.stream.put_text(b"lc", repr(value.cache_parameters()))
    encoder.put(value.__wrapped__)


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
    (types.GenericAlias, lambda e, v: e.put([v.__origin__, v.__args__])),
    (types.UnionType, lambda e, v: e.put([type(v), v.__args__])),
    (functools.partial, _put_partial),
    (functools.cached_property, lambda e, v: e.put(v.func)),
    (type(functools.cache(len)), _put_remembering),
    (
        (operator.attrgetter, operator.itemgetter, operator.methodcaller),
        lambda e, v: e.put([*v.__reduce__()]),
    ),
    (logging.Logger, lambda e, v: e.stream.put_text(b"lo", v.name)),
    (pathlib.PurePath, lambda e, v: e.stream.put_text(b"pa", str(v))),
    (re.Pattern, lambda e, v: e.put([v.pattern, v.flags])),
    (torch.qscheme, lambda e, v: e.stream.put_text(b"qs", str(v))),
    (torch._ops.OpOverloadPacket, lambda e, v: e.stream.put_text(b"pk", v._qualified_op_name)),
    (dict, _put_dict),
    (types.MappingProxyType, lambda e, v: e.put_mapping(dict(v))),
    ((list, deque), _put_list),
)
