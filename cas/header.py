"""Creating a store, and deciding whether a directory is one that may be used."""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cas import filesystems, fsio
from cas.chunking import check_chunk_size
from cas.errors import (
    NetworkFilesystem,
    NotAStore,
    PermissionRefused,
    StoreNotFound,
    UnknownFormat,
    UsageError,
)
from cas.layout import FANOUT, FORMAT, Layout
from cas.modes import Modes
from cas.strictjson import canonical_json, load_json, require_keys

#: A longer ``cas.json`` is not one, and is not read any further.
_MAX_HEADER = 64 << 10


@dataclass(frozen=True, slots=True)
class Header:
    """The content of ``cas.json``."""

    format: int
    chunk_size: int
    id: str

    def encode(self) -> bytes:
        document = {"format": self.format, "chunk_size": self.chunk_size, "id": self.id}
        return canonical_json(document) + b"\n"


def check_filesystem(root: Path) -> None:
    """Refuse a place where flock and LMDB do not work.

    Raises:
        NetworkFilesystem
    """
    existing = root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    fstype = filesystems.type_of(existing)
    if filesystems.is_network(fstype):
        raise NetworkFilesystem(root, fstype)


def read(layout: Layout) -> Header:
    """Read and check ``cas.json``.

    Raises:
        StoreNotFound: there is no directory, or an empty one.
        NotAStore: there is something else.
        UnknownFormat: a store of another version.
    """
    root = layout.root
    try:
        with open(layout.header, "rb") as file:
            data = file.read(_MAX_HEADER + 1)
    except FileNotFoundError:
        if not root.is_dir() or _is_half_made(layout):
            raise StoreNotFound(root) from None
        if not layout.header.exists():
            raise NotAStore(root, "the directory holds other files") from None
        return read(layout)  # another process has just finished making it
    except NotADirectoryError:
        raise NotAStore(root, "it is a file, or lies below one") from None
    except IsADirectoryError:
        raise NotAStore(root, "its cas.json is a directory") from None
    except PermissionError as error:
        raise PermissionRefused(
            root, "read the store at", error.strerror or "permission denied"
        ) from None
    return _parse(root, data)


def _parse(root: Path, data: bytes) -> Header:
    try:
        if len(data) > _MAX_HEADER:
            raise UsageError(f"more than {_MAX_HEADER} bytes")
        document = load_json(data)
        if not isinstance(document, dict) or "format" not in document:
            raise UsageError("no format")
        if document["format"] != FORMAT:
            raise UnknownFormat(root, document["format"], FORMAT)
        fields = require_keys(document, ("format", "chunk_size", "id"), "the header")
        if type(fields["chunk_size"]) is not int or not isinstance(fields["id"], str):
            raise UsageError("a field has the wrong type")
        return Header(FORMAT, check_chunk_size(fields["chunk_size"]), fields["id"])
    except UsageError as error:
        raise NotAStore(root, f"its cas.json is not valid ({error})") from None


def _is_half_made(layout: Layout) -> bool:
    """Whether a creation was cut short here: only our own directories, with nothing in them."""
    ours = set(layout.directories())
    for path in layout.root.rglob("*"):
        leftover = path.parent == layout.tmp and path.name.startswith("header-")
        unnamed = path.name.startswith(".") and path.with_name(path.name.split(".")[1]) in ours
        if not leftover and not ((unnamed or path in ours) and path.is_dir()):
            return False
    return True


def create(layout: Layout, chunk_size: int, modes: Modes) -> Header:
    """Make a store at ``layout.root``; if another process is faster, use what it made.

    ``cas.json`` comes last, so a half-made store is none.

    Raises:
        NotAStore, PermissionRefused, NoSpace
    """
    header = Header(FORMAT, check_chunk_size(chunk_size), secrets.token_hex(16))
    root = layout.root
    try:
        with fsio.os_errors(root, "create a store at"):
            fsio.make_parents(root, modes.directory)
            for directory in layout.directories():
                fsio.make_directory(directory, modes.directory)
            temporary = layout.tmp / f"header-{header.id}"
            fsio.create_file(temporary, header.encode(), mode=modes.data, sync=True)
            fsio.link_exclusive(temporary, layout.header)
            fsio.unlink(temporary)
            fsio.sync_directories([root, layout.chunks, layout.manifests])
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise NotAStore(root, "it is a file, or lies below one") from None
        raise
    return read(layout)


def restore_directories(layout: Layout, modes: Modes) -> None:
    """Make the directories that a copy without empty ones, or a hand, took away."""
    wanted = layout.directories()
    with fsio.os_errors(layout.root):
        # Counting names is cheap, and enough: only a store that lacks some is looked at closely.
        tops = (layout.chunks, layout.manifests)
        found = sum(len(os.listdir(path)) for path in tops if path.is_dir())
        flat = wanted[: -len(tops) * len(FANOUT)]
        if found >= len(tops) * len(FANOUT) and all(path.is_dir() for path in flat):
            return
        if os.access(layout.root, os.W_OK | os.X_OK):
            missing = [path for path in wanted if not path.is_dir()]
            for path in missing:
                fsio.make_directory(path, modes.directory)
            fsio.sync_directories({path.parent for path in missing})


def is_writable(layout: Layout) -> bool:
    """Whether this process may create files in the store (False on a read-only mount)."""
    places = (layout.root, layout.tmp, layout.leases, layout.locks, layout.refs, layout.chunks)
    return all(os.access(path, os.W_OK | os.X_OK) for path in places)
