"""Tensors to byte streams and back: what `cas` knows about torch.

Importing this package imports torch; ``import cas`` does not.
"""

from __future__ import annotations

from cas.torch.checkpoint import CheckpointDamaged, CheckpointNotFound
from cas.torch.loading import Loaded, StateMismatch, load_into
from cas.torch.mapping import MapBudget, Mapper, map_recipe
from cas.torch.spill import Spilled, SpillUnsupported, spill
from cas.torch.streaming import (
    UnsupportedTensor,
    inner_tensors,
    memory_view,
    put_storage,
    put_tensor,
    storage_view,
)

__all__ = [
    "CheckpointDamaged",
    "CheckpointNotFound",
    "Loaded",
    "MapBudget",
    "Mapper",
    "SpillUnsupported",
    "Spilled",
    "StateMismatch",
    "UnsupportedTensor",
    "inner_tensors",
    "load_into",
    "map_recipe",
    "memory_view",
    "put_storage",
    "put_tensor",
    "spill",
    "storage_view",
]
