"""Files outside the store whose chunks are known: what has not changed is not hashed again.

A file is known by device, inode, size and both times. They change with every write, except that
two writes within one tick of the clock leave the same times, and that writes through a shared
mapping count only when the page was clean before. So a file is remembered only if, before it was
read, it had not changed for a while and its dirty pages were written back, and only on
filesystems that then notice the next write to them.

What is remembered saves time and is never needed: a file of it that is lost, torn or rotten is
read again, and a wrong answer would take a file that changed without any of its times changing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat as stat_module
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from cas import filesystems, fsio
from cas.digest import Digest
from cas.errors import CasError, UsageError
from cas.layout import Layout
from cas.manifest import Recipe, encode_part, parse_part
from cas.mappings import FileRange, Mappings, is_unwritten
from cas.modes import Modes
from cas.strictjson import (
    MAX_DOCUMENT_BYTES,
    Json,
    as_digest,
    as_int,
    as_list,
    canonical_json,
    load_json,
    require_keys,
)

logger = logging.getLogger(__name__)

#: Far more than a tick of any clock, or than clocks are usually corrected by.
SETTLED_NS: Final = 60 * 10**9
#: Filesystems on local disks, whose times come from this machine's clock.
DISKS: Final = frozenset(("btrfs", "ext2", "ext3", "ext4", "f2fs", "xfs", "zfs"))
#: Shorter memory is hashed in the time that it takes to find out what it is.
MIN_BYTES: Final = 2 << 20
#: Files remembered in one store; the least recently used are forgotten first.
MAX_FILES: Final = 1000
_TRAILER = len(str(Digest(bytes(32)))) + 1


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a range: what it is made of, and the BLAKE3 of all of it. Either may be
    None: not known."""

    recipe: Recipe | None = None
    digest: Digest | None = None

    def joined(self, other: Known) -> Known:
        """Both together; ``other`` wins."""
        return Known(other.recipe or self.recipe, other.digest or self.digest)


Ranges: TypeAlias = "dict[tuple[int, int], Known]"


@dataclass(frozen=True, slots=True)
class Identity:
    """What changes when a file does. Times are nanoseconds since the epoch."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Identity:
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def name(self) -> str:
        """The name of the file in which it is remembered, whatever its state."""
        return Digest.of(b"%d %d" % (self.device, self.inode)).hex()[:32]

    def is_settled(self, now: int) -> bool:
        """Whether the last change is so long ago that a later one cannot have the same times."""
        return max(self.modified, self.changed) <= now - SETTLED_NS


@dataclass(frozen=True, slots=True)
class Source:
    """A range of a file, and the state that the file was in when it was found there."""

    range: FileRange
    identity: Identity

    @property
    def key(self) -> tuple[int, int]:
        return self.range.offset, self.range.length


class Sources:
    """What one writer knows of files outside the store. Not thread safe."""

    def __init__(
        self,
        layout: Layout,
        modes: Modes,
        *,
        disks: frozenset[str] = DISKS,
        now: Callable[[], int],
    ) -> None:
        self._layout = layout
        self._modes = modes
        self._disks = disks
        self._now = now
        self._types: dict[int, bool] = {}
        self._known: dict[Identity, Ranges] = {}
        self._learnt: dict[Identity, Ranges] = {}
        self._watched: set[Identity] = set()

    def locate(self, found: FileRange) -> Source | None:
        """The file's state, if it is a file whose state tells whether it has changed."""
        try:
            stat = os.stat(found.path)
        except OSError:
            return None
        # Where they differ, the path names another file by now; or the filesystem has two minds
        # about its numbers (btrfs), and nothing can be known for sure.
        if (stat.st_dev, stat.st_ino) != (found.device, found.inode):
            return None
        if not stat_module.S_ISREG(stat.st_mode) or not self._is_on_disk(stat.st_dev, found.path):
            return None
        if found.offset + found.length > stat.st_size:  # the last page goes on behind the end
            return None
        return Source(found, Identity.of(stat))

    def _is_on_disk(self, device: int, path: str) -> bool:
        if device not in self._types:
            self._types[device] = filesystems.type_of(Path(path)) in self._disks
        return self._types[device]

    def recall(self, source: Source) -> Known:
        """What was known of the range when the file was in this state."""
        if source.identity not in self._known:
            self._known[source.identity] = read(self._layout, source.identity)
        return self._known[source.identity].get(source.key, Known())

    def watch(self, source: Source) -> bool:
        """Whether any write to the file from now on will show; asked before the range is read.

        Its dirty pages are written back for that: the next write to one of them counts then.
        """
        if source.identity not in self._watched:
            if not source.identity.is_settled(self._now()):
                return False
            try:
                fsio.sync_path(Path(source.range.path))
            except OSError:
                return False
            if self.locate(source.range) != source:
                return False
            self._watched.add(source.identity)
        return True

    def learn(self, source: Source, known: Known) -> None:
        """Remember it of a range that `watch` said yes to, if its file did not change meanwhile."""
        if self.locate(source.range) == source:
            joined = self.recall(source).joined(known)
            self._known[source.identity][source.key] = joined
            self._learnt.setdefault(source.identity, {})[source.key] = joined

    def save(self, staging: Path) -> None:
        """Write down what was learnt, by way of ``staging``. Not durably: it can be learnt again.

        Raises:
            NoSpace, PermissionRefused
        """
        learnt, self._learnt = self._learnt, {}
        for identity, ranges in learnt.items():
            path = self._layout.source(identity.name)
            there = read(self._layout, identity)  # others may have learnt more
            merged = {key: there.get(key, Known()).joined(known) for key, known in ranges.items()}
            data = encode(identity, {**there, **merged})
            if len(data) > MAX_DOCUMENT_BYTES:
                continue
            temporary = staging / f"source-{secrets.token_hex(8)}"
            with fsio.os_errors(path):
                fsio.make_directory(path.parent, self._modes.directory)
                fsio.create_file(temporary, data, mode=self._modes.file, sync=False)
                fsio.rename(temporary, path)
        if learnt:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # others forget too
            paths = [Path(entry.path) for entry in os.scandir(self._layout.sources)]
            if len(paths) > MAX_FILES:
                paths.sort(key=lambda path: path.stat().st_mtime)
                for path in paths[: len(paths) - MAX_FILES * 9 // 10]:
                    fsio.unlink(path)


class MappedSources:
    """What is known of memory that maps files which have not changed. Thread safe."""

    def __init__(self, sources: Sources, root: Path) -> None:
        self._sources = sources
        # Chunks that a model was loaded from; the kernel names them without symbolic links.
        self._mappings = Mappings(ignored=os.path.realpath(root))
        self._mutex = threading.Lock()

    def find(self, view: memoryview) -> Source | None:
        """The range of a file that ``view`` is, if that is sure, and worth to know."""
        if len(view) < MIN_BYTES:
            return None
        with self._mutex:
            found = self._mappings.find(view)
            return None if found is None else self._sources.locate(found)

    def recall(self, source: Source) -> Known:
        """What was learnt of the range."""
        with self._mutex:
            return self._sources.recall(source)

    def watch(self, source: Source) -> Source | None:
        """What can be learnt of after the range was read, which is about to be; None if not."""
        with self._mutex:
            return source if self._sources.watch(source) else None

    def learn(self, source: Source, known: Known) -> None:
        """Remember it of what `watch` gave, unless the file or the memory changed meanwhile."""
        with self._mutex:
            if is_unwritten(source.range):
                self._sources.learn(source, known)

    def save(self, staging: Path) -> None:
        """Write down what was learnt; an error loses it, and nothing else."""
        try:
            with self._mutex:
                self._sources.save(staging)
        except (CasError, OSError) as error:
            logger.info("what is known of files was not saved: %s", error)


# --- files --------------------------------------------------------------------------------------


def read(layout: Layout, identity: Identity) -> Ranges:
    """The ranges remembered of a file in this state; none if there are none, or no longer."""
    try:
        with open(layout.source(identity.name), "rb") as file:
            found, ranges = decode(file.read(MAX_DOCUMENT_BYTES + 1))
    except (OSError, CasError):
        return {}
    return ranges if found == identity else {}


def encode(identity: Identity, ranges: Ranges) -> bytes:
    """One line of canonical JSON, and one with its digest."""
    document = {
        "device": identity.device,
        "inode": identity.inode,
        "size": identity.size,
        "modified": identity.modified,
        "changed": identity.changed,
        "ranges": [[*place, *_encode_known(known)] for place, known in sorted(ranges.items())],
    }
    body = canonical_json(document) + b"\n"
    return body + f"{Digest.of(body)}\n".encode()


def _encode_known(known: Known) -> list[Json]:
    parts: Json = None
    if known.recipe is not None:
        parts = [encode_part(part) for part in known.recipe.parts]
    return [parts, None if known.digest is None else known.digest.hex()]


def decode(data: bytes) -> tuple[Identity, Ranges]:
    """
    Raises:
        UsageError: it is not what `encode` gives.
    """
    body, trailer = data[:-_TRAILER], data[-_TRAILER:]
    if trailer != f"{Digest.of(body)}\n".encode():
        raise UsageError("it does not match the digest in its last line")
    return parse(body)


def parse(body: bytes) -> tuple[Identity, Ranges]:
    """
    Raises:
        UsageError: it does not describe ranges of a file.
    """
    keys = ("device", "inode", "size", "modified", "changed", "ranges")
    top = require_keys(load_json(body), keys, "a known file")
    numbers = [as_int(top[key], key, 0, 2**64 - 1) for key in keys[:2]]
    identity = Identity(*numbers, *(as_int(top[key], key) for key in keys[2:5]))
    return identity, dict(_parse_ranges(as_list(top["ranges"], "ranges"), identity.size))


def _parse_ranges(listed: list[Any], size: int) -> Iterator[tuple[tuple[int, int], Known]]:
    for item in listed:
        match item:
            case [offset, length, parts, digest]:
                first = as_int(offset, "an offset", 0, size)
                count = as_int(length, "a length", 1, size - first)
                yield (
                    (first, count),
                    Known(
                        None if parts is None else _parse_recipe(parts, count),
                        None if digest is None else as_digest(digest, "a digest"),
                    ),
                )
            case _:
                raise UsageError("a range has four parts")


def _parse_recipe(parts: Any, size: int) -> Recipe:
    recipe = Recipe(tuple(parse_part(part) for part in as_list(parts, "a recipe")))
    if recipe.size != size:
        raise UsageError(f"a recipe gives {recipe.size} bytes of {size}")
    return recipe
