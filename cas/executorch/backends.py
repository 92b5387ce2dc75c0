"""From the name of a backend to ExecuTorch's partitioners for it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import Partitioner

from cas.errors import CasError, UsageError
from cas.exportspec import (
    BackendNotFound,
    BackendUnavailable,
    ExportOptions,
    check_backend,
    check_specs,
)

XNNPACK = ("executorch.backends.xnnpack.partition.xnnpack_partitioner", "XnnpackPartitioner")
CUDA = ("executorch.backends.cuda.cuda_partitioner", "CudaPartitioner")

#: What ``to_edge_transform_and_lower`` takes: for all methods, or for each.
Partitioners: TypeAlias = "list[Partitioner] | dict[str, list[Partitioner]]"


class ExportFailed(CasError):
    """PyTorch or ExecuTorch could not do a stage. Their error is ``__cause__``."""

    def __init__(self, stage: str, cause: BaseException) -> None:
        self.stage = stage
        if isinstance(cause, SystemExit):
            super().__init__(f"{stage} failed: the code called sys.exit({cause}); -v shows where")
            return
        text = str(cause).strip() or type(cause).__name__
        first = text.splitlines()[0]
        super().__init__(f"{stage} failed: {type(cause).__name__}: {first[:500]}; -v shows all")


class Backend(Protocol):
    """A backend that is there."""

    #: Arguments of ``EdgeCompileConfig`` without which this backend does not work.
    edge_config: dict[str, Any]

    def partitioners(self, methods: Iterable[str]) -> Partitioners: ...


class Given:
    """The same partitioners for all methods; none for the portable operators."""

    def __init__(self, *partitioners: Partitioner) -> None:
        self.edge_config: dict[str, Any] = {}
        self._partitioners = partitioners

    def partitioners(self, methods: Iterable[str]) -> Partitioners:
        return [*self._partitioners]


class Cuda:
    """ExecuTorch's CUDA backend, which wants to know the name of each method that it compiles.

    The edge program is configured as ExecuTorch's own CUDA export scripts do it: the backend knows
    no dim order operators, and leaves operators whole that the check would have decomposed.
    """

    def __init__(self, specs: Iterable[tuple[str, str]]) -> None:
        self.edge_config: dict[str, Any] = {"_check_ir_validity": False, "_skip_dim_order": True}
        self._specs = [CompileSpec(key, value.encode()) for key, value in specs]

    def partitioners(self, methods: Iterable[str]) -> Partitioners:
        module, attr = CUDA
        make = _load(module, attr, "cuda", ours=True)
        return {
            name: [make([CompileSpec("method_name", name.encode()), *self._specs])]
            for name in methods
        }


def resolve_backend(options: ExportOptions) -> Backend:
    """The backend that is asked for, if this machine can lower to it.

    Raises:
        BackendUnavailable: it cannot be imported, or there is no GPU for it.
        BackendNotFound: there is no such module, or nothing of that name in it.
        UsageError: no such backend.
    """
    check_backend(options.backend)
    check_specs(options.backend, options.specs)
    if options.backend == "portable":
        return Given()
    if options.backend == "xnnpack":
        return Given(_partitioner(*XNNPACK, "xnnpack", ours=True))
    if options.backend == "cuda":
        require_cuda()
        return Cuda(options.specs)
    module, _, attr = options.backend.partition(":")
    return Given(_partitioner(module, attr, options.backend, ours=False))


def require_cuda() -> None:
    """See that this machine can compile for CUDA.

    Raises:
        BackendUnavailable: with what is missing.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        raise BackendUnavailable(
            f"backend cuda needs a build of torch with CUDA, and this is {torch.__version__}; "
            "install one (https://pytorch.org/get-started), on a machine with an NVIDIA GPU"
        )
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            "backend cuda compiles on a GPU, and torch finds none "
            "(torch.cuda.is_available() is false); export on a machine with a GPU and its driver"
        )
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailable(
            "backend cuda needs triton, which is not installed; install it with: pip install triton"
        )


def _partitioner(module: str, attr: str, spec: str, *, ours: bool) -> Partitioner:
    value = _load(module, attr, spec, ours=ours)
    if not isinstance(value, Partitioner) and callable(value):
        try:
            value = value()
        except (Exception, SystemExit) as error:
            raise ExportFailed(f"making the partitioner {spec}", error) from error
    if not isinstance(value, Partitioner):
        raise UsageError(
            f"backend {spec} gives a {type(value).__name__}; expected an ExecuTorch Partitioner, "
            "or a callable without parameters that returns one"
        )
    return value


def _load(module: str, attr: str, spec: str, *, ours: bool) -> Any:
    """An attribute of a module, which is ``ours`` if ``spec`` is a name that stands for it."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not ours and missing and f"{module}.".startswith(f"{missing}."):
            raise BackendNotFound(f"backend {spec}: there is no module {missing!r}") from error
        raise BackendUnavailable(f"backend {spec} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise ExportFailed(f"importing backend {spec}", error) from error
    try:
        return getattr(found, attr)
    except AttributeError:
        raise BackendNotFound(f"backend {spec}: module {module} has no {attr!r}") from None
