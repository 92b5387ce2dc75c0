"""Reading safetensors checkpoints: one file, or shards with an index; a tensor at a time.

The format is parsed by the ``safetensors`` package, which checks a header in full before it gives
out anything. The index of a sharded checkpoint is parsed here, and believed as little.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from cas.errors import Damaged, InvalidName, NotFound, PermissionRefused, Refused, UsageError
from cas.layout import check_file_name

INDEX_SUFFIX: Final = ".safetensors.index.json"

#: An index names each tensor of a checkpoint; that of a model of 100,000 has about 10 MiB.
MAX_INDEX_BYTES: Final = 64 << 20


class CheckpointNotFound(NotFound):
    """There is no checkpoint, or not all of its files."""


class CheckpointDamaged(Damaged):
    """A checkpoint that cannot be read. ``path`` is the file, ``reason`` what is wrong with it."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(
            f"{path} cannot be read: {reason}; it is damaged, or was not completely downloaded: "
            "fetch or write it again"
        )


class Checkpoint:
    """An open checkpoint. Its tensors are views of the mapped files, and keep those mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._names: dict[str, Any] = {}
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def names(self) -> tuple[str, ...]:
        """The names of all tensors, in the order in which they lie in the files."""
        return tuple(self._names)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor with its name. It is a view of the file: nothing is read before it is used.

        Raises:
            CheckpointDamaged: a type that torch or the safetensors package does not know.
        """
        for name, file in self._names.items():
            with _errors(self.path):
                tensor = _get(file, name, self.path)
            yield name, tensor

    def _open(self, stack: ExitStack) -> None:
        index = self._index_path()
        if index is None:
            file = _open_file(stack, self.path)
            self._names = dict.fromkeys(_keys(file), file)
            return
        table = _read_index(index)
        for shard in dict.fromkeys(table.values()):
            file = _open_file(stack, index.parent / shard)
            held = [name for name in _keys(file) if table.get(name) == shard]
            self._names.update(dict.fromkeys(held, file))
        absent = [name for name in table if name not in self._names]
        if absent:
            raise CheckpointDamaged(
                index.parent / table[absent[0]],
                f"the index says that it holds {absent[0]!r}, which it does not",
            )

    def _index_path(self) -> Path | None:
        """The index, if the checkpoint is sharded; `path` becomes a directory's one file if not."""
        if not self.path.is_dir():
            return self.path if self.path.name.endswith(INDEX_SUFFIX) else None
        indices = sorted(self.path.glob(f"*{INDEX_SUFFIX}"))
        files = indices or sorted(self.path.glob("*.safetensors"))
        if len(files) != 1:
            found = ", ".join(file.name for file in files[:4]) or "none"
            raise CheckpointNotFound(
                f"expected one safetensors checkpoint in {self.path}, found {found}; give the "
                "file, or the index of the shards"
            )
        if indices:
            return indices[0]
        self.path = files[0]
        return None


def _open_file(stack: ExitStack, path: Path) -> Any:
    with _errors(path):
        if path.is_dir():
            raise UsageError(f"{path} is a directory, not a safetensors file")
        return stack.enter_context(_package().safe_open(path, framework="pt", device="cpu"))


def _keys(file: Any) -> list[str]:
    # In file order, which a disk reads faster; an older package only knows the sorted one.
    return list(file.offset_keys() if hasattr(file, "offset_keys") else file.keys())


def _get(file: Any, name: str, path: Path) -> torch.Tensor:
    try:
        tensor: torch.Tensor = file.get_tensor(name)
    except AttributeError as error:  # the package knows the type, this torch does not
        raise CheckpointDamaged(path, f"{name!r}: {error} (torch {torch.__version__})") from error
    return tensor


def _read_index(path: Path) -> Mapping[str, str]:
    """``weight_map`` of an index: tensor name to the name of a file beside it."""
    with _errors(path):
        size = path.stat().st_size
        if size > MAX_INDEX_BYTES:
            raise CheckpointDamaged(path, f"it has {size} bytes, far more than an index needs")
        data = path.read_bytes()
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(path, f"it is not JSON ({error})") from None
    table = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(table, dict) or not table:
        raise CheckpointDamaged(path, "it has no 'weight_map' of tensor names to files")
    for shard in set(map(str, table.values())):
        try:
            check_file_name(shard)
        except InvalidName as error:
            raise CheckpointDamaged(path, f"a shard's {error}") from None
    return {name: str(shard) for name, shard in table.items()}


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Tell what the operating system or the safetensors package says in terms of the file."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointNotFound(f"there is no checkpoint file {path}") from None
    except PermissionError as error:
        reason = (error.strerror or "not permitted").lower()
        raise PermissionRefused(path, "read", reason) from None
    except _package().SafetensorError as error:
        raise CheckpointDamaged(path, str(error)) from error


def _package() -> Any:
    try:
        return importlib.import_module("safetensors")
    except ImportError:
        raise Refused(
            "the safetensors package is not installed; install it with: pip install safetensors"
        ) from None
