"""Whether a chunk's bytes are what its digest says, and setting aside those that are not.

A damaged chunk of the right size counts as known, so nobody would write it again. Set aside, it is
missing, and the next put of its bytes brings it back.
"""

from __future__ import annotations

from cas import chunkfiles, fsio
from cas.context import Context
from cas.digest import Digest
from cas.errors import ChunkError
from cas.index import Entry


def find(context: Context, digest: Digest, size: int) -> ChunkError | None:
    """What is wrong with a chunk that should have ``size`` bytes."""
    path = context.layout.chunk(digest)
    if size > context.chunk_size:  # before memory is asked for
        return chunkfiles.damaged(digest, path, f"it has {size} bytes, more than a chunk can")
    try:
        chunkfiles.read_into(path, digest, size, memoryview(bytearray(size)))
    except ChunkError as error:
        return error
    return None


def is_good(context: Context, digest: Digest) -> bool:
    """Whether the chunk is there and its bytes are what the digest says."""
    size = chunkfiles.size_on_disk(context.layout.chunk(digest))
    return size is not None and find(context, digest, size) is None


def is_damaged(context: Context, digest: Digest) -> bool:
    """Whether a chunk is still there, and still damaged: a writer may have replaced it."""
    size = chunkfiles.size_on_disk(context.layout.chunk(digest))
    return size is not None and find(context, digest, size) is not None


def set_aside(context: Context, digest: Digest) -> bool:
    """Move a chunk to quarantine if it is still damaged now that nobody can replace it."""
    path = context.layout.chunk(digest)
    with context.index.write() as txn:
        actual = chunkfiles.size_on_disk(path)
        if actual is None:
            return False
        error = find(context, digest, actual)
        entry = txn.get(digest)
        if error is None:  # another writer stored it afresh, or only the entry was wrong
            if entry is None or entry.size != actual:
                txn.put(digest, Entry(actual, context.now(), context.now()))
            return False
        txn.delete(digest)
        fsio.rename(path, context.layout.quarantined(digest))
        fsio.sync_directories([path.parent, context.layout.quarantine])
    return True
