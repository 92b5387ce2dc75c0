"""Debug handles inside of XNNPACK's payload, and putting others in their place.

The payload is a small header and a flatbuffer (``XNNGraph``), in which every node has the debug
handle of the node it was made from. `docs/adr` explains why they are replaced on a hit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final

from cas.executorch.actions.errors import Unrecordable

_MAGIC: Final = b"XH00"
#: Where the header says where the flatbuffer begins.
_OFFSET_AT: Final = 10
#: What a node without a debug handle has.
UNSET: Final = 65535
#: Slots of ``XNNGraph.xnodes`` and ``XNode.debug_handle`` in their tables.
_XNODES: Final = 6
_HANDLE: Final = 8


def relocate(payload: bytes, handles: Mapping[int, int]) -> bytes:
    """The payload with every handle replaced by the one that it is mapped to.

    Raises:
        Unrecordable: the payload is not what XNNPACK makes, or holds a handle that is not mapped.
    """
    changed = bytearray(payload)
    try:
        for place in _places(payload):
            handle = _u32(payload, place)
            if handle != UNSET:
                struct.pack_into("<I", changed, place, handles[handle])
    except KeyError as error:
        raise Unrecordable(f"XNNPACK's payload holds the unknown debug handle {error}") from None
    except struct.error:
        raise Unrecordable("XNNPACK's payload is cut off or damaged") from None
    return bytes(changed)


def _places(payload: bytes) -> Iterator[int]:
    """Where in the payload the handles are."""
    if payload[4:8] != _MAGIC:
        raise Unrecordable("XNNPACK's payload does not begin as expected")
    start = _u32(payload, _OFFSET_AT)
    graph = start + _u32(payload, start)
    field = _field(payload, graph, _XNODES)
    if field is None:
        return
    vector = field + _u32(payload, field)
    for index in range(_u32(payload, vector)):
        entry = vector + 4 + 4 * index
        place = _field(payload, entry + _u32(payload, entry), _HANDLE)
        if place is None:
            raise Unrecordable("a node in XNNPACK's payload has no debug handle")
        yield place


def _field(payload: bytes, table: int, slot: int) -> int | None:
    """Where a field of a flatbuffer's table is; None for one that is left out."""
    virtual = table - struct.unpack_from("<i", payload, table)[0]
    if virtual < 0 or slot + 2 > _u16(payload, virtual):
        return None
    offset = _u16(payload, virtual + slot)
    return table + offset if offset else None


def _u16(payload: bytes, offset: int) -> int:
    return int(struct.unpack_from("<H", payload, offset)[0])


def _u32(payload: bytes, offset: int) -> int:
    return int(struct.unpack_from("<I", payload, offset)[0])
