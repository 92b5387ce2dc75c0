"""Loading a source, and making methods of what it gives.

Everything that can be wrong with a user's source is told in terms of the user's file: which line
raised, what was found, what is expected.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.export import AdditionalInputs, Dim, ExportedProgram, ShapesCollection

from cas.errors import CasError, PermissionRefused, UsageError
from cas.exportspec import Source, SourceDamaged, SourceInvalid, SourceNotFound

#: The dynamic shape hints that are not `Dim` objects, such as `Dim.AUTO`.
_HINTS = (type(Dim.AUTO),)

SHAPES = (
    "(module, args[, kwargs][, dynamic_shapes]), an ExportedProgram, a dict of method name to "
    "either, or a callable without parameters that returns one of these"
)


class SourceRaised(UsageError):
    """The user's code raised. ``where`` is ``file:line`` in it; the cause is ``__cause__``."""

    def __init__(self, action: str, where: str, line: str, cause: BaseException) -> None:
        self.where = where
        self.line = line
        shown = f"\n    {line}" if line else ""
        super().__init__(f"{action} failed at {where}: {_one_line(cause)}{shown}")


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module and the example inputs to trace it with: the arguments of `torch.export.export`."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None = None
    dynamic_shapes: Any = None


#: What one method of the program is made from.
Method = ExportedProgram | ModuleCall


@contextlib.contextmanager
def import_path(source: Source) -> Iterator[None]:
    """Let the source import its neighbours, as Python does for a script or for ``python -m``.

    Keep it entered through the export: a model may import lazily in its ``forward``. An exported
    program imports nothing, and its directory may be full of anything.
    """
    if source.location.endswith(".pt2"):
        yield
        return
    directory = Path(source.location).parent if source.is_file else Path()
    entry = str(directory.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def load_methods(source: Source) -> dict[str, Method]:
    """Load the source and return its methods by name (``forward`` when it names none).

    Raises:
        SourceNotFound: a missing file, module or attribute.
        SourceDamaged: a ``.pt2`` file that is truncated or not one.
        PermissionRefused: a ``.pt2`` file that may not be read.
        SourceRaised: the user's code raised.
        SourceInvalid: it gave something that cannot be exported.
    """
    source.check_file()
    if source.location.endswith(".pt2"):
        return {"forward": _load_pt2(Path(source.location))}
    module = _import_file(source) if source.is_file else _import_module(source)
    return normalise(_attribute(module, source), source)


def _load_pt2(path: Path) -> ExportedProgram:
    try:
        with open(path, "rb"):
            pass
    except PermissionError as error:
        raise PermissionRefused(path, "read", (error.strerror or "not permitted").lower()) from None
    if not zipfile.is_zipfile(path):
        raise SourceDamaged(
            f"{path} is not a complete .pt2 file (it has no archive directory at its end): it was "
            "truncated, or written by something else; write it again with torch.export.save"
        )
    if not _is_export_archive(path):
        raise SourceInvalid(
            f"{path} was not written by torch.export.save (by torch.save, perhaps); a .pt2 source "
            "holds an exported program: torch.export.save(torch.export.export(model, args), path)"
        )
    try:
        return torch.export.load(path)
    except Exception as error:
        raise SourceDamaged(
            f"{path} could not be loaded: {_one_line(error)}; it is damaged, or this torch "
            f"({torch.__version__}) cannot read it: write it again with torch.export.save"
        ) from error


def _is_export_archive(path: Path) -> bool:
    """Whether the archive names its format, or its serialized program, as export archives do."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile:
        return True  # damaged, which loading it will tell
    # In a truncated archive the last archive inside it is found instead, which begins later.
    if min((entry.header_offset for entry in entries), default=0) > 0:
        return True
    names = {Path(entry.filename).name for entry in entries}
    return "archive_format" in names or "serialized_exported_program.json" in names


def _import_file(source: Source) -> ModuleType:
    path = Path(source.location)
    name = path.stem if path.stem.isidentifier() else "cas_export_source"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SourceInvalid(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickles in the file look their module up
    try:
        with _user_code(f"importing {path}", path):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        if previous is not None:
            sys.modules[name] = previous
        raise
    return module


def _import_module(source: Source) -> ModuleType:
    name = source.location
    try:
        with _user_code(f"importing {name}", None):
            return importlib.import_module(name)
    except SourceRaised as error:
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing and (name == missing or name.startswith(missing + ".")):
            raise SourceNotFound(
                f"there is no module {missing!r}; it must be installed, or importable from the "
                "current directory"
            ) from cause
        raise


def _attribute(module: ModuleType, source: Source) -> Any:
    value: Any = module
    for part in source.attr.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            known = [k for k, v in vars(module).items() if _offered(k, v, module)]
            hint = f"; it defines {', '.join(known[:8])}" if known else ""
            raise SourceNotFound(f"{source.location} has no {source.attr!r}{hint}") from None
    return value


def _offered(name: str, value: object, module: ModuleType) -> bool:
    """Whether an attribute is worth suggesting: public, and not merely imported there."""
    if name.startswith("_") or isinstance(value, ModuleType):
        return False
    home = getattr(value, "__module__", module.__name__)
    return home == module.__name__ or isinstance(value, ExportedProgram)


def normalise(value: Any, source: Source) -> dict[str, Method]:
    """Turn what a source gave into methods by name; a callable is called first."""
    subject = source.text
    if callable(value) and not isinstance(value, (torch.nn.Module, ExportedProgram)):
        path = Path(source.location) if source.is_file else None
        with _user_code(f"calling {source.attr}()", path):
            value = value()
        subject = f"{source.attr}()"
    if not isinstance(value, Mapping):
        return {"forward": _method(value, subject)}
    if not value:
        raise SourceInvalid(f"{subject} gave an empty dict; expected {SHAPES}")
    methods: dict[str, Method] = {}
    for name, entry in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise SourceInvalid(f"{subject} gave a dict with the key {name!r}: not a method name")
        methods[name] = _method(entry, f"{subject}[{name!r}]")
    return methods


def _method(value: Any, subject: str) -> Method:
    if isinstance(value, ExportedProgram):
        return value
    if isinstance(value, torch.nn.Module):
        raise SourceInvalid(
            f"{subject} gave a module without example inputs; return (module, args), for example "
            "(model, (torch.zeros(1, 8),))"
        )
    if not isinstance(value, tuple):
        raise SourceInvalid(f"{subject} gave {_kind(value)}; expected {SHAPES}")
    if not 2 <= len(value) <= 4:
        raise SourceInvalid(f"{subject} gave a tuple of {len(value)} entries; expected {SHAPES}")
    module, args, *rest = value
    if not isinstance(module, torch.nn.Module):
        raise SourceInvalid(
            f"{subject} gave a tuple that begins with {_kind(module)}, not with a torch.nn.Module"
        )
    if not isinstance(args, (tuple, list)):
        raise SourceInvalid(
            f"{subject}: the example inputs are {_kind(args)}, not a tuple; for one input write "
            "(module, (x,))"
        )
    kwargs, shapes = _keywords_and_shapes(rest, subject)
    return ModuleCall(module, tuple(args), kwargs, shapes)


def _keywords_and_shapes(rest: list[Any], subject: str) -> tuple[dict[str, Any] | None, Any]:
    """Tell apart the two optional entries, of which either may be left out."""
    if len(rest) == 1 and _are_shapes(rest[0]):
        return None, rest[0]
    kwargs = rest[0] if rest else None
    shapes = rest[1] if len(rest) > 1 else None
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SourceInvalid(f"{subject}: the keyword inputs are {_kind(kwargs)}, not a dict")
    return (dict(kwargs) if kwargs is not None else None), shapes


def _are_shapes(value: Any) -> bool:
    """Whether a third entry is dynamic shapes: keyword inputs are a dict that holds no `Dim`."""
    if isinstance(value, (ShapesCollection, AdditionalInputs, tuple, list)):
        return True
    return isinstance(value, Mapping) and any(_holds_dim(v) for v in value.values())


def _holds_dim(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_dim(v) for v in value.values())
    if isinstance(value, (tuple, list)):
        return any(_holds_dim(v) for v in value)
    return isinstance(value, (Dim, *_HINTS))


@contextlib.contextmanager
def _user_code(action: str, path: Path | None) -> Iterator[None]:
    """Report what the user's code raises at the user's line, instead of at ours."""
    try:
        yield
    except CasError:
        raise
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise SourceRaised(action, where, (error.text or "").strip(), error) from error
    except (Exception, SystemExit) as error:
        where, line = _user_frame(error, path)
        raise SourceRaised(action, where, line, error) from error


def _user_frame(error: BaseException, path: Path | None) -> tuple[str, str]:
    """The innermost frame in the user's file, else the innermost outside the import machinery."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    if path is not None:
        resolved = path.resolve()
        own = [frame for frame in frames if Path(frame.filename).resolve() == resolved]
        frames = own or frames
    if not frames:
        return "an unknown line", ""
    return f"{frames[-1].filename}:{frames[-1].lineno}", frames[-1].line or ""


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, SystemExit):
        return f"it called sys.exit({text}); guard that with `if __name__ == '__main__':`"
    shown = text if len(text) <= 300 else text[:297] + "..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
