"""Finding the bytes of chunks in files that may hold them.

A digest says nothing about where its bytes are, and a file has too many places to hash at each. So
chunks are looked for where they are likely to begin: where a manifest says that a file of that size
has them; at the cuts of each tensor of a safetensors file, of each member of a zip archive (which
``.pt`` and ``.pt2`` files are) and of the whole file; and beside bytes that are known, because they
are the chunk's neighbours in an artifact's file. What is found is believed for its digest only.
"""

from __future__ import annotations

import itertools
import logging
import os
import stat
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from cas import fsio
from cas.chunking import cut
from cas.digest import Digest
from cas.errors import NotFound, UsageError
from cas.manifest import ChunkPart, DataPart, FileEntry, Part
from cas.strictjson import load_json

logger = logging.getLogger(__name__)

#: Bytes that mark a place. Long enough that chance does not repeat them.
_ANCHOR: Final = 64
#: Different bytes that an anchor must have: padding and runs of one value mark nothing.
_VARIETY: Final = 12
#: Passes over one file in search of anchors; each takes as long as reading it.
_MAX_PASSES: Final = 64
#: Places of one anchor that are tried.
_MAX_PLACES: Final = 256
_BLOCK: Final = 8 << 20
#: Times that all of a file is hashed at most, whatever tensors it claims to have.
_MAX_HASHED: Final = 4
_MAX_HEADER: Final = 64 << 20

#: Reads a chunk that the store has; None if it has not.
ReadChunk = Callable[[ChunkPart], "bytes | None"]
#: Called with each chunk that was found.
Take = Callable[[Digest, bytes], None]


class SourceMissing(NotFound):
    """A file or directory to repair from does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"there is no {path} to repair from")


def source_files(paths: Iterable[Path]) -> list[Path]:
    """The files among ``paths`` and below the directories among them, each once.

    Raises:
        SourceMissing
        UsageError: something else than a file or a directory, a pipe say.
    """
    files: dict[Path, None] = {}
    for path in paths:
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise SourceMissing(path) from None
        if stat.S_ISREG(mode):
            files[path] = None
        elif stat.S_ISDIR(mode):
            files.update(dict.fromkeys(_below(path)))
        else:
            raise UsageError(f"{path} is neither a file nor a directory")
    return list(files)


def _below(directory: Path) -> Iterator[Path]:
    for parent, directories, names in os.walk(directory):
        directories.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file() and not path.is_symlink():
                yield path


class Source:
    """One file to look in. It may change meanwhile: every read copies, and can be short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with fsio.os_errors(path, "read"):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer at the end of the file, or where it cannot be read."""
        if offset < 0 or offset >= self.size:
            return b""
        try:
            return os.pread(self._fd, min(length, self.size - offset), offset)
        except OSError as error:  # a bad sector, say: what is elsewhere may still be found
            logger.warning("%s cannot be read at %d: %s", self.path, offset, error.strerror)
            return b""

    def places(self, needle: bytes) -> Iterator[int]:
        """Where ``needle`` begins, from the start of the file on."""
        offset = 0
        while block := self.read(offset, _BLOCK + len(needle) - 1):
            at = block.find(needle)
            while at >= 0:
                yield offset + at
                at = block.find(needle, at + 1)
            offset += _BLOCK


class Search:
    """What is still wanted, and the ways of looking for it."""

    def __init__(
        self,
        wanted: dict[Digest, int],
        files: Sequence[FileEntry],
        chunk_size: int,
        read_chunk: ReadChunk,
        take: Take,
    ) -> None:
        """
        Args:
            wanted: digest -> size; what is found is removed from it.
            files: where manifests use the wanted chunks.
            chunk_size: bytes at which the store cuts.
        """
        self.wanted = wanted
        self._files = files
        self._chunk_size = chunk_size
        self._read_chunk = read_chunk
        self._take = take

    def look_in(self, source: Source) -> None:
        """Try every way, the cheap ones first, until nothing is wanted any more."""
        for way in (self._as_described, self._at_cuts, self._beside_neighbours):
            if self.wanted:
                way(source)

    def _offer(self, digest: Digest, data: bytes) -> bool:
        """Whether ``data`` is the wanted chunk; then it is taken."""
        if len(data) != self.wanted.get(digest) or Digest.of(data) != digest:
            return False
        del self.wanted[digest]
        self._take(digest, data)
        return True

    # --- where a manifest says ------------------------------------------------------------------

    def _as_described(self, source: Source) -> None:
        for entry in self._files:
            if entry.size == source.size:
                self._at_shift(source, entry, 0)
                self._from_slices(source, entry)

    def _at_shift(self, source: Source, entry: FileEntry, shift: int) -> None:
        """Whole chunks, if the source has the bytes of ``entry`` at other offsets by ``shift``."""
        for position, part in _positions(entry):
            if isinstance(part, ChunkPart) and part.digest in self.wanted:
                begin = position - part.offset + shift
                self._offer(part.digest, source.read(begin, part.size))

    def _from_slices(self, source: Source, entry: FileEntry) -> None:
        """Chunks of which the file has only slices, if these make up all of it."""
        slices: dict[Digest, list[tuple[int, int, int]]] = {}
        for position, part in _positions(entry):
            if isinstance(part, ChunkPart) and part.digest in self.wanted:
                slices.setdefault(part.digest, []).append((part.offset, part.length, position))
        for digest, pieces in slices.items():
            data = bytearray()
            for offset, length, position in sorted(pieces):
                skip = len(data) - offset
                if 0 <= skip < length:
                    data += source.read(position + skip, length - skip)
            self._offer(digest, bytes(data))

    # --- where data is cut ----------------------------------------------------------------------

    def _at_cuts(self, source: Source) -> None:
        """Hash each piece of each range once, if its length is that of something wanted."""
        sizes = set(self.wanted.values())
        budget = _MAX_HASHED * source.size
        for begin, length in dict.fromkeys([(0, source.size), *tensor_ranges(source)]):
            for offset, size in cut(length, self._chunk_size):
                if not self.wanted or budget <= 0:
                    return
                if size in sizes:
                    budget -= size
                    data = source.read(begin + offset, size)
                    self._offer(Digest.of(data), data)

    # --- beside what is known -------------------------------------------------------------------

    def _beside_neighbours(self, source: Source) -> None:
        """Where the source has a neighbour, it may have what is wanted at the same distance."""
        passes = 0
        for entry in self._files:
            parts = list(_positions(entry))
            for index, (position, part) in enumerate(parts):
                if not isinstance(part, ChunkPart) or part.digest not in self.wanted:
                    continue
                for anchor, known_at in self._anchors(parts, index):
                    if passes == _MAX_PASSES or part.digest not in self.wanted:
                        break
                    passes += 1
                    shift = self._shift_of(source, part, position, anchor, known_at)
                    if shift is not None:  # then more of this file may be found at once
                        self._at_shift(source, entry, shift)

    def _shift_of(
        self, source: Source, part: ChunkPart, position: int, anchor: bytes, known_at: int
    ) -> int | None:
        """Take the chunk at its distance from one of the places of ``anchor``; by how much the
        source is shifted there against the artifact's file."""
        for place in itertools.islice(source.places(anchor), _MAX_PLACES):
            shift = place - known_at
            begin = position - part.offset + shift
            if self._offer(part.digest, source.read(begin, part.size)):
                return shift
        return None

    def _anchors(
        self, parts: Sequence[tuple[int, Part]], index: int
    ) -> Iterator[tuple[bytes, int]]:
        """Known bytes close to a part, before it and behind it, with their place in the file."""
        for step in (-1, 1):
            near = index + step
            while 0 <= near < len(parts):
                position, part = parts[near]
                data = self._known(part)
                at = _telling(data, from_end=step < 0)
                if at is not None:
                    yield data[at : at + _ANCHOR], position + at
                    break
                near += step

    def _known(self, part: Part) -> bytes:
        if isinstance(part, DataPart):
            return part.data
        if isinstance(part, ChunkPart) and part.digest not in self.wanted:
            whole = self._read_chunk(part)
            if whole is not None:
                return whole[part.offset : part.offset + part.length]
        return b""


def _positions(entry: FileEntry) -> Iterator[tuple[int, Part]]:
    position = 0
    for part in entry.recipe.parts:
        yield position, part
        position += part.length


def _telling(data: bytes, *, from_end: bool) -> int | None:
    """Where in ``data`` there are bytes that would hardly occur by chance elsewhere."""
    starts = range(0, len(data) - _ANCHOR + 1, _ANCHOR)
    for at in reversed(starts) if from_end else starts:
        if len(set(data[at : at + _ANCHOR])) >= _VARIETY:
            return at
    return None


# --- containers ---------------------------------------------------------------------------------


def tensor_ranges(source: Source) -> list[tuple[int, int]]:
    """(offset, length) of the tensors, or members, of a file of a known kind.

    Nothing of any other, of a damaged one too: these places come on top of a search of it all.
    """
    if source.read(0, 2) == b"PK":
        return _zip_members(source)
    return _safetensors(source)


def _safetensors(source: Source) -> list[tuple[int, int]]:
    """https://huggingface.co/docs/safetensors: u64 length, JSON of that length, data."""
    head = source.read(0, 8)
    if len(head) < 8:
        return []
    (length,) = struct.unpack("<Q", head)
    begin = 8 + length
    if not 2 <= length <= _MAX_HEADER or begin > source.size:
        return []
    try:
        document = load_json(source.read(8, length))
    except UsageError:
        return []
    if not isinstance(document, dict):
        return []
    ranges = []
    for entry in document.values():
        match entry:
            case {"data_offsets": [int(first), int(end)]} if 0 <= first <= end:
                if begin + end <= source.size:
                    ranges.append((begin + first, end - first))
    return ranges


def _zip_members(source: Source) -> list[tuple[int, int]]:
    """The members that are stored as they are."""
    if _directory_size(source) > _MAX_HEADER:
        return []
    try:
        with zipfile.ZipFile(source.path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error):
        return []
    ranges = []
    for member in members:
        header = source.read(member.header_offset, 30)
        if member.compress_type != zipfile.ZIP_STORED or len(header) < 30:
            continue
        name, extra = struct.unpack("<HH", header[26:])
        ranges.append((member.header_offset + 30 + name + extra, member.file_size))
    return [(at, size) for at, size in ranges if size > 0 and at + size <= source.size]


def _directory_size(source: Source) -> int:
    """What the archive says that its directory takes: zipfile would read all of that at once."""
    tail_at = max(0, source.size - 65_557)
    tail = source.read(tail_at, 65_557)
    end = tail.rfind(b"PK\5\6")
    if end < 0 or len(tail) < end + 22:
        return 0
    (size,) = struct.unpack_from("<I", tail, end + 12)
    locator = tail[max(0, end - 20) : end]
    if len(locator) == 20 and locator.startswith(b"PK\6\7"):
        (at,) = struct.unpack_from("<Q", locator, 8)
        record = source.read(at, 56)
        if len(record) == 56:
            (size,) = struct.unpack_from("<Q", record, 40)
    return int(size)
