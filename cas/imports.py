"""Be told when a module has been imported, without importing it.

A program may set environment variables before it imports torch, and may never import it. Whoever
wants to do something to such a module waits for it here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportWatch(MetaPathFinder):
    """Calls ``act`` with each of ``names`` as soon as its module's code has run.

    What the module's own importer does with it afterwards, such as binding a function by
    ``from module import function``, comes later. A module that is there already is announced at
    once. ``act`` must not raise: the program's import would fail.
    """

    def __init__(self, names: Iterable[str], act: Callable[[str], None]) -> None:
        self._names = set(names)
        self._act = act

    def begin(self) -> None:
        for name in sorted(self._names & set(sys.modules)):
            self._names.discard(name)
            self._act(name)
        if self._names:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Announce nothing from here on."""
        self._names.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        self._names.discard(fullname)  # and so it is found as if nobody watched
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _AnnouncingLoader(spec.loader, self._act)
        return spec


class _AnnouncingLoader(Loader):
    """Loads with ``loader``, leaves it in its own place, and tells."""

    def __init__(self, loader: Loader, act: Callable[[str], None]) -> None:
        self._loader = loader
        self._act = act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._act(module.__name__)
