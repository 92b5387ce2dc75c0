"""The policy file: what it may say, and that a slip in it is reported, not guessed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas import Store
from cas.config import Config, parse_age, parse_count, parse_duration, parse_size, parse_umask
from cas.errors import StoreDamaged, UsageError
from cas.layout import Layout
from cas.testing.strategies import no_deadlines

no_deadlines()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("90s", 90), ("15m", 900), (" 2 h ", 7200), ("7d", 604800)],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5h", "h", "1y", "1 h 2 m", "1e3", "9" * 10, "\u0661"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="duration"):
        parse_duration(text)


@given(st.integers(0, 0o77))
def test_every_umask_that_leaves_the_owner_alone_is_allowed(value: int) -> None:
    assert parse_umask(f"{value:04o}") == value


@pytest.mark.parametrize("text", ["", "8", "0700", "777", "-2", "0o22", "00022", "2 "])
def test_a_umask_that_is_none_or_locks_out_the_owner_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="umask"):
        parse_umask(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("200G", 200 * 10**9),
        ("200GB", 200 * 10**9),
        ("200g", 200 * 10**9),
        ("200GiB", 200 << 30),
        ("200Gi", 200 << 30),
        ("200gib", 200 << 30),
        ("500M", 500 * 10**6),
        ("1.5G", 1_500_000_000),
        ("0.5Ki", 512),
        ("7 TiB", 7 << 40),
        ("12k", 12_000),
        ("12B", 12),
        ("  4096 ", 4096),
        ("1", 1),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    size = parse_size(text)
    assert size is not None and size.on(Path("/")) == nbytes
    assert str(size) == text.strip()


@pytest.mark.parametrize("text", ["0", "0G", "0%", "none", " none "])
def test_no_size_is_no_limit(text: str) -> None:
    assert parse_size(text) is None


@pytest.mark.parametrize("text", ["10%", "10 %", "10.0%"])
def test_a_size_can_be_a_part_of_the_filesystem(text: str, tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    size = parse_size(text)
    assert size is not None and size.on(tmp_path) == stat.f_blocks * stat.f_frsize // 10


@pytest.mark.parametrize(
    "text",
    [
        *("", "-1", "G", "1X", "1e9", "1,5G", "5i", "5iB", "5GiBs", "ten", "%", "1%%", "0x10"),
        *("101%", "10E", "9" * 20, "\u0661G", "inf", "nan"),
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"size|filesystem"):
        parse_size(text)


@given(st.integers(1, 10**18))
def test_every_number_of_bytes_is_a_size(nbytes: int) -> None:
    size = parse_size(str(nbytes))
    assert size is not None and size.on(Path("/")) == nbytes


def test_counts_and_ages_can_be_none() -> None:
    assert (parse_count("3"), parse_count("none")) == (3, None)
    assert (parse_age("30d"), parse_age("0s"), parse_age("none")) == (30 * 86400, 0, None)
    for text in ("0", "-1", "1.5", "", "all", "9" * 10):
        with pytest.raises(UsageError, match="number of generations"):
            parse_count(text)


def load(root: Path, text: str) -> Config:
    layout = Layout(root)
    layout.config.write_text(text)
    return Config.load(layout)


def test_no_file_means_defaults(tmp_path: Path) -> None:
    assert Config.load(Layout(tmp_path)) == Config(umask=None, grace=0)


def test_values_are_read(tmp_path: Path) -> None:
    assert load(tmp_path, 'umask = "0002"\ngrace = "1h"\n') == Config(umask=2, grace=3600)


def test_a_policy_is_read_as_text_or_as_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, 'keep_last = 3\nolder_than = "30d"\nmax_size = "200GiB"\n')
    assert (config.keep_last, config.older_than) == (3, 30 * 86400)
    assert config.max_size == parse_size(str(200 << 30))
    config = load(tmp_path, 'keep_last = "none"\nmax_size = 5000\n')
    assert (config.keep_last, config.max_size) == (None, parse_size("5000"))


def test_a_policy_survives_reopening_and_can_be_taken_back(tmp_path: Path) -> None:
    values = {"keep_last": "3", "older_than": "2w", "max_size": "12.5%"}
    with Store.open(tmp_path / "s") as store:
        for key, value in values.items():
            store.set_config(key, value)
    layout = Layout(tmp_path / "s")
    assert Config.load(layout) == Config().overridden(values)
    assert str(Config.load(layout).max_size) == "12.5%"
    with Store.open(tmp_path / "s") as store:
        for key in values:
            store.set_config(key, "none")
    assert Config.load(layout) == Config()


@pytest.mark.parametrize(
    "text",
    [
        'gracee = "1h"',
        "keep_last = 0",
        "keep_last = true",
        'max_size = "plenty"',
        'older_than = "1y"',
        'grace = "soon"',
        "umask = true",
        "grace = 1.5",
        "grace = [1]",
        "umask =",
        "\0",
    ],
)
def test_a_slip_in_the_file_is_reported_with_its_path(tmp_path: Path, text: str) -> None:
    with pytest.raises(StoreDamaged, match=r"config\.toml"):
        load(tmp_path, text)


def test_bytes_that_are_no_text_are_reported(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(StoreDamaged):
        Config.load(Layout(tmp_path))


def test_a_setting_survives_reopening(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        store.set_config("grace", "2h")
        store.set_config("umask", "0007")
        with pytest.raises(UsageError, match="unknown setting"):
            store.set_config("color", "red")
    with Store.open(tmp_path / "s") as store:
        assert store.context.config == Config(umask=0o007, grace=7200)
        assert store.context.modes.umask == 0o007
        assert not list(store.context.layout.leases.iterdir())


@pytest.mark.parametrize(("text", "umask"), [('"0002"', 0o002), ("0o077", 0o077), ("0o027", 0o027)])
def test_a_umask_is_what_it_spells_as_text_and_as_an_octal_number(
    tmp_path: Path, text: str, umask: int
) -> None:
    (tmp_path / "config.toml").write_text(f"umask = {text}\n")
    assert Config.load(Layout(tmp_path)).umask == umask


def test_what_is_taken_back_is_the_default_again(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        for key, value in (("grace", "2h"), ("umask", "0007"), ("max_size", "10%")):
            store.set_config(key, value)
            assert store.set_config(key, None) == Config()
        with pytest.raises(UsageError, match="unknown setting"):
            store.set_config("color", None)
    assert Config.load(Layout(tmp_path / "s")) == Config()


def test_two_who_have_the_store_open_keep_each_others_settings(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as one, Store.open(tmp_path / "s") as other:
        one.set_config("grace", "1h")
        config = other.set_config("umask", "0027")
    assert (config.grace, config.umask) == (3600, 0o027)
