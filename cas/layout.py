"""Where everything lies in a store, and which names from outside may become part of a path.

No other module joins a path below the store's root. ``docs/format.md`` specifies the layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cas.digest import Digest
from cas.errors import InvalidName

FORMAT = 1

#: A name is part of a directory name of at most 255 bytes, in which ``/`` takes three.
MAX_NAME = 200
_NAME_CHARS = re.compile(r"[A-Za-z0-9._+=,-]+")
_GENERATION = re.compile(r"[0-9]{8,18}")
_BURIED = ".gone"
_HEX64 = re.compile(r"[0-9a-f]{64}")
_WRITER = re.compile(r"[0-9a-f]{32}")

#: The one fan-out level of ``chunks/`` and ``manifests/`` (see docs/adr/0002).
FANOUT = tuple(f"{i:02x}" for i in range(256))


def check_ref_name(name: str) -> str:
    """Return ``name`` if it may name an artifact.

    A name is one or more components of ``A-Z a-z 0-9 . _ + = , -`` joined by ``/``; no component
    is empty or starts with ``.`` or ``-``.

    Raises:
        InvalidName: with the reason.
    """
    if not name:
        raise InvalidName(name, "it is empty")
    if not name.isascii():
        raise InvalidName(name, "only ASCII letters, digits and . _ + = , - / are allowed")
    for component in name.split("/"):
        if not component:
            raise InvalidName(name, "it starts or ends with '/', or has an empty component")
        if component[0] in ".-":
            raise InvalidName(name, f"component {component!r} starts with {component[0]!r}")
        if not _NAME_CHARS.fullmatch(component):
            raise InvalidName(name, "only letters, digits and . _ + = , - / are allowed")
    if len(escape_ref_name(name)) > MAX_NAME:
        raise InvalidName(name, f"it is longer than {MAX_NAME} characters ('/' counts as three)")
    return name


def check_file_name(name: str) -> str:
    """Return ``name`` if it may name a file of an artifact: one path component, printable.

    Raises:
        InvalidName: with the reason.
    """
    kind = "file name"
    if not name or name in (".", ".."):
        raise InvalidName(name, "it is empty or a directory", kind=kind)
    if "/" in name or "\\" in name:
        raise InvalidName(name, "it must be one path component, without '/' or '\\'", kind=kind)
    if not name.isprintable():
        raise InvalidName(name, "it has control or unprintable characters", kind=kind)
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise InvalidName(name, "it is not valid Unicode", kind=kind) from None
    if len(encoded) > MAX_NAME:
        raise InvalidName(name, f"it is longer than {MAX_NAME} bytes", kind=kind)
    return name


def escape_ref_name(name: str) -> str:
    """One directory name for a ref name; ``%`` is in no valid name, so this is one to one."""
    return name.replace("/", "%2F")


def unescape_ref_name(directory: str) -> str:
    """The inverse of `escape_ref_name`.

    Raises:
        InvalidName: the directory was not made by this library.
    """
    return check_ref_name(directory.replace("%2F", "/"))


def parse_ref(text: str) -> tuple[str, int | None]:
    """Split ``NAME`` or ``NAME@GENERATION``.

    Raises:
        InvalidName: the name or the generation is malformed.
    """
    name, at, generation = text.partition("@")
    check_ref_name(name)
    if not at:
        return name, None
    if not re.fullmatch(r"[0-9]{1,18}", generation) or int(generation) < 1:
        raise InvalidName(text, "after '@' stands a generation: a whole number from 1 on")
    return name, int(generation)


@dataclass(frozen=True, slots=True)
class Layout:
    """Every path of the store at ``root``."""

    root: Path

    @property
    def header(self) -> Path:
        return self.root / "cas.json"

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def chunks(self) -> Path:
        return self.root / "chunks"

    @property
    def manifests(self) -> Path:
        return self.root / "manifests"

    @property
    def actions(self) -> Path:
        return self.root / "actions"

    @property
    def refs(self) -> Path:
        return self.root / "refs"

    @property
    def leases(self) -> Path:
        return self.root / "leases"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def index_lock(self) -> Path:
        """Shared by every index transaction, exclusive while the index is put in place."""
        return self.locks / "index"

    @property
    def index_gate(self) -> Path:
        """Held for a moment on the way to `index_lock`, so that who wants it alone gets it."""
        return self.locks / "index-gate"

    @property
    def write_lock(self) -> Path:
        """Taken before LMDB's own lock, which cannot be interrupted while it is waited for."""
        return self.locks / "write"

    @property
    def gc_lock(self) -> Path:
        return self.locks / "gc"

    @property
    def flights(self) -> Path:
        """Locks of the actions that are being computed now."""
        return self.locks / "actions"

    @property
    def action_journal(self) -> Path:
        return self.actions / "journal"

    @property
    def action_counters(self) -> Path:
        return self.actions / "counters"

    @property
    def journal_lock(self) -> Path:
        return self.locks / "journal"

    @property
    def sources(self) -> Path:
        """What is known of files outside the store."""
        return self.root / "sources"

    def source(self, name: str) -> Path:
        return self.sources / name

    def chunk(self, digest: Digest) -> Path:
        text = digest.hex()
        # One parse instead of three: this is asked for every chunk of every tensor.
        return Path(f"{self.root}/chunks/{text[:2]}/{text}")

    def manifest(self, digest: Digest) -> Path:
        text = digest.hex()
        return Path(f"{self.root}/manifests/{text[:2]}/{text}")

    def action(self, key: Digest) -> Path:
        text = key.hex()
        return self.actions / text[:2] / text

    def flight(self, key: Digest) -> Path:
        return self.flights / key.hex()

    def ref_dir(self, name: str) -> Path:
        return Path(f"{self.root}/refs/{escape_ref_name(check_ref_name(name))}")

    def ref(self, name: str, generation: int) -> Path:
        directory = escape_ref_name(check_ref_name(name))
        return Path(f"{self.root}/refs/{directory}/{generation:08d}")

    def buried(self, name: str, generation: int) -> Path:
        """What a removed generation leaves, so that its number is not used again."""
        path = self.ref(name, generation)
        return path.with_name(path.name + _BURIED)

    def lease(self, writer: str) -> Path:
        return self.leases / writer

    def staging(self, writer: str) -> Path:
        return self.tmp / writer

    def staged(self, writer: str, digest: Digest) -> Path:
        return Path(f"{self.root}/tmp/{writer}/{digest.hex()}")

    def quarantined(self, digest: Digest) -> Path:
        return self.quarantine / digest.hex()

    def quarantined_action(self, key: Digest) -> Path:
        return self.quarantine / f"action-{key.hex()}"

    def directories(self) -> list[Path]:
        """What a new store consists of, parents first. Records make their fan-out themselves."""
        flat = [self.chunks, self.manifests, self.refs, self.leases, self.tmp]
        flat += [self.actions, self.quarantine, self.locks, self.flights]
        return [*flat, *(top / sub for top in (self.chunks, self.manifests) for sub in FANOUT)]


def parse_digest_name(name: str) -> Digest | None:
    """The digest that a file name of ``chunks/``, ``manifests/`` or ``actions/`` spells."""
    return Digest(bytes.fromhex(name)) if _HEX64.fullmatch(name) else None


def parse_generation(name: str) -> int | None:
    """The generation that a file name below ``refs/<name>/`` spells, or None."""
    if not _GENERATION.fullmatch(name):
        return None
    generation = int(name)
    return generation if generation >= 1 and f"{generation:08d}" == name else None


def parse_buried(name: str) -> int | None:
    """The removed generation that a file name below ``refs/<name>/`` spells, or None."""
    return parse_generation(name.removesuffix(_BURIED)) if name.endswith(_BURIED) else None


def is_writer_id(name: str) -> bool:
    """Whether ``name`` is a writer's id: 32 lower-case hex digits."""
    return _WRITER.fullmatch(name) is not None
