"""Saying before the long work that its result cannot fit.

What cannot be told in advance is left to the work, which fails clearly when the disk is full.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from cas import chunkfiles, filesystems
from cas.context import Context
from cas.digest import Digest
from cas.errors import NoSpace

#: From this many chunks on it is worth a look: fewer fail soon enough by themselves.
MIN_CHUNKS: Final = 16


def check_room(
    context: Context, pieces: Sequence[memoryview], staged: Container[Digest] = ()
) -> None:
    """Refuse to begin storing ``pieces``, each a chunk, where the new ones among them cannot fit.

    As long as all of them would fit, this costs one statvfs. Otherwise they are hashed once more
    than storing takes, to know which are new: known chunks, zeros and those that the writer has
    ``staged`` already take no space.

    Raises:
        NoSpace: with the bytes needed and free; nothing was written.
    """
    if len(pieces) < MIN_CHUNKS:
        return
    free = filesystems.free_bytes(context.layout.root)
    if sum(map(len, pieces)) <= free:
        return
    unknown = _unknown(context, pieces)
    needed = sum(size for digest, size in unknown.items() if digest not in staged)
    if needed > free:
        raise NoSpace(context.layout.root, needed=needed, free=free)


def _unknown(context: Context, pieces: Sequence[memoryview]) -> dict[Digest, int]:
    """The distinct chunks that the store does not have, and their sizes."""
    zeros = {Digest.of(bytes(size)) for size in {len(view) for view in pieces}}
    found: dict[Digest, int] = {}
    for view in pieces:
        digest = Digest.of(view)
        # Only an estimate: the file's size says enough, and the store's mutex is not needed.
        known = chunkfiles.size_on_disk(context.layout.chunk(digest)) == len(view)
        if not known and digest not in zeros:
            found[digest] = len(view)
    return found
