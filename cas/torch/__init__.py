"""Tensors to byte streams and back: what `cas` knows about torch.

Importing this package imports torch; ``import cas`` does not.
"""

from __future__ import annotations

from cas.torch.mapping import MapBudget, Mapper, map_recipe
from cas.torch.streaming import (
    UnsupportedTensor,
    memory_view,
    put_storage,
    put_tensor,
    storage_view,
)

__all__ = [
    "MapBudget",
    "Mapper",
    "UnsupportedTensor",
    "map_recipe",
    "memory_view",
    "put_storage",
    "put_tensor",
    "storage_view",
]
