"""Facts about the environment that decide what any backend makes of a program."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from typing import Final

import torch
from executorch.version import __version__ as executorch_version
from executorch.version import git_version as executorch_git

from cas.digest import Digest
from cas.executorch.actions import facts_installed, places

#: Packages that take part in lowering, or that compilers are written with.
_PACKAGES: Final = (
    "coremltools",
    "flatbuffers",
    "numpy",
    "sympy",
    "torchao",
    "triton",
)

#: Variables whose names begin so are inputs of torch, ExecuTorch, their backends or compilers.
_PREFIXES: Final = (
    "AOT_INDUCTOR",
    "CAS_ENV_",
    "CUDA_",
    "ET_",
    "EXECUTORCH",
    "INDUCTOR",
    "PYTORCH_",
    "QNN",
    "TORCH",
    "TRITON_",
    "VGF",
    "XNN",
)
_VARIABLES: Final = frozenset(
    {
        "CC",
        "CFLAGS",
        "CPATH",
        "CPLUS_INCLUDE_PATH",
        "CXX",
        "CXXFLAGS",
        "C_INCLUDE_PATH",
        "LDFLAGS",
        "LD_LIBRARY_PATH",
        "LIBRARY_PATH",
        "NVCC_APPEND_FLAGS",
        "NVCC_PREPEND_FLAGS",
        "OMP_NUM_THREADS",
        "SOURCE_DATE_EPOCH",
    }
)
#: Where caches and logs go, and how memory is managed while compiling.
_IRRELEVANT: Final = frozenset(
    {
        "CUDA_CACHE_MAXSIZE",
        "CUDA_CACHE_PATH",
        "CUDA_LAUNCH_BLOCKING",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_COMPILE_DEBUG_DIR",
        "TORCH_EXTENSIONS_DIR",
        "TORCH_HOME",
        "TORCH_LOGS",
        "TORCH_LOGS_FORMAT",
        "TORCH_LOGS_OUT",
        "TORCH_TRACE",
        "TRITON_CACHE_DIR",
        "TRITON_HOME",
    }
)
#: Read by nearly everything, and of no consequence for what is compiled.
PROCESS_VARIABLES: Final = frozenset(
    {
        "COLUMNS",
        "HOME",
        "HOSTNAME",
        "LANG",
        "LC_ALL",
        "LINES",
        "LNAME",
        "LOGNAME",
        "NO_COLOR",
        "OLDPWD",
        "PATH",
        "PWD",
        "PYTEST_CURRENT_TEST",
        "PYTHONHASHSEED",
        "SHLVL",
        "TEMP",
        "TERM",
        "TMP",
        "TMPDIR",
        "USER",
        "USERNAME",
        "_",
    }
)

#: Another one in each terminal, directory or run: no part of an environment read as a whole.
_OF_A_SESSION: Final = frozenset(
    {
        "COLUMNS",
        "LINES",
        "OLDPWD",
        "PWD",
        "PYTEST_CURRENT_TEST",
        "PYTHONHASHSEED",
        "SHLVL",
        "TERM",
        "_",
    }
)


def is_declared(variable: str) -> bool:
    """Whether an environment variable is a fact of every action."""
    if variable in _IRRELEVANT:
        return False
    return variable in _VARIABLES or variable.startswith(_PREFIXES)


def is_of_a_session(variable: str) -> bool:
    """Whether a variable is left out where code looks at the environment as a whole."""
    return variable in _OF_A_SESSION or variable in _IRRELEVANT


def is_irrelevant(variable: str) -> bool:
    """Whether it makes no difference to what is compiled that a known package reads a variable."""
    return variable in _IRRELEVANT or variable in PROCESS_VARIABLES


def ambient_facts(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a program can change while it runs, for every backend."""
    found = {
        "torch: default dtype": str(torch.get_default_dtype()),
        "torch: default device": str(torch.get_default_device()),
        "torch: deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "torch: float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    for name, value in (os.environ if environ is None else environ).items():
        if is_declared(name):
            found[f"variable: {name}"] = shown(value)
    return found


def shown(value: str) -> str:
    """A value as a fact; one that may name a user, a job or a secret as its digest."""
    text = places.scrub(value)
    if len(text) > 200 or places.names_a_path(text):
        return str(Digest.of(text.encode("utf-8", "surrogateescape")))
    return text


def fixed_facts() -> dict[str, str]:
    """Versions and the machine. Neither paths nor names of users are in any fact."""
    system, version = platform.libc_ver()
    found = {
        "version: python": f"{platform.python_implementation()} {platform.python_version()}",
        "version: libc": f"{system} {version}",
        "version: torch": f"{torch.__version__} {torch.version.git_version}",
        "version: executorch": f"{executorch_version} {executorch_git}",
        "machine: architecture": platform.machine(),
        "machine: system": platform.system(),
    }
    for package in _PACKAGES:
        found[f"version: {package}"] = _version(package)
    return {**found, **facts_installed.edited_facts()}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
