"""A store's optional policy file, ``config.toml``: flat keys, each with a type and a default."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from cas import fsio
from cas.errors import StoreDamaged, UsageError
from cas.layout import Layout

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True)
class Config:
    """What a store's owner decided.

    umask: permission bits to withhold from everything the store creates; None: the process's own.
        A store shared by a group has 0o002.
    grace: seconds for which gc spares what nothing uses any more.
    """

    umask: int | None = None
    grace: int = 0

    @classmethod
    def load(cls, layout: Layout) -> Config:
        """The store's configuration; defaults where it has none.

        Raises:
            StoreDamaged: the file is not TOML, or holds an unknown key or a bad value.
        """
        try:
            document = tomllib.loads(layout.config.read_text("utf-8"))
        except FileNotFoundError:
            return cls()
        except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, huge numbers, too deep
            raise StoreDamaged(layout.config, f"is not valid TOML: {error}") from None
        config = cls()
        for key, value in document.items():
            try:
                config = config.with_value(key, _as_text(key, value))
            except UsageError as error:
                raise StoreDamaged(layout.config, f"is not usable: {error}") from None
        return config

    def with_value(self, key: str, text: str) -> Config:
        """A copy with ``key`` set to what ``text`` spells.

        Raises:
            UsageError: unknown key or malformed value.
        """
        if key not in KEYS:
            raise UsageError(f"unknown setting {key!r}; settings are {', '.join(KEYS)}")
        value: Any = parse_umask(text) if key == "umask" else parse_duration(text)
        return replace(self, **{key: value})

    def save(self, layout: Layout, temporary: Path, modes: fsio.Modes) -> None:
        document: dict[str, Any] = {}
        if self.umask is not None:
            document["umask"] = f"{self.umask:04o}"
        if self.grace:
            document["grace"] = f"{self.grace}s"
        data = tomli_w.dumps(document).encode()
        fsio.replace_file(layout.config, data, mode=modes.file, temporary=temporary)


def _as_text(key: str, value: object) -> str:
    """A TOML value as the text that spells it; TOML's ``0o002`` is an integer already."""
    if key == "umask" and type(value) is int and value >= 0:
        return f"{value:o}"
    if isinstance(value, str) or type(value) is int:
        return str(value)
    raise UsageError(f"{key} must be a string")


KEYS = tuple(field.name for field in fields(Config))


def parse_umask(text: str) -> int:
    """An octal umask such as ``0002``."""
    if not re.fullmatch(r"0?[0-7]{1,3}", text):
        raise UsageError(f"umask {text!r} is not an octal number such as 0002")
    value = int(text, 8)
    if value & 0o700:
        raise UsageError(f"umask {text!r} would take the store away from its owner")
    return value


def parse_duration(text: str) -> int:
    """Seconds: a whole number with an optional unit s, m, h, d or w."""
    match = re.fullmatch(r"([0-9]{1,9})\s*([smhdw]?)", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a duration such as 90s, 15m, 2h, 7d or 4w")
    return int(match[1]) * _UNITS[match[2] or "s"]
