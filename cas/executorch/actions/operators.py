"""The identity of an operator: its name, its schema, and for a user's operator its source."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

import torch
from executorch.exir.dialects.backend._ops import BackendOpOverload
from executorch.exir.dialects.edge._ops import EdgeOpOverload

from cas.digest import Digest
from cas.executorch.actions.errors import Unkeyable

#: Operators that torch, torchao and ExecuTorch themselves register: the versions of the packages
#: say what they do.
KNOWN_NAMESPACES: Final = frozenset(
    {
        "EDGE_DO_NOT_DECOMP",
        "_c10d_functional",
        "_quantized",
        "aten",
        "c10d_functional",
        "cadence",
        "channels_last",
        "cortex_m",
        "dim_order_ops",
        "et_copy",
        "et_vk",
        "executorch",
        "executorch_cuda",
        "executorch_prim",
        "executorch_utils",
        "higher_order",
        "inductor",
        "llama",
        "prim",
        "prims",
        "qnn_custom",
        "quant",
        "quantized",
        "quantized_decomposed",
        "rngprims",
        "torchao",
        "tosa",
        "xnnpack",
    }
)

#: Overloads of other packages that hold one of torch's.
DIALECT_OVERLOADS: Final = (EdgeOpOverload, BackendOpOverload)


def operator_text(operator: Any) -> str:
    """
    Raises:
        Unkeyable: what it does depends on something that cannot be named.
    """
    if isinstance(operator, torch._ops.HigherOrderOperator):
        name = str(operator._name)
        if "triton" in name:
            raise Unkeyable(f"a Triton kernel of the user's ({name})")
        return f"higher order|{name}"
    inner = operator._op if isinstance(operator, DIALECT_OVERLOADS) else operator
    schema = str(operator._schema)
    return f"{type(operator).__name__}|{schema}|{_origin(inner)}"


def _origin(operator: Any) -> str:
    namespace = str(operator.namespace)
    if namespace in KNOWN_NAMESPACES:
        return ""
    definition = torch._library.custom_ops.OPDEFS.get(f"{namespace}::{operator._opname}")
    if definition is None:
        raise Unkeyable(f"the operator {operator} of a package that is not known")
    source = inspect.getsourcefile(definition._init_fn)
    if source is None:
        raise Unkeyable(f"the operator {operator} has no source file")
    return str(Digest.of(Path(source).read_bytes()))
