"""Takes the bytes ExecuTorch hands over and gives back what it is to hold instead."""

from __future__ import annotations

import hashlib
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import torch
from executorch.exir._serialize._cord import FileBackedData

from cas import fsio
from cas.executorch.blob import PREFIX, RecipeReader, StoredBytes, StoredSource
from cas.executorch.labels import Labels
from cas.manifest import Recipe
from cas.torch.devices import bytes_of, plain_torch
from cas.torch.mapping import ChunkFiles
from cas.torch.streaming import ChunkSink, Readable, memory_view, put_storage, storage_view

#: Shorter data stays plain bytes: a chunk file takes a file system block of 4 KiB anyway, and a
#: recipe holds literals of up to as much.
THRESHOLD: Final = 4096

#: Data from this size on is hashed in a thread of its own while it is put.
WORTH_A_THREAD: Final = 1 << 20

Held: TypeAlias = "bytes | StoredBytes"


class CaptureWriter(ChunkSink, RecipeReader, ChunkFiles, Protocol):
    """What a capture needs of a store's writer."""

    def plain_reader(self) -> RecipeReader: ...


class Intake:
    """Puts data into the store as it appears. Data below ``threshold`` bytes is left alone."""

    def __init__(self, writer: CaptureWriter, threshold: int = THRESHOLD) -> None:
        self.writer = writer
        self.threshold = threshold
        self.source = StoredSource(writer, writer.plain_reader())
        self.labels = Labels()
        self._files: weakref.WeakKeyDictionary[Any, StoredBytes] = weakref.WeakKeyDictionary()
        self._ahead = _Ahead()

    def keep(self, data: bytes | memoryview, sha256: bytes | None = None) -> Held:
        """``sha256`` is the digest of ``data``, if somebody has computed it already."""
        if len(data) < max(self.threshold, 1):
            return data if isinstance(data, bytes) else bytes(data)
        return self._stored(data, sha256)

    def keep_tensor(self, tensor: torch.Tensor) -> Held | None:
        """The bytes that ExecuTorch would take of a tensor; None where it would fail to.

        That is the elements of a contiguous tensor, and the whole storage of any other one.
        """
        if tensor.device.type != "cpu" or tensor.requires_grad:
            return None
        if not tensor.is_contiguous():
            return self.keep(storage_view(tensor.untyped_storage()))
        view = memory_view(tensor)
        return None if view is None else self.keep(view)

    def keep_file(self, data: Any) -> Any:
        """ExecuTorch's own file-backed data; its file is read once and stays its owner's.

        It is not closed: callers may add the same object under a second name.
        """
        if isinstance(data, StoredBytes) or len(data) < max(self.threshold, 1):
            return data
        stored = self._files.get(data)
        if stored is None:
            with open(Path(data._path), "rb", buffering=0) as file:
                recipe = self.writer.put_stream(file)
            stored = StoredBytes(self.source, recipe, data.prefix(PREFIX))
            if data._sha256 is not None:
                self.source.learn_sha256(recipe, data._sha256)
            self._files[data] = stored
        return stored

    def keep_storage(self, storage: torch.UntypedStorage) -> StoredBytes:
        """All bytes of a storage on any device; short ones stay in the recipe.

        Raises:
            UnsupportedTensor: the storage has no bytes (meta).
        """
        recipe = put_storage_or_literal(self.writer, storage, self.threshold)
        return StoredBytes(self.source, recipe, _first_bytes(storage))

    def move_file(self, path: str | Path) -> StoredBytes:
        """A file that is ours to have: its bytes go to the store, and it is removed at once."""
        with open(path, "rb", buffering=0) as file:
            prefix = file.read(PREFIX)
            file.seek(0)
            source = _Hashing(file)
            recipe = self.writer.put_stream(source)
        self.source.learn_sha256(recipe, source.sha256.digest())
        fsio.unlink(Path(path))
        return StoredBytes(self.source, recipe, prefix)

    def keep_any(self, data: Any) -> Any:
        """`keep` or `keep_file`, by type; anything else is given back for ExecuTorch to judge."""
        if isinstance(data, FileBackedData):
            return self.keep_file(data)
        if isinstance(data, (bytes, memoryview)):
            return self.keep(data)
        return data

    def sha256_while_putting(self, data: memoryview) -> bytes:
        """The SHA-256 of ``data``, which is put meanwhile: two hashes take the time of one.

        A `keep` with this digest that follows in this thread finds the work done.
        """
        with ThreadPoolExecutor(1, "cas-sha256") as pool:  # its end gives the memory back
            hashing = pool.submit(hashlib.sha256, data)
            recipe = self.writer.put(data)
            digest = hashing.result().digest()
        self._ahead.put = digest, recipe
        return digest

    def _stored(self, data: bytes | memoryview, sha256: bytes | None) -> StoredBytes:
        recipe = self._put(data, sha256)
        if sha256 is not None:
            self.source.learn_sha256(recipe, sha256)
        return StoredBytes(self.source, recipe, bytes(data[:PREFIX]))

    def _put(self, data: bytes | memoryview, sha256: bytes | None) -> Recipe:
        ahead, self._ahead.put = self._ahead.put, None
        if ahead is not None and ahead[0] == sha256:
            return ahead[1]
        return self.writer.put(data)


class _Ahead(threading.local):
    """What this thread has put before it was told to keep it, under its SHA-256."""

    put: tuple[bytes, Recipe] | None = None


class _Hashing:
    """A stream whose SHA-256 is known when it was read."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()

    def readinto(self, buffer: memoryview, /) -> int | None:
        count = self._stream.readinto(buffer)
        if count:
            self.sha256.update(buffer[:count])
        return count


def _first_bytes(storage: torch.UntypedStorage) -> bytes:
    return bytes(storage_view(_on_host(storage, min(PREFIX, storage.nbytes()))))


def _on_host(storage: torch.UntypedStorage, length: int) -> torch.UntypedStorage:
    """The first bytes of a storage on any device, in host memory of their own."""
    with plain_torch():
        return bytes_of(storage)[:length].to("cpu", copy=True).untyped_storage()


def put_storage_or_literal(
    writer: ChunkSink, storage: torch.UntypedStorage, threshold: int = THRESHOLD
) -> Recipe:
    """The recipe of a storage's bytes; where they are few, they stand in the recipe itself.

    Raises:
        UnsupportedTensor: the storage has no bytes (meta).
    """
    if storage.nbytes() < min(threshold, THRESHOLD) and storage.device.type != "meta":
        return Recipe.literal(bytes(storage_view(_on_host(storage, storage.nbytes()))))
    return put_storage(writer, storage)
