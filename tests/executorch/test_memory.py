"""An export under capture needs no second copy of the weights in anonymous memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

#: 128 MiB of float32 weights in layers of 16 MiB.
LAYERS, WIDTH = 8, 2048
WEIGHTS = LAYERS * WIDTH * WIDTH * 4

#: Exports weights that are mapped from a file, and prints the peak of the anonymous memory over
#: what an equal export of a tiny model leaves behind.
SCRIPT = """
import ctypes, json, sys, threading, time, torch
from pathlib import Path
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from torch import nn
import cas
from cas.executorch import capture

folder, kind, backend, strict, captured = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
layers, width = {layers}, {width}
# On every machine the same: two threads, and pages of the usual size (PR_SET_THP_DISABLE).
torch.set_num_threads(2)
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10

def model(width, layers):
    with torch.device("meta"):
        if kind == "tied":
            head = nn.Linear(width, width * layers, bias=False)
            return nn.Sequential(nn.Embedding(width * layers, width), head).eval()
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).eval()

def load(module, path):
    values = torch.load(path, mmap=True)
    weights = [nn.Parameter(value, requires_grad=False) for value in values]
    for layer, weight in zip(module, weights * 2 if kind == "tied" else weights):
        layer.weight = weight

def save(width, layers, path):
    torch.manual_seed(0)
    whole = torch.empty(layers, width, width).normal_()
    # The layers of the "views" are slices of one tensor.
    kept = {{"tied": [whole.view(-1, width)], "views": list(whole.unbind())}}
    torch.save(kept.get(kind) or [layer.clone() for layer in whole], path)

def run(module, width, name, captured):
    def program():
        inputs = torch.zeros(1, dtype=torch.long) if kind == "tied" else torch.ones(1, width)
        exported = torch.export.export(module, (inputs,), strict=strict)
        partitioner = [XnnpackPartitioner()] if backend == "xnnpack" else None
        return to_edge_transform_and_lower(exported, partitioner=partitioner).to_executorch(
            ExecutorchBackendConfig(external_constants=backend == "portable"))
    if not captured:
        (folder / name).mkdir()
        with open(folder / name / "model.pte", "wb") as file:
            made = program()
            made.write_to_file(file)
        made.write_tensor_data_to_file(str(folder / name))
        return
    with cas.Store.open(folder / "store", workers=2, buffer_bytes=8 << 20) as store:
        with capture(store, name) as cap:
            cap.save(program(), folder / name)

tiny = model(64, 1).to_empty(device="cpu")
run(tiny, 64, "tiny", captured)
weights = folder / "weights.pt"
if not weights.exists():
    save(width, layers, weights)
    sys.exit()
large = model(width, layers)
load(large, weights)
base, peak, done = anonymous(), 0, threading.Event()

def sample():
    global peak
    while not done.wait(0.01):
        peak = max(peak, anonymous())

thread = threading.Thread(target=sample)
thread.start()
run(large, width, "large", captured)
done.set()
thread.join()
print(json.dumps(peak - base))
"""


def peak(folder: Path, kind: str, backend: str, *, strict: bool, captured: bool) -> float:
    """Peak anonymous memory of an export, as a multiple of the weights."""
    script = SCRIPT.format(layers=LAYERS, width=WIDTH)
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder)]
    arguments = [json.dumps(value) for value in (kind, backend, strict, captured)]
    repository = Path(__file__).resolve().parents[2]
    for _ in range(1 if (folder / "weights.pt").exists() else 2):
        for name in ("tiny", "large"):
            for path in (folder / name).glob("*"):
                path.unlink()
            if (folder / name).exists():
                (folder / name).rmdir()
        result = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, cwd=repository, check=False
        )
        assert result.returncode == 0, result.stderr[-3000:]
    return float(json.loads(result.stdout.splitlines()[-1])) / WEIGHTS


@pytest.mark.parametrize(
    ("kind", "backend", "strict", "stock", "most"),
    [
        ("layers", "portable", False, 1.0, 0.35),
        ("layers", "xnnpack", False, 2.0, 0.35),
        ("layers", "xnnpack", True, 2.0, 0.35),
        ("tied", "xnnpack", False, 3.0, 0.35),
        # Two of the eight layers at a time: ExecuTorch clones one before the last is let go.
        ("views", "portable", False, 2.0, 0.5),
    ],
)
def test_peak_memory_is_a_fraction_of_the_weights(
    kind: str, backend: str, strict: bool, stock: float, most: float, tmp_path: Path
) -> None:
    assert peak(tmp_path, kind, backend, strict=strict, captured=False) > 0.9 * stock
    # What is left, 0.15 to 0.2, is one buffer of a chunk per worker, the graph and the recipes,
    # which do not grow with the weights; the bound leaves room for what the allocator keeps beside
    # them. bench/memory.py gives the true figure, over a model large enough for these not to count.
    assert peak(tmp_path, kind, backend, strict=strict, captured=True) < most
