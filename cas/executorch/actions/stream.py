"""A stream of tagged, length-prefixed values: what two different inputs can never share."""

from __future__ import annotations

import struct
from typing import Final

from cas.digest import Digest

_LENGTH: Final = struct.Struct("<Q")


class Stream:
    """Values in order, each as tag, length and bytes, so that no two sequences look alike."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def put(self, tag: bytes, payload: bytes = b"") -> None:
        """``tag`` has two bytes."""
        self._parts.append(tag + _LENGTH.pack(len(payload)) + payload)

    def put_text(self, tag: bytes, text: str) -> None:
        self.put(tag, text.encode("utf-8", "surrogatepass"))

    def put_count(self, tag: bytes, count: int) -> None:
        self.put(tag, _LENGTH.pack(count))

    def bytes(self) -> bytes:
        return b"".join(self._parts)

    def digest(self) -> Digest:
        return Digest.of(self.bytes())
