"""Weights of a checkpoint that is mapped, as torch maps it: put again, they are not read again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from cas import filesystems
from cas.filestat import DISKS
from cas.ingest import Ingest
from cas.manifest import Recipe
from cas.testing.stores import open_store, scratch
from cas.torch import put_storage

pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/pagemap", os.R_OK), reason="/proc/self/pagemap cannot be read here"
)


def test_the_weights_of_a_mapped_checkpoint_are_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if filesystems.type_of(tmp_path) not in DISKS:
        pytest.skip("temporary files are not on a disk's filesystem here")
    weights = {"large": torch.randn(1 << 20), "small": torch.ones(7), "other": torch.randn(1 << 20)}
    torch.save(weights, tmp_path / "model.pt")
    read: list[int] = []
    real = Ingest.put

    def put(self: Ingest, data: memoryview) -> Recipe:
        read.append(len(data))
        return real(self, data)

    monkeypatch.setattr(Ingest, "put", put)
    recipes = []
    with scratch() as root, open_store(root / "s", clock=lambda: time.time() + 3600) as store:
        for run in range(3):
            loaded = torch.load(tmp_path / "model.pt", mmap=True)
            if run == 2:
                loaded["other"][100_000] = 42.0  # on a page that is all its own
            with store.writer() as writer:
                recipes.append(
                    {n: put_storage(writer, t.untyped_storage()) for n, t in loaded.items()}
                )
                writer.barrier()
                stored = writer.read(recipes[-1]["other"])
            assert stored == loaded["other"].numpy().tobytes()
    assert recipes[1] == recipes[0] and recipes[2]["large"] == recipes[0]["large"]
    assert recipes[2]["other"] != recipes[0]["other"]
    # All three; only the small one; the small one, and the one that was written to.
    assert read == [4 << 20, 28, 4 << 20, 28, 28, 4 << 20]
