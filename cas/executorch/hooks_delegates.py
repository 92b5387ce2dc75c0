"""Hooks: backends that return their weights inside ``processed_bytes``."""

from __future__ import annotations

import functools
import hashlib
import importlib
import threading
from typing import Any

from cas.executorch import seams
from cas.executorch.blob import StoredBytes
from cas.executorch.intake import WORTH_A_THREAD, Intake
from cas.executorch.patches import Patches


def install(patches: Patches, intake: Intake) -> None:
    """Hold a delegate's blob in the store, and let the emitter see it without reading it back.

    Anybody else who asks a lowered module for its ``processed_bytes`` gets real bytes.
    """
    emitting = _Emitting()
    _install_lowered_module(patches, intake, emitting)
    emitter = importlib.import_module(seams.EMITTER)
    emitter_class: Any = emitter._Emitter
    original = emitter_class._emit_delegate

    @functools.wraps(original)
    def emit_delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, emitting.now = emitting.now, True
        try:
            return original(self, *args, **kwargs)
        finally:
            emitting.now = outer

    patches.set(emitter_class, "_emit_delegate", emit_delegate)
    # The emitter hashes the blob only to recognise one that it has emitted before.
    patches.set(emitter, "hashlib", _Hashlib(intake))


def _install_lowered_module(patches: Patches, intake: Intake, emitting: _Emitting) -> None:
    lowered_class: Any = importlib.import_module(seams.LOWERED).LoweredBackendModule
    original = lowered_class.__init__

    @functools.wraps(original)
    def init(
        self: Any,
        edge_program: Any,
        backend_id: str,
        processed_bytes: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        kept = intake.keep_any(processed_bytes)
        original(self, edge_program, backend_id, kept, *args, **kwargs)

    def processed_bytes(self: Any) -> Any:
        """The delegate's blob, as ExecuTorch's own property gives it."""
        held = self._processed_bytes
        if isinstance(held, StoredBytes) and not emitting.now:
            return held.to_bytes()
        return held

    patches.set(lowered_class, "__init__", init)
    patches.set(lowered_class, "processed_bytes", property(processed_bytes))


class _Emitting(threading.local):
    """Whether this thread is inside the emitter."""

    now: bool = False


class _Hashlib:
    """The standard module, except that ``sha256`` also takes stored bytes, and puts constants.

    The emitter hashes each constant to see whether it is new, and saves it if it is.
    """

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def __getattr__(self, name: str) -> Any:
        return getattr(hashlib, name)

    def sha256(self, data: Any = b"", **kwargs: Any) -> Any:
        if isinstance(data, StoredBytes):
            return _KnownHash(data.sha256())
        if isinstance(data, memoryview) and len(data) >= WORTH_A_THREAD:
            return _KnownHash(self._intake.sha256_while_putting(data))
        return hashlib.sha256(data, **kwargs)


class _KnownHash:
    """A finished hash."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def digest(self) -> bytes:
        return self._digest

    def hexdigest(self) -> str:
        return self._digest.hex()
