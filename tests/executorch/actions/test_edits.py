"""An edit of a model compiles the partitions that it changes, and no other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from torch import nn
from torch.export import export

import cas
from cas.executorch import capture
from cas.executorch.actions import backends, cache
from cas.executorch.actions.outcomes import ActionOptions

WIDTH = 32
#: A whole export is one action of its own, and would hide these.
DELEGATES = ActionOptions(whole=False)


class Layer(nn.Module):
    """Partitions of XNNPACK, parted by a normalization that it does not take."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 80)
        self.down = nn.Linear(80, WIDTH)
        # Or the first layer would differ from all others: its input alone needs no gradient.
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(*seeds: int, rows: int = 6) -> Any:
    model = nn.Sequential(*(Layer(seed) for seed in seeds)).eval()
    return export(model, (torch.ones(rows, WIDTH),), strict=False)


def change_one_weight(program: Any) -> Any:
    program.state_dict["1.up.weight"].detach()[0, 0] += 1.0
    return program


def lower(program: Any) -> Any:
    return to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()


#: Edit -> hits and misses with canonical keys, and with strict ones. A layer is one partition.
EDITS = {
    "first": ((0, 4), (0, 4)),
    "one weight changed": ((3, 1), (3, 1)),
    "layer in front": ((4, 1), (0, 5)),
    "layer removed": ((3, 0), (0, 3)),
    "other length": ((0, 4), (0, 4)),
}


def edited(name: str) -> Any:
    if name == "one weight changed":
        return change_one_weight(build(1, 2, 3, 4))
    seeds = {"layer in front": (9, 1, 2, 3, 4), "layer removed": (1, 3, 4)}.get(name, (1, 2, 3, 4))
    return build(*seeds, rows=8 if name == "other length" else 6)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True], ids=["canonical", "strict"])
def test_an_edit_compiles_what_it_changes(
    strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_dependencies", {})
    if strict:
        monkeypatch.setattr(backends, "_XNNPACK_SOURCES", frozenset())
    found, grown = {}, {}
    with cas.Store.open(tmp_path / "store", chunk_size=64 << 10) as store:
        for name in EDITS:
            if name == "layer removed" and not strict:
                stock = lower(edited(name)).buffer
            with capture(store, "model", threshold=1, actions=DELEGATES) as captured:
                program = lower(edited(name))
                captured.save(program, tmp_path / "out")
                outcomes = captured.outcomes
                found[name] = (outcomes.hits, outcomes.missed)
                grown[name] = captured.counters.new_bytes
            if name == "layer removed" and not strict:
                assert (tmp_path / "out" / "model.pte").read_bytes() == stock
    assert found == {name: counts[strict] for name, counts in EDITS.items()}
    if strict:
        return
    layer = 4 * (2 * WIDTH * 80 + WIDTH + 80)
    assert grown["first"] > 4 * layer
    # Weights that were not changed are stored once, whatever happens to what they are part of.
    assert grown["one weight changed"] < layer
    assert layer < grown["layer in front"] < 2 * layer
    assert grown["layer removed"] < layer
    assert grown["other length"] < layer
