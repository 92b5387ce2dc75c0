"""What users get wrong, each with its message and exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cas.testing.damage import fill_disk

from .conftest import Filled, Run, commit

# --- the store's directory ----------------------------------------------------------------------


def test_a_store_that_does_not_exist(run: Run, store_dir: Path) -> None:
    for command in (("ls",), ("stats",), ("show", "x"), ("gc",), ("verify",), ("rm", "x")):
        outcome = run(*command)
        assert outcome.code == 3, command
        assert f"there is no store at {store_dir}" in outcome.err
    assert not store_dir.exists(), "looking for a store must not make one"


def test_a_directory_that_belongs_to_something_else(run: Run, store_dir: Path) -> None:
    store_dir.mkdir()
    (store_dir / "thesis.tex").write_text("precious")
    for command in (("ls",), ("config", "set", "grace", "1h")):
        outcome = run(*command)
        assert outcome.code == 5, command
        assert "is not a cas store" in outcome.err
    assert [path.name for path in store_dir.iterdir()] == ["thesis.tex"]


def test_a_store_that_is_a_file(run: Run, store_dir: Path) -> None:
    store_dir.write_text("a file")
    for command in (("ls",), ("config", "set", "grace", "1h")):
        outcome = run(*command)
        assert outcome.code == 5, command
        assert "is a file" in outcome.err
    assert store_dir.read_text() == "a file"


def test_a_store_of_an_unknown_format(run: Run, filled: Filled) -> None:
    header = filled.path / "cas.json"
    document = json.loads(header.read_text())
    header.chmod(0o644)
    header.write_text(json.dumps({**document, "format": 999}))
    outcome = run("ls")
    assert outcome.code == 5
    assert "format 999" in outcome.err


def test_a_store_on_a_network_filesystem(
    run: Run, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cas.filesystems.type_of", lambda *_: "nfs4")
    outcome = run("ls")
    assert outcome.code == 5
    assert "network filesystem (nfs4)" in outcome.err


def test_a_store_that_cannot_be_written_still_serves_readers(
    run: Run, filled: Filled, tmp_path: Path, frozen: Callable[[Path], None]
) -> None:
    frozen(filled.path)
    assemble = ("assemble", "other", "-o", str(tmp_path / "out"))
    for command in (("ls",), ("show", "other"), ("stats",), ("verify",), ("config",), assemble):
        assert run(*command).code == 0, command
    assert (tmp_path / "out" / "weights.bin").read_bytes() == filled.other
    for command in (
        ("rm", "other"),
        ("gc",),
        ("verify", "--repair"),
        ("verify", "--drop-quarantine"),
        ("verify", "--rebuild-index"),
        ("config", "set", "grace", "1h"),
    ):
        outcome = run(*command)
        assert outcome.code == 5, command
        assert "read-only" in outcome.err


def test_a_store_where_none_can_be_made(
    run: Run, store_dir: Path, frozen: Callable[[Path], None]
) -> None:
    parent = store_dir / "parent"
    parent.mkdir(parents=True)
    frozen(parent)
    outcome = run("--store", parent / "store", "config", "set", "grace", "1h")
    assert outcome.code == 5
    assert str(parent) in outcome.err


# --- names --------------------------------------------------------------------------------------

BAD_NAMES = {
    "parent directory": "../escape",
    "parent directory inside": "a/../b",
    "absolute path": "/etc/passwd",
    "empty": "",
    "empty component": "a//b",
    "trailing slash": "a/",
    "control character": "a\nb",
    "escape sequence": "a\x1b[31mb",
    "nul": "a\x00b",
    "300 characters": "a" * 300,
    "not ASCII": "modèle",
    "right to left override": "a\u202eb",
    "space": "a b",
    "leading dash": "-a",
    "hidden": ".a",
    "backslash": "a\\b",
    "percent": "a%2Fb",
    "generation zero": "a@0",
    "generation of letters": "a@latest",
    "two generations": "a@1@2",
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES.keys())
@pytest.mark.parametrize("command", ["show", "rm", "assemble"])
def test_a_name_that_is_not_allowed(
    run: Run, filled: Filled, tmp_path: Path, command: str, name: str
) -> None:
    more = ["-o", str(tmp_path / "out")] if command == "assemble" else []
    outcome = run(command, *more, "--", name)
    assert outcome.code == 2
    assert "not allowed" in outcome.err
    assert outcome.err.isprintable() or outcome.err.rstrip("\n").isprintable()
    assert not (tmp_path / "out").exists()


def test_an_unknown_name_and_an_unknown_generation(run: Run, filled: Filled) -> None:
    unknown = run("show", "models/two")
    assert unknown.code == 3
    assert "models/one" in unknown.err
    assert "there is models/one" in run("show", "mdoels/one").err
    assert "`cas ls` lists" in run("show", "elsewhere").err
    generation = run("show", "models/one@7")
    assert generation.code == 3
    assert "models/one@2" in generation.err


def test_names_that_differ_only_by_case(run: Run, filled: Filled) -> None:
    import cas
    from cas.errors import InvalidName

    assert run("show", "Other").code == 3
    with cas.Store.open(filled.path) as store, pytest.raises(InvalidName, match="only by case"):
        commit(store, "Other", b"x")


# --- the output directory -----------------------------------------------------------------------


def test_an_output_directory_that_is_a_file(run: Run, filled: Filled, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        outcome = run("assemble", "other", "-o", output)
        assert outcome.code == 5
        assert f"the output directory {output} is a file, or lies below one" in outcome.err
    assert (tmp_path / "file").read_text() == "mine"


def test_an_output_file_that_is_a_directory(run: Run, filled: Filled, tmp_path: Path) -> None:
    (tmp_path / "out" / "weights.bin").mkdir(parents=True)
    outcome = run("assemble", "other", "-o", tmp_path / "out")
    assert outcome.code == 5
    assert "weights.bin" in outcome.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["weights.bin"]


def test_an_output_directory_that_cannot_be_written(
    run: Run, filled: Filled, tmp_path: Path, frozen: Callable[[Path], None]
) -> None:
    (tmp_path / "out").mkdir()
    frozen(tmp_path / "out")
    for output in (tmp_path / "out", tmp_path / "out" / "below"):
        outcome = run("assemble", "other", "-o", output)
        assert outcome.code == 5
        assert str(output) in outcome.err
        assert "cas: cannot write to output directory" in outcome.err


def test_an_output_directory_on_a_full_disk(run: Run, filled: Filled, small_disk: Path) -> None:
    fill_disk(small_disk, leave=8192)
    outcome = run("assemble", "other", "-o", small_disk / "out")
    assert outcome.code == 6
    assert "no space left" in outcome.err
    assert str(small_disk) in outcome.err
    assert list((small_disk / "out").iterdir()) == []


def test_a_missing_output_option(run: Run, filled: Filled) -> None:
    outcome = run("assemble", "other")
    assert outcome.code == 2
    assert "'-o'" in outcome.err
