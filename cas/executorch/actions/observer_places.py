"""Who looks whether a file is there: the functions of `os` that ask for it, replaced.

Python tells its audit hooks which files are opened, but not which are looked for. A program that
looks for a file and does not find it may do otherwise once it is there.
"""

from __future__ import annotations

import errno
import functools
import os
import pathlib
import posixpath
import stat
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from cas.digest import Digest
from cas.executorch.actions.frames import caller, module_of, outside

_stat: Final = os.stat
_REPLACED: Final = ("access", "lstat", "stat")
_original: Final[dict[str, Any]] = {name: getattr(os, name) for name in _REPLACED}
#: Where Python says which functions take more than a path; some look there before they call one.
_ABILITIES: Final[tuple[set[Any], ...]] = (
    os.supports_dir_fd,
    os.supports_effective_ids,
    os.supports_fd,
    os.supports_follow_symlinks,
)
#: The code that looks at each directory on the way to a file, thousands of times; by ``id()``,
#: since code is slow to hash.
_RESOLVING: Final = frozenset(
    id(getattr(posixpath, name).__code__)
    for name in ("_joinrealpath", "realpath")
    if hasattr(posixpath, name)
)
#: Where paths are looked up for somebody else.
_MACHINERY: Final = frozenset(
    {
        "fnmatch", "genericpath", "glob", "os", "pathlib", "pathlib._local", "posixpath",
        "tokenize",
    }
)  # fmt: skip
#: They look for source lines, modules, packages and places for temporary files; modules are seen
#: when they are there. To say where a node was made, torch reads every source file on the stack,
#: the user's script too, and none is an input.
_UNIMPORTANT: Final = frozenset(
    {
        "_frozen_importlib_external", "importlib._bootstrap_external", "importlib.metadata",
        "inspect", "linecache", "pkgutil", "tempfile", "zipimport",
    }
)  # fmt: skip
#: Of `shutil`: what they look for is removed, or is a program that is looked for again as a whole.
_OF_SHUTIL: Final = ("_access_check", "_rmtree", "rmtree", "which")


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells that a file has changed; times in nanoseconds."""

    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, path: str) -> FileStamp | None:
        """None: it is not there."""
        try:
            found = _stat(path)
        except OSError:
            return None
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def is_since(self, moment: int) -> bool:
        """Whether it was made or written after ``moment``."""
        # Anybody can set the first to what they like, the future too.
        return min(self.modified, self.changed) >= moment


def kind_at(path: str | bytes | os.PathLike[str]) -> str:
    """What is at a path: "absent", "file" or "directory"."""
    try:
        mode = _stat(path).st_mode
    except OSError:
        return "absent"
    return "directory" if stat.S_ISDIR(mode) else "file"


def listing_at(path: str) -> str:
    """The names of all that is in a directory, as a digest; empty without one."""
    try:
        names = sorted(name for name in os.listdir(path) if name != "__pycache__")
    except OSError:
        return ""
    return Digest.of("\0".join(names).encode("utf-8", "surrogateescape")).hex()


def install(looked: Callable[[str, str], None]) -> None:
    """Call ``looked`` with each path, as it was asked for, and what is there, until `restore`."""
    for name in _REPLACED:
        function = _watched(_original[name], looked)
        for ability in _ABILITIES:
            if _original[name] in ability:
                ability.add(function)
        _set(name, function)


def restore() -> None:
    for name, original in _original.items():
        for ability in _ABILITIES:
            if getattr(os, name) is not original:
                ability.discard(getattr(os, name))
        _set(name, original)


def _set(name: str, function: Any) -> None:
    setattr(os, name, function)
    accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 has functions of its own
    if accessor is not None and name in vars(accessor):
        setattr(accessor, name, staticmethod(function))


def _watched(original: Any, looked: Callable[[str, str], None]) -> Any:
    @functools.wraps(original)
    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        frame = caller(1)
        if frame is not None and id(frame.f_code) in _RESOLVING:
            return original(path, *args, **kwargs)
        try:
            result = original(path, *args, **kwargs)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                _tell(looked, path, kwargs)
            raise
        _tell(looked, path, kwargs)
        return result

    return call


def _tell(looked: Callable[[str, str], None], path: Any, options: dict[str, Any]) -> None:
    if isinstance(path, int) or options.get("dir_fd") is not None:
        return
    if not is_unimportant(caller(2)):
        looked(os.fsdecode(path), kind_at(path))


def is_unimportant(frame: types.FrameType | None) -> bool:
    """Whether the code at ``frame`` looks for files that are no inputs."""
    frame = outside(frame, _MACHINERY)
    if frame is None:
        return False
    module = module_of(frame)
    if module == "shutil":
        return frame.f_code.co_name.startswith(_OF_SHUTIL)
    return module in _UNIMPORTANT or module.split(".", 1)[0] == "cas"


def is_for_source_lines(frame: types.FrameType | None) -> bool:
    """Whether the code at ``frame`` reads a source file only to show lines of it."""
    return module_of(outside(frame, _MACHINERY)) == "linecache"


def is_removed(frame: types.FrameType | None) -> bool:
    """Whether the code at ``frame`` opens a directory in order to remove it."""
    return frame is not None and (
        module_of(frame) == "shutil" and frame.f_code.co_name.startswith(("_rmtree", "rmtree"))
    )
