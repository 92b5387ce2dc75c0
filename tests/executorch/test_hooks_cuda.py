"""CudaBackend's weight collector gives the same artifact, and makes no files of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.cuda import cuda_weight_collector
from executorch.exir._serialize._cord import FileBackedData
from export_weights import LIBRARY, collect, example, weights_of

import cas
from cas.executorch import StoredBytes, capture, hooks_cuda, seams

EVERYTHING: dict[str, Any] = {"threshold": 1, "map_threshold": 1}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Stands for Inductor's cache, where the collector keeps its temporary files."""
    (tmp_path / "inductor").mkdir()
    return tmp_path / "inductor"


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize("methods", [1, 2])
def test_the_artifact_is_that_of_stock(
    methods: int, options: dict[str, Any], work: Path, store: cas.Store
) -> None:
    weights = [weights_of(**example()) for _ in range(methods)]
    stock = collect(work, *weights)
    assert sum(type(buffer) is FileBackedData for buffer in stock.buffers) > 5
    assert list(work.iterdir()) != []
    expected = bytes(stock.data)
    with capture(store, **options):
        captured = collect(work, *weights)
        assert captured.metadata == stock.metadata
        assert bytes(captured.data) == expected
        assert all(
            isinstance(buffer, StoredBytes)
            for buffer in captured.buffers
            if not isinstance(buffer, bytes)
        )


def test_no_temporary_file_is_left(work: Path, store: cas.Store) -> None:
    with capture(store):
        held = collect(work, weights_of(**example()))
        assert list(work.iterdir()) == []
        assert held.buffers


def test_a_second_method_writes_no_weights(work: Path, store: cas.Store) -> None:
    first, second = weights_of(**example()), weights_of(**example())
    with capture(store) as cap:
        collect(work, first)
        before = cap.counters
        collect(work, first, second)
        assert cap.counters.new_bytes - before.new_bytes == LIBRARY
        assert cap.counters.logical_bytes > 2 * before.logical_bytes


def test_short_weights_get_no_chunk_of_their_own(work: Path, store: cas.Store) -> None:
    with capture(store) as cap:
        collect(work, weights_of(**{f"b{i}": torch.full((100,), float(i)) for i in range(50)}))
        assert cap.counters.chunks == 1  # the library


def test_without_the_hook_the_files_are_taken_in(
    work: Path, store: cas.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(**example())
    expected = bytes(collect(work, weights).data)
    monkeypatch.setattr(hooks_cuda, "install", lambda patches, intake: None)
    with capture(store):
        captured = collect(work, weights)
        assert bytes(captured.data) == expected
        assert any(isinstance(buffer, StoredBytes) for buffer in captured.buffers)


def test_a_backend_that_is_not_installed_is_no_obstacle(
    store: cas.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [
        seams.Seam(seam.name, seam.module + "_gone", seam.path, seam.parameters, seam.optional)
        if seam.optional
        else seam
        for seam in seams.SEAMS
    ]
    monkeypatch.setattr(seams, "SEAMS", gone)
    before = cuda_weight_collector._write_tensor_storage
    with capture(store):
        assert cuda_weight_collector._write_tensor_storage is before


def test_a_weight_of_onednn_is_refused_as_stock_refuses_it(work: Path, store: cas.Store) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    path = work / "x"
    with capture(store), pytest.raises(RuntimeError, match="MKLDNN constants are not supported"):
        cuda_weight_collector._write_tensor_storage(torch.eye(3).to_mkldnn(), str(path))


def test_a_file_that_somebody_hands_over_is_stocks_business(work: Path, store: cas.Store) -> None:
    (work / "x").write_bytes(b"abc")
    with capture(store):
        data = cuda_weight_collector.FileBackedData.move_from(str(work / "x"))
        assert (type(data), data.to_bytes()) == (FileBackedData, b"abc")
