"""Hook: which weights XNNPACK's named data came from; its keys are digests."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any, Final

from cas.executorch import seams
from cas.executorch.labels import Label, label_named, name_of_input
from cas.executorch.patches import Patches

#: XNNPACK's types of elements by the ends of their names, as torch's, with their sizes in bytes.
_TYPES: Final = {
    "bf16": ("bfloat16", 2),
    "fp16": ("float16", 2),
    "fp32": ("float32", 4),
    "qcint32": ("int32", 4),
    "qcint8": ("int8", 1),
    "qint32": ("int32", 4),
    "qint8": ("int8", 1),
    "quint8": ("uint8", 1),
}
#: Of scales, by their size.
_SCALES: Final = {2: "bfloat16", 4: "float32"}


def install(patches: Patches) -> None:
    """Look at each value that was added to XNNPACK's graph: it says where its constant lies."""
    module = seams.module_of("xnnpack constants")
    if module is None:
        return
    visitor: Any = module.NodeVisitor
    original = visitor.define_tensor
    signature = inspect.signature(original)

    @functools.wraps(original)
    def define_tensor(self: Any, tensor: Any, xnn_graph: Any, *args: Any, **kwargs: Any) -> None:
        known = len(xnn_graph.xvalues)
        original(self, tensor, xnn_graph, *args, **kwargs)
        bound = signature.bind(self, tensor, xnn_graph, *args, **kwargs)
        quantized = bound.arguments.get("quant_params")
        node = tensor if quantized is None else quantized.q_input
        name = name_of_input(self.exported_program, node.name)
        for value in xnn_graph.xvalues[known:]:
            if name is not None:
                _label(self._named_data_store, xnn_graph.constant_data, name, value.xvalue_union)

    patches.set(visitor, "define_tensor", define_tensor)


def _label(store: Any, constants: Sequence[Any], name: str, value: Any) -> None:
    """Label the constant of one value, and the scales of its channels, if it has any."""
    tensor = getattr(value, "tensor_value", value)
    if tensor.constant_buffer_idx > 0:
        constant = constants[tensor.constant_buffer_idx]
        dtype, shape = _layout(tensor, constant.size)
        label_named(store, constant.named_key, Label(name, dtype, shape))
    scales = getattr(value, "quant_params", None)
    position = getattr(scales, "scale_buffer_idx", -1)
    if position > 0:
        constant, count = constants[position], int(scales.num_scales)  # type: ignore[union-attr]
        dtype = _SCALES.get(constant.size // count) if count else None
        label_named(store, constant.named_key, Label(f"{name}.scale", dtype, (count,)))


def _layout(tensor: Any, size: int) -> tuple[str | None, tuple[int, ...] | None]:
    """Type and shape of a constant's bytes as they lie there; XNNPACK permutes some weights.

    Two numbers of four bits share a byte, and bytes is what their tensor has.
    """
    shape = tuple(int(length) for length in tensor.dims)
    kind = tensor.datatype.name.removeprefix("xnn_datatype_")
    if kind in ("qbint4", "qcint4") and len(shape) > 0 and shape[0] > 0 and size % shape[0] == 0:
        return "uint8", (shape[0], size // shape[0])
    dtype, length = _TYPES.get(kind, (None, 0))
    return (dtype, shape) if length * math.prod(shape) == size else (None, None)
