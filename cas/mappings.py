"""Which part of which file a piece of memory is, for sure: what Linux tells of its mappings.

Memory that maps a file privately shows the file's bytes only where nobody wrote to it: a written
page is a copy. The kernel says of each page whether it is one. Whatever is not certain is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LINE = re.compile(
    rb"([0-9a-f]+)-([0-9a-f]+) ([r-])([w-])([x-])([ps]) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) "
    rb"([0-9]+) +(/[^\n]*)"
)
#: For so long a list of mappings may tell that memory is none; never that it is one.
_HINT_SECONDS: Final = 1.0
#: Of a page's eight bytes in pagemap the highest: present, in the swap, and a page of a file.
_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20
_ENTRY: Final = 8
#: Which values of that byte say that there is no copy of the page: it is the file's, or not here.
_CLEAN: Final = frozenset(
    value for value in range(256) if not value & _SWAPPED and (value & 0xA0) in (0x00, 0x20, 0xA0)
)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A range of addresses that maps a file from ``offset`` on."""

    start: int
    end: int
    offset: int
    device: int
    inode: int
    path: str
    may_be_written: bool
    shared: bool


@dataclass(frozen=True, slots=True)
class FileRange:
    """``length`` bytes of memory at ``address`` that are those at ``offset`` of the file ``path``.

    ``device`` and ``inode`` are the mapped file's; ``path`` may name another one by now.
    """

    address: int
    length: int
    offset: int
    device: int
    inode: int
    path: str


class Mappings:
    """The file mappings of this process, those of files below ``ignored`` left out."""

    def __init__(self, ignored: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._ignored = ignored.rstrip("/") + "/"
        self._clock = clock
        self._hint = b""
        self._hinted = float("-inf")

    def find(self, view: memoryview) -> FileRange | None:
        """The part of a file that ``view`` maps, if all of it does, unwritten; else None."""
        address = address_of(view)
        if address is None or not self._may_map(address):
            return None
        found = find_range(_read(), address, len(view))
        if found is None or found.path.startswith(self._ignored) or not is_unwritten(found):
            return None
        return found

    def _may_map(self, address: int) -> bool:
        """False if, a moment ago, this was no part of a file of interest: a cheap way out."""
        now = self._clock()
        if now - self._hinted > _HINT_SECONDS:
            self._hint, self._hinted = _read(), now
        first = next(mappings_from(self._hint, address), None)
        if first is None or first.start > address:
            return False
        return not first.path.startswith(self._ignored)


def is_unwritten(found: FileRange) -> bool:
    """Whether no page of the range is a private copy. False where the kernel does not tell."""
    page = mmap.PAGESIZE
    first = found.address // page
    count = (found.address + found.length + page - 1) // page - first
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        done = 0
        while done < count:
            want = min(count - done, 1 << 17) * _ENTRY
            data = os.pread(fd, want, (first + done) * _ENTRY)
            if len(data) != want or not set(data[_ENTRY - 1 :: _ENTRY]) <= _CLEAN:
                return False
            done += want // _ENTRY
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _read() -> bytes:
    """What the kernel tells of this process's mappings; nothing where there is no /proc."""
    try:
        with open("/proc/self/maps", "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def mappings_from(maps: bytes, address: int) -> Iterator[Mapping]:
    """The mappings of files in ``maps`` that end above ``address``, rising.

    ``maps`` is what proc_pid_maps(5) prints, rising addresses: thousands of lines in a process
    that maps chunks, so the place is found by halving. Mappings of no file are left out.
    """
    low, high = 0, len(maps)
    while low < high:
        middle = maps.rfind(b"\n", low, (low + high) // 2) + 1 or low
        end = maps.find(b"\n", middle, high)
        end = high if end < 0 else end + 1
        if _end_of(maps[middle:end]) <= address:
            low = end
        else:
            high = middle
    while low < len(maps):
        end = maps.find(b"\n", low)
        end = len(maps) if end < 0 else end
        mapping = parse_line(maps[low:end])
        if mapping is not None:
            yield mapping
        low = end + 1


def _end_of(line: bytes) -> int:
    return int(line[line.index(b"-") + 1 : line.index(b" ")], 16)


def parse_line(line: bytes) -> Mapping | None:
    """One line; None if the mapping is of no file, or of one that has no name any more."""
    match = _LINE.fullmatch(line)
    if match is None or match[11].endswith(b" (deleted)"):
        return None
    return Mapping(
        start=int(match[1], 16),
        end=int(match[2], 16),
        offset=int(match[7], 16),
        device=os.makedev(int(match[8], 16), int(match[9], 16)),
        inode=int(match[10]),
        path=os.fsdecode(match[11].replace(b"\\012", b"\n")),
        may_be_written=match[4] == b"w",
        shared=match[6] == b"s",
    )


def find_range(maps: bytes, address: int, length: int) -> FileRange | None:
    """The range in the file that some adjacent mappings of it show, without a gap or an overlap."""
    first: Mapping | None = None
    position = address
    for mapping in mappings_from(maps, address):
        if mapping.start > position or (mapping.shared and mapping.may_be_written):
            return None
        if first is None:
            first = mapping
        elif not _continues(first, mapping):
            return None
        position = mapping.end
        if position >= address + length:
            offset = address - first.start + first.offset
            return FileRange(address, length, offset, first.device, first.inode, first.path)
    return None


def _continues(first: Mapping, later: Mapping) -> bool:
    same = (first.device, first.inode, first.path) == (later.device, later.inode, later.path)
    return same and later.offset - first.offset == later.start - first.start


# --- where a buffer lies ------------------------------------------------------------------------


class _PyBuffer(ctypes.Structure):
    """CPython's Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(data: Buffer) -> int | None:
    """The address of a contiguous buffer's first byte, also of one that is read only."""
    buffer = _PyBuffer()
    try:
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(buffer), 0)
    except BufferError:
        return None
    try:
        address: int | None = buffer.buf
        return address
    finally:
        with contextlib.suppress(BufferError):
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
