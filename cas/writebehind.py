"""Files whose bytes the disk is still writing, and who waits for them."""

from __future__ import annotations

import os
import threading
from collections import deque

from cas import fsio


class WriteBehind:
    """Files on their way to the disk: beyond the limits, who adds one waits for the oldest.

    ``limit`` is in bytes; at most ``files`` descriptors are kept open besides.
    """

    def __init__(self, limit: int, files: int) -> None:
        self._limit = limit
        self._most = files
        self._changed = threading.Condition()
        self._files: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._awaited = 0
        self._error: OSError | None = None

    def add(self, fd: int, size: int) -> None:
        """Take over a descriptor from `fsio.create_begun`.

        Raises:
            OSError: this or an older file could not be written.
        """
        with self._changed:
            self._files.append((fd, size))
            self._bytes += size
        self._wait(self._limit, self._most)

    def drain(self) -> None:
        """Wait for all, also for those that other threads wait for.

        Raises:
            OSError: a file could not be written, now or at any time before.
        """
        self._wait(0, 0)
        with self._changed:
            self._changed.wait_for(lambda: not self._awaited)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Wait for none."""
        with self._changed:
            files, self._files, self._bytes = self._files, deque(), 0
        for fd, _ in files:
            os.close(fd)

    def _wait(self, limit: int, most: int) -> None:
        while True:
            with self._changed:
                if self._bytes <= limit and len(self._files) <= most:
                    return
                fd, size = self._files.popleft()
                self._bytes -= size
                self._awaited += 1
            self._end(fd)

    def _end(self, fd: int) -> None:
        failed: OSError | None = None
        try:
            fsio.end_write_out(fd)
        except OSError as error:
            failed = error
            raise
        finally:
            os.close(fd)
            with self._changed:
                self._error = self._error or failed
                self._awaited -= 1
                self._changed.notify_all()
