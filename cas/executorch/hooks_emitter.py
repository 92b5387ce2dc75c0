"""Hooks: constants on their way into a program (the emitter, and XNNPACK's node visitor)."""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import Any, Final

import torch

from cas.executorch import seams
from cas.executorch.blob import StoredBytes
from cas.executorch.copies import PrivateCopies
from cas.executorch.intake import Intake
from cas.executorch.labels import label_of_constant
from cas.executorch.patches import Patches

#: The seams in whose modules ``bytes`` is shadowed.
_ZERO_COPY: Final = ("emitted constants", "xnnpack constants")


def install(patches: Patches, intake: Intake, copies: PrivateCopies) -> None:
    _install_constants(patches, intake, copies)
    zero_copy = zero_copy_bytes(max(intake.threshold, 1), patches.active)
    for seam in seams.SEAMS:
        if seam.name in _ZERO_COPY:
            _install_zero_copy(patches, seam, zero_copy)


def _install_constants(patches: Patches, intake: Intake, copies: PrivateCopies) -> None:
    emitter_class: Any = importlib.import_module(seams.EMITTER)._Emitter
    original = emitter_class._save_new_const_tensor

    @functools.wraps(original)
    def save_new_const_tensor(
        self: Any, spec: Any, buffer_data: Any, hashed: str, *args: Any, **kwargs: Any
    ) -> Any:
        kept = intake.keep(buffer_data, bytes.fromhex(hashed))
        label = label_of_constant(self, spec)
        if label is not None:
            intake.labels.add(kept, label)
        index = original(self, spec, kept, hashed, *args, **kwargs)
        if isinstance(kept, StoredBytes) and label is not None:
            _drop_clone(spec, _weight(self.exported_program, label.name), kept, copies)
        return index

    patches.set(emitter_class, "_save_new_const_tensor", save_new_const_tensor)


def _drop_clone(spec: Any, weight: Any, kept: StoredBytes, copies: PrivateCopies) -> None:
    """Let a spec hold a mapping of what was stored instead of a clone of its weight.

    ExecuTorch clones a weight that is a view or has odd strides, and the spec keeps the clone for
    as long as the program lives. Whoever reads the spec's storage later finds the same bytes.
    """
    held = spec.storage
    if held is None or not isinstance(weight, torch.Tensor) or len(kept) != held.nbytes():
        return
    if held.data_ptr() == weight.untyped_storage().data_ptr():
        return
    mapped = copies.of_recipe(kept.recipe)
    if mapped is not None:
        spec.storage = mapped
        del held
        _return_freed_memory()


def _return_freed_memory() -> None:
    """Give the kernel what is free in the heap.

    After the first clones glibc serves the later ones from its heap, where small objects keep
    them from being returned or used again: freed, they would still take their memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _weight(program: Any, name: str) -> Any:
    found = program.state_dict.get(name)
    return program.constants.get(name) if found is None else found


def _install_zero_copy(patches: Patches, seam: seams.Seam, zero_copy: type) -> None:
    if seams.resolve(seam) is None:
        return
    module = importlib.import_module(seam.module)
    # A module global shadows the builtin for the functions of that module and for nobody else.
    patches.set(module, "bytes", zero_copy)


def zero_copy_bytes(threshold: int, active: Callable[[], bool]) -> type:
    """A stand-in for ``bytes`` that views a large ctypes array instead of copying it.

    The two modules that get it call ``bytes(array)`` on the memory of a tensor that they hold for
    longer than the result: they hash it and pass it on to a function that is hooked here and
    consumes it before it returns. Everything else, and all while not ``active``, is what ``bytes``
    does.
    """

    class ZeroCopyBytes(metaclass=_LikeBytes):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and isinstance(args[0], ctypes.Array):
                array = args[0]
                if ctypes.sizeof(array) >= threshold and active():
                    return memoryview(array).cast("B")
            return bytes(*args, **kwargs)

    return ZeroCopyBytes


class _LikeBytes(type):
    """Answers for ``bytes`` in isinstance, issubclass and class attributes."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, bytes)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, bytes)

    def __getattr__(cls, name: str) -> Any:
        return getattr(bytes, name)
