"""Paths without the parts that differ from machine to machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Final

#: A path that no token stands for may name a user or a job: it is shown as a digest only.
_ABSOLUTE: Final = re.compile(r"(?:^|[\s=:;,'\"(\[])/[^\s/]")


@functools.cache
def roots() -> tuple[tuple[str, str], ...]:
    """Token and directory, the longest directory first: ``{site}``, ``{stdlib}``, ``{prefix}``."""
    found = [("{site}", directory) for directory in _site_directories()]
    found.append(("{stdlib}", sysconfig.get_path("stdlib")))
    found += [("{prefix}", sys.prefix), ("{prefix}", sys.base_prefix)]
    known = {os.path.realpath(directory): token for token, directory in reversed(found)}
    pairs = [(token, directory) for directory, token in known.items()]
    return tuple(sorted(pairs, key=lambda pair: -len(pair[1])))


def _site_directories() -> list[str]:
    """Where torch and ExecuTorch are, and where this environment installs packages."""
    found = []
    for package in ("executorch", "torch"):
        spec = importlib.util.find_spec(package)
        if spec is not None:
            found += [str(Path(place).parent) for place in spec.submodule_search_locations or ()]
    return [*found, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]


def portable(path: str) -> str:
    """``path`` with a token for the directory of the installation that it is in."""
    real = os.path.realpath(path)
    for token, directory in roots():
        if real == directory or real.startswith(directory + os.sep):
            return token + real[len(directory) :]
    return real


def local(path: str) -> str:
    """What a portable path is called here; the first that exists, of several directories."""
    for token, directory in roots():
        if path.startswith(token) and os.path.lexists(candidate := directory + path[len(token) :]):
            return candidate
    return path


@functools.lru_cache(maxsize=4096)
def _is_of_stdlib(file: str) -> bool:
    return portable(file).startswith("{stdlib}")


def is_stdlib(module: str) -> bool:
    """Whether a module is Python's own, and not one of the user's that has its name."""
    top = module.split(".", 1)[0]
    if top not in sys.stdlib_module_names or top == "__main__":
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    return not isinstance(file, str) or _is_of_stdlib(file)


def scrub(text: str) -> str:
    """``text`` with tokens for the directories of this installation."""
    for token, directory in roots():
        text = text.replace(directory, token)
    return text


def names_a_path(text: str) -> bool:
    """Whether a scrubbed text still holds an absolute path."""
    return _ABSOLUTE.search(text) is not None
