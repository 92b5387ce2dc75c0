"""The findings of ExecuTorch's review of file-backed CUDA weights, each as a promise.

ExecuTorch keeps a weight in a temporary file that the finalizer of a Python object removes. Its
reviewers named six things that such a design must get right. Here nothing owns a file: bytes lie
in the store, which its lease protects and its gc cleans.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.cuda import cuda_weight_collector
from executorch.backends.cuda.cuda_weight_collector import CudaWeightCollector
from executorch.exir._serialize._cord import FileBackedData
from export_weights import collect, example, weights_of

import cas
from cas.executorch import CaptureEnded, LargeReadWarning, StoredBytes, blob, capture
from cas.executorch.aoti import capture_package
from cas.executorch.errors import PackageIncomplete
from cas.executorch.hooks_aoti import require_outputs
from cas.executorch.patches import Patches
from cas.manifest import Recipe, ZeroPart
from cas.testing.stores import assert_sound, chunk_files, open_store
from cas.testing.stores import collect as collect_garbage


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "inductor").mkdir()
    return tmp_path / "inductor"


def assert_no_trace(store: cas.Store, work: Path) -> None:
    """Nothing is left in Inductor's directory, and of the store nothing that gc does not remove."""
    assert list(work.iterdir()) == []
    collect_garbage(store)
    assert chunk_files(store) == []
    assert [path for path in store.context.layout.tmp.rglob("*") if path.is_file()] == []
    assert_sound(store)


# --- 1: ownership does not hang on finalizers ---------------------------------------------------


class Failed(Exception):
    pass


def _fail_with(artifact: Any) -> None:
    raise Failed(len(artifact.storages))


def test_1_a_traceback_neither_keeps_a_file_nor_deletes_one(work: Path, store: cas.Store) -> None:
    caught: list[BaseException] = []
    with pytest.raises(Failed), capture(store):
        artifact = CudaWeightCollector().materialize(
            weights_of(**example()), str(work), lambda tensor: 1
        )
        kept = artifact.storages["cuda_fqn_weight:cuda:big"]
        try:
            _fail_with(artifact)
        except Failed as error:
            caught.append(error)  # its traceback holds the frames, and they hold the artifact
            gc.collect()
            assert bytes(kept) == example()["big"].numpy().tobytes()
            raise
    with pytest.raises(CaptureEnded):
        bytes(kept)
    assert_no_trace(store, work)
    assert caught


def test_1_a_reference_cycle_changes_nothing(work: Path, store: cas.Store, tmp_path: Path) -> None:
    class Holder:
        pass

    with capture(store):
        holder = Holder()
        holder.me = holder  # type: ignore[attr-defined]
        holder.collected = collect(work, weights_of(**example()))  # type: ignore[attr-defined]
        kept, gone = holder.collected.data, weakref.ref(holder)  # type: ignore[attr-defined]
        expected = bytes(kept)
        del holder
        gc.collect()
        assert gone() is None
        with open(tmp_path / "data.ptd", "wb") as file:
            kept.write_to_file(file)
    assert (tmp_path / "data.ptd").read_bytes() == expected
    assert_no_trace(store, work)


def test_1_stored_bytes_have_no_finalizer(work: Path, store: cas.Store) -> None:
    with capture(store):
        for data in collect(work, weights_of(**example())).buffers:
            if isinstance(data, StoredBytes):
                assert not hasattr(data, "_finalizer")
                data.close()
                assert len(bytes(data)) == len(data)


#: One process that imports torch once and forks: a child that ends like any program in the middle
#: of a capture, and one that is killed while a chunk is written.
ENDINGS = """
import os, signal, sys
sys.path[:0] = [sys.argv[3], sys.argv[4]]
import torch
from export_weights import collect, example, weights_of
from executorch.backends.cuda.cuda_weight_collector import CudaWeightCollector
import cas
from cas import fsio
from cas.executorch import capture
from cas.testing.stores import open_store
from pathlib import Path

def work(ending):
    held = capture(open_store(Path(sys.argv[1]) / ending))
    held.__enter__()
    if ending == "kill":
        seen = []
        def hook(operation, path):
            if operation == "create":
                seen.append(path)
            if len(seen) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
        fsio.set_step_hook(hook)
    directory = Path(sys.argv[2])
    weights = weights_of(**example())
    artifact = CudaWeightCollector().materialize(weights, str(directory), lambda tensor: 1)
    cycle = [held, artifact]
    cycle.append(cycle)
    print("collected", flush=True)

for ending in ("exit", "kill"):
    child = os.fork()
    if child == 0:
        work(ending)
        sys.exit(7)  # the capture is still open, and a cycle holds what it collected
    print(ending, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_1_interpreter_exit_and_sigkill_leave_only_what_gc_removes(
    work: Path, tmp_path: Path, repository: Path
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-c", ENDINGS),
            *(str(tmp_path), str(work), str(repository), str(Path(__file__).parent)),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
    )
    assert done.stdout.split() == ["collected", "exit", "7", "kill", str(-signal.SIGKILL)]
    assert "Traceback" not in done.stderr
    for ending in ("exit", "kill"):
        with open_store(tmp_path / ending) as store:
            left = [*chunk_files(store), *store.context.layout.tmp.rglob("*/*")]
            assert left or ending == "exit", "the process died too early to prove anything"
            assert_no_trace(store, work)


# --- 2: the all-CUDA layout is covered ----------------------------------------------------------
# `test_aoti_layout.py` compares it with torch's own code; the rule is explained at its line.


def test_2_the_all_cuda_layout_is_packed_and_any_other_one_padded() -> None:
    from cas.executorch.aoti_layout import BlobLayout

    class OnCuda(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    odd = torch.arange(7, dtype=torch.uint8)
    device = odd.as_subclass(OnCuda)
    places = {
        name: [(slot.offset, slot.padding) for slot in BlobLayout.of(constants)]
        for name, constants in {
            "cuda": {"a": device, "b": device},
            "mixed": {"a": device, "b": odd},
            "cpu": {"a": odd, "b": odd},
        }.items()
    }
    assert places["cuda"] == [(0, 0), (7, 0)]
    assert places["mixed"] == places["cpu"] == [(0, 57), (64, 57)]


# --- 3: a missing .so is reported ---------------------------------------------------------------


def test_3_a_missing_library_is_reported_with_what_there_was(
    store: cas.Store, tmp_path: Path
) -> None:
    (tmp_path / "c.wrapper_weights.blob").write_bytes(b"w")
    (tmp_path / "c.wrapper.cpp").write_bytes(b"c")
    outputs = [str(tmp_path / "c.wrapper.cpp"), str(tmp_path / "c.wrapper_weights.blob")]
    for attempt in (lambda: require_outputs(outputs), lambda: capture_package(store, outputs, "n")):
        with pytest.raises(PackageIncomplete) as caught:
            attempt()
        assert ".so" in caught.value.missing
        assert caught.value.found == ("c.wrapper.cpp", "c.wrapper_weights.blob")


# --- 4: a storage of no bytes -------------------------------------------------------------------


def test_4_a_zero_length_storage_is_stored_as_nothing(work: Path, store: cas.Store) -> None:
    weights = weights_of(empty=torch.zeros(0, 33), also=torch.zeros(4, 0), one=torch.ones(1))
    stock = collect(work, weights)
    expected = bytes(stock.data)
    del stock
    with capture(store, threshold=1) as cap:
        before = cap.counters.chunks
        captured = collect(work, weights)
        assert bytes(captured.data) == expected
        assert [len(data) for data in captured.buffers].count(0) == 1
        assert cap.counters.chunks - before <= 2  # the library and the only element


# --- 5: an accidental bytes() of a huge blob is warned about ------------------------------------


def test_5_reading_a_huge_blob_into_memory_warns(work: Path, store: cas.Store) -> None:
    with capture(store):
        data = collect(work, weights_of(small=torch.ones(5000))).buffers[-1]
        source = data.source
        size = blob.LARGE_READ + 1
        huge = StoredBytes(source, Recipe((ZeroPart(size),)), bytes(32))
        with pytest.warns(LargeReadWarning, match=f"{size} bytes of stored weights"):
            assert len(bytes(huge)) == size


# --- 6: the default path is untouched -----------------------------------------------------------


def test_6_nothing_of_a_capture_outlives_it(
    store: cas.Store, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[tuple[Any, str]] = []
    original = Patches.set

    def spy(self: Patches, owner: Any, name: str, value: Any) -> None:
        places.append((owner, name))
        before.setdefault((id(owner), name), vars(owner).get(name, "absent"))
        original(self, owner, name, value)

    before: dict[tuple[int, str], Any] = {}
    monkeypatch.setattr(Patches, "set", spy)
    with capture(store):
        assert cuda_weight_collector.FileBackedData is not FileBackedData
    assert len(places) > 15
    for owner, name in places:
        assert vars(owner).get(name, "absent") is before[id(owner), name]


def test_6_without_a_capture_the_collector_is_stock(work: Path, store: cas.Store) -> None:
    with capture(store):
        pass
    collected = collect(work, weights_of(**example()))
    assert not any(isinstance(buffer, StoredBytes) for buffer in collected.buffers)
    assert list(work.glob(".executorch_*.data")) != []


def test_6_another_thread_exports_as_without_a_capture(work: Path, store: cas.Store) -> None:
    found: list[Any] = []
    with capture(store):
        thread = threading.Thread(
            target=lambda: found.extend(collect(work, weights_of(**example())).buffers)
        )
        thread.start()
        thread.join()
        assert len(found) > 5
        assert not any(isinstance(buffer, StoredBytes) for buffer in found)
        assert any(type(buffer) is FileBackedData for buffer in found)
        assert list(work.iterdir()) != []
    assert os.listdir(work) != []
