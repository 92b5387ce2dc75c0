"""What a backend returned, as JSON and chunks, and back again.

A record may come from a shared store, so nothing in it is believed: every index, number and name
is checked before an object is made of it, and nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStoreOutput
from executorch.exir._serialize.data_serializer import DataEntry
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.exir.scalar_type import ScalarType
from executorch.exir.tensor_layout import TensorLayout

from cas.errors import UsageError
from cas.executorch.actions.errors import Unrecordable
from cas.executorch.actions.lowered import content_digest
from cas.executorch.actions.names import Constants, freeze_labels, thaw_labels
from cas.executorch.blob import PREFIX, StoredBytes
from cas.executorch.intake import Intake
from cas.executorch.labels import merge_labels, named_labels
from cas.executorch.recipes import MAX_LITERAL
from cas.manifest import Recipe
from cas.records import ActionRecord
from cas.strictjson import Json, as_int, as_list, as_text, require_keys

#: Records of version 1 have no labels.
VERSION: Final = 2
MAX_ALIGNMENT: Final = 1 << 31
_RESULT_KEYS: Final = ("blob", "blob_sha256", "debug_handles", "store")
_STORE_KEYS: Final = {
    1: ("buffers", "external", "pte"),
    2: ("buffers", "external", "labels", "pte"),
}


class Freezer:
    """Turns results into JSON that refers to recipes by position, and maybe to constants."""

    def __init__(self, intake: Intake, constants: Constants = None) -> None:
        self._intake = intake
        self._constants = constants
        self.recipes: list[Recipe] = []
        self._positions: dict[Recipe, int] = {}
        self._stores: list[Json] = []
        self._store_ids: dict[int, int] = {}

    def freeze(self, results: Iterable[Any], handles: Sequence[int]) -> dict[str, Json]:
        """
        Raises:
            Unrecordable: a result holds something else than bytes, numbers and names.
        """
        frozen: list[Json] = [self._result(result) for result in results]
        return {
            "version": VERSION,
            "results": frozen,
            "stores": self._stores,
            "handles": [*handles],
        }

    def _result(self, result: Any) -> dict[str, Json]:
        if result._delegate_info_meta is not None:
            raise Unrecordable("the backend hands over live objects (_delegate_info_meta)")
        blob = self._keep(result.processed_bytes)
        digest = content_digest(result.processed_bytes)
        self._intake.source.learn_sha256(self.recipes[blob], digest)  # the emitter asks for it
        return {
            "blob": blob,
            "blob_sha256": digest.hex(),
            "debug_handles": freeze_handles(result.debug_handle_map),
            "store": self._store(result.data_store_output),
        }

    def _store(self, output: Any) -> int | None:
        """Results can share one store of named data: then they will share it on a hit, too."""
        if output is None:
            return None
        known = self._store_ids.get(id(output))
        if known is not None:
            return known
        external: list[Json] = [
            [_name(tag), _freeze_entries(table)] for tag, table in output.external_data.items()
        ]
        self._stores.append(
            {
                "buffers": [self._buffer(buffer) for buffer in output.buffers],
                "labels": freeze_labels(named_labels(output), self._constants),
                "pte": _freeze_entries(output.pte_data),
                "external": external,
            }
        )
        position = self._store_ids[id(output)] = len(self._stores) - 1
        return position

    def _buffer(self, data: Any) -> list[Json]:
        """With its SHA-256 if that is known: where it is not, nobody may ever ask for it."""
        position = self._keep(data)
        digest = self._intake.source.known_sha256(self.recipes[position])
        if isinstance(data, FileBackedData) and not isinstance(data, StoredBytes):
            digest = data._sha256
        return [position, None if digest is None else digest.hex()]

    def _keep(self, data: Any) -> int:
        recipe = self._recipe(data)
        position = self._positions.get(recipe)
        if position is None:
            position = self._positions[recipe] = len(self.recipes)
            self.recipes.append(recipe)
        return position

    def _recipe(self, data: Any) -> Recipe:
        if isinstance(data, StoredBytes) and data.source is self._intake.source:
            return data.recipe
        if isinstance(data, FileBackedData):
            with open(data._path, "rb", buffering=0) as file:
                return self._intake.writer.put_stream(file)
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise Unrecordable(f"data of type {type(data).__qualname__}")
        if len(data) <= MAX_LITERAL:
            return Recipe.literal(bytes(data))
        return self._intake.writer.put(data)


def freeze_handles(handles: Any) -> Json:
    """A debug handle map, with the kinds of its keys and values."""
    if handles is None:
        return None
    if type(handles) is not dict:
        raise Unrecordable(f"a debug handle map of type {type(handles).__qualname__}")
    frozen: list[Json] = []
    for key, value in handles.items():
        if type(key) not in (int, str) or type(value) not in (tuple, list, int):
            raise Unrecordable("a debug handle map with other keys or values than numbers")
        numbers = [value] if isinstance(value, int) else list(value)
        if any(type(number) is not int for number in numbers):
            raise Unrecordable("a debug handle map with other values than numbers")
        frozen.append([key, type(value).__name__, [*numbers]])
    return frozen


def _name(value: Any) -> str:
    if type(value) is not str:
        raise Unrecordable(f"a name of type {type(value).__qualname__}")
    return value


def _freeze_entries(table: Mapping[str, Any]) -> list[Json]:
    frozen: list[Json] = []
    for key, entry in table.items():
        layout = entry.tensor_layout
        shape: Json = None
        if layout is not None:
            sizes, order = [*map(int, layout.sizes)], [*map(int, layout.dim_order)]
            shape = [int(layout.scalar_type), [*sizes], [*order]]
        frozen.append([_name(key), entry.buffer_index, entry.alignment, shape])
    return frozen


# --- and back -----------------------------------------------------------------------------------


class Thawer:
    """Makes results of a record. The writer of ``intake`` protects the record's chunks."""

    def __init__(self, intake: Intake, record: ActionRecord, constants: Constants = None) -> None:
        self._intake = intake
        self._constants = constants
        self._recipes = record.recipes
        self._document = require_keys(
            record.result, ("handles", "results", "stores", "version"), "a result"
        )
        self._version = as_int(self._document["version"], "the version")
        if self._version not in _STORE_KEYS:
            raise UsageError("the result is of another version of cas")

    def handles(self) -> tuple[int, ...]:
        """The debug handles of the programs that were compiled.

        Raises:
            UsageError: the record is not one of a delegate.
        """
        values = as_list(self._document["handles"], "handles")
        return tuple(as_int(value, "a debug handle") for value in values)

    def thaw(self) -> list[Any]:
        """The results, as the backend returned them.

        Raises:
            UsageError: the record is not one of a delegate.
            ChunkMissing, ChunkDamaged
        """
        stores = [self._store(value) for value in as_list(self._document["stores"], "stores")]
        results = as_list(self._document["results"], "results")
        return [self._result(value, stores) for value in results]

    def _result(self, value: Any, stores: list[Any]) -> Any:
        entry = require_keys(value, _RESULT_KEYS, "a delegate's result")
        store = entry["store"]
        if store is not None:
            store = stores[as_int(store, "a store", 0, len(stores) - 1)]
        return PreprocessResult(
            processed_bytes=self._data(entry["blob"], entry["blob_sha256"]),
            debug_handle_map=thaw_handles(entry["debug_handles"]),
            data_store_output=store,
        )

    def _store(self, value: Any) -> Any:
        entry = require_keys(value, _STORE_KEYS[self._version], "named data")
        buffers = []
        for item in as_list(entry["buffers"], "buffers"):
            position, digest = _pair(item, "a buffer")
            buffers.append(self._data(position, digest))
        external = {}
        for item in as_list(entry["external"], "external data"):
            tag, table = _pair(item, "external data")
            external[as_text(tag, "a tag")] = _thaw_entries(table, len(buffers))
        output = NamedDataStoreOutput(buffers, _thaw_entries(entry["pte"], len(buffers)), external)
        merge_labels(output, thaw_labels(entry.get("labels", []), self._constants))
        return output

    def _data(self, position: Any, sha256: Any) -> bytes | StoredBytes:
        """Small data in memory, and the rest where it is."""
        recipe = self._recipes[as_int(position, "a recipe", 0, len(self._recipes) - 1)]
        digest = None if sha256 is None else _thaw_sha256(sha256)
        writer, source = self._intake.writer, self._intake.source
        if recipe.size < max(self._intake.threshold, 1):
            return writer.read(recipe)
        if digest is not None:
            source.learn_sha256(recipe, digest)
        return StoredBytes(source, recipe, writer.read(recipe, 0, min(PREFIX, recipe.size)))


def _thaw_sha256(value: Any) -> bytes:
    try:
        digest = bytes.fromhex(as_text(value, "a SHA-256"))
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise UsageError("a SHA-256 is not one")
    return digest


def thaw_handles(value: Any) -> Any:
    if value is None:
        return None
    handles: dict[int | str, Any] = {}
    for item in as_list(value, "a debug handle map"):
        if not isinstance(item, list) or len(item) != 3 or type(item[0]) not in (int, str):
            raise UsageError("a debug handle map has an entry of another form")
        numbers = [as_int(number, "a debug handle") for number in as_list(item[2], "handles")]
        handles[item[0]] = _of_kind(item[1], numbers)
    return handles


def _of_kind(kind: Any, numbers: list[int]) -> Any:
    if kind == "tuple":
        return tuple(numbers)
    if kind == "list":
        return numbers
    if kind == "int" and len(numbers) == 1:
        return numbers[0]
    raise UsageError("a debug handle map has values of another kind")


def _pair(value: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise UsageError(f"{what} must be a pair")
    return value[0], value[1]


def _thaw_entries(value: Any, buffers: int) -> dict[str, Any]:
    entries = {}
    for item in as_list(value, "named data"):
        if not isinstance(item, list) or len(item) != 4:
            raise UsageError("named data has an entry of another form")
        entries[as_text(item[0], "a key of named data")] = DataEntry(
            buffer_index=as_int(item[1], "a buffer", 0, buffers - 1),
            alignment=as_int(item[2], "an alignment", 1, MAX_ALIGNMENT),
            tensor_layout=_thaw_layout(item[3]),
        )
    return entries


def _thaw_layout(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        raise UsageError("a tensor's layout has another form")
    try:
        kind = ScalarType(as_int(value[0], "a type of elements"))
    except ValueError:
        raise UsageError("a tensor has elements of an unknown type") from None
    sizes = [as_int(size, "a size") for size in as_list(value[1], "sizes")]
    order = [as_int(axis, "an axis") for axis in as_list(value[2], "a dim order")]
    if sorted(order) != list(range(len(sizes))):
        raise UsageError("a dim order does not fit its sizes")
    return TensorLayout(kind, sizes, order)
