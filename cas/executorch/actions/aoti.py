"""Facts that decide what AOTInductor makes of a program, besides the program and its options."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from cas.digest import Digest
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.facts import shown
from cas.executorch.actions.objects import ObjectEncoder
from cas.executorch.actions.stream import Stream

#: Functions of the user's that change what Inductor makes; torch keeps them out of its snapshot.
_CUSTOM_PASSES: Final = (
    "_post_fusion_custom_pass",
    "_pre_fusion_custom_pass",
    "joint_custom_post_pass",
    "joint_custom_pre_pass",
    "post_grad_custom_post_pass",
    "post_grad_custom_pre_pass",
    "pre_grad_custom_pass",
)
#: Options of Inductor without a say in the result.
_IRRELEVANT: Final = ("_save_config_ignore", "_cache_config_ignore_prefix")


def fixed_facts() -> dict[str, str]:
    """The compilers, the sources of torch, the processor and the GPU.

    Takes a fifth of a second, once per process, to hash torch's sources.
    """
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    compiler = str(builder.get_compiler_version_info(builder.get_cpp_compiler()))
    return {
        "torch: sources": codecache.torch_key().hex(),
        "compiler: c++": str(Digest.of(compiler.encode("utf-8", "surrogateescape"))),
        "machine: processor": _processor(),
        **_gpu(),
    }


def ambient_facts() -> dict[str, str]:
    """What a program can change: Inductor's options, registered lowerings, threads.

    Raises:
        Unkeyable: Inductor is to run a function of the user's that has no identity.
    """
    config: Any = importlib.import_module("torch._inductor.config")
    _check_passes(config)
    options = config.save_config_portable(ignore_private_configs=False)
    options["aot_inductor.metadata"] = _own_metadata(options.get("aot_inductor.metadata"))
    found = {
        f"inductor: {name}": shown(_text(value))
        for name, value in options.items()
        if name not in _IRRELEVANT
    }
    found["torch: threads"] = str(torch.get_num_threads())
    found["inductor: lowerings of the user's"] = _foreign_lowerings()
    return found


def _own_metadata(metadata: Any) -> Any:
    """Without what the first compile of a process enters there, about the machine."""
    if not isinstance(metadata, Mapping):
        return metadata
    return {key: value for key, value in metadata.items() if not str(key).startswith("AOTI_")}


def _text(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(repr, value)))
    if isinstance(value, Mapping):
        return repr(sorted((str(key), _text(item)) for key, item in value.items()))
    return repr(value)


def _check_passes(config: Any) -> None:
    for name in _CUSTOM_PASSES:
        function = getattr(config, name, None)
        if function is not None and not (hasattr(function, "uuid") and function.uuid()):
            raise Unkeyable(f"Inductor's option {name} is a function without uuid()")


def _foreign_lowerings() -> str:
    """Lowerings that are not torch's own, by their code and what it refers to."""
    module = sys.modules.get("torch._inductor.lowering")
    if module is None:
        return "none"
    stream = Stream()
    count = 0
    for operator, function in getattr(module, "lowerings", {}).items():
        inner = _unwrapped(function)
        if _written_in(inner).split(".", 1)[0] == "torch":
            continue
        if not hasattr(inner, "__code__"):
            raise Unkeyable(f"the lowering of {operator} is no plain function")
        count += 1
        encoder = ObjectEncoder()
        encoder.put(inner)
        stream.put_text(b"lo", str(operator))
        stream.put(b"lc", encoder.stream.digest())
    return str(stream.digest()) if count else "none"


def _written_in(function: Any) -> str:
    """The module; what a function says of itself may be copied from another one."""
    scope = getattr(function, "__globals__", {})
    return str(scope.get("__name__", getattr(function, "__module__", "torch")))


def _unwrapped(function: Any) -> Any:
    inner = getattr(function, "__wrapped__", function)
    return inner.func if isinstance(inner, functools.partial) else inner


def _processor() -> str:
    """What ``-march=native`` looks at."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        kinds = ("flags", "Features", "model name", "CPU part", "isa")
        return str(Digest.of("\n".join(sorted({x for x in lines if x.startswith(kinds)})).encode()))
    return os.uname().machine


def _gpu() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu: name": str(device.name),
        "gpu: capability": f"{device.major}.{device.minor}",
        "gpu: multiprocessors": str(device.multi_processor_count),
        "gpu: memory": str(device.total_memory),
        "gpu: cuda": str(torch.version.cuda),
        "gpu: driver": _driver_version(),
    }


def _driver_version() -> str:
    """What torch asks the driver itself for; not all of its builds can."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return "unknown" if ask is None else str(ask())
