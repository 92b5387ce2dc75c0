"""A store's optional policy file, ``config.toml``: flat keys, each with a type and a default."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import tomli_w

from cas import fsio
from cas.errors import StoreDamaged, UsageError
from cas.layout import Layout
from cas.modes import Modes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_POWERS = " KMGTPE"
_MAX_BYTES = 2**63 - 1
#: TOML is parsed in Python: a longer file, which is no configuration, would take minutes.
_MAX_CONFIG = 64 << 10
#: What unsets a setting that has no value by default.
NONE: Final = "none"


@dataclass(frozen=True, slots=True)
class Size:
    """A limit: ``amount`` bytes, or that share of the capacity of a filesystem. Shown as given."""

    amount: Fraction
    is_share: bool
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text

    def on(self, path: Path) -> int:
        """The limit in bytes, for a store that lies on the filesystem of ``path``."""
        if not self.is_share:
            return int(self.amount)
        stat = os.statvfs(path)
        return int(self.amount * stat.f_blocks * stat.f_frsize)


@dataclass(frozen=True, slots=True)
class Config:
    """What a store's owner decided.

    umask: permission bits to withhold from everything the store creates; None: the process's own.
        A store shared by a group has 0o002.
    grace: seconds for which gc spares what nothing uses any more.
    keep_last, older_than (seconds), max_size: what gc gives up, see `cas.retention.Policy`; None:
        no such rule. ``max_size`` is kept by every writer, too.
    """

    umask: int | None = None
    grace: int = 0
    keep_last: int | None = None
    older_than: int | None = None
    max_size: Size | None = None

    @classmethod
    def load(cls, layout: Layout) -> Config:
        """The store's configuration; defaults where it has none.

        Raises:
            StoreDamaged: the file is not TOML, or holds an unknown key or a bad value.
            PermissionRefused
        """
        try:
            with fsio.os_errors(layout.config, "read"), open(layout.config, "rb") as file:
                data = file.read(_MAX_CONFIG + 1)
        except FileNotFoundError:
            return cls()
        if len(data) > _MAX_CONFIG:
            raise StoreDamaged(layout.config, f"has more than {_MAX_CONFIG} bytes")
        try:
            document = tomllib.loads(data.decode("utf-8"))
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
        return replace(self, **{key: _PARSERS[key](text)})

    def without(self, key: str) -> Config:
        """A copy in which ``key`` is the default again.

        Raises:
            UsageError: unknown key.
        """
        if key not in KEYS:
            raise UsageError(f"unknown setting {key!r}; settings are {', '.join(KEYS)}")
        return replace(self, **{key: getattr(Config(), key)})

    def overridden(self, values: Mapping[str, str]) -> Config:
        """A copy with ``values``, by key, in place of what it has.

        Raises:
            UsageError: unknown key or malformed value.
        """
        config = self
        for key, text in values.items():
            config = config.with_value(key, text)
        return config

    def save(self, layout: Layout, temporary: Path, modes: Modes) -> None:
        document: dict[str, Any] = {}
        if self.umask is not None:
            document["umask"] = f"{self.umask:04o}"
        if self.grace:
            document["grace"] = f"{self.grace}s"
        if self.keep_last is not None:
            document["keep_last"] = self.keep_last
        if self.older_than is not None:
            document["older_than"] = f"{self.older_than}s"
        if self.max_size is not None:
            document["max_size"] = str(self.max_size)
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


def parse_count(text: str) -> int | None:
    """How many to keep: a whole number from 1 on; None for ``none``."""
    if text.strip() == NONE:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < 1:
        raise UsageError(f"{text!r} is not a number of generations: 1 or more, or {NONE}")
    return int(text)


def parse_age(text: str) -> int | None:
    """`parse_duration`; None for ``none``."""
    return None if text.strip() == NONE else parse_duration(text)


def parse_size(text: str) -> Size | None:
    """A limit on a store's size; None for ``0`` and ``none``, which mean that there is no limit.

    ``200G`` and ``200GB`` are 200 * 10^9 bytes, ``200Gi`` and ``200GiB`` 200 * 2^30, ``10%`` a
    tenth of the filesystem, a number alone is bytes. Upper and lower case are the same.
    """
    stripped = text.strip()
    if stripped == NONE:
        return None
    match = re.fullmatch(
        r"([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*(?:(%)|(?:([kmgtpe])(i)?)?b?)",
        stripped,
        re.ASCII | re.IGNORECASE,
    )
    if match is None:
        raise UsageError(
            f"{text!r} is not a size such as 200G, 200GiB, 500M, 10% or a number of bytes"
        )
    number, percent, unit, binary = match.groups()
    amount = Fraction(number)
    if percent:
        amount /= 100
        if amount > 1:
            raise UsageError(f"{text!r} is more than all of the filesystem")
    else:
        amount *= (1024 if binary else 1000) ** _POWERS.index((unit or " ").upper())
        if amount > _MAX_BYTES:
            raise UsageError(f"{text!r} is larger than any filesystem")
    return Size(amount, bool(percent), stripped) if amount else None


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "umask": parse_umask,
    "grace": parse_duration,
    "keep_last": parse_count,
    "older_than": parse_age,
    "max_size": parse_size,
}
