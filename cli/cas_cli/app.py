"""What a command works with: its settings, the store, progress, and how to report."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cas.config import KEYS, Config
from cas.layout import Layout
from cas.progress import SILENT, Progress
from cas_cli.options import Given
from cas_cli.render import print_json
from cas_cli.settings import BY_NAME, SETTINGS, Effective, resolve, store_path

if TYPE_CHECKING:
    from cas.store import Store


@dataclass(slots=True)
class App:
    """One invocation."""

    given: Given
    environ: Mapping[str, str]
    flags: dict[str, object] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The store's directory."""
        return store_path(self.given, self.environ)

    def effective(self, name: str) -> Effective:
        """A setting's value and origin.

        Raises:
            UsageError: it is malformed where it stands.
        """
        setting = BY_NAME[name]
        flag = self.flags.get(name, getattr(self.given, name, None))
        return resolve(setting, flag, self.environ, self._stored() if setting.stored else {})

    def all_effective(self) -> list[Effective]:
        return [self.effective(setting.name) for setting in SETTINGS]

    def _stored(self) -> dict[str, Any]:
        config = Config.load(Layout(self.path))
        default = Config()
        values = {key: getattr(config, key) for key in KEYS}
        return {key: v for key, v in values.items() if v != getattr(default, key)}

    def _overrides(self) -> dict[str, str]:
        """Settings of the store that the environment decides, for writers to go by."""
        names = [s.name for s in SETTINGS if s.stored and s.env in self.environ]
        for name in names:
            self.effective(name)  # raises the error that names the variable
        return {name: self.environ[BY_NAME[name].env] for name in names if name != "umask"}

    def actions(self, no_actions: bool, recheck: str | None) -> tuple[bool, float]:
        """Whether to use what was computed before, and the share of it to compute again.

        Raises:
            UsageError: the share is none.
        """
        setting = BY_NAME["recheck"]
        share = float(resolve(setting, recheck, self.environ, {}).value)
        return not (no_actions or self.effective("disable").value), share

    @contextlib.contextmanager
    def store(
        self, *, create: bool = False, write: bool = False, command: str | None = None
    ) -> Iterator[Store]:
        """The store. ``write`` says that the command makes no sense without writing."""
        from cas.errors import ReadOnlyStore
        from cas.store import Store

        def refusal(asked_by: str | None = None) -> ReadOnlyStore:
            name = command or click.get_current_context().info_name or "write"
            return ReadOnlyStore(self.path, name, asked_by)

        asked = self.effective("read_only")
        read_only = bool(asked.value)
        # The store knows its own umask, so only one from outside is passed on.
        umask = resolve(BY_NAME["umask"], self.given.umask, self.environ, {}).value
        if read_only and write:
            raise refusal(asked.decided_by)
        with Store.open(
            self.path,
            create=create,
            read_only=read_only,
            umask=umask,
            settings=self._overrides(),
        ) as store:
            if store.read_only and write:
                raise refusal()
            yield store

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """A display for a person at a terminal, nothing for anybody else."""
        from cas_cli.progress import TerminalProgress, wanted

        if not wanted(self.given.no_progress):
            yield SILENT
            return
        with TerminalProgress() as display:
            yield display

    def report(self, document: Any, show: Callable[[], None]) -> None:
        """Print the document as JSON, or as a person likes it."""
        if self.given.json:
            print_json(document)
        else:
            show()


def current() -> App:
    """The app of the running command."""
    given = click.get_current_context().find_root().ensure_object(Given)
    _log_to_stderr(given.verbose)
    return App(given, os.environ)


class _Notes(logging.Handler):
    """Warnings of the library, as one line each on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"cas: {record.levelname.lower()}: {record.getMessage()}", err=True)


def _log_to_stderr(verbose: bool) -> None:
    logger = logging.getLogger("cas")
    logger.handlers = [_Notes()]
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    logger.propagate = False
