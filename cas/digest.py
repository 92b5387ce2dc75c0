"""BLAKE3-256 digests as a value type (https://github.com/BLAKE3-team/BLAKE3-specs)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from blake3 import blake3

from cas.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

DIGEST_SIZE = 32
#: For long runs of bytes. One in a forked child: the hasher's pool of threads does not survive
#: fork, and a child that handed it work would wait for ever.
_threads = blake3.AUTO
_TEXT = re.compile(r"blake3:([0-9a-f]{64})")


def _after_fork() -> None:
    global _threads
    _threads = 1


os.register_at_fork(after_in_child=_after_fork)


def long_hasher() -> blake3:
    """A BLAKE3 hasher that uses every core for long updates, and is safe after fork."""
    return blake3(max_threads=_threads)


class Digest(bytes):
    """The BLAKE3 of some bytes: 32 raw bytes inside, ``blake3:<64 hex>`` outside.

    A subclass of ``bytes``, so that it is an index key, a lease record and a dictionary key as it
    stands, at no cost per chunk.
    """

    __slots__ = ()

    def __new__(cls, raw: bytes) -> Digest:
        if len(raw) != DIGEST_SIZE:
            raise UsageError(f"a digest has {DIGEST_SIZE} bytes, got {len(raw)}")
        return super().__new__(cls, raw)

    @classmethod
    def of(cls, data: Buffer) -> Digest:
        """Hash ``data`` on the calling thread (the GIL is released for all but tiny buffers)."""
        return cls(blake3(data).digest())

    @classmethod
    def of_stream(cls, pieces: Iterable[Buffer]) -> Digest:
        """Hash the concatenation of ``pieces``, each piece with every core."""
        hasher = long_hasher()
        for piece in pieces:
            hasher.update(piece)
        return cls(hasher.digest())

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Read ``blake3:<64 lower-case hex digits>``.

        Raises:
            UsageError: anything else, so that a digest from outside can never be a path.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise UsageError(f"not a digest: {str(text)[:80]!r} (expected blake3:<64 hex digits>)")
        return cls(bytes.fromhex(match[1]))

    def __str__(self) -> str:
        return "blake3:" + self.hex()

    def __repr__(self) -> str:
        return f"Digest({self.hex()[:12]}…)"
