"""Fixtures that every part of the suite may use."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cas import Store
from cas.testing.stores import open_store, scratch
from cas.writer import Writer

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture
def root() -> Iterator[Path]:
    """An empty directory in memory, for stores and what comes out of them."""
    with scratch() as path:
        yield path


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    """A new store with small chunks, in ``root / "s"``."""
    with open_store(root / "s") as opened:
        yield opened


@pytest.fixture
def writer(store: Store) -> Iterator[Writer]:
    """A writer of ``store``, which commits nothing unless the test does."""
    with store.writer() as opened:
        yield opened


@pytest.fixture
def seed() -> int:
    """Of what a test does at random; printed, so that a failure can be seen again by ``SEED``.

    Always the same in CI: what chance finds there would hold up somebody else's change.
    """
    given = os.environ.get("SEED") or ("1" if os.environ.get("CI") else None)
    seed = random.randrange(1 << 32) if given is None else int(given)
    print(f"seed {seed}")
    return seed


@pytest.fixture(scope="session", autouse=True)
def as_an_ordinary_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The usual umask, a home that can be written, and a name, whoever runs the tests."""
    before = os.umask(0o022)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("USER", "LOGNAME"):
            patch.setenv(name, "an-ordinary-user")
        yield
    os.umask(before)


#: What makes a program show colours, or hide them, wherever its output goes.
COLOURS = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test reads the developer's settings, or touches the store in their home directory."""
    for name in [name for name in os.environ if name.startswith("CAS_") or name in COLOURS]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg-cache"))
