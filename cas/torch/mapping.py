"""A recipe as a torch storage whose pages are the store's chunk files.

The mapping is private: a write goes to a page of the process's own (copy on write) and never to
the store. Reading costs clean file pages, which the kernel can drop at any time, and no anonymous
memory.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import torch

from cas.digest import Digest
from cas.errors import ChunkDamaged
from cas.manifest import ChunkPart, DataPart, Part, Recipe
from cas.torch.streaming import storage_view

log = logging.getLogger("cas.torch.mapping")

#: Smaller storages are copied: a mapping is a limited resource and a copy of this size is cheap.
MIN_MAPPED: Final = 1 << 20

PAGE: Final = mmap.PAGESIZE
MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
_RW: Final = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED: Final = ctypes.c_void_p(-1).value


class ChunkFiles(Protocol):
    """The part of a store's writer that gives access to chunk files."""

    def open_chunk(self, digest: Digest, /) -> int: ...


class MapBudget:
    """How many mappings may be live at once, below the kernel's ``vm.max_map_count``.

    Beyond the kernel's limit not only our mappings fail but any allocation of the process, so the
    budget leaves a quarter of what was free at the start to everybody else.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.warned = False
        # A collected mapping gives its share back, and the collector may run inside `take`.
        self._lock = threading.RLock()

    @classmethod
    def of_kernel(cls) -> MapBudget:
        try:
            limit = int(Path("/proc/sys/vm/max_map_count").read_text())
            with open("/proc/self/maps", "rb") as maps:
                used = sum(1 for _ in maps)
        except (OSError, ValueError):
            limit, used = 65530, 4096
        return cls(max(0, (limit - used) * 3 // 4))

    def take(self, count: int) -> bool:
        with self._lock:
            if self.used + count > self.limit:
                return False
            self.used += count
            return True

    def give(self, count: int) -> None:
        with self._lock:
            self.used -= count

    def warn_once(self, reason: str) -> None:
        if not self.warned:
            self.warned = True
            log.warning(
                "fell back to plain copies in memory instead of mapping chunk files: %s", reason
            )


class _Defaults:
    """The process-wide budget, measured on first use."""

    budget: MapBudget | None = None


def default_budget() -> MapBudget:
    if _Defaults.budget is None:
        _Defaults.budget = MapBudget.of_kernel()
    return _Defaults.budget


class Mapper:
    """Maps recipes for one writer, and checks each chunk's content the first time it is used.

    The check matters: a chunk that the store already had is trusted by its name, and a rotten one
    would otherwise flow into a backend and come out as new data that verifies clean.
    """

    def __init__(
        self,
        files: ChunkFiles,
        *,
        min_size: int = MIN_MAPPED,
        budget: MapBudget | None = None,
        check: bool = True,
    ) -> None:
        self.min_size = min_size
        self.mapped_bytes = 0
        self.copied_bytes = 0
        self._files = files
        self._budget = budget
        self._check = check
        self._checked: set[Digest] = set()

    def storage(self, recipe: Recipe) -> torch.UntypedStorage:
        """A storage with the recipe's bytes, private to whoever holds it.

        Raises:
            ChunkDamaged: a chunk file does not hold what its name says.
            ChunkMissing: a chunk file is gone.
        """
        storage = self.mapped(recipe)
        if storage is None:
            self.copied_bytes += recipe.size
            return self._copied(recipe)
        return storage

    def mapped(self, recipe: Recipe) -> torch.UntypedStorage | None:
        """`storage`, but None instead of a copy in memory where the recipe cannot be mapped."""
        storage = self._mapped(recipe) if recipe.size >= max(self.min_size, 1) else None
        if storage is not None:
            self.mapped_bytes += recipe.size
        return storage

    def _copied(self, recipe: Recipe) -> torch.UntypedStorage:
        storage = torch.empty(recipe.size, dtype=torch.uint8).untyped_storage()
        view = storage_view(storage)
        for position, part in _positions(recipe):
            self._fill(part, view[position : position + part.length], zeroed=False)
        return storage

    def _mapped(self, recipe: Recipe) -> torch.UntypedStorage | None:
        budget = self._budget or default_budget()
        if not sys.platform.startswith("linux"):
            budget.warn_once(f"not supported on {sys.platform}")
            return None
        wanted = 1 + sum(1 for _ in recipe.chunks())
        if not budget.take(wanted):
            budget.warn_once(
                f"{budget.used} of {budget.limit} mappings are in use; raise vm.max_map_count"
            )
            return None
        try:
            region = _Region(recipe.size, budget, wanted)
        except OSError as error:
            budget.give(wanted)
            _require_out_of_memory(error, budget)
            return None
        try:
            self._map_parts(region, recipe)
        except OSError as error:
            region.release()
            _require_out_of_memory(error, budget)
            return None
        except BaseException:
            region.release()
            raise
        return region.storage()

    def _map_parts(self, region: _Region, recipe: Recipe) -> None:
        for position, part in _positions(recipe):
            view = region.view(position, part.length)
            last = position + part.length == recipe.size
            if isinstance(part, ChunkPart) and _fits_pages(position, part, last):
                self._map_chunk(region, position, part)
            else:
                self._fill(part, view, zeroed=True)

    def _map_chunk(self, region: _Region, position: int, part: ChunkPart) -> None:
        descriptor = self._files.open_chunk(part.digest)
        try:
            # A mapping beyond the end of a short file would be a SIGBUS instead of an error.
            _check_size(descriptor, part)
            region.map(position, part.length, descriptor, part.offset)
            if self._check and part.digest not in self._checked:
                whole = part.length == part.size
                view = region.view(position, part.length) if whole else None
                data = view if view is not None else _read_all(descriptor, part.size)
                self._verify(part, data, descriptor)
        finally:
            os.close(descriptor)

    def _fill(self, part: Part, view: memoryview, *, zeroed: bool) -> None:
        if isinstance(part, DataPart):
            view[:] = part.data
        elif isinstance(part, ChunkPart):
            descriptor = self._files.open_chunk(part.digest)
            try:
                _check_size(descriptor, part)
                data = _read_all(descriptor, part.size)
                if self._check and part.digest not in self._checked:
                    self._verify(part, data, descriptor)
            finally:
                os.close(descriptor)
            view[:] = data[part.offset : part.offset + part.length]
        elif not zeroed:
            ctypes.memset(ctypes.addressof(ctypes.c_ubyte.from_buffer(view)), 0, len(view))

    def _verify(self, part: ChunkPart, data: memoryview, descriptor: int) -> None:
        if Digest.of(data) != part.digest:
            raise _damaged(part, descriptor, "its content does not match its digest")
        self._checked.add(part.digest)


def is_mapping(storage: torch.UntypedStorage) -> bool:
    """Whether a storage's memory is a mapping that a `Mapper` of this process made."""
    return storage.device.type == "cpu" and storage.data_ptr() in _LIVE


def map_recipe(
    files: ChunkFiles,
    recipe: Recipe,
    *,
    min_size: int = MIN_MAPPED,
    budget: MapBudget | None = None,
) -> torch.UntypedStorage:
    """One recipe as a private (copy on write) mapping; see `Mapper`."""
    return Mapper(files, min_size=min_size, budget=budget).storage(recipe)


#: Where the mappings begin that a storage uses.
_LIVE: Final[set[int]] = set()


class _Region:
    """A reserved range of addresses, anonymous until parts of it are mapped over."""

    def __init__(self, size: int, budget: MapBudget, mappings: int) -> None:
        self.size = size
        self._length = -(-size // PAGE) * PAGE
        self._budget = budget
        self._mappings = mappings
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._base = _libc_mmap(0, self._length, flags, -1, 0)
        self._array = (ctypes.c_ubyte * size).from_address(self._base)

    def map(self, position: int, length: int, descriptor: int, offset: int) -> None:
        flags = mmap.MAP_PRIVATE | MAP_FIXED
        _libc_mmap(self._base + position, length, flags, descriptor, offset)

    def view(self, position: int, length: int) -> memoryview:
        return memoryview(self._array).cast("B")[position : position + length]

    def storage(self) -> torch.UntypedStorage:
        finalizer = weakref.finalize(
            self._array, _release, self._base, self._length, self._budget, self._mappings
        )
        # At exit the process gives everything back anyway, and a tensor may outlive this handler.
        finalizer.atexit = False
        _LIVE.add(self._base)
        return torch.frombuffer(self._array, dtype=torch.uint8).untyped_storage()

    def release(self) -> None:
        _release(self._base, self._length, self._budget, self._mappings)


def _release(base: int, length: int, budget: MapBudget, mappings: int) -> None:
    _LIVE.discard(base)  # before another thread can be given the address
    _LIBC.munmap(base, length)
    budget.give(mappings)


def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


_LIBC: Final = _load_libc()


def _libc_mmap(address: int, length: int, flags: int, descriptor: int, offset: int) -> int:
    """mmap(2), which the standard module offers only without an address."""
    result = _LIBC.mmap(address or None, length, _RW, flags, descriptor, offset)
    if result is None or result == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


def _positions(recipe: Recipe) -> Iterator[tuple[int, Part]]:
    position = 0
    for part in recipe.parts:
        yield position, part
        position += part.length


def _fits_pages(position: int, part: ChunkPart, last: bool) -> bool:
    if position % PAGE or part.offset % PAGE:
        return False
    return last or part.length % PAGE == 0


def _check_size(descriptor: int, part: ChunkPart) -> None:
    size = os.fstat(descriptor).st_size
    if size != part.size:
        raise _damaged(part, descriptor, f"it has {size} bytes instead of {part.size}")


def _damaged(part: ChunkPart, descriptor: int, detail: str) -> ChunkDamaged:
    try:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        path = Path(part.digest.hex())
    return ChunkDamaged(str(part.digest), path, detail=detail)


def _read_all(descriptor: int, size: int) -> memoryview:
    buffer = memoryview(bytearray(size))
    position = 0
    while position < size:
        count = os.preadv(descriptor, [buffer[position:]], position)
        if count == 0:
            break
        position += count
    return buffer[:position]


def _require_out_of_memory(error: OSError, budget: MapBudget) -> None:
    if error.errno != errno.ENOMEM:
        raise error
    budget.warn_once(f"the kernel refused a mapping ({error.strerror})")
