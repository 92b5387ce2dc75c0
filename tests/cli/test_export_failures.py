"""What cannot be exported, and what `cas export` says about it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cas.testing.damage import fill_disk

from .conftest import NET, Run

pytest.importorskip("executorch")


def test_backend_cuda_on_a_machine_without_cuda(export: Run, net: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    outcome = export("make", "--backend", "cuda", "--spec", "low_memory_mode=ON")
    assert outcome.code == 5
    assert outcome.err.startswith("cas: backend cuda ")
    assert "GPU" in outcome.err
    assert not (net / "out").exists()


INVALID = {
    "bare": "gave a module without example inputs; return (module, args)",
    "nothing": "gave None; expected (module, args[, kwargs][, dynamic_shapes])",
    "text": "gave a str; expected",
    "short": "gave a tuple of 1 entries",
    "long": "gave a tuple of 5 entries",
    "no_module": "begins with a str, not with a torch.nn.Module",
    "loose_input": "the example inputs are a Tensor, not a tuple; for one input write",
    "bad_keywords": "the keyword inputs are an int, not a dict",
    "empty": "gave an empty dict",
    "bad_method": "the key 'not a name': not a method name",
    "raises": "KeyError: 'weights'\n    return missing[\"weights\"]",
    "parameters": "missing 1 required positional argument: 'size'",
    "X": "gave a Tensor; expected",
}


@pytest.mark.parametrize("attr", INVALID)
def test_a_source_that_gives_the_wrong_thing(export: Run, net: Path, run: Run, attr: str) -> None:
    outcome = export(attr)
    assert outcome.code == 2, outcome.err
    assert INVALID[attr] in outcome.err
    assert "Traceback" not in outcome.err
    assert not (net / "out").exists()
    assert run("ls", "--json").json["refs"] == []


def test_an_error_in_the_source_is_shown_at_its_own_line(export: Run, net: Path) -> None:
    line = NET.splitlines().index('    return missing["weights"]') + 1
    assert f"{net / 'net.py'}:{line}: KeyError" in export("raises").err
    assert "Traceback" in export("raises", "-v").err


def test_an_attribute_that_does_not_exist(export: Run) -> None:
    outcome = export("mkae")
    assert outcome.code == 3
    assert "net.py has no 'mkae'; it defines Net, Keyword, make" in outcome.err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named"),
        ("def broken(:\n    pass", "SyntaxError"),
        ("import sys\nsys.exit(3)", "it called sys.exit(3); guard that with"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
    ids=["import", "syntax", "exit", "raise"],
)
def test_a_source_that_does_not_import(run: Run, net: Path, body: str, message: str) -> None:
    (net / "bad.py").write_text(f"# a comment\n{body}\n")
    outcome = run("export", "bad.py:make", "-o", "out")
    assert outcome.code == 2
    assert message in outcome.err
    assert "bad.py:" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_module_that_cannot_be_found_and_one_that_fails(run: Run, net: Path) -> None:
    outcome = run("export", "no_such_package.models:make", "-o", "out")
    assert outcome.code == 3
    assert "there is no module 'no_such_package'" in outcome.err
    (net / "needy.py").write_text("import no_such_dependency\n")
    outcome = run("export", "needy:make", "-o", "out")
    assert outcome.code == 2
    assert "needy.py:1" in outcome.err


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_program_file(run: Run, net: Path, keep: int) -> None:
    import torch

    whole = net / "whole.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(1, 4),)), whole)
    (net / "cut.pt2").write_bytes(whole.read_bytes()[: whole.stat().st_size * keep // 200 or keep])
    outcome = run("export", "cut.pt2", "-o", "out")
    assert outcome.code == 4
    assert "cut.pt2" in outcome.err
    assert "torch.export.save" in outcome.err


def test_a_file_of_torch_save_is_no_source(run: Run, net: Path) -> None:
    import torch

    torch.save(torch.nn.Linear(4, 4).state_dict(), net / "weights.pt2")
    outcome = run("export", "weights.pt2", "-o", "out")
    assert outcome.code == 2
    assert "was not written by torch.export.save" in outcome.err


def test_a_program_file_that_may_not_be_read(
    run: Run, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cas.executorch import loading

    (net / "closed.pt2").write_bytes(b"")

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(loading, "open", refuse, raising=False)
    outcome = run("export", "closed.pt2", "-o", "out")
    assert outcome.code == 5
    assert "cannot read closed.pt2: permission denied" in outcome.err


def test_a_model_that_cannot_be_traced(export: Run, run: Run) -> None:
    outcome = export("untraceable")
    assert outcome.code == 1
    assert "cas: export failed: " in outcome.err
    assert "Traceback" not in outcome.err
    assert run("ls", "--json").json["refs"] == []
    assert run("verify").code == 0


@pytest.mark.parametrize(
    ("attr", "message"),
    [
        ("exits", "cas: export failed: the code called sys.exit()"),
        ("handled", "cas: export failed: ValueError: the real reason"),
        ("wrong_shape", "cas: export failed: RuntimeError: a and b must have same reduction dim"),
    ],
)
def test_a_model_that_fails_while_it_is_traced(
    export: Run, spawn: Run, net: Path, attr: str, message: str
) -> None:
    outcome = spawn("export", f"net.py:{attr}", "-o", "out", cwd=net)
    assert outcome.code == 1
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert lines[-1].startswith(message)
    assert lines[:-1] == ["the user's own output"]


def test_a_complex_weight_is_not_converted(export: Run) -> None:
    outcome = export("complex_buffer", "--dtype", "float16")
    assert outcome.code == 2
    assert "cannot convert phase, which is complex" in outcome.err


def test_a_partitioner_that_exits(export: Run) -> None:
    outcome = export("make", "--backend", "net:partitioner_exits")
    assert outcome.code == 1
    assert "making the partitioner net:partitioner_exits failed: the code called" in outcome.err


@pytest.mark.parametrize("backend", ["no_such_module.x:Y", "net:Missing"])
def test_a_backend_that_does_not_exist(export: Run, backend: str) -> None:
    outcome = export("make", "--backend", backend)
    assert outcome.code == 3, outcome.err
    assert f"backend {backend}: " in outcome.err


def test_an_unsupported_executorch_is_found_before_the_source_runs(
    run: Run, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executorch import version

    monkeypatch.setattr(version, "__version__", "1.6.0")
    outcome = run("export", "net.py:make", "-o", "out")
    assert outcome.code == 5
    assert "the user's own output" not in outcome.err


def test_a_full_disk_under_the_store(net: Path, small_disk: Path, run: Run) -> None:
    (net / "big.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(1024, 1024).eval(), (torch.zeros(1, 1024),)\n"
    )
    outcome = run("--store", small_disk / "store", "export", "big.py:make", "-o", "out")
    assert outcome.code == 6, outcome.err
    assert "no space left" in outcome.err
    assert str(small_disk) in outcome.err
    assert not (net / "out" / "model.pte").exists()


def test_a_full_disk_under_the_output_leaves_nothing_behind(
    net: Path, small_disk: Path, export: Run, run: Run
) -> None:
    fill_disk(small_disk, leave=8192)
    outcome = run("export", "net.py:make", "-o", small_disk / "out")
    assert outcome.code == 6
    assert "only 8192 are free for the output" in outcome.err, "told before the export began"
    assert str(small_disk) in outcome.err
    assert list((small_disk / "out").iterdir()) == []
    assert run("ls", "--json").json["refs"] == []
    assert run("verify").code == 0
