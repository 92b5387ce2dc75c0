"""Graphs and exported programs, written into an `Encoder`'s streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import sympy
import torch
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputSpec
from torch.utils import _pytree as pytree

from cas.executorch.actions.encoder import Encoder
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.handles import Handles
from cas.executorch.actions.lowered import put_lowered
from cas.executorch.actions.policy import NOISE, ORIGIN, STRICT, TAGS, KeyPolicy
from cas.executorch.actions.stream import Stream
from cas.executorch.actions.weights import StorageDigests

_CONSTANTS: Final = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class ProgramEncoder(Encoder):
    """An encoder that also knows graphs: control flow, delegates and whole programs."""

    def __init__(self, policy: KeyPolicy = STRICT, digests: StorageDigests | None = None) -> None:
        super().__init__(policy, digests)
        self.handles = Handles(policy.handles)
        self._skipped = policy.skipped()
        self._names: dict[str, int] = {}
        self._groups: dict[tuple[str, int], int] = {}

    def put_other(self, value: Any) -> None:
        if isinstance(value, LoweredBackendModule):
            put_lowered(self, value)
        elif isinstance(value, torch.fx.GraphModule):
            self.put_graph(value)
        else:
            super().put_other(value)

    # --- programs -------------------------------------------------------------------------------

    def put_program(self, program: ExportedProgram) -> None:
        """An exported program with its constants.

        Raises:
            Unkeyable: it holds something that has no stable form.
        """
        self.put_graph(program.graph_module)
        nodes = {node.name: n for n, node in enumerate(program.graph_module.graph.nodes)}
        signature = program.graph_signature
        for spec in signature.input_specs:
            self._put_input(program, spec, nodes)
        for output in signature.output_specs:
            self._put_output(output, nodes)
        named = {spec.target for spec in signature.input_specs}
        self._put_unused(program.state_dict, named)
        self._put_unused(program.constants, named)
        self._put_ranges(program)
        self._put_calls(program)
        self.put([str(getattr(verifier, "dialect", verifier)) for verifier in program.verifiers])
        self.put(getattr(program, "_guards_code", None) or [])
        self._put_examples(program.example_inputs)

    def _put_input(
        self, program: ExportedProgram, spec: InputSpec, nodes: Mapping[str, int]
    ) -> None:
        self.stream.put_text(b"is", spec.kind.name)
        self._put_argument(spec.arg, nodes)
        self._put_target(spec.target)
        self.put(spec.persistent)
        if spec.kind in _CONSTANTS:
            target = str(spec.target)
            held = program.state_dict if target in program.state_dict else program.constants
            self.put_constant(target, held.get(target))
        elif spec.kind is InputKind.CUSTOM_OBJ:
            raise Unkeyable(f"an object of the user's as an input ({spec.target})")

    def _put_output(self, spec: OutputSpec, nodes: Mapping[str, int]) -> None:
        self.stream.put_text(b"os", spec.kind.name)
        self._put_argument(spec.arg, nodes)
        self._put_target(spec.target)

    def _put_argument(self, argument: Any, nodes: Mapping[str, int]) -> None:
        if hasattr(argument, "class_fqn"):
            raise Unkeyable(f"an object of the user's as an argument ({argument.class_fqn})")
        self.stream.put_text(b"ar", type(argument).__name__)
        name = getattr(argument, "name", None)
        if isinstance(name, str) and name in nodes:
            self.stream.put_count(b"no", nodes[name])
        elif hasattr(argument, "value"):
            self.put(argument.value)
        else:
            self.put(name)

    def _put_target(self, target: str | None) -> None:
        if target is None or self.policy.names:
            self.put(target)
        else:
            self.put(self._names.setdefault(target, len(self._names)))

    def _put_unused(self, values: Mapping[str, Any], named: set[str | None]) -> None:
        """What no input refers to, but a backend could read all the same."""
        rest = {name: value for name, value in values.items() if name not in named}
        self.stream.put_count(b"un", len(rest))
        for name, value in rest.items():
            self.put_name(name)
            self.put_constant(name, value)

    def _put_ranges(self, program: ExportedProgram) -> None:
        ranges = sorted(
            f"{sympy.srepr(symbol)}|{_bound(bounds.lower)}|{_bound(bounds.upper)}"
            for symbol, bounds in program.range_constraints.items()
        )
        self.put(ranges)

    def _put_calls(self, program: ExportedProgram) -> None:
        for call in program.module_call_graph:
            if call.signature is not None:
                self.put_name(call.fqn)
                self.put([call.signature.in_spec, call.signature.out_spec])

    def _put_examples(self, inputs: Any) -> None:
        leaves = pytree.tree_leaves(inputs)
        self.stream.put_count(b"ei", len(leaves))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not self.policy.example_inputs:
                self.put([leaf.dtype, str(leaf.device), tuple(leaf.shape), tuple(leaf.stride())])
            else:
                self.put(leaf)

    # --- graphs ---------------------------------------------------------------------------------

    def put_graph(self, module: torch.fx.GraphModule) -> None:
        outer = self.ordinals
        nodes = list(module.graph.nodes)
        self.ordinals = {node: n for n, node in enumerate(nodes)}
        self.stream.put_count(b"gr", len(nodes))
        for node in nodes:
            self._put_graph_node(module, node)
        meta = {key: value for key, value in module.meta.items() if key not in NOISE}
        self.put(meta)
        self.ordinals = outer

    def _put_graph_node(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
        self.stream.put_text(b"nd", node.op)
        self.put_name(node.name)
        if node.op == "get_attr":
            self.put_name(str(node.target))
            self.put(_attribute(module, str(node.target)))
        elif node.op == "placeholder":
            self.put_name(str(node.target))
        elif node.op == "call_function":
            self.put(node.target)
        elif node.op != "output":
            raise Unkeyable(f"a node that is a {node.op}")
        self.put_items(b"()", node.args)
        self.put_mapping(node.kwargs)
        self._put_meta(node)

    def _put_meta(self, node: torch.fx.Node) -> None:
        for key in sorted(key for key in node.meta if key not in self._skipped):
            value = node.meta[key]
            if value is None:
                continue
            if key == "debug_handle" and self._is_foreign_handle(node):
                continue
            self.stream.put_text(b"me", key)
            if key == "debug_handle":
                self._put_handle(value)
            elif key in ORIGIN or key in NOISE or key in TAGS:
                self.put(_names(value))
            else:
                self.put(value)
        if self.policy.groups:
            self._put_group(node)

    def _is_foreign_handle(self, node: torch.fx.Node) -> bool:
        """Whether it is the handle of a node outside, whose value is an input of the partition.

        No result that can be relocated holds it: then it would be refused when it is recorded.
        """
        return self.policy.handles == "pattern" and node.op == "placeholder"

    def _put_handle(self, value: Any) -> None:
        for part in self.handles.encode(value):
            self.stream.put_count(b"dh", part)

    def _put_group(self, node: torch.fx.Node) -> None:
        """Which first ancestor a node has, by order of appearance: graphs are known by ``id()``."""
        source = node.meta.get("from_node")
        if not source:
            return
        oldest = source[-1]
        while oldest.from_node:
            oldest = oldest.from_node[-1]
        key = (str(oldest.name), int(oldest.graph_id))
        self.stream.put_count(b"gp", self._groups.setdefault(key, len(self._groups)))

    # --- used for values that are written aside -------------------------------------------------

    def aside(self) -> Stream:
        """Start a new stream for what follows, and give back the one written so far."""
        done, self.stream = self.stream, Stream()
        return done


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _bound(value: Any) -> str:
    return sympy.srepr(value) if isinstance(value, sympy.Basic) else repr(value)


def _names(value: Any) -> Any:
    """Where a node came from, as plain values: classes by their names."""
    if isinstance(value, (str, int, bool, bytes, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): _names(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_names(item) for item in value]
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{getattr(value, '__module__', '')}.{name}"
    text = str(value)
    if " at 0x" in text:
        raise Unkeyable(f"an origin of type {type(value).__qualname__}")
    return text
