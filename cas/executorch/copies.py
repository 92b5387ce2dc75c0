"""Private copies of tensors that live in chunk files instead of anonymous memory."""

from __future__ import annotations

import torch

from cas.executorch.intake import CaptureWriter
from cas.manifest import Recipe
from cas.torch.mapping import Mapper
from cas.torch.streaming import memory_view, put_storage, put_tensor


class PrivateCopies:
    """Copies tensors by storing their bytes and mapping the chunks copy-on-write.

    Nothing is remembered from one copy to the next. A tensor's bytes can change between two
    copies in ways that leave no trace (``t.data.mul_()`` does not even change ``t._version``), so
    each copy hashes what is there now; bytes that are known cost no write.
    """

    def __init__(self, writer: CaptureWriter, mapper: Mapper) -> None:
        self._writer = writer
        self._mapper = mapper

    def of_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """A private copy of a whole storage; None where a plain copy is the better one."""
        if storage.device.type != "cpu" or storage.nbytes() < self._mapper.min_size:
            return None
        return self._mapper.storage(put_storage(self._writer, storage))

    def of_recipe(self, recipe: Recipe) -> torch.UntypedStorage | None:
        """The recipe's bytes as a private mapping; None where a plain copy is the better one."""
        return None if recipe.size < self._mapper.min_size else self._mapper.storage(recipe)

    def of_tensor(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A private copy of the bytes under a tensor, with the same strides and no gradient.

        None where a plain copy is the better one, or the tensor is not one range of plain bytes.
        """
        view = memory_view(tensor)
        if view is None or len(view) < self._mapper.min_size:
            return None
        storage = self._mapper.storage(self._writer.put(view))
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storage, 0, tensor.size(), tensor.stride())

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A contiguous tensor of a device as a private mapping in host memory.

        The bytes pass through the host in pieces. None where a plain copy is the better one.
        """
        if tensor.numel() * tensor.element_size() < self._mapper.min_size:
            return None
        storage = self._mapper.storage(put_tensor(self._writer, tensor))
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(storage, 0, tensor.size(), tensor.stride())
