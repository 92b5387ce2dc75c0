"""Putting the debug handles of this program into a result that was made for another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cas.errors import UsageError
from cas.executorch.actions.backends import Profile
from cas.executorch.actions.errors import Unrecordable
from cas.executorch.actions.xnnpack import UNSET


def check_relocatable(profile: Profile, results: Sequence[Any], handles: Sequence[int]) -> None:
    """See, when a result is recorded, that its handles will be found again.

    Raises:
        Unrecordable: they would not be.
    """
    if profile.policy.handles != "pattern":
        return
    if UNSET in handles:
        raise Unrecordable(f"a debug handle is {UNSET}, which stands for none")
    identity = {handle: handle for handle in handles}
    for result in results:
        if result.debug_handle_map:
            raise Unrecordable("the backend made a debug handle map of its own")
        blob = bytes(result.processed_bytes)
        if profile.relocate is None or profile.relocate(blob, identity) != blob:
            raise Unrecordable("the payload's debug handles were not found")


def relocate(
    profile: Profile, results: Sequence[Any], old: Sequence[int], new: Sequence[int]
) -> None:
    """Replace the handles ``old`` by ``new`` in results that were recorded.

    Raises:
        UsageError, Unrecordable: the record does not fit the program.
    """
    if profile.policy.handles != "pattern" or tuple(old) == tuple(new):
        return
    if len(old) != len(new) or profile.relocate is None:
        raise UsageError("the record has other debug handles than the program")
    mapping = dict(zip(old, new, strict=True))
    for result in results:
        result.processed_bytes = profile.relocate(bytes(result.processed_bytes), mapping)
