"""Where a run of bytes is cut into chunks. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from cas.errors import UsageError

DEFAULT_CHUNK_SIZE = 4 << 20
#: The page size of common machines divides it, so a chunk file can be mapped anywhere in a tensor.
MIN_CHUNK_SIZE = 64 << 10
MAX_CHUNK_SIZE = 64 << 20


def check_chunk_size(size: int) -> int:
    """Return ``size`` if a store may use it.

    Raises:
        UsageError: not a power of two from 64 KiB to 64 MiB.
    """
    if not MIN_CHUNK_SIZE <= size <= MAX_CHUNK_SIZE or size & (size - 1):
        raise UsageError(
            f"chunk_size {size} is not a power of two from {MIN_CHUNK_SIZE} to {MAX_CHUNK_SIZE}"
        )
    return size


def cut(length: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    """Yield the (offset, length) of each chunk of ``length`` bytes.

    Cuts start at the first byte, so equal tensors give equal chunks wherever they lie in a file.
    """
    for offset in range(0, length, chunk_size):
        yield offset, min(chunk_size, length - offset)
