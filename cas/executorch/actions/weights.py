"""Digests of tensor storages, each computed once per lowering."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import torch

from cas.digest import Digest, long_hasher
from cas.ingest import Piece
from cas.manifest import Recipe
from cas.torch.streaming import Readable, put_storage, storage_view

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PIECE: Final = 4 << 20


class StorageDigests:
    """BLAKE3 of whole storages, remembered for as long as this object lives.

    Keep one per lowering, not longer: bytes can change in ways that leave no trace in torch. The
    storages are held, so that no address is used a second time meanwhile.
    """

    def __init__(self, of_view: Callable[[memoryview], Digest] | None = None) -> None:
        """``of_view`` gives the digest of host memory: a store's writer knows some already."""
        self._of_view = of_view
        self._known: dict[tuple[int, int, str, int], tuple[Digest, torch.UntypedStorage]] = {}
        self.hashed_bytes = 0

    def of(self, storage: torch.UntypedStorage, version: int = 0) -> Digest:
        """The digest of all bytes of a storage, on any device.

        ``version`` is what the tensor's version counter says: another one means other bytes.
        """
        key = (storage.data_ptr(), storage.nbytes(), str(storage.device), version)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = (self._digest(storage), storage)
            self.hashed_bytes += storage.nbytes()
        return found[0]

    def _digest(self, storage: torch.UntypedStorage) -> Digest:
        if self._of_view is not None and storage.device.type == "cpu":
            return self._of_view(storage_view(storage))
        return _digest(storage)


def _digest(storage: torch.UntypedStorage) -> Digest:
    sink = _Hashing()
    put_storage(sink, storage)
    return Digest(sink.hasher.digest())


class _Hashing:
    """Takes bytes as a store's writer does, and only hashes them."""

    chunk_size = _PIECE

    def __init__(self) -> None:
        self.hasher = long_hasher()

    def put(self, data: Buffer, /) -> Recipe:
        self.hasher.update(data)
        return Recipe()

    def put_stream(self, source: Readable, /) -> Recipe:
        piece = memoryview(bytearray(_PIECE))
        while count := source.readinto(piece):
            self.hasher.update(piece[:count])
        return Recipe()

    def put_pieces(self, pieces: Iterable[Piece], /) -> Recipe:
        for piece in pieces:
            try:
                self.hasher.update(piece.ready())
            finally:
                piece.release()
        return Recipe()
