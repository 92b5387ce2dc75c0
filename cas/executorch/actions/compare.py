"""Whether a record and a fresh compile of the same thing agree."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cas.executorch.actions.lowered import content_digest

#: A content digest in the name of a piece of named data.
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def differences(recorded: Sequence[Any], fresh: Sequence[Any], *, exact: bool) -> list[str]:
    """What is not the same, in words.

    Without ``exact`` only what the rest of the program relies on is compared: compilers that
    choose among kernels by measuring them do not make the same bytes twice.
    """
    if len(recorded) != len(fresh):
        return ["the number of results"]
    found = []
    for number, (old, new) in enumerate(zip(recorded, fresh, strict=True)):
        where = f" of partition {number}" if len(fresh) > 1 else ""
        found += [f"{what}{where}" for what in _differences(old, new, exact)]
    return found


def _differences(old: Any, new: Any, exact: bool) -> list[str]:
    found = []
    if exact and content_digest(old.processed_bytes) != content_digest(new.processed_bytes):
        found.append("the delegate's blob")
    if old.debug_handle_map != new.debug_handle_map:
        found.append("the debug handles")
    before, after = old.data_store_output, new.data_store_output
    if (before is None) != (after is None):
        found.append("the presence of named data")
    elif before is not None:
        found += _store_differences(before, after, exact)
    return found


def _store_differences(old: Any, new: Any, exact: bool) -> list[str]:
    if _tables(old, exact) != _tables(new, exact):
        return ["the names, alignments or layouts of named data"]
    if exact:
        before = [content_digest(buffer) for buffer in old.buffers]
        after = [content_digest(buffer) for buffer in new.buffers]
        if before != after:
            return ["the named data"]
    return []


def _tables(store: Any, exact: bool) -> list[tuple[str | None, list[Any]]]:
    """The tables in order, by the files that they are for."""
    tables: list[tuple[str | None, Mapping[str, Any]]] = [(None, store.pte_data)]
    tables += store.external_data.items()
    return [(tag, [_entry(key, entry, exact) for key, entry in t.items()]) for tag, t in tables]


def _entry(key: str, entry: Any, exact: bool) -> Any:
    layout = entry.tensor_layout
    shape = None if layout is None else (layout.scalar_type, layout.sizes, layout.dim_order)
    return (key if exact else _DIGEST.sub("*", key), entry.alignment, shape)
