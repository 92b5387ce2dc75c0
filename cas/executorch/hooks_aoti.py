"""Hooks: what AOTInductor copies on its way from a program to its outputs.

Three copies of weights, each as large as what it copies: a clone of every buffer that a program
lifts, the dense weights file built in memory, and that file read back in one piece.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from cas import fsio
from cas.executorch import seams
from cas.executorch.copies import PrivateCopies
from cas.executorch.errors import PackageIncomplete
from cas.executorch.intake import Intake
from cas.executorch.patches import Patches
from cas.torch.streaming import is_plain

log = logging.getLogger(__name__)

#: A dense weights file of fewer bytes is built in memory as ever.
MIN_SCRATCH: Final = 1 << 20

#: How AOTInductor ends the names of a graph's library and of its dense weights file.
LIBRARY: Final = ".wrapper.so"
BLOB: Final = ".wrapper_weights.blob"


def install(patches: Patches, intake: Intake, copies: PrivateCopies, scratch: Path) -> None:
    """``scratch`` is a directory on a disk, for the bytes of a file that is being built."""
    _install_clones(patches, copies)
    _install_blob(patches, scratch)
    backend = seams.module_of("aoti weights file")
    if backend is not None:
        _install_read_back(patches, intake, backend.AotiBackend)
        _install_outputs_check(patches, backend.AotiBackend)


# --- clones of lifted buffers -------------------------------------------------------------------


class _Unlifting(threading.local):
    """Whether this thread is where Inductor clones the buffers of a program."""

    now: bool = False


def _install_clones(patches: Patches, copies: PrivateCopies) -> None:
    """Inductor clones each buffer, since the compiled program may change its initial value.

    Its autotuner clones inputs with the same function. Those must stay what and where they are.
    """
    inductor = importlib.import_module(seams.COMPILE_FX)
    unlifting = _Unlifting()
    unlift, clone = inductor._unlift_graph, inductor.clone_preserve_strides

    @functools.wraps(unlift)
    def unlift_graph(*args: Any, **kwargs: Any) -> Any:
        outer, unlifting.now = unlifting.now, True
        try:
            return unlift(*args, **kwargs)
        finally:
            unlifting.now = outer

    @functools.wraps(clone)
    def clone_preserve_strides(x: torch.Tensor) -> Any:
        private = private_clone(x, copies) if unlifting.now else None
        return clone(x) if private is None else private

    patches.set(inductor, "_unlift_graph", unlift_graph)
    patches.set(inductor, "clone_preserve_strides", clone_preserve_strides)


def private_clone(tensor: torch.Tensor, copies: PrivateCopies) -> torch.Tensor | None:
    """What ``clone_preserve_strides`` gives, as a mapping; None where the clone is better.

    In its low-memory mode CudaBackend brings the clones of device buffers to the host. Then the
    bytes come from the device to the store in pieces, and neither side holds a second copy.
    """
    if not is_plain(tensor) or tensor.requires_grad or tensor.numel() == 0:
        return None
    # The clone spans the elements and the gaps between them, but not what lies before or after.
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in steps)
    flat = torch.as_strided(tensor, (span,), (1,))
    if tensor.device.type == "cpu":
        private = copies.of_tensor(flat)
    else:
        private = copies.on_host(flat) if _clones_go_to_the_host() else None
    return None if private is None else torch.as_strided(private, tensor.size(), tensor.stride())


def _clones_go_to_the_host() -> bool:
    """Whether CudaBackend is in its low-memory mode; it is not, if its module is not even there."""
    backend = sys.modules.get(seams.CUDA_BACKEND)
    active = getattr(backend, "_is_cpu_clone_active", None)
    return active is not None and bool(active())


# --- the dense weights file ---------------------------------------------------------------------


def _install_blob(patches: Patches, scratch: Path) -> None:
    """Inductor builds the file in a ``bytearray`` and then writes it out in one piece."""
    module = importlib.import_module(seams.CODECACHE)
    # A module global shadows the builtin for the functions of that module and for nobody else.
    patches.set(module, "bytearray", scratch_bytearray(scratch, patches.active))


def scratch_bytearray(directory: Path, active: Callable[[], bool]) -> Callable[..., Any]:
    """A stand-in for ``bytearray``: a large size gives a view of a mapped file without a name.

    The pages of the file are the kernel's to write out, and slices of the view are no copies.
    While not ``active``, for fewer bytes and for any other argument it is what ``bytearray`` is.
    """

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is int and active():
            buffer = scratch_buffer(directory, args[0])
            if buffer is not None:
                return buffer
        return bytearray(*args, **kwargs)

    return stand_in


def scratch_buffer(directory: Path, size: int) -> memoryview | None:
    """``size`` zero bytes on a disk that end with their last user; None if they are few.

    None also where the disk has no room: then memory has to do, as it does without capture.
    """
    if size < MIN_SCRATCH:
        return None
    try:
        return memoryview(fsio.map_scratch(directory, size))
    except OSError as error:
        log.warning("a weights file of %d bytes is built in memory: %s", size, error)
        return None


def _install_read_back(patches: Patches, intake: Intake, backend: Any) -> None:
    """The base of the AOTInductor backends reads the file back and hashes it."""
    original = vars(backend)["load_weights_blob"]

    @functools.wraps(original.__func__)
    def load_weights_blob(cls: Any, blob_path: str, compile_specs: Any) -> Any:
        small = os.path.getsize(blob_path) < max(intake.threshold, 1)
        if small or not patches.active():
            return original.__get__(None, cls)(blob_path, compile_specs)
        stored = intake.move_file(blob_path)
        return stored, stored.sha256().hex()

    patches.set(backend, "load_weights_blob", classmethod(load_weights_blob))


# --- outputs ------------------------------------------------------------------------------------


class _Lowering(threading.local):
    """Whether this thread compiles for an AOTInductor backend of ExecuTorch."""

    now: bool = False


def _install_outputs_check(patches: Patches, backend: Any) -> None:
    """Name what is missing. The backends' own errors print every weight's values instead."""
    inductor = importlib.import_module(seams.INDUCTOR)
    lowering = _Lowering()
    preprocess, compile_graph = vars(backend)["preprocess"], inductor.aot_compile

    @functools.wraps(preprocess.__func__)
    def flagged(cls: Any, *args: Any, **kwargs: Any) -> Any:
        outer, lowering.now = lowering.now, True
        try:
            return preprocess.__get__(None, cls)(*args, **kwargs)
        finally:
            lowering.now = outer

    @functools.wraps(compile_graph)
    def aot_compile(*args: Any, **kwargs: Any) -> Any:
        outputs = compile_graph(*args, **kwargs)
        if lowering.now:
            require_outputs(outputs if isinstance(outputs, list) else [outputs])
        return outputs

    patches.set(backend, "preprocess", classmethod(flagged))
    patches.set(inductor, "aot_compile", aot_compile)


def require_outputs(outputs: list[Any]) -> None:
    """See that a shared library and its weights are among what AOTInductor gave.

    Raises:
        PackageIncomplete: with what there is.
    """
    names = [os.path.basename(item) for item in outputs if isinstance(item, str)]
    weights = [type(item).__name__ for item in outputs if not isinstance(item, str)]
    if not any(name.endswith(LIBRARY) for name in names):
        raise PackageIncomplete(LIBRARY, names + weights)
    if not weights and not any(name.endswith(BLOB) for name in names):
        raise PackageIncomplete(BLOB, names)
