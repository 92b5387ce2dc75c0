"""Only the chunks of a manifest: all that gc and statistics need, in a fraction of the time.

A large store has a million parts in its manifests; `cas.manifest` makes an object of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cas.chunking import MAX_CHUNK_SIZE
from cas.digest import DIGEST_SIZE
from cas.errors import CasError
from cas.layout import FORMAT
from cas.manifest import FILE_KEYS, MANIFEST_KEYS, Manifest
from cas.strictjson import as_int, as_list, load_json, require_keys


@dataclass(frozen=True, slots=True)
class Closure:
    """``size`` is the bytes of a manifest's files, ``chunks`` each distinct chunk and its size."""

    size: int
    chunks: dict[bytes, int]

    @classmethod
    def parse(cls, data: bytes) -> Closure:
        """What `Manifest.parse` would say, in a fraction of the time.

        It looks at all that can name a chunk. What it does not look at (names, tensors, whether
        sizes add up) may be wrong; what it does not understand goes to `Manifest.parse`.

        Raises:
            ManifestDamaged
        """
        try:
            return _closure(load_json(data))
        except (CasError, LookupError, TypeError, ValueError):
            manifest = Manifest.parse(data)
            return cls(manifest.size, dict(manifest.chunks().items()))


def _closure(document: Any) -> Closure:
    """The closure of a well-formed manifest.

    Raises:
        CasError, LookupError, TypeError, ValueError: it is not one, or is one of another format.
    """
    top = require_keys(document, MANIFEST_KEYS, "a manifest")
    as_int(top["format"], "format", FORMAT, FORMAT)
    size = 0
    chunks: dict[bytes, int] = {}
    for entry in as_list(top["files"], "files"):
        size += as_int(require_keys(entry, FILE_KEYS, "a file")["size"], "a file's size")
        _add_chunks(entry["recipe"], chunks)
    if chunks:
        if set(map(len, chunks)) != {DIGEST_SIZE}:  # white space is no digit
            raise ValueError("a digest")
        as_int(min(chunks.values()), "a chunk's size", 1, MAX_CHUNK_SIZE)
        as_int(max(chunks.values()), "a chunk's size", 1, MAX_CHUNK_SIZE)
    return Closure(size, chunks)


def _add_chunks(recipe: Any, chunks: dict[bytes, int]) -> None:
    """A million parts pass through here when gc looks at a large store: hence so few checks."""
    to_bytes = bytes.fromhex
    for part in as_list(recipe, "a recipe"):
        kind = part[0]
        if kind == "chunk" or kind == "slice":
            chunks[to_bytes(part[1])] = part[2]
        elif kind != "zero" and kind != "data":
            raise ValueError("a part")
