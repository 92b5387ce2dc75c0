"""Every setting's effective value and where it came from: flag, environment, store, default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cas.config import NONE, parse_age, parse_count, parse_duration, parse_size, parse_umask
from cas.errors import UsageError
from cas_cli.options import Given

#: The origins of a value that the store itself holds, and of one that nobody gave.
FROM_STORE = "store's config.toml"
FROM_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. ``stored`` says whether the store's config.toml can hold it."""

    name: str
    flag: str
    env: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    default: Callable[[], Any]
    stored: bool
    help: str


@dataclass(frozen=True, slots=True)
class Effective:
    """A setting's value, and in ``origin`` who decided it."""

    setting: Setting
    value: Any
    origin: str

    @property
    def from_outside(self) -> bool:
        """Whether a flag or the environment decided, whatever the store says."""
        return self.origin not in (FROM_STORE, FROM_DEFAULT)

    @property
    def decided_by(self) -> str:
        """The flag, variable or file, without the word that says which of these it is."""
        return self.origin.split()[-1]

    def shown(self) -> str:
        return self.setting.show(self.value)


def default_store() -> Path:
    """The `cas` directory in the user's cache directory."""
    from platformdirs import user_cache_path

    return user_cache_path("cas", appauthor=False)


def parse_switch(text: str) -> bool:
    """A boolean, as people write it in an environment variable."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise UsageError(f"{text!r} is not a yes or no (1, true, yes, on; 0, false, no, off)")


def parse_share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise UsageError(f"{text!r} is not a number from 0 to 1")
    return share


def show_duration(seconds: int) -> str:
    for unit, size in (("w", 604800), ("d", 86400), ("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _or_none(show: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: NONE if value is None else show(value)


def _show_umask(value: int | None) -> str:
    return "the process's own" if value is None else f"{value:04o}"


def _parse_store(text: str) -> Path:
    if not text.strip():
        raise UsageError("the store's directory is empty")
    return Path(text).expanduser()


SETTINGS = (
    Setting(
        "store", "--store", "CAS_STORE", _parse_store, str, default_store, False,
        "the store's directory",
    ),
    Setting(
        "read_only", "--read-only", "CAS_READONLY", parse_switch, lambda v: "yes" if v else "no",
        lambda: False, False, "write nothing to the store",
    ),
    Setting(
        "umask", "--umask", "CAS_UMASK", parse_umask, _show_umask, lambda: None, True,
        "permissions withheld from new files; 0002 for a store shared by a group",
    ),
    Setting(
        "grace", "gc --grace", "CAS_GRACE", parse_duration, show_duration, lambda: 0, True,
        "for how long gc spares what nothing uses any more",
    ),
    Setting(
        "keep_last", "gc --keep-last", "CAS_KEEP_LAST", parse_count, _or_none(str), lambda: None,
        True, "gc drops all but so many generations of each artifact",
    ),
    Setting(
        "older_than", "gc --older-than", "CAS_OLDER_THAN", parse_age, _or_none(show_duration),
        lambda: None, True, "gc drops old generations and action records not used for so long",
    ),
    Setting(
        "max_size", "gc --max-size", "CAS_MAX_SIZE", parse_size, _or_none(str), lambda: None, True,
        "for how many bytes gc and writers make room, dropping what was not used for longest",
    ),
    Setting(
        "disable", "--no-actions", "CAS_DISABLE", parse_switch, lambda v: "yes" if v else "no",
        lambda: False, False, "compute everything; run scripts as if cas were not there",
    ),
    Setting(
        "recheck", "--recheck", "CAS_RECHECK", parse_share, lambda v: f"{v:g}", lambda: 0.0,
        False, "the share of what was computed before to compute again, and compare",
    ),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in SETTINGS}


def resolve(
    setting: Setting, flag: object, environ: Mapping[str, str], stored: Mapping[str, Any]
) -> Effective:
    """The effective value: the flag, else the environment, else the store, else the default.

    Raises:
        UsageError: a value does not parse; the message names where it stands.
    """
    if flag is not None:
        return Effective(setting, _parsed(setting, flag, setting.flag), f"flag {setting.flag}")
    if setting.env in environ:
        value = _parsed(setting, environ[setting.env], setting.env)
        return Effective(setting, value, f"environment {setting.env}")
    if setting.stored and setting.name in stored:
        return Effective(setting, stored[setting.name], FROM_STORE)
    return Effective(setting, setting.default(), FROM_DEFAULT)


def _parsed(setting: Setting, value: object, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return setting.parse(value)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def store_path(given: Given, environ: Mapping[str, str]) -> Path:
    path: Path = resolve(BY_NAME["store"], given.store, environ, {}).value
    return path
