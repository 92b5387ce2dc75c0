"""What killed processes left of their locks goes, and nothing else. See also test_actions.py."""

from __future__ import annotations

import os

import pytest

from cas import Digest, Store
from cas.testing.stores import collect

KEY = Digest.of(b"an action")


def test_gc_leaves_alone_what_is_no_lock_of_an_action(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    flights = store.context.layout.flights
    (flights / "README").write_text("not a lock")
    directory, pipe = flights / ("a" * 64), flights / ("b" * 64)
    directory.mkdir()
    os.mkfifo(pipe)  # an open would wait for who writes to it
    (flights / ("c" * 64)).symlink_to(store.path / "elsewhere")
    store.context.layout.flight(KEY).touch()
    collect(store)
    assert {path.name[:6] for path in flights.iterdir()} == {*("README", "a" * 6, "b" * 6, "c" * 6)}
    assert str(directory) in caplog.text and str(pipe) in caplog.text
