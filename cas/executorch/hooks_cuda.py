"""Hooks: the weights that CudaBackend collects from AOTInductor.

Its collector writes each storage to a temporary file and keeps the file's owner, whose finalizer
removes it. Under capture a storage goes to the store as it is read, from the device or from the
host, and what stands in for the file owns nothing. The same storage of a second method is known
by its content and written nowhere.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir.scalar_type import ScalarType
from executorch.exir.tensor import get_scalar_type

from cas import fsio
from cas.executorch import seams
from cas.executorch.blob import StoredBytes
from cas.executorch.intake import Intake
from cas.executorch.labels import Label, dtype_name, label_named, shape_of
from cas.executorch.patches import Patches


class CollectedData(FileBackedData):  # type: ignore[misc]
    """`FileBackedData` for the collector, which makes one of what the writing function gave."""

    @classmethod
    def move_from(cls, path: str, sha256: Any = None) -> Any:
        # The hooked function gives the stored bytes themselves in place of their digest.
        if isinstance(sha256, StoredBytes):
            return sha256
        return FileBackedData.move_from(path, sha256)


def install(patches: Patches, intake: Intake) -> None:
    """Without the collector's module these weights come as files, and are taken in from there."""
    collector = seams.module_of("cuda storages")
    if collector is None:
        return
    original = collector._write_tensor_storage

    @functools.wraps(original)
    def write_tensor_storage(tensor: torch.Tensor, path: str) -> Any:
        if tensor.is_mkldnn:
            return original(tensor, path)  # which refuses it
        # The collector has made an empty file. It goes first, so that nothing is left of it
        # whatever happens to this process while the storage is read.
        fsio.unlink(Path(path))
        return intake.keep_storage(tensor.untyped_storage())

    patches.set(collector, "_write_tensor_storage", write_tensor_storage)
    patches.set(collector, "FileBackedData", CollectedData)
    _install_labels(patches, collector.CudaWeightCollector)


def _install_labels(patches: Patches, collector_class: Any) -> None:
    """Know the tensors by name, type and shape; their keys are all that the program tells."""
    original = collector_class._add_weight

    @functools.wraps(original)
    def add_weight(self: Any, entry: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = dtype_name(get_scalar_type(ScalarType(entry.dtype)))
        label_named(self._store, entry.storage_key, Label(entry.fqn, dtype, shape_of(entry.sizes)))
        return original(self, entry, *args, **kwargs)

    patches.set(collector_class, "_add_weight", add_weight)
