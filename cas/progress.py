"""How the library tells a caller that long work moves on."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the steps of one operation, from one thread at a time.

    `start` begins a step that has ``total`` bytes (None: unknown); `advance` adds bytes to it.
    """

    def start(self, label: str, total: int | None) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def finish(self) -> None: ...


class Silent:
    """A progress that tells nobody."""

    def start(self, label: str, total: int | None) -> None:
        """Ignore it."""

    def advance(self, nbytes: int) -> None:
        """Ignore it."""

    def finish(self) -> None:
        """Ignore it."""


SILENT: Progress = Silent()
