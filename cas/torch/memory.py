"""The process's own memory, as the kernel sees it: what is anonymous, and giving it back."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

import torch

PAGE: Final = mmap.PAGESIZE

#: Page entries read at once: 512 KiB of them, for 256 MiB of memory.
_ENTRIES: Final = 64 << 10


def anonymous_bytes(address: int, length: int) -> int:
    """How many of ``length`` bytes lie in anonymous pages, which only the process itself can free.

    Pages of a mapped file do not count, and neither do pages that were never touched; pages of a
    private mapping that were written do, and so do pages that were swapped out. Where the kernel
    does not tell (``/proc/self/pagemap``), all do.
    """
    if length <= 0:
        return 0
    first, last = address // PAGE, -(-(address + length) // PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(first * 8)
            pages = sum(
                _anonymous_pages(pagemap.read(min(_ENTRIES, last - start) * 8))
                for start in range(first, last, _ENTRIES)
            )
    except OSError:
        return length
    return min(pages * PAGE, length)


def _anonymous_pages(entries: bytes) -> int:
    """Of the entries of proc_pid_pagemap(5), those in memory or swapped, and of no file."""
    if not entries:
        return 0
    flags = torch.frombuffer(bytearray(entries), dtype=torch.int64) >> 61 & 0b111
    return int(((flags & 0b110 != 0) & (flags & 0b001 == 0)).sum())


def return_freed_memory() -> None:
    """Give the kernel what is free in the heap.

    glibc serves large blocks from its heap once a few of them were freed, where small objects keep
    them from being returned: freed, they would still take their memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
