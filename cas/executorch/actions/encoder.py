"""Values as bytes that are the same in every process, and different for different values.

Whatever has no such form (a user's function, an opaque object, a sparse tensor) is refused with
`Unkeyable`: then the action is compiled as ever, and nothing is kept.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from cas.digest import Digest
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.operators import DIALECT_OVERLOADS, operator_text
from cas.executorch.actions.policy import STRICT, KeyPolicy
from cas.executorch.actions.stream import Stream
from cas.executorch.actions.weights import StorageDigests

#: Functions and classes of these packages are named, not looked into: the versions and sources of
#: the packages are facts of their own.
KNOWN_PACKAGES: Final = frozenset(
    {"_operator", "builtins", "executorch", "math", "operator", "torch", "torchao"}
)


class Encoder:
    """Writes values into two streams: the bytes of weights, and all the rest.

    Constants are told apart by content, and by which of them share memory: partitioners and
    compilers merge constants by address.
    """

    def __init__(self, policy: KeyPolicy = STRICT, digests: StorageDigests | None = None) -> None:
        self.policy = policy
        self.digests = digests if digests is not None else StorageDigests()
        self.stream = Stream()
        self.weights = Stream()
        #: Name of a constant -> digest of its storage, for explaining a miss.
        self.named_weights: dict[str, str] = {}
        self.ordinals: dict[torch.fx.Node, int] = {}
        self._aliases: dict[tuple[int, int, str], int] = {}

    # --- values ---------------------------------------------------------------------------------

    def put(self, value: Any) -> None:
        """Append one value.

        Raises:
            Unkeyable: it has no form that is the same in every process.
        """
        exact = _EXACT.get(type(value))
        if exact is not None:
            exact(self, value)
            return
        for kind, encode in _KINDS:
            if isinstance(value, kind):
                encode(self, value)
                return
        self.put_other(value)

    def put_other(self, value: Any) -> None:
        """A value of no known kind. A subclass may know more."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.put_dataclass(value)
            return
        raise Unkeyable(f"a value of type {type_name(type(value))}")

    def put_items(self, tag: bytes, items: Iterable[Any]) -> None:
        values = tuple(items)
        self.stream.put_count(tag, len(values))
        for value in values:
            self.put(value)

    def put_mapping(self, mapping: Mapping[Any, Any]) -> None:
        """In the mapping's own order: whoever iterates over it sees that order."""
        self.stream.put_count(b"{}", len(mapping))
        for key, value in mapping.items():
            self.put(key)
            self.put(value)

    def put_name(self, name: str) -> None:
        """A name that counts only where the policy says so."""
        if self.policy.names:
            self.stream.put_text(b"na", name)

    def put_callable(self, function: Any) -> None:
        """A function or class, by name, if its package is one whose version is a fact."""
        module = getattr(function, "__module__", None) or ""
        name = getattr(function, "__qualname__", "<")
        if module.split(".", 1)[0] not in KNOWN_PACKAGES or "<" in name:
            raise Unkeyable(f"a function of the user's, {module}.{name}")
        self.stream.put_text(b"fn", f"{module}.{name}")

    def put_dataclass(self, value: Any) -> None:
        kind = type(value)
        if kind.__module__.split(".", 1)[0] not in KNOWN_PACKAGES:
            raise Unkeyable(f"a value of type {type_name(kind)}")
        self.stream.put_text(b"dc", type_name(kind))
        for field in dataclasses.fields(value):
            self.stream.put_text(b"fi", field.name)
            self.put(getattr(value, field.name))

    def put_set(self, value: Iterable[Any]) -> None:
        """In the order of the encoded elements, for a set has none of its own."""
        encoded = []
        outer = self.stream
        for element in value:
            if isinstance(element, torch.Tensor):
                raise Unkeyable("a set of tensors")
            self.stream = Stream()
            self.put(element)
            encoded.append(self.stream.bytes())
        self.stream = outer
        self.stream.put_count(b"se", len(encoded))
        for element in sorted(encoded):
            self.stream.put(b"el", element)

    def put_node(self, node: torch.fx.Node) -> None:
        try:
            ordinal = self.ordinals[node]
        except KeyError:
            raise Unkeyable(f"node {node.name!r} of another graph") from None
        self.stream.put_count(b"no", ordinal)

    def put_symbol(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> None:
        node = value.node
        expression = getattr(node, "expr", None)
        if not isinstance(expression, sympy.Basic):
            raise Unkeyable(f"a symbolic value without an expression ({type(node).__name__})")
        self.stream.put_text(b"sy", f"{type(value).__name__}:{sympy.srepr(expression)}")
        if self.policy.hints:
            hint = getattr(node, "_hint", None)
            self.put(hint if isinstance(hint, (int, float, bool)) else None)

    def put_tuple(self, value: tuple[Any, ...]) -> None:
        if type(value) not in (tuple, torch.Size):
            if not hasattr(value, "_fields"):
                raise Unkeyable(f"a value of type {type_name(type(value))}")
            self.stream.put_text(b"nt", type_name(type(value)))
        self.put_items(b"()", value)

    def put_tree(self, spec: pytree.TreeSpec) -> None:
        try:
            self.stream.put_text(b"tr", pytree.treespec_dumps(spec))
        except (NotImplementedError, TypeError, ValueError) as error:
            raise Unkeyable(f"a structure of arguments ({error})") from None

    # --- tensors --------------------------------------------------------------------------------

    def put_tensor(self, tensor: torch.Tensor) -> None:
        """Everything about a tensor that a compiler can see, and the bytes of a real one."""
        fake = isinstance(tensor, FakeTensor) or tensor.device.type == "meta"
        if not fake and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            self._put_wrapper(tensor)
            return
        check_plain(tensor)
        self._put_layout(tensor, "fake" if fake else "real")
        if fake:
            return
        storage = tensor.untyped_storage()
        self.stream.put_count(b"nb", storage.nbytes())
        if storage.nbytes():
            place = (storage.data_ptr(), storage.nbytes(), str(storage.device))
            self.stream.put_count(b"al", self._aliases.setdefault(place, len(self._aliases)))
        self.weights.put(b"st", self._storage_digest(tensor))

    def put_constant(self, name: str, value: Any) -> None:
        """A parameter, buffer or constant of a program."""
        self.put(value)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            self.named_weights[name] = self.digest_of_value(value)

    def digest_of_value(self, value: torch.Tensor) -> str:
        """The first digits of what identifies a tensor's bytes, for a person to compare."""
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return "meta" if value.device.type == "meta" else self._storage_digest(value).hex()[:32]
        names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return "+".join(self.digest_of_value(getattr(value, name)) for name in names)

    def _storage_digest(self, tensor: torch.Tensor) -> Digest:
        version = 0 if tensor.is_inference() else int(tensor._version)
        return self.digests.of(tensor.untyped_storage(), version)

    def _put_wrapper(self, tensor: torch.Tensor) -> None:
        kind = type(tensor)
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            raise Unkeyable(f"a tensor of type {type_name(kind)}")
        names, context = flatten()
        self.stream.put_text(b"tw", type_name(kind))
        self.put([tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad])
        self.put([list(names), context])
        for name in names:
            self.put(getattr(tensor, name))

    def _put_layout(self, tensor: torch.Tensor, what: str) -> None:
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        kind = "" if what == "fake" else type(tensor).__name__
        flags = f"{tensor.requires_grad:d}{tensor.is_conj():d}{tensor.is_neg():d}"
        self.stream.put_text(b"te", f"{what}|{kind}|{tensor.dtype}|{device}|{flags}")
        self.put_items(b"sh", tensor.shape)
        self.put_items(b"sd", tensor.stride())
        self.put(tensor.storage_offset())


def check_plain(tensor: torch.Tensor) -> None:
    """
    Raises:
        Unkeyable: the tensor is more than a strided view of plain bytes.
    """
    if tensor.layout is not torch.strided or getattr(tensor, "is_mkldnn", False):
        raise Unkeyable(f"a tensor of layout {tensor.layout}")
    if tensor.is_quantized:
        raise Unkeyable("a quantized tensor")
    if tensor.is_nested:
        raise Unkeyable("a nested tensor")


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _text(encoder: Encoder, tag: bytes, value: object) -> None:
    encoder.stream.put_text(tag, str(value))


def _put_operator(encoder: Encoder, operator: Any) -> None:
    encoder.stream.put_text(b"op", operator_text(operator))


def _put_enum(encoder: Encoder, value: enum.Enum) -> None:
    encoder.stream.put_text(b"en", f"{type_name(type(value))}.{value.name}")
    if isinstance(value, enum.Flag):  # of several together there may be no name
        _text(encoder, b"fg", value.value)


def _put_float(encoder: Encoder, value: float) -> None:
    # The bits: -0.0 is not 0.0, and one NaN is not another.
    encoder.stream.put(b"fl", struct.pack("<d", value))


_EXACT: Final[dict[type, Callable[[Encoder, Any], None]]] = {
    type(None): lambda e, v: e.stream.put(b"00"),
    type(Ellipsis): lambda e, v: e.stream.put(b".."),
    bool: lambda e, v: e.stream.put(b"bo", bytes([v])),
    int: lambda e, v: _text(e, b"in", v),
    float: _put_float,
    complex: lambda e, v: e.stream.put(b"cx", struct.pack("<dd", v.real, v.imag)),
    str: lambda e, v: e.stream.put_text(b"st", v),
    bytes: lambda e, v: e.stream.put(b"by", v),
    bytearray: lambda e, v: e.stream.put(b"ba", bytes(v)),
    tuple: Encoder.put_tuple,
    list: lambda e, v: e.put_items(b"[]", v),
    immutable_list: lambda e, v: e.put_items(b"[]", v),
    dict: Encoder.put_mapping,
    immutable_dict: Encoder.put_mapping,
    torch.fx.Node: Encoder.put_node,
    torch.dtype: lambda e, v: _text(e, b"dt", v),
    torch.device: lambda e, v: _text(e, b"dv", v),
    torch.layout: lambda e, v: _text(e, b"ly", v),
    torch.memory_format: lambda e, v: _text(e, b"mf", v),
}

#: Tried in order for what is not of exactly one of the types above.
_KINDS: Final[tuple[tuple[Any, Callable[[Encoder, Any], None]], ...]] = (
    ((torch.SymInt, torch.SymFloat, torch.SymBool), Encoder.put_symbol),
    (torch.Tensor, Encoder.put_tensor),
    (enum.Enum, _put_enum),
    (sympy.Basic, lambda e, v: e.stream.put_text(b"ex", sympy.srepr(v))),
    ((torch._ops.OpOverload, torch._ops.HigherOrderOperator, *DIALECT_OVERLOADS), _put_operator),
    (pytree.TreeSpec, Encoder.put_tree),
    (tuple, Encoder.put_tuple),
    ((set, frozenset), Encoder.put_set),
    (slice, lambda e, v: e.put_items(b"/:", (v.start, v.stop, v.step))),
    ((types.BuiltinFunctionType, types.FunctionType, type), Encoder.put_callable),
)
