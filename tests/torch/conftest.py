"""A store on the disk: what is mapped from it are pages of files, as they are for users."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cas


@pytest.fixture
def chunk_size() -> int:
    """The smallest that a store allows; a module that works with more overrides it."""
    return 64 << 10


@pytest.fixture
def store(tmp_path: Path, chunk_size: int) -> Iterator[cas.Store]:
    with cas.Store.open(tmp_path / "store", chunk_size=chunk_size) as opened:
        yield opened
