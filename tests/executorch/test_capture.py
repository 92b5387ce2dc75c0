"""What `capture` and `Capture.save` promise besides the bytes."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.operators import node_visitor
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.devtools import generate_etrecord
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.canonical_partitioners import duplicate_constant_node_pass
from executorch.exir.emit import _emitter
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.serde import export_serialize
from export_cases import CASES, EXTERNAL, one, write_files, x_mlp
from export_models import mlp
from safetensors.torch import save_file
from torch._dynamo.variables import builder
from torch.export import ExportedProgram, _trace, export
from torch.fx.traceback import NodeSource

import cas
from cas import verify
from cas.errors import InvalidName, PermissionRefused, Refused, UsageError
from cas.executorch import CaptureActive, CaptureEnded, ForeignBytes, capture
from cas.repair import repair
from cas.testing.damage import flip_bit

ABSENT = object()
PATCHED = [
    (NamedDataStore, "add_named_data"),
    (_emitter._Emitter, "_save_new_const_tensor"),
    (_emitter._Emitter, "_emit_delegate"),
    (_emitter, "bytes"),
    (_emitter, "hashlib"),
    (node_visitor, "bytes"),
    (LoweredBackendModule, "__init__"),
    (LoweredBackendModule, "processed_bytes"),
    (ExportedProgram, "__deepcopy__"),
    (duplicate_constant_node_pass, "copy"),
    (builder, "_clone_input"),
    (_trace, "_export"),
    (export_serialize.EnumEncoder, "default"),
    (NodeSource, "__deepcopy__"),
]


def attributes() -> list[Any]:
    return [vars(owner).get(name, ABSENT) for owner, name in PATCHED]


@pytest.fixture(scope="module")
def program() -> Any:
    """A stock program with an external file, made outside any capture."""
    return one(mlp(), x_mlp(), config=EXTERNAL).program


# --- patching -----------------------------------------------------------------------------------


def test_every_hook_is_set_inside_and_gone_after(store: cas.Store) -> None:
    before = attributes()
    with capture(store):
        assert all(now is not old for now, old in zip(attributes(), before, strict=True))
    assert all(now is old for now, old in zip(attributes(), before, strict=True))


def test_hooks_are_gone_after_an_exception(store: cas.Store) -> None:
    before = attributes()
    with pytest.raises(ZeroDivisionError), capture(store):
        raise ZeroDivisionError
    assert all(now is old for now, old in zip(attributes(), before, strict=True))
    with capture(store):  # and the next capture is not locked out
        pass


def test_hooks_are_gone_when_entering_fails(
    store: cas.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = attributes()

    def fail(*args: Any) -> None:
        raise RuntimeError("half way")

    monkeypatch.setattr("cas.executorch.hooks_dynamo.install", fail)
    with pytest.raises(RuntimeError, match="half way"):
        capture(store).__enter__()
    assert all(now is old for now, old in zip(attributes(), before, strict=True))
    monkeypatch.undo()
    with capture(store):
        pass


def test_a_nested_capture_is_refused(store: cas.Store) -> None:
    with capture(store), pytest.raises(CaptureActive) as caught:
        capture(store).__enter__()
    assert isinstance(caught.value, Refused)
    assert caught.value.exit_code == 5


def test_a_capture_in_another_thread_is_refused(store: cas.Store) -> None:
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            with capture(store):
                pass
        except CaptureActive as error:
            caught.append(error)

    with capture(store):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(caught) == 1


@pytest.mark.parametrize("name", ["mlp_xnnpack", "blob_backend", "mlp_portable_external"])
def test_an_export_of_another_thread_is_none_of_its_business(
    name: str, store: cas.Store, tmp_path: Path
) -> None:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(CASES[name]().program))
    with capture(store, threshold=1, map_threshold=1) as cap:
        thread.start()
        thread.join()
        assert cap.counters.logical_bytes == 0
    write_files(made[0], tmp_path / "other")  # after the capture, as if there had been none
    write_files(CASES[name]().program, tmp_path / "stock")
    for path in (tmp_path / "stock").iterdir():
        assert (tmp_path / "other" / path.name).read_bytes() == path.read_bytes()


# --- saving -------------------------------------------------------------------------------------


def test_a_stock_program_can_be_saved_too(store: cas.Store, program: Any, tmp_path: Path) -> None:
    with capture(store, "stock") as cap:
        saved = cap.save(program, tmp_path / "out", basename="net")
    expected = {"net.pte", "_default_external_constant.ptd"}
    assert {path.name for path in saved.paths} == expected
    with open(tmp_path / "net.pte", "wb") as file:
        program.write_to_file(file)
    assert (tmp_path / "out/net.pte").read_bytes() == (tmp_path / "net.pte").read_bytes()


def test_the_second_export_adds_no_chunk(store: cas.Store, tmp_path: Path) -> None:
    counts = []
    for generation in (1, 2):
        with capture(store, "mlp") as cap:
            saved = cap.save(one(mlp(), x_mlp()).program, tmp_path / str(generation))
        assert saved.commit.ref.generation == generation
        counts.append(saved.commit.new_chunks)
    assert counts[0] > 0
    assert counts[1] == 0


def test_the_next_export_restores_what_was_removed_by_hand_or_set_aside(
    store: cas.Store, tmp_path: Path
) -> None:
    with capture(store, "mlp") as cap:
        first = cap.save(one(mlp(), x_mlp()).program, tmp_path / "first")
    removed, damaged, *_ = sorted(store.manifest("mlp").chunks())
    store.context.layout.chunk(removed).unlink()
    flip_bit(store.context.layout.chunk(damaged))
    report = verify.verify(store)
    assert set(report.missing) == {removed, damaged}
    assert report.affected_refs == ("mlp@1",)
    with capture(store, "mlp") as cap:
        second = cap.save(one(mlp(), x_mlp()).program, tmp_path / "second")
    assert second.commit.new_chunks == 2
    assert verify.verify(store).clean
    (path,) = store.assemble("mlp@1", tmp_path / "again")
    assert path.read_bytes() == first.paths[0].read_bytes() == second.paths[0].read_bytes()


@pytest.mark.parametrize("save", [torch.save, save_file], ids=["pt", "safetensors"])
def test_a_checkpoint_of_the_weights_repairs_an_export(
    store: cas.Store, tmp_path: Path, save: Callable[[Any, Path], None]
) -> None:
    model = mlp()
    save(model.state_dict(), tmp_path / "checkpoint")
    with capture(store, "mlp") as cap:
        saved = cap.save(one(model, x_mlp()).program, tmp_path / "out")
    weights = {
        part.digest
        for tensor in store.manifest("mlp").tensors
        for entry in store.manifest("mlp").files
        for part in entry.recipe.slice(tensor.offset, tensor.nbytes).chunks()
    }
    assert len(weights) > 4
    for digest in weights:
        store.context.layout.chunk(digest).unlink()
    report = verify.verify(store)
    done = repair(store, report, [tmp_path / "checkpoint"])
    assert set(done.repaired) == weights and not done.affected_refs
    (path,) = store.assemble("mlp", tmp_path / "again")
    assert path.read_bytes() == saved.paths[0].read_bytes()


def test_portable_and_xnnpack_share_the_weights(store: cas.Store, tmp_path: Path) -> None:
    with capture(store) as cap:
        portable = cap.save(one(mlp(), x_mlp()).program, tmp_path / "a", name="portable")
        before = cap.counters.new_bytes
        lowered = one(mlp(), x_mlp(), XnnpackPartitioner()).program
        cap.save(lowered, tmp_path / "b", name="xnnpack")
        added = cap.counters.new_bytes - before
    assert portable.commit.logical_bytes > 400_000
    assert added < 20_000  # the program, not the weights


def test_tensors_lie_where_the_manifest_says(store: cas.Store, tmp_path: Path) -> None:
    model = mlp()
    with capture(store, "mlp", threshold=1) as cap:
        cap.save(one(model, x_mlp()).program, tmp_path / "in")
        cap.save(one(model, x_mlp(), config=EXTERNAL).program, tmp_path / "ext", name="ext")
    for name, directory in (("mlp", "in"), ("ext", "ext")):
        found = {}
        for tensor in store.manifest(name).tensors:
            data = (tmp_path / directory / tensor.file).read_bytes()
            found[tensor.name] = data[tensor.offset : tensor.offset + tensor.nbytes]
            assert tensor.dtype == "float32"
            assert tensor.shape == tuple(model.get_parameter(tensor.name).shape)
        expected = {key: value.numpy().tobytes() for key, value in model.state_dict().items()}
        assert found == expected


def test_the_provenance_says_how(store: cas.Store, program: Any, tmp_path: Path) -> None:
    with capture(store, "mlp") as cap:
        cap.save(
            program,
            tmp_path / "out",
            provenance={"source": "mlp.py"},
            command=["export", "mlp"],
            created="2026-01-02T03:04:05Z",
        )
    provenance = store.manifest("mlp").provenance
    assert provenance["source"] == "mlp.py"
    assert provenance["command"] == ["export", "mlp"]
    assert provenance["created"] == "2026-01-02T03:04:05Z"
    assert provenance["methods"] == ["forward"]
    versions = provenance["versions"]
    assert isinstance(versions, dict)
    assert versions["torch"] == torch.__version__
    assert versions["cas"] == cas.__version__


def test_a_name_is_needed_somewhere(store: cas.Store, program: Any, tmp_path: Path) -> None:
    with capture(store) as cap:
        with pytest.raises(UsageError, match="no name"):
            cap.save(program, tmp_path / "out")
        cap.save(program, tmp_path / "out", name="here")
    assert not list((tmp_path).glob("out/*.tmp"))
    with pytest.raises(InvalidName):
        capture(store, "../escape")


def test_only_a_finished_program_can_be_saved(store: cas.Store, tmp_path: Path) -> None:
    with capture(store, "x") as cap, pytest.raises(UsageError, match="to_executorch"):
        cap.save(object(), tmp_path / "out")
    assert not list(store.refs())


@pytest.mark.parametrize("tag", ["../outside", "a/b", "/root", "a\\b", "new\nline", "x" * 300])
def test_a_hostile_external_tag_is_refused(tag: str, store: cas.Store, tmp_path: Path) -> None:
    config = ExecutorchBackendConfig(external_constants=lambda node: tag)
    with capture(store, "x") as cap:
        hostile = one(mlp(), x_mlp(), config=config).program
        with pytest.raises(InvalidName):
            cap.save(hostile, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(store.refs())


def test_two_tags_for_one_file_are_refused(store: cas.Store, tmp_path: Path) -> None:
    config = ExecutorchBackendConfig(
        external_constants=lambda node: "w" if "first" in node.name else "w.ptd"
    )
    with capture(store, "x") as cap, pytest.raises(InvalidName, match="two external tags"):
        cap.save(one(mlp(), x_mlp(), config=config).program, tmp_path / "out")


def test_a_file_in_the_way_is_found_before_the_commit(
    store: cas.Store, program: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "out/model.pte").mkdir(parents=True)
    with capture(store, "x") as cap:
        for target in (tmp_path / "file", tmp_path / "file/below", tmp_path / "out"):
            with pytest.raises(Refused, match=r"is a file|is a directory"):
                cap.save(program, target)
    assert not list(store.refs())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_found_before_the_commit(
    store: cas.Store, program: Any, tmp_path: Path
) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with capture(store, "x") as cap:
        for target in (tmp_path / "closed", tmp_path / "closed/below"):
            with pytest.raises(PermissionRefused):
                cap.save(program, target)
    assert not list(store.refs())


# --- after the capture --------------------------------------------------------------------------


def test_use_after_the_capture_says_so(store: cas.Store, tmp_path: Path) -> None:
    with capture(store, "mlp") as cap:
        kept = one(mlp(), x_mlp()).program
    with pytest.raises(CaptureEnded, match="has ended"):
        cap.save(kept, tmp_path / "out")
    with pytest.raises(CaptureEnded, match="stored weights are read"):
        kept.write_to_file(open(os.devnull, "wb"))  # noqa: SIM115
    with pytest.raises(CaptureEnded):
        _ = kept.buffer
    with pytest.raises(CaptureEnded):
        _ = cap.counters


def test_a_program_of_another_capture_is_refused(store: cas.Store, tmp_path: Path) -> None:
    with capture(store):
        kept = one(mlp(), x_mlp()).program
    with capture(store, "x") as cap, pytest.raises(ForeignBytes):
        cap.save(kept, tmp_path / "out")
    assert not list(store.refs())


def test_leaving_without_save_leaves_no_artifact(store: cas.Store) -> None:
    with capture(store, "mlp"):
        one(mlp(), x_mlp())
    assert not list(store.refs())


# --- ETRecord -----------------------------------------------------------------------------------


def write_etrecords(directory: Path) -> None:
    """The one that an export gathers by itself, and one made of a lowered program afterwards."""
    directory.mkdir()
    exported = export(mlp(), x_mlp(), strict=False)
    edge = to_edge_transform_and_lower(
        exported, partitioner=[XnnpackPartitioner()], generate_etrecord=True
    )
    program = edge.to_executorch()
    program.get_etrecord().save(str(directory / "gathered"))
    generate_etrecord(str(directory / "lowered"), edge, program)


def contents(path: Path) -> dict[str, int]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: info.file_size for info in archive.infolist()}


def test_etrecords_hold_what_stock_ones_hold(store: cas.Store, tmp_path: Path) -> None:
    write_etrecords(tmp_path / "stock")
    with capture(store, threshold=1, map_threshold=1):
        write_etrecords(tmp_path / "captured")
    for name in ("gathered", "lowered"):
        stock, captured = (
            contents(tmp_path / "stock" / name),
            contents(tmp_path / "captured" / name),
        )
        assert captured == stock
        assert max(stock.values()) > 400_000  # the weights are in there
