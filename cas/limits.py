"""Keeping a store within its largest size, while it is written to."""

from __future__ import annotations

import logging
import threading

from cas import gc
from cas.context import Context
from cas.errors import Busy, CasError
from cas.retention import Policy

logger = logging.getLogger(__name__)

#: Where a gc could not make the store small enough, the next one waits until the store has grown by
#: this part of its limit: it walks the whole store, and would find the same.
GROWTH = 20


class SizeLimit:
    """One writer's part in keeping ``max_size``, which every writer of every process has."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._mutex = threading.Lock()
        self._enough = 0
        self._told = False

    def keep(self, *, replaced: bool = False) -> None:
        """Collect garbage, and give up what the policy allows, if the store is too large now.

        It does not wait for another gc, and its failure is not the writer's: it is logged.

        Args:
            replaced: something is not current any more, so that even a gc which has just been of
                no use may find something to give up.
        """
        if replaced:
            self._enough = 0
        if not self._mutex.acquire(blocking=False):
            return  # another thread is at it
        try:
            self._keep()
        except (CasError, OSError) as error:
            logger.warning("the store could not be kept within max_size: %s", error)
        finally:
            self._mutex.release()

    def _keep(self) -> None:
        config = self.context.settings()
        if config.max_size is None:
            return
        limit = config.max_size.on(self.context.layout.root)
        if self._size() <= max(limit, self._enough):
            return
        logger.info("making room: the store has more than %s", config.max_size)
        policy = Policy(config.keep_last, config.older_than, limit)
        try:
            report = gc.collect(self, grace=config.grace, policy=policy)
        except Busy:
            return
        left = self._size()
        if left <= limit:
            return
        self._enough = left + limit // GROWTH
        if not self._told:
            self._told = True
            logger.warning(
                "the store at %s has %d bytes of chunks, more than max_size allows (%s): %s",
                self.context.layout.root,
                left,
                config.max_size,
                "; ".join(report.problems)
                or "what is left is current, in use, or protected by keep_last, older_than or "
                "grace",
            )

    def _size(self) -> int:
        with self.context.index.read() as txn:
            return txn.totals()[1]
