"""Keeping a store within its largest size, while it is written to."""

from __future__ import annotations

import contextlib
import logging
import threading

from cas import gc
from cas.config import Config
from cas.context import Context
from cas.digest import Digest
from cas.errors import Busy, CasError, NoSpace
from cas.index import Stuck
from cas.retention import Policy

logger = logging.getLogger(__name__)

#: Where a gc could not make the store small enough, the next one waits until the store has grown by
#: this part of its limit: it walks the whole store, and would find the same.
GROWTH = 20
#: What one writer found out so holds for the others too, for this many times as long as it took,
#: within these bounds (seconds): grace passes, and what is protected by its age grows older.
PATIENCE = 20
SHORTEST, LONGEST = 10, 3600


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
            self._keep(replaced)
        except (CasError, OSError) as error:
            logger.warning("the store could not be kept within max_size: %s", error)
        finally:
            self._mutex.release()

    def _keep(self, replaced: bool) -> None:
        config = self.context.settings()
        if config.max_size is None:
            return
        limit = config.max_size.on(self.context.layout.root)
        size, stuck = self._look()
        if size <= max(limit, self._enough):
            if replaced and stuck.policy:  # when it does not fit any more, this can be dropped
                reconsider(self.context)
            return
        if replaced:
            stuck = reconsider(self.context)
        elif self._is_stuck(stuck, size, _fingerprint(config, limit)):
            self._tell(config, size, "a gc a short while ago could drop nothing more")
            return
        self._collect(config, limit, stuck)

    def _collect(self, config: Config, limit: int, stuck: Stuck) -> None:
        logger.info("making room: the store has more than %s", config.max_size)
        policy = Policy(config.keep_last, config.older_than, limit)
        began = self.context.clock()
        try:
            report = gc.collect(self, grace=config.grace, policy=policy)
        except Busy:
            return
        left, _ = self._look()
        if left <= limit:
            return
        self._enough = left + limit // GROWTH
        # Not because of who lives now, or of what could not be read: that may be over at any time.
        if report.kept_bytes > limit and not report.problems:
            seconds = min(max(PATIENCE * (self.context.clock() - began), SHORTEST), LONGEST)
            until = self.context.now() + int(seconds)
            fingerprint = _fingerprint(config, limit)
            _remember(self.context, Stuck(stuck.changes, fingerprint, self._enough, until))
        self._tell(
            config,
            left,
            "; ".join(report.problems)
            or "what is left is current, in use, or protected by keep_last, older_than or grace",
        )

    def _look(self) -> tuple[int, Stuck]:
        with self.context.index.read() as txn:
            return txn.totals()[1], txn.stuck()

    def _is_stuck(self, stuck: Stuck, size: int, fingerprint: int) -> bool:
        """Whether another writer's gc has lately found that there is nothing to drop."""
        left = stuck.until - self.context.now()
        # More than the longest is left only if the clock was set back.
        return stuck.policy == fingerprint and size <= stuck.enough and 0 < left <= LONGEST

    def _tell(self, config: Config, size: int, why: str) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "the store at %s has %d bytes of chunks, more than max_size allows (%s): %s",
                self.context.layout.root,
                size,
                config.max_size,
                why,
            )


def reconsider(context: Context) -> Stuck:
    """Have the next writer look again what it can drop, because something can be dropped by now.

    A disk that is too full for it is no error: what was remembered does not hold for long.
    """
    with contextlib.suppress(NoSpace), context.index.write() as txn:
        changed = Stuck(changes=(txn.stuck().changes + 1) % 2**64)
        txn.put_stuck(changed)
        return changed
    return Stuck()


def _remember(context: Context, stuck: Stuck) -> None:
    """Unless something became old while gc looked."""
    with contextlib.suppress(NoSpace), context.index.write() as txn:
        if txn.stuck().changes == stuck.changes:
            txn.put_stuck(stuck)


def _fingerprint(config: Config, limit: int) -> int:
    """Not 0: that stands for nothing remembered."""
    rules = (limit, config.keep_last, config.older_than, config.grace)
    return int.from_bytes(Digest.of(repr(rules).encode())[:8], "little") | 1
