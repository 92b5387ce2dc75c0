"""Bytes on their way to the disk: who waits, who is told of an error, what stays open."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path

import pytest

from cas import fsio
from cas.writebehind import WriteBehind


def test_a_barrier_waits_for_what_another_thread_waits_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        begun.set()
        assert go_on.wait(120)
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(fsio, "end_write_out", slow)
    writing = WriteBehind(limit=0, files=0)
    first: list[OSError] = []

    def add() -> None:
        try:
            writing.add(os.open(tmp_path, os.O_RDONLY), 1)
        except OSError as error:
            first.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    assert begun.wait(120)
    threading.Timer(0.05, go_on.set).start()
    with pytest.raises(OSError, match="lost"):
        writing.drain()
    thread.join()
    assert len(first) == 1


def test_only_so_many_files_are_open_on_their_way_to_the_disk(tmp_path: Path) -> None:
    gc.collect()  # what garbage holds open must not be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    writing = WriteBehind(limit=1 << 20, files=3)
    for number in range(9):
        writing.add(fsio.create_begun(tmp_path / f"{number}", b"x", mode=0o600), 1)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    writing.close()
    assert len(os.listdir("/proc/self/fd")) == before
