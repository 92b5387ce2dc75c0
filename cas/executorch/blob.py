"""`StoredBytes`: what ExecuTorch holds in place of weight bytes during a capture."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator
from typing import Any, Final, NoReturn, Protocol

from executorch.exir._serialize._cord import FileBackedData

from cas.errors import UsageError
from cas.executorch.errors import CaptureEnded
from cas.manifest import Recipe

#: Longer data may still be turned into ``bytes``, with a warning: it defeats the purpose.
LARGE_READ: Final = 64 << 20

#: ExecuTorch compares lengths and this many leading bytes before it compares digests.
PREFIX: Final = 32

#: Files whose ``write`` is done with its argument when it returns.
_COPYING: Final = (io.BufferedWriter, io.BufferedRandom, io.FileIO, io.BytesIO)


class ViewSink:
    """Base of sinks that, like those files, keep nothing of what they are given to write."""


def takes_views(outfile: Any) -> bool:
    """Whether a view of memory that is used again may be written to ``outfile``."""
    return type(outfile) in _COPYING or isinstance(outfile, ViewSink)


class LargeReadWarning(ResourceWarning):
    """Stored weights were read back into memory in one piece."""


class RecipeReader(Protocol):
    """The part of a store's writer that gives bytes back."""

    def read(self, recipe: Recipe, offset: int = 0, length: int | None = None, /) -> bytes: ...

    def stream(self, recipe: Recipe, /) -> Iterator[memoryview]: ...


class StoredSource:
    """The bytes behind a capture's `StoredBytes`, for as long as the capture lasts.

    ``plain`` is a reader that works in a child which fork() made, where the other one does not.
    """

    def __init__(self, reader: RecipeReader, plain: RecipeReader | None = None) -> None:
        self._reader: RecipeReader | None = reader
        self._plain = plain
        self._process = os.getpid()
        self._sha256: dict[Recipe, bytes] = {}

    def reader(self) -> RecipeReader:
        if self._reader is None:
            raise CaptureEnded("stored weights are read")
        if self._plain is not None and os.getpid() != self._process:
            return self._plain
        return self._reader

    def end(self) -> None:
        """Every later read is refused with `CaptureEnded`."""
        self._reader = None

    def outlive(self) -> None:
        """From here on read without the writer, which may end: a program that ran to its last line
        has handlers and threads that are still to write. What was put must be published.
        """
        self._reader = self._plain

    def learn_sha256(self, recipe: Recipe, digest: bytes) -> None:
        """Remember a digest that somebody computed from the bytes themselves."""
        self._sha256.setdefault(recipe, digest)

    def known_sha256(self, recipe: Recipe) -> bytes | None:
        """The digest, if it was computed already."""
        return self._sha256.get(recipe)

    def sha256(self, recipe: Recipe) -> bytes:
        known = self._sha256.get(recipe)
        if known is None:
            hasher = hashlib.sha256()
            for piece in self.reader().stream(recipe):
                hasher.update(piece)
            known = self._sha256[recipe] = hasher.digest()
        return known


class StoredBytes(FileBackedData):  # type: ignore[misc]
    """Bytes that lie in the store, in the shape ExecuTorch accepts wherever it accepts ``bytes``.

    It is a value: it owns no file and no memory beyond the first few bytes, so copying it, losing
    it in a traceback or finalizing it at exit neither leaks nor deletes anything. Two of them are
    equal if their content is. The base class's constructor is deliberately not called, for that
    one would take over a file.
    """

    def __init__(self, source: StoredSource, recipe: Recipe, prefix: bytes) -> None:
        self._source = source
        self._recipe = recipe
        self._prefix = prefix

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @property
    def source(self) -> StoredSource:
        return self._source

    def __len__(self) -> int:
        return self._recipe.size

    def prefix(self, size: int) -> bytes:
        if size <= len(self._prefix) or len(self._prefix) == len(self):
            return self._prefix[:size]
        return self._source.reader().read(self._recipe, 0, min(size, len(self)))

    def sha256(self) -> bytes:
        """The SHA-256 of the bytes: ExecuTorch compares it with those of plain ``bytes``."""
        return self._source.sha256(self._recipe)

    def to_bytes(self) -> bytes:
        if len(self) > LARGE_READ:
            warnings.warn(
                f"{len(self)} bytes of stored weights are read into memory; write the program "
                "with `cap.save(...)` or `write_to_file` instead of using `.buffer` or bytes()",
                LargeReadWarning,
                stacklevel=3,
            )
        return self._source.reader().read(self._recipe)

    def __bytes__(self) -> bytes:
        return self.to_bytes()

    def write_to_file(self, outfile: Any) -> None:
        """Write the bytes to an open binary file, through a bounded buffer."""
        for piece in self._source.reader().stream(self._recipe):
            outfile.write(piece if takes_views(outfile) else bytes(piece))

    def close(self) -> None:
        """Nothing to close: the store owns the bytes."""

    @classmethod
    def move_from(cls, path: str, sha256: bytes | None = None) -> NoReturn:
        raise UsageError("stored bytes take over no file; put them into a store")

    def __copy__(self) -> StoredBytes:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredBytes:
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredBytes):
            return NotImplemented
        return self._recipe == other._recipe

    def __hash__(self) -> int:
        return hash(self._recipe)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "stored weights cannot be pickled, for they lie in a store; save the program with "
            "`cap.save(...)`, or pickle one that was made outside the capture"
        )

    def __repr__(self) -> str:
        return f"<StoredBytes of {len(self)} bytes>"
