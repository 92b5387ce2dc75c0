"""A source, exported through the store: what `cas export` does, as one call.

Without options this is exactly ``torch.export.export``, ``to_edge_transform_and_lower`` with the
backend's partitioner and ``to_executorch()``, so that a script of those three calls writes the
same bytes. Every option corresponds to one argument of them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from executorch.exir import (
    EdgeCompileConfig,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from executorch.exir.passes import MemoryPlanningPass
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from cas.errors import CasError, UsageError
from cas.executorch.actions.outcomes import ActionOptions
from cas.executorch.backends import Backend, ExportFailed, resolve_backend
from cas.executorch.capture import Capture, capture
from cas.executorch.loading import Method, ModuleCall, import_path, load_methods
from cas.executorch.seams import check_version
from cas.executorch.space import warn_of_little_space
from cas.exportspec import DEFAULT_TAG, ExportOptions, Source
from cas.manifest import Manifest
from cas.progress import SILENT, Progress

if TYPE_CHECKING:
    from cas.executorch.saving import SaveResult
    from cas.store import Store

log = logging.getLogger(__name__)

#: What a disk says that is full or cannot be written: true of the machine, not of the model.
_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def export_source(
    store: Store,
    source: Source,
    directory: Path,
    *,
    name: str | None = None,
    basename: str = "model",
    options: ExportOptions | None = None,
    spill: bool = True,
    reuse: bool = True,
    recheck: float = 0.0,
    progress: Progress = SILENT,
    command: Sequence[str] | None = None,
    created: str | None = None,
) -> SaveResult:
    """Export ``source`` under the store, write the files to ``directory``, record the artifact.

    With ``spill`` the weights that the source holds in memory go to the store before they are
    exported, and take none from then on; see `cas.torch.spill`. The files are the same.
    With ``reuse`` nothing is lowered or compiled that was before; the share ``recheck`` of it is
    all the same, and compared.

    ``command`` and ``created`` (a time in ISO 8601) go to the artifact's provenance, with the
    source and the options.

    Raises:
        CasError: of the class that fits: a bad source or option, a stage that failed, no space.
    """
    options = options or ExportOptions()
    options.validate()
    check_version()
    name = name or source.default_name()
    with import_path(source):
        with _stage(progress, "load"):
            backend = resolve_backend(options)
            methods = load_methods(source)
        warn_of_little_space(methods, directory)
        actions = ActionOptions(reuse, whole=True, recheck=recheck)
        with capture(store, name, spill=spill, actions=actions, progress=progress) as cap:
            if spill:
                _spill_programs(cap, methods, progress)
            program = lower(methods, backend, options, progress)
            with _stage(progress, "store"):
                saved = cap.save(
                    program,
                    directory,
                    basename=basename,
                    provenance={"source": source.text, "options": options.changed()},
                    command=command,
                    created=created,
                )
    for event in cap.outcomes.events:
        if event.outcome == "mismatch":
            log.warning("%s: its record was wrong, in %s; replaced", event.label, event.detail)
    if options.external_weights:
        _warn_of_weights_inside(store.manifest(saved.commit.ref), f"{basename}.pte")
    return saved


def _spill_programs(cap: Capture, methods: Mapping[str, Method], progress: Progress) -> None:
    """What is exported already passes the place where the capture spills modules."""
    for method in methods.values():
        if isinstance(method, ExportedProgram):
            with _stage(progress, "spill"):
                cap.spill(method)


def _warn_of_weights_inside(manifest: Manifest, program: str) -> None:
    """Not every backend, and not every kind of weight, heeds the wish for a file of its own."""
    # Equal weights lie in one place.
    sizes = {(tensor.file, tensor.offset): tensor.nbytes for tensor in manifest.tensors}
    inside = sum(nbytes for (file, _), nbytes in sizes.items() if file == program)
    total = sum(sizes.values())
    if 2 * inside > total:
        log.warning(
            "%d of %d bytes of weights stayed in %s: the backend does not put them into a file "
            "of their own",
            inside,
            total,
            program,
        )


def lower(
    methods: Mapping[str, Method],
    backend: Backend,
    options: ExportOptions,
    progress: Progress = SILENT,
) -> ExecutorchProgramManager:
    """The three calls, from methods to a program that is ready to be written."""
    programs: dict[str, ExportedProgram] = {}
    for name, method in methods.items():
        with _stage(progress, "export"):
            programs[name] = export_method(method, options)
    partitioners = backend.partitioners(programs)
    if options.external_weights and partitioners:
        for program in programs.values():
            tag_weights(program, options.external_tag)
    with _stage(progress, "lower"):
        edge = to_edge_transform_and_lower(
            programs,
            # None, as a script says it: for ExecuTorch the same, but for an action another key.
            partitioner=partitioners or None,
            compile_config=edge_config(options, backend),
        )
    with _stage(progress, "emit"):
        return edge.to_executorch(backend_config(options))


# --- stages -------------------------------------------------------------------------------------


def export_method(method: Method, options: ExportOptions) -> ExportedProgram:
    """``torch.export.export``, unless the source is an exported program already."""
    if isinstance(method, ExportedProgram):
        if options.dtype is not None:
            raise UsageError("--dtype needs a module to convert; the source is exported already")
        if options.strict is not None:
            raise UsageError("--strict needs a module to trace; the source is exported already")
        return method
    if options.dtype is not None:
        method = convert(method, getattr(torch, options.dtype))
    if method.module.training:
        log.warning("the module is in training mode; call .eval() for inference behaviour")
    extra: dict[str, Any] = {} if options.strict is None else {"strict": options.strict}
    return torch.export.export(
        method.module, method.args, method.kwargs, dynamic_shapes=method.dynamic_shapes, **extra
    )


def convert(call: ModuleCall, dtype: torch.dtype) -> ModuleCall:
    """The same call with floating point weights and inputs of another type.

    The module is converted in place, as `Module.to` does it: a converted copy would take the
    memory of the weights once more. It was made for this export.

    Raises:
        UsageError: a weight is complex; converting it would drop the imaginary part.
    """
    for name, tensor in chain(call.module.named_parameters(), call.module.named_buffers()):
        if tensor.is_complex():
            raise UsageError(f"--dtype cannot convert {name}, which is complex; export without it")

    def one(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return ModuleCall(
        call.module.to(dtype),
        pytree.tree_map(one, call.args),
        pytree.tree_map(one, call.kwargs),
        call.dynamic_shapes,
    )


def tag_weights(program: ExportedProgram, tag: str) -> None:
    """Ask the delegate to keep its weights in ``<tag>.ptd`` (XNNPACK does; others may not).

    ExecuTorch's own pass sets the tag on an unlifted module, which must then be exported again.
    The tag ends up on the placeholders of the weights, so it is set there: the same bytes come
    out, dynamic shapes survive, and nothing is traced twice.
    """
    signature = program.graph_signature
    weights = {
        *signature.inputs_to_parameters,
        *signature.inputs_to_buffers,
        *signature.inputs_to_lifted_tensor_constants,
    }
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in weights:
            node.meta.setdefault("custom", {})["delegate_constant_tag"] = tag


def edge_config(options: ExportOptions, backend: Backend) -> EdgeCompileConfig | None:
    changed = dict(backend.edge_config)
    if options.check_ir is not None:
        changed["_check_ir_validity"] = options.check_ir
    if options.dim_order is not None:
        changed["_skip_dim_order"] = not options.dim_order
    return EdgeCompileConfig(**changed) if changed else None


def backend_config(options: ExportOptions) -> ExecutorchBackendConfig | None:
    changed: dict[str, Any] = {
        "segment_alignment": options.segment_alignment,
        "constant_tensor_alignment": options.constant_alignment,
        "delegate_alignment": options.delegate_alignment,
        "extract_delegate_segments": options.extract_delegate_segments,
        "remove_view_copy": options.remove_view_copy,
        "do_quant_fusion_and_const_prop": options.quant_fusion,
        "memory_planning_pass": _memory_planning(options),
        "external_constants": _external_constants(options),
    }
    given = {key: value for key, value in changed.items() if value is not None}
    return ExecutorchBackendConfig(**given) if given else None


def _memory_planning(options: ExportOptions) -> MemoryPlanningPass | None:
    given = {
        "alloc_graph_input": options.alloc_graph_input,
        "alloc_graph_output": options.alloc_graph_output,
    }
    given = {key: value for key, value in given.items() if value is not None}
    return MemoryPlanningPass(**given) if given else None


def _external_constants(options: ExportOptions) -> Any:
    if not options.external_weights:
        return None
    if options.external_tag == DEFAULT_TAG:
        return True
    tag = options.external_tag
    return lambda node: tag


@contextlib.contextmanager
def _stage(progress: Progress, label: str) -> Iterator[None]:
    """One stage on the progress display; what PyTorch or ExecuTorch raises names the stage."""
    progress.start(label, None)
    try:
        yield
    except (CasError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        known = _library_error(error)
        if known is error:
            raise
        if known is not None:
            raise known from error
        raise ExportFailed(label, error) from error
    finally:
        progress.finish()


def _library_error(error: BaseException) -> CasError | OSError | None:
    """An error of the library, or a full disk, that frames in between wrapped in their own.

    Any other OSError may be one that the model's code met and handled, long before it failed.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, CasError):
            return current
        if isinstance(current, OSError) and current.errno in _DISK:
            return current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None
