"""What AOTInductor compiled comes out of the store: nothing is compiled, and the files are equal.

The records are those of the exports that `export_cuda.py` made for `test_cuda.py`; see there for
what stands in for the GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cas

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parents[1]
#: Two methods that share their weights, and a layer of a transformer with its cache.
REPLAYED = ("mlp_two_methods-OFF", "kv_cache-OFF")
TUNED = "mlp_two_methods-tuned"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def run(cuda_exports: Path, out: Path, *names: str, recheck: float = 0.0) -> Any:
    """One process with an Inductor cache of its own."""
    out.mkdir(parents=True)
    (out / "tmp").mkdir()
    (cuda_exports / "objects").mkdir(exist_ok=True)  # where that compiler looks
    settings = {
        "CXX": str(cuda_exports / "g++"),
        "TMPDIR": str(out / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "PYTHONHASHSEED": "3",
        "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE.parents[1] / 'cli'}",
    }
    store = out.parent / "store"
    if not store.exists():  # a copy: other tests look at the artifacts of that one
        shutil.copytree(cuda_exports / "captured" / "store", store)
    child = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(HERE / "action_cuda.py")),
            *(str(store), str(out), str(recheck), *names),
        ],
        env={**os.environ, **settings},
        stderr=subprocess.PIPE,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:].decode()
    return json.loads((out / "report.json").read_text())


def assert_same_tensors(store: Path, name: str) -> None:
    """Of the export that recorded and the one that was given it: names, types and shapes, too."""
    with cas.Store.open(store, read_only=True) as opened:
        recorded, hit = (opened.manifest(f"{name}@{generation}").tensors for generation in (1, 2))
    assert hit == recorded
    weights = [entry for entry in hit if entry.file.endswith(".ptd")]
    assert len(weights) > 3
    assert {entry.dtype for entry in weights} == {"float32"}
    assert None not in {entry.shape for entry in weights}


def test_a_hit_compiles_nothing_and_gives_the_recorded_files(
    cuda_exports: Path, tmp_path: Path
) -> None:
    first = run(cuda_exports, tmp_path / "first", *REPLAYED, TUNED)
    for name in REPLAYED:
        found = first[name]
        assert (found["compiles"], found["misses"], found["uncacheable"]) == (0, {}, {}), found
        assert found["hits"] == 1  # both methods in one action, for the backend compiles them so
        expected = contents(cuda_exports / "stock" / name)
        assert contents(tmp_path / "first" / name) == expected
        assert_same_tensors(tmp_path / "store", name)
    assert (first[TUNED]["compiles"], first[TUNED]["misses"]) == (1, {"absent": 1})
    # Tuning does not give the same bytes twice, so a hit gives those of the run that recorded it.
    second = run(cuda_exports, tmp_path / "second", TUNED)
    assert (second[TUNED]["compiles"], second[TUNED]["hits"]) == (0, 1)
    assert contents(tmp_path / "second" / TUNED) == contents(tmp_path / "first" / TUNED)


def test_no_fact_of_a_record_is_a_path_or_a_user(cuda_exports: Path) -> None:
    with cas.Store.open(cuda_exports / "captured" / "store", read_only=True) as store:
        records = [record for record in store.actions.list() if record.kind == "delegate"]
    assert len(records) >= 8
    for record in records:
        text = json.dumps(dict(record.factors))
        assert str(cuda_exports) not in text
        assert '"/' not in text
        assert sys.prefix not in text
        assert len(record.factors["environment"]) > 500
