"""What stands for a program that was not lowered, because its files are known."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from executorch.exir import ExecutorchProgramManager
from executorch.exir._serialize._cord import Cord

from cas.errors import UsageError
from cas.executorch.actions.errors import Unrecordable
from cas.executorch.blob import PREFIX, StoredBytes
from cas.executorch.intake import Intake
from cas.executorch.recipes import MAIN, build_recipes, data_file_name, pieces_of
from cas.executorch.tensors import tensor_entries
from cas.manifest import Recipe, TensorEntry
from cas.records import ActionRecord
from cas.strictjson import Json, as_int, as_list, as_text, check_json, require_keys

_OPERATOR: Final = re.compile(r"(?P<space>[a-z]\w*)::(?P<name>[A-Za-z]\w*)(?:\.(?P<overload>\w+))?")
_KEYS: Final = ("config_methods", "files", "methods", "tensors")


class ReplayedProgram(ExecutorchProgramManager):  # type: ignore[misc]
    """A finished program of which only the files are known. The rest is made when it is asked for.

    Writing needs no more than the files, and is inherited.
    """

    def __init__(
        self,
        contents: ProgramContents,
        source: Any,
        prefix: Callable[[Recipe], bytes],
        make: Callable[[], Any],
    ) -> None:
        def cord(recipe: Recipe) -> Any:
            return Cord(StoredBytes(source, recipe, prefix(recipe)))

        self.recorded_tensors = contents.tensors
        self._make = make
        self._methods = contents.methods
        self._recorded_config_methods = contents.config_methods
        self._pte_data = cord(contents.main)
        self._tensor_data = {tag: cord(recipe) for tag, recipe in contents.data.items()}
        self._buffer = None
        self._etrecord = None

    @property
    def methods(self) -> set[str]:
        return set(self._methods)

    @property
    def config_methods(self) -> set[str]:
        return set(self._recorded_config_methods)

    def __getattr__(self, name: str) -> Any:
        if name in ("_make", "__setstate__"):  # not made yet, by a copy
            raise AttributeError(name)
        return getattr(self._make(), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._make(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._make().__reduce_ex__(protocol)


class ProgramContents:
    """The files of a finished program, and what is known of them.

    ``data`` are the recipes of its data files by tag; ``tensors`` name these files as ExecuTorch
    does, and the program's own `MAIN`.
    """

    def __init__(
        self,
        main: Recipe,
        data: Mapping[str, Recipe],
        methods: tuple[str, ...],
        config_methods: tuple[str, ...],
        tensors: tuple[TensorEntry, ...],
    ) -> None:
        self.main = main
        self.data = data
        self.methods = methods
        self.config_methods = config_methods
        self.tensors = tensors

    @classmethod
    def of(cls, program: Any, intake: Intake) -> ProgramContents:
        """Put what is not in the store yet, and take down the rest.

        Raises:
            Unrecordable
        """
        data = program._tensor_data or {}
        cords = {MAIN: program._pte_data, **{data_file_name(tag): c for tag, c in data.items()}}
        if len(cords) != len(data) + 1 or not all(isinstance(tag, str) for tag in data):
            raise Unrecordable("two data files of one name")
        pieces = {name: pieces_of(cord) for name, cord in cords.items()}
        recipes = build_recipes(pieces, intake)
        return cls(
            recipes[MAIN],
            {tag: recipes[data_file_name(tag)] for tag in data},
            tuple(sorted(program.methods)),
            tuple(sorted(program.config_methods)),
            tuple(tensor_entries(program, pieces, MAIN, intake.labels)),
        )

    def differences(self, other: ProgramContents, *, exact: bool) -> list[str]:
        """Which files are not the same, in words; without ``exact``, whether there are the same."""
        if [*self.data] != [*other.data] or self.methods != other.methods:
            return ["which methods or data files there are"]
        if not exact:
            return []
        found = [] if self.main == other.main else ["the program"]
        return [*found, *(f"{tag}.ptd" for tag in self.data if self.data[tag] != other.data[tag])]

    # --- as a record ----------------------------------------------------------------------------

    def freeze(self) -> tuple[dict[str, Json], tuple[Recipe, ...]]:
        tensors: list[Json] = []
        for t in self.tensors:
            shape: Json = None if t.shape is None else [*t.shape]
            tensors.append([t.name, t.file, t.offset, t.nbytes, t.dtype, shape])
        result: dict[str, Json] = {
            "config_methods": [*self.config_methods],
            "files": [*self.data],
            "methods": [*self.methods],
            "tensors": tensors,
        }
        return result, (self.main, *self.data.values())

    @classmethod
    def thaw(cls, record: ActionRecord) -> ProgramContents:
        """What `freeze` wrote.

        Raises:
            UsageError: the record holds something else.
        """
        result = require_keys(check_json(record.result, "a result"), _KEYS, "a whole export")
        tags = _texts(result["files"], "data files")
        if len(record.recipes) != len(tags) + 1 or len(set(tags)) != len(tags):
            raise UsageError("the record has other recipes than files")
        names = {MAIN, *map(data_file_name, tags)}
        return cls(
            record.recipes[0],
            dict(zip(tags, record.recipes[1:], strict=True)),
            _texts(result["methods"], "methods"),
            _texts(result["config_methods"], "methods"),
            tuple(_tensor(item, names) for item in as_list(result["tensors"], "tensors")),
        )


def freeze_exceptions(config: Any) -> dict[str, Json]:
    """What lowering added to its caller's compile config: operators that are not checked."""
    exceptions = () if config is None else config._core_aten_ops_exception_list
    return {"exceptions": [str(operator.name()) for operator in exceptions]}


def thaw_exceptions(record: ActionRecord) -> list[Any]:
    """The operators that `freeze_exceptions` named.

    Raises:
        UsageError: the record holds something else.
    """
    result = require_keys(check_json(record.result, "a result"), ("exceptions",), "a lowering")
    return [_operator(name) for name in _texts(result["exceptions"], "operators")]


def _operator(name: str) -> Any:
    match = _OPERATOR.fullmatch(name)
    if match is None:
        raise UsageError("an operator's name has another form")
    try:
        packet = getattr(getattr(torch.ops, match["space"]), match["name"])
        return getattr(packet, match["overload"] or "default")
    except (AttributeError, RuntimeError):
        raise UsageError(f"there is no operator {name}") from None


def first_bytes(intake: Intake, recipe: Recipe) -> bytes:
    return intake.writer.read(recipe, 0, min(PREFIX, recipe.size))


def _texts(value: Any, what: str) -> tuple[str, ...]:
    return tuple(as_text(item, what) for item in as_list(value, what))


def _tensor(value: Any, files: set[str]) -> TensorEntry:
    fields = as_list(value, "a tensor")
    if len(fields) != 6 or fields[1] not in files:
        raise UsageError("a tensor has another form, or is in a file that is not there")
    name, file, offset, nbytes, dtype, shape = fields
    return TensorEntry(
        name=as_text(name, "a tensor's name"),
        file=as_text(file, "a file"),
        offset=as_int(offset, "an offset"),
        nbytes=as_int(nbytes, "a size"),
        dtype=None if dtype is None else as_text(dtype, "a dtype"),
        shape=None
        if shape is None
        else tuple(as_int(n, "a size") for n in as_list(shape, "shape")),
    )
