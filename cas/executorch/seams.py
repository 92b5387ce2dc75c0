"""Which ExecuTorch versions capture knows, and what it expects to find in them.

Everything is checked before anything is changed: an unknown version, a missing function or a
function with other parameters is refused by name. See ``docs/executorch.md`` for what each seam is
used for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

from cas.executorch.errors import SeamMismatch, UnsupportedVersion

#: Releases whose sources were read and whose exports the test suite compares byte for byte.
SUPPORTED_VERSIONS: Final = ("1.5.1",)

#: The torch that each of them is built against; the hooks reach into torch as well.
TORCH_VERSIONS: Final = {"1.5.1": "2.13"}


@dataclass(frozen=True, slots=True)
class Seam:
    """One place in another package that capture relies on.

    ``parameters`` are the leading parameters a function must have; None where the attribute is
    not called but must exist. An ``optional`` seam may be missing as a module (its backend is not
    installed), but not be different.
    """

    name: str
    module: str
    path: str
    parameters: tuple[str, ...] | None = None
    optional: bool = False

    @property
    def where(self) -> str:
        return f"{self.module}.{self.path}"


EMITTER: Final = "executorch.exir.emit._emitter"
NODE_VISITOR: Final = "executorch.backends.xnnpack.operators.node_visitor"
BACKENDS: Final = "executorch.exir.backend.backend_api"
NAMED_DATA: Final = "executorch.exir._serialize._named_data_store"
LOWERED: Final = "executorch.exir.lowered_backend_module"
CORD: Final = "executorch.exir._serialize._cord"
PROGRAM: Final = "executorch.exir.program._program"
DYNAMO: Final = "torch._dynamo.variables.builder"
DYNAMO_UTILS: Final = "torch._dynamo.utils"
FX_TRACEBACK: Final = "torch.fx.traceback"
SERDE: Final = "executorch.exir.serde.export_serialize"
EXPORT: Final = "torch.export._trace"
DUPLICATES: Final = "executorch.exir.backend.canonical_partitioners.duplicate_constant_node_pass"
INDUCTOR: Final = "torch._inductor"
COMPILE_FX: Final = "torch._inductor.compile_fx"
CODECACHE: Final = "torch._inductor.codecache"
AOTI_BACKEND: Final = "executorch.backends.aoti.aoti_backend"
CUDA_COLLECTOR: Final = "executorch.backends.cuda.cuda_weight_collector"
#: Not imported here: that takes half a second, and triton.
CUDA_BACKEND: Final = "executorch.backends.cuda.cuda_backend"

SEAMS: Final = (
    Seam(
        "named data",
        NAMED_DATA,
        "NamedDataStore.add_named_data",
        ("self", "key", "data", "alignment", "external_tag", "tensor_layout"),
    ),
    Seam(
        "merged named data",
        NAMED_DATA,
        "NamedDataStore.merge_named_data_store",
        ("self", "other"),
    ),
    Seam(
        "finished named data",
        NAMED_DATA,
        "NamedDataStore.get_named_data_store_output",
        ("self",),
    ),
    Seam(
        "emitted constants",
        EMITTER,
        "_Emitter._save_new_const_tensor",
        ("self", "spec", "buffer_data", "hashed"),
    ),
    Seam("emitted delegates", EMITTER, "_Emitter._emit_delegate", ("self", "lowered_module")),
    Seam("emitter hashing", EMITTER, "hashlib.sha256"),
    Seam(
        "xnnpack constants",
        NODE_VISITOR,
        "NodeVisitor.define_tensor",
        ("self", "tensor", "xnn_graph"),
        optional=True,
    ),
    Seam(
        "lowered modules",
        LOWERED,
        "LoweredBackendModule.__init__",
        ("self", "edge_program", "backend_id", "processed_bytes"),
    ),
    Seam("processed bytes", LOWERED, "LoweredBackendModule.processed_bytes"),
    Seam("file backed data", CORD, "FileBackedData.write_to_file", ("self", "outfile")),
    Seam("file backed digest", CORD, "FileBackedData.sha256", ("self",)),
    Seam("cord", CORD, "Cord.append", ("self", "data")),
    Seam("cord writing", CORD, "Cord.write_to_file", ("self", "outfile")),
    Seam(
        "written programs",
        PROGRAM,
        "ExecutorchProgramManager.write_to_file",
        ("self", "open_file"),
    ),
    Seam(
        "written data",
        PROGRAM,
        "ExecutorchProgramManager.write_tensor_data_to_file",
        ("self", "outdir"),
    ),
    Seam("programs in memory", PROGRAM, "ExecutorchProgramManager.buffer"),
    Seam("older programs", PROGRAM, "ExecutorchProgram.write_to_file", ("self", "open_file")),
    Seam("program copies", "torch.export", "ExportedProgram.__reduce_ex__"),
    Seam("backend look-up", BACKENDS, "BackendDetails.__subclasses__"),
    Seam(
        "backend compiles",
        BACKENDS,
        "BackendDetails.preprocess_multimethod",
        ("edge_programs", "compile_specs"),
    ),
    Seam(
        "backend copies",
        BACKENDS,
        "BackendDetails.copy_exported_program_for_preprocess",
        ("edge_program", "compile_specs"),
    ),
    Seam("shared weights", DUPLICATES, "copy.deepcopy", ("x", "memo")),
    Seam(
        "shared weights pass",
        DUPLICATES,
        "duplicate_constant_node",
        ("exported_program", "candidate_node"),
    ),
    Seam("dynamo input clones", DYNAMO, "_clone_input", ("value", "fake_mode")),
    Seam("export entry", EXPORT, "_export", ("mod", "args")),
    Seam("moved storages", "torch", "UntypedStorage._swap_data_ptr_"),
    Seam("serialized programs", SERDE, "EnumEncoder.default", ("self", "obj")),
    Seam("node histories", FX_TRACEBACK, "NodeSource.NodeInfo.__init__", ("self", "name")),
    Seam("node history actions", FX_TRACEBACK, "NodeSourceAction"),
    Seam("dynamo marks", DYNAMO_UTILS, "copy_dynamo_tensor_attributes", ("src", "dst")),
    Seam("inductor buffers", COMPILE_FX, "_unlift_graph", ("mod", "gm", "graph_signature")),
    Seam("inductor clones", COMPILE_FX, "clone_preserve_strides", ("x",)),
    Seam("inductor weights file", CODECACHE, "AotCodeCompiler.compile"),
    Seam("inductor outputs", INDUCTOR, "aot_compile", ("gm", "args")),
    Seam(
        "aoti weights file",
        AOTI_BACKEND,
        "AotiBackend.load_weights_blob",
        ("blob_path", "compile_specs"),
        optional=True,
    ),
    Seam(
        "aoti compiling",
        AOTI_BACKEND,
        "AotiBackend.preprocess",
        ("edge_program", "compile_specs"),
        optional=True,
    ),
    Seam(
        "cuda storages",
        CUDA_COLLECTOR,
        "_write_tensor_storage",
        ("tensor", "path"),
        optional=True,
    ),
    Seam(
        "cuda weights",
        CUDA_COLLECTOR,
        "CudaWeightCollector._add_weight",
        ("self", "entry"),
        optional=True,
    ),
    Seam(
        "cuda storage files",
        CUDA_COLLECTOR,
        "FileBackedData.move_from",
        ("path", "sha256"),
        optional=True,
    ),
)


def executorch_version() -> str:
    """The installed version, as the package itself says it (``1.5.1+cpu``)."""
    try:
        return str(importlib.import_module("executorch.version").__version__)
    except ModuleNotFoundError:
        return "none"


def check_version(supported: Iterable[str] = SUPPORTED_VERSIONS) -> str:
    """The installed version, if it is supported; a local suffix such as ``+cpu`` is ignored.

    Raises:
        UnsupportedVersion: it is not, or torch is not the one that belongs to it.
    """
    found = executorch_version()
    known = tuple(supported)
    if found.split("+", 1)[0] not in known:
        raise UnsupportedVersion("executorch", found, known)
    torch_found, torch_known = str(torch.__version__), TORCH_VERSIONS.get(found.split("+", 1)[0])
    if torch_known is not None and not torch_found.startswith(f"{torch_known}."):
        raise UnsupportedVersion("torch", torch_found, (f"{torch_known}.*",))
    return found


def check_seams(seams: Iterable[Seam] = SEAMS) -> None:
    """
    Raises:
        SeamMismatch: a seam is missing or has another signature.
    """
    for seam in seams:
        target = resolve(seam)
        if target is not None and seam.parameters is not None:
            _check_parameters(seam, target)


def module_of(name: str) -> Any:
    """The module of the seam of that name; None for an optional one that is not installed."""
    seam = next(seam for seam in SEAMS if seam.name == name)
    return None if resolve(seam) is None else importlib.import_module(seam.module)


def resolve(seam: Seam) -> Any:
    """What the seam names, or None for an optional one whose module is not installed."""
    try:
        target = importlib.import_module(seam.module)
    except ImportError as error:
        if seam.optional:
            return None
        raise _mismatch(seam, f"the module cannot be imported ({error})") from error
    for name in seam.path.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            raise _mismatch(seam, f"there is no {name!r}") from None
    return target


def _check_parameters(seam: Seam, target: Any) -> None:
    try:
        found = tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError) as error:
        raise _mismatch(seam, f"it has no signature ({error})") from error
    expected = seam.parameters or ()
    if found[: len(expected)] != expected:
        raise _mismatch(
            seam, f"its parameters are ({', '.join(found)}), expected ({', '.join(expected)}, ...)"
        )


def _mismatch(seam: Seam, detail: str) -> SeamMismatch:
    if seam.module.startswith("torch"):
        version = f"torch {torch.__version__}"
    else:
        version = f"executorch {executorch_version()}"
    return SeamMismatch(seam.name, seam.where, version, detail)
