"""Hooks: constants on their way into a program (the emitter, and XNNPACK's node visitor)."""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any, Final

from cas.executorch import seams
from cas.executorch.intake import Intake
from cas.executorch.labels import label_of_constant
from cas.executorch.patches import Patches

#: The seams in whose modules ``bytes`` is shadowed.
_ZERO_COPY: Final = ("emitted constants", "xnnpack constants")


def install(patches: Patches, intake: Intake) -> None:
    _install_constants(patches, intake)
    zero_copy = zero_copy_bytes(max(intake.threshold, 1))
    for seam in seams.SEAMS:
        if seam.name in _ZERO_COPY:
            _install_zero_copy(patches, seam, zero_copy)


def _install_constants(patches: Patches, intake: Intake) -> None:
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
        return original(self, spec, kept, hashed, *args, **kwargs)

    patches.set(emitter_class, "_save_new_const_tensor", save_new_const_tensor)


def _install_zero_copy(patches: Patches, seam: seams.Seam, zero_copy: type) -> None:
    if seams.resolve(seam) is None:
        return
    module = importlib.import_module(seam.module)
    # A module global shadows the builtin for the functions of that module and for nobody else.
    patches.set(module, "bytes", zero_copy)


def zero_copy_bytes(threshold: int) -> type:
    """A stand-in for ``bytes`` that views a large ctypes array instead of copying it.

    The two modules that get it call ``bytes(array)`` on the memory of a tensor that they hold for
    longer than the result: they hash it and pass it on to a function that is hooked here and
    consumes it before it returns. Everything else is what ``bytes`` does.
    """

    class ZeroCopyBytes(metaclass=_LikeBytes):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and isinstance(args[0], ctypes.Array):
                array = args[0]
                if ctypes.sizeof(array) >= threshold:
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
