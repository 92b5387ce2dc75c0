"""Hook: lowered programs that are serialized to JSON, as an ETRecord of one is."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from cas.executorch.blob import StoredBytes
from cas.executorch.patches import Patches
from cas.executorch.seams import SERDE


def install(patches: Patches) -> None:
    """Let ExecuTorch's encoder write named data that is stored as the bytes it stands for.

    The format holds the bytes themselves, so this reads them into memory as stock does.
    """
    encoder: Any = importlib.import_module(SERDE).EnumEncoder
    original = encoder.default

    @functools.wraps(original)
    def default(self: Any, obj: Any) -> Any:
        return original(self, obj.to_bytes() if isinstance(obj, StoredBytes) else obj)

    patches.set(encoder, "default", default)
