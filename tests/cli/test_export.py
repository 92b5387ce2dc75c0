"""`cas export`: what it takes, what it says, and what it records."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cas.exportspec import parse_source

from .conftest import NET, Run

pytest.importorskip("executorch")


def test_json_has_the_documented_keys_and_nothing_else_on_stdout(export: Run, net: Path) -> None:
    document = export("make", "--json", "--basename", "net").json
    assert list(document) == [
        "ref",
        "manifest",
        "files",
        "logical_bytes",
        "new_bytes",
        "chunks",
        "new_chunks",
        "seconds",
    ]
    assert document["ref"] == "net/make@1"
    assert document["files"][0]["path"] == str(Path("out") / "net.pte")
    assert document["logical_bytes"] == (net / "out" / "net.pte").stat().st_size
    assert document["new_bytes"] > 0


def test_what_the_source_prints_goes_to_stderr(export: Run) -> None:
    outcome = export("make")
    assert "the user's own output" in outcome.err
    assert "the user's own output" not in outcome.out


def test_native_output_does_not_reach_stdout(spawn: Run, net: Path) -> None:
    buffered = {"PYTHONUNBUFFERED": ""}
    outcome = spawn("export", "net.py:prints", "-o", "out", "--json", cwd=net, **buffered)
    assert outcome.code == 0, outcome.err
    assert outcome.json["ref"] == "net/prints@1"
    assert "from native code" in outcome.err
    assert "around the redirection" in outcome.err


def test_a_second_export_adds_nothing(export: Run) -> None:
    assert export("make", "--json").json["new_chunks"] > 0
    again = export("make", "--json").json
    assert (again["ref"], again["new_chunks"], again["new_bytes"]) == ("net/make@2", 0, 0)


def test_the_same_export_again_is_not_lowered(
    export: Run, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = export("make", "--json").json["files"][0]["blake3"]
    assert export("make", "--json", "--no-actions").json["files"][0]["blake3"] == first
    monkeypatch.setattr(
        "executorch.exir.program._program._gen_edge_manager_for_partitioners",
        lambda *_: pytest.fail("it was lowered"),
    )
    again = export("make", "--json").json
    assert (again["files"][0]["blake3"], again["ref"]) == (first, "net/make@3")
    monkeypatch.undo()
    assert run("stats", "--json", "-v").json["action_counters"]["hits"] == 1


def test_the_origin_is_recorded(export: Run, run: Run) -> None:
    assert export("make", "--name", "n", "--no-dim-order", "--dtype", "float16").code == 0
    document = run("show", "n", "--json").json
    found = document["provenance"]
    assert found["source"] == "net.py:make"
    assert found["options"] == {
        "backend": "portable",
        "external_weights": False,
        "dtype": "float16",
        "dim_order": False,
    }
    assert set(found["versions"]) == {"cas", "executorch", "torch"}
    assert found["created"].endswith("+00:00")
    assert {t["dtype"] for t in document["tensors"]} & {"float16", "half", "torch.float16"}


@pytest.mark.parametrize(
    "attr", ["keyword", "exported", "program", "table", "Holder.inner"], ids=str
)
def test_every_form_of_source_is_taken(export: Run, attr: str) -> None:
    outcome = export(attr)
    assert outcome.code == 0, outcome.err


def test_a_program_file_and_a_module_are_sources_too(run: Run, net: Path) -> None:
    import torch

    (net / "pkg").mkdir()
    (net / "pkg" / "__init__.py").write_text("")
    (net / "pkg" / "model.py").write_text(NET.replace("print", "len"))
    outcome = run("export", "pkg.model:make", "-o", "out", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["ref"] == "model/make@1"
    net_module = torch.nn.Linear(4, 4).eval()
    torch.export.save(torch.export.export(net_module, (torch.ones(1, 4),)), "saved model.pt2")
    outcome = run("export", "saved model.pt2", "-o", "out", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["ref"] == "saved-model@1"


def test_the_directory_of_a_program_file_is_not_imported_from(tmp_path: Path) -> None:
    from cas.executorch.loading import import_path

    before = list(sys.path)
    with import_path(parse_source(str(tmp_path / "program.pt2"))):
        assert sys.path == before
    with import_path(parse_source(f"{tmp_path / 'net.py'}:make")):
        assert sys.path == [str(tmp_path), *before]


def test_weights_that_stay_inside_are_told(export: Run) -> None:
    outcome = export("not_quantized_outside", "--backend", "xnnpack", "--external-weights")
    assert outcome.code == 0, outcome.err
    assert "bytes of weights stayed in model.pte" in outcome.err
    assert "stayed in" not in export("make", "--backend", "xnnpack", "--external-weights").err


@pytest.mark.parametrize(("flags", "spill"), [([], True), (["--no-spill"], False)])
def test_a_model_is_spilled_unless_told_not_to(
    flags: list[str],
    spill: bool,
    export: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cas.errors import Refused
    from cas.executorch import exporting

    def record(*args: object, **kwargs: object) -> None:
        raise Refused(f"spill is {kwargs['spill']}")

    monkeypatch.setattr(exporting, "export_source", record)
    assert f"spill is {spill}" in export("make", *flags).err
