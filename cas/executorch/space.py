"""An early word about little space: before a long export, not at its end.

How large an export's files become is known when they are about to be written, and is checked then.
Before, the weights of the source are an estimate: quantization may make them smaller, and a
backend that packs them may keep some twice. So this warns and refuses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch.export import ExportedProgram

from cas import filesystems
from cas.executorch.loading import Method

log = logging.getLogger(__name__)


def weights_bytes(methods: Iterable[Method]) -> int:
    """Bytes of the weights of all methods, each storage once."""
    sizes: dict[int, int] = {}
    for tensor in chain.from_iterable(map(_tensors, methods)):
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            try:
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            except RuntimeError:  # of a subclass or a fake tensor: it has none of its own
                continue
    return sum(sizes.values())


def _tensors(method: Method) -> Iterator[torch.Tensor]:
    if isinstance(method, ExportedProgram):
        held = chain(method.state_dict.values(), method.constants.values())
        return (value for value in held if isinstance(value, torch.Tensor))
    return chain(method.module.parameters(), method.module.buffers())


def warn_of_little_space(methods: Mapping[str, Method], directory: Path) -> None:
    """Say so if the weights as they are would not fit where the files are to go."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    needed, free = weights_bytes(methods.values()), filesystems.free_bytes(place)
    if needed > free:
        log.warning(
            "the weights have %d bytes, and only %d are free for the output in %s: unless the "
            "export makes them smaller, it will fail at its end",
            needed,
            free,
            directory,
        )
