"""What `cas export` refuses before it imports ExecuTorch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cas.errors import UsageError
from cas.exportspec import ExportOptions, SourceInvalid, parse_source

from .conftest import Filled, Run


@pytest.fixture(autouse=True)
def no_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these may need seconds of imports to be found."""
    monkeypatch.setattr(
        "cas_cli.commands.export._frameworks", lambda *_: pytest.fail("frameworks were imported")
    )


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("def make(): ...\n")
    return tmp_path


@pytest.mark.parametrize(
    "text", ["model.py", "model.py:", ":make", "", "model", "dir/model:make", "model.py:ma ke",
             "a..b:make", "model.py:1x", "model.pte"],
)  # fmt: skip
def test_a_source_of_no_known_form(run: Run, model: Path, text: str) -> None:
    outcome = run("export", "-o", "out", "--", text)
    assert outcome.code == 2
    assert "expected file.pt2, PKG.MOD:ATTR or FILE.py:ATTR" in outcome.err


@pytest.mark.parametrize("text", ["none.py:make", "none.pt2", "no/such/dir/none.pt2"])
def test_a_source_file_that_does_not_exist(run: Run, model: Path, text: str) -> None:
    outcome = run("export", text, "-o", "out")
    assert outcome.code == 3
    assert f"source file {text.partition(':')[0]} does not exist" in outcome.err
    assert not (model / "out").exists()


def test_a_source_file_that_is_a_directory(run: Run, model: Path) -> None:
    (model / "dir.pt2").mkdir()
    outcome = run("export", "dir.pt2", "-o", "out")
    assert outcome.code == 2
    assert "is not a file" in outcome.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "cuda", "--spec", "low_memory=ON"], "unknown compile spec 'low_memory'"),
        (["--backend", "cuda", "--spec", "max_autotune=yes"], "max_autotune is ON or OFF"),
        (["--backend", "cuda", "--spec", "max_autotune"], "expected KEY=VALUE"),
        (["--backend", "cuda", "--spec", "=ON"], "expected KEY=VALUE"),
        (["--backend", "cuda", "--spec", "method_name=f"], "filled in for each method"),
        (["--backend", "cuda", *(["--spec", "max_autotune=ON"] * 2)], "is given twice"),
        (["--backend", "xnnpack", "--spec", "max_autotune=ON"], "xnnpack takes no compile specs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_compile_spec_that_makes_no_sense(
    run: Run, model: Path, options: list[str], message: str
) -> None:
    outcome = run("export", "model.py:make", "-o", "out", *options)
    assert outcome.code == 2
    assert message in outcome.err
    assert not (model / "out").exists()


def test_a_directory_where_the_cuda_weights_go(run: Run, model: Path) -> None:
    (model / "out" / "aoti_cuda_blob.ptd").mkdir(parents=True)
    outcome = run("export", "model.py:make", "-o", "out", "--backend", "cuda")
    assert outcome.code == 5
    assert "aoti_cuda_blob.ptd" in outcome.err


@pytest.mark.parametrize("backend", ["vulcan", "a:", ":b", "a b:c", ""])
def test_an_unknown_backend_names_the_known_ones(run: Run, model: Path, backend: str) -> None:
    outcome = run("export", "model.py:make", "-o", "out", "--backend", backend)
    assert outcome.code == 2
    assert "portable, xnnpack, cuda or PKG.MOD:PARTITIONER" in outcome.err


@pytest.mark.parametrize(
    "options",
    [
        ["--name", "../x"],
        ["--name", "a\nb"],
        ["--basename", "a/b"],
        ["--basename", "../model"],
        ["--external-tag", "../weights"],
        ["--external-tag", "a\x00b"],
        ["--external-tag", ""],
        ["--output", ""],
        ["--segment-alignment", "3"],
        ["--segment-alignment", str(1 << 31)],
        ["--constant-alignment", "0"],
        ["--dtype", "int8"],
    ],
    ids=" ".join,
)
def test_an_option_that_makes_no_sense(run: Run, model: Path, options: list[str]) -> None:
    outcome = run("export", "model.py:make", "-o", "out", *options)
    assert outcome.code == 2, outcome.err
    assert not (model / "out").exists()


def test_an_output_that_is_a_file(run: Run, model: Path) -> None:
    outcome = run("export", "model.py:make", "-o", "model.py")
    assert outcome.code == 5
    assert "the output directory model.py is a file, or lies below one" in outcome.err


@pytest.mark.parametrize("below", ["", "chunks", "new/dir"])
def test_an_output_inside_the_store(run: Run, model: Path, store_dir: Path, below: str) -> None:
    outcome = run("export", "model.py:make", "-o", store_dir / below)
    assert outcome.code == 5
    assert "is inside the store" in outcome.err
    assert not (store_dir / "new").exists()


@pytest.mark.parametrize("file", ["model.pte", "weights.ptd"])
def test_a_directory_in_the_way_of_a_file(run: Run, model: Path, file: str) -> None:
    (model / "out" / file).mkdir(parents=True)
    outcome = run("export", "model.py:make", "-o", "out", "--external-tag", "weights")
    assert outcome.code == 5
    assert f"{file}: it is a directory" in outcome.err


def test_a_name_that_collides_with_another(run: Run, model: Path, filled: Filled) -> None:
    outcome = run("export", "model.py:make", "-o", "out", "--name", "Models/ONE")
    assert outcome.code == 2
    assert "differs from the existing 'models/one' only by case" in outcome.err


def test_a_store_that_cannot_be_written(
    run: Run, model: Path, filled: Filled, frozen: Callable[[Path], None]
) -> None:
    frozen(filled.path)
    outcome = run("export", "model.py:make", "-o", "out")
    assert outcome.code == 5
    assert "read-only" in outcome.err


def test_a_store_that_is_none(run: Run, model: Path, store_dir: Path) -> None:
    store_dir.mkdir()
    (store_dir / "thesis.tex").write_text("precious")
    outcome = run("export", "model.py:make", "-o", "out")
    assert outcome.code == 5
    assert "is not a cas store" in outcome.err


def test_without_executorch_it_says_how_to_install_it(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = run("export", "model.py:make", "-o", "out")
    assert outcome.code == 5
    assert "pip install 'cas-artifacts[executorch]'" in outcome.err


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("model.py:make", "model/make"),
        ("some/dir/my model (2).py:Net.make", "my-model-2-/Net.make"),
        ("pkg.mod:make", "mod/make"),
        ("dir/all-MiniLM.pt2", "all-MiniLM"),
        (".hidden.pt2", "hidden"),
    ],
)
def test_the_default_name_comes_from_the_source(text: str, name: str) -> None:
    assert parse_source(text).default_name() == name


def test_a_source_that_gives_no_name_asks_for_one() -> None:
    with pytest.raises(SourceInvalid, match="--name"):
        parse_source("模型.pt2").default_name()


def test_only_what_was_changed_is_recorded() -> None:
    assert ExportOptions().changed() == {"backend": "portable", "external_weights": False}
    options = ExportOptions(backend="xnnpack", external_weights=True, check_ir=False)
    assert options.changed() == {
        "backend": "xnnpack",
        "external_weights": True,
        "external_tag": "_default_external_constant",
        "check_ir": False,
    }


def test_dtypes_are_those_that_torch_knows() -> None:
    code = (
        "import torch; from cas.exportspec import DTYPES;"
        "assert all(isinstance(getattr(torch, name), torch.dtype) for name in DTYPES)"
    )
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_dtype_is_refused_where_it_is_unknown() -> None:
    with pytest.raises(UsageError, match="dtype must be one of"):
        ExportOptions(dtype="int4").validate()
