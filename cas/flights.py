"""Doing something once although several processes want it at once: a lock that names the thing.

The file of the lock is there only while somebody holds it, or was killed while holding it. A
process that ends, however it ends, has let go.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cas import fsio
from cas.errors import CasError
from cas.layout import parse_digest_name
from cas.locks import FileLock
from cas.progress import SILENT, Progress

logger = logging.getLogger(__name__)

#: Who has waited for so long is told what for, also without a progress display.
PATIENCE: Final = 5.0

#: Locks that this process holds or waits for; a forked child must not keep them alive.
_airborne: set[FileLock] = set()


@contextlib.contextmanager
def flight(
    path: Path, mode: int, what: str, *, wait: bool = True, progress: Progress = SILENT
) -> Iterator[bool]:
    """Hold the lock at ``path`` for the length of the block; yields whether it is held.

    Args:
        mode: of the file.
        what: it is about, for who waits.
        wait: for whoever has it. Without, False is yielded at once if somebody does.

    Where there can be no lock, on a full disk say, the block runs as if it were held: to do the
    same twice is a waste, and no more.
    """
    try:
        lock = _take(path, mode, what, wait, progress)
    except (CasError, OSError) as error:
        logger.info("%s; others may do the same meanwhile", error)
        yield True
        return
    try:
        yield lock is not None
    finally:
        if lock in _airborne:  # and not in a forked child, which leaves the block too
            try:
                # While it is locked: whoever waits for it sees that it lost its name.
                fsio.unlink(path)
            finally:
                lock.unlock()
                _drop(lock)


def _take(path: Path, mode: int, what: str, wait: bool, progress: Progress) -> FileLock | None:
    while True:
        with fsio.os_errors(path):
            lock = FileLock.open(path, mode)
        _airborne.add(lock)
        try:
            if not lock.try_exclusive():
                if not wait:
                    _drop(lock)
                    return None
                with _telling(what, progress):
                    lock.exclusive()
        except BaseException:
            _drop(lock)
            raise
        if lock.is_current():
            return lock
        _drop(lock)  # its last owner has removed it: take the file of that name now


@contextlib.contextmanager
def _telling(what: str, progress: Progress) -> Iterator[None]:
    """Tell the user that this takes its time because of somebody else."""
    logger.info("waiting for another process that has begun %s", what)
    words = ("waiting for another process that has begun %s; it ends with that process", what)
    timer = threading.Timer(PATIENCE, logger.warning, words)
    timer.daemon = True
    timer.start()
    progress.start("waiting for the same work elsewhere", None)
    try:
        yield
    finally:
        timer.cancel()
        progress.finish()


def _drop(lock: FileLock) -> None:
    _airborne.discard(lock)
    lock.close()


def _after_fork() -> None:
    for lock in _airborne:
        lock.close()
    _airborne.clear()


os.register_at_fork(after_in_child=_after_fork)


def remove_idle(directory: Path) -> None:
    """Remove the files that killed processes left; nobody waits for them. gc's part.

    What is no lock of an action by its name is left alone, as everywhere in a store; so is, with
    a warning, what has such a name and is no file.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(directory.iterdir()):
            if parse_digest_name(path.name):
                _remove_if_idle(path)


def _remove_if_idle(path: Path) -> None:
    try:
        with fsio.os_errors(path, "remove"):
            lock = FileLock.find(path)
    except FileNotFoundError:
        if path.is_symlink() or path.exists():
            logger.warning("%s is no file of this store, and is left alone", path)
        return
    try:
        # Its owner may have removed it since, and another made a new one of that name.
        if lock.try_exclusive() and lock.is_current():
            with fsio.os_errors(path, "remove"):
                fsio.unlink(path)
    finally:
        lock.close()
