"""Where ExecuTorch looks its backends up: every one it finds there asks the store first.

``backend_api`` knows its backends by one name, ``BackendDetails``, and uses it for nothing else
than looking at its subclasses. So one attribute is replaced, and neither a backend's class nor
code that calls it directly is touched.
"""

from __future__ import annotations

import importlib
from typing import Any

from cas.executorch.actions.cache import DelegateActions
from cas.executorch.actions.keys import Programs, Specs
from cas.executorch.patches import Patches
from cas.executorch.seams import BACKENDS


def install(patches: Patches, actions: DelegateActions) -> None:
    """Let lowering in this thread find results that were recorded."""
    module = importlib.import_module(BACKENDS)
    patches.set(module, "BackendDetails", _Registry(module.BackendDetails, actions, patches))


class _Registry:
    """The class of all backends, except that its subclasses ask the store first."""

    def __init__(self, registry: Any, actions: DelegateActions, patches: Patches) -> None:
        self._registry = registry
        self._actions = actions
        self._patches = patches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def __subclasses__(self) -> list[Any]:
        found: list[Any] = self._registry.__subclasses__()
        if not self._patches.active():
            return found
        return [_Backend(backend, self._actions) for backend in found]


class _Backend:
    """One backend."""

    def __init__(self, backend: Any, actions: DelegateActions) -> None:
        self._backend = backend
        self._actions = actions
        self.__name__ = backend.__name__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def copy_exported_program_for_preprocess(self, program: Any, specs: Any) -> Any:
        """No copy: one is made when it turns out that there is something to compile."""
        return program

    def preprocess_multimethod(self, programs: Programs, specs: Specs) -> Any:
        return self._actions.multimethod(self._backend, programs, specs)

    def preprocess(self, program: Any, specs: Any) -> Any:
        return self._actions.single(self._backend, program, specs)
