"""The dense weights file of AOTInductor: which bytes it holds, in which order, at which offsets.

ExecuTorch before 1.5, its Metal backend, and packages of plain ``torch._inductor.aot_compile`` with
``package_constants_on_disk_format="binary_blob"`` keep all constants of one compiled graph in one
file (``*_weights.blob``). The file has no header and no table. The compiled code knows a size for
each constant and finds the next one by adding it up, so the layout is part of the format:

- The constants stand in the order of the graph's constants, without those that were folded away.
- A constant without elements takes no bytes, whatever its storage holds. Any other one is its
  whole storage, also where the tensor is a view of a part of it.
- Where every constant is on a CUDA device they are packed; otherwise each is padded with zeros to
  a multiple of 64 bytes, the last one too. A graph without constants has an empty file.

The rules were read in torch 2.13 (``AotCodeCompiler.compile``); a test runs that very code against
this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from cas.executorch.intake import put_storage_or_literal
from cas.manifest import Recipe, ZeroPart
from cas.torch.streaming import ChunkSink, UnsupportedTensor

#: ``ALIGN_BYTES`` of ``torch._inductor.utils``.
ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """One constant's place: ``nbytes`` bytes at ``offset``, and ``padding`` zero bytes after it."""

    name: str
    offset: int
    nbytes: int
    padding: int


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """Where each constant lies in a dense weights file. ``padded`` is false for all-CUDA ones."""

    slots: tuple[Slot, ...]
    padded: bool

    @classmethod
    def of(cls, constants: Mapping[str, torch.Tensor]) -> BlobLayout:
        """The layout of a graph's constants, given in the graph's order.

        Raises:
            UnsupportedTensor: a constant has no storage of plain bytes (mkldnn, sparse, meta).
        """
        sizes = {name: constant_nbytes(name, tensor) for name, tensor in constants.items()}
        return cls.place(sizes, padded=not all(tensor.is_cuda for tensor in constants.values()))

    @classmethod
    def place(cls, sizes: Mapping[str, int], *, padded: bool) -> BlobLayout:
        """The layout of constants of the given numbers of bytes."""
        return cls(tuple(_place(sizes, padded)), padded)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        if not self.slots:
            return 0
        last = self.slots[-1]
        return last.offset + last.nbytes + last.padding

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)


def _place(sizes: Mapping[str, int], padded: bool) -> Iterator[Slot]:
    offset = 0
    for name, nbytes in sizes.items():
        # On the CPU the compiled code uses constants where they lie in the mapped file, and its
        # vector loads want each to begin at a multiple of 64: so each is filled up, and the last
        # one as well, because the size that the code adds up and checks is the padded one. To a
        # CUDA device each is copied, to an aligned address of its own: so nothing is padded. One
        # constant elsewhere is enough for all to be padded, those on the device too.
        padding = -nbytes % ALIGNMENT if padded else 0
        yield Slot(name, offset, nbytes, padding)
        offset += nbytes + padding


def constant_nbytes(name: str, tensor: torch.Tensor) -> int:
    """How many bytes a constant takes in the file, without padding.

    Raises:
        UnsupportedTensor: it has no storage of plain bytes.
    """
    if tensor.is_mkldnn or tensor.layout is not torch.strided:
        kind = "mkldnn" if tensor.is_mkldnn else str(tensor.layout)
        raise UnsupportedTensor(
            f"the constant {name!r}, a {kind} tensor",
            "convert it with `.to_dense()` before the export",
        )
    # A view without elements may hang on a large storage; nobody reads that through it.
    return 0 if tensor.numel() == 0 else tensor.untyped_storage().nbytes()


def constants_of(weights: Mapping[str, tuple[torch.Tensor, Any]]) -> dict[str, torch.Tensor]:
    """The constants of an AOTInductor ``Weights`` object, in the order of the graph."""
    return {name: tensor for name, (tensor, _) in weights.items()}


def put_blob(writer: ChunkSink, constants: Mapping[str, torch.Tensor]) -> tuple[BlobLayout, Recipe]:
    """Store the dense file of some constants without ever building it: storage by storage.

    Chunks are cut at the constants' boundaries, so weights that the store has from elsewhere cost
    nothing. A storage is read as often as it occurs; one on a device is streamed.

    Raises:
        UnsupportedTensor: see `BlobLayout.of`.
    """
    layout = BlobLayout.of(constants)
    return layout, Recipe.concat(_slot_recipes(writer, layout, constants))


def _slot_recipes(
    writer: ChunkSink, layout: BlobLayout, constants: Mapping[str, torch.Tensor]
) -> Iterator[Recipe]:
    for slot in layout:
        if slot.nbytes:
            yield put_storage_or_literal(writer, constants[slot.name].untyped_storage())
        if slot.padding:
            yield Recipe((ZeroPart(slot.padding),))
