"""Assembled files run, and compute what the eager model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from executorch.runtime import Runtime, Verification
from export_cases import CASES, Built

import cas
from cas.executorch import capture

#: Largest absolute difference from eager. The quantized models differ by their quantization.
TOLERANCE = {
    "mlp_portable": 1e-5,
    "mlp_portable_external": 1e-5,
    "mlp_xnnpack": 1e-5,
    "conv_xnnpack_external": 1e-4,
    "mlp_int8_xnnpack": 0.05,
    "mlp_int4_xnnpack": 0.05,
    "tied_portable_external": 1e-3,
    "minilm_portable": 1e-4,
    "minilm_xnnpack": 1e-3,
    "minilm_xnnpack_external": 1e-3,
}
FAST = ("mlp_portable_external", "mlp_xnnpack", "conv_xnnpack_external", "mlp_int4_xnnpack")


def parameters() -> list[object]:
    return [
        pytest.param(name, marks=() if name in FAST else (pytest.mark.slow,)) for name in TOLERANCE
    ]


def run(directory: Path, built: Built) -> torch.Tensor:
    data = next(iter(directory.glob("*.ptd")), None)
    program = Runtime.get().load_program(
        directory / "model.pte", verification=Verification.InternalConsistency, data_path=data
    )
    (output,) = program.load_method("forward").execute(list(built.inputs))
    assert isinstance(output, torch.Tensor)
    return output


@pytest.mark.parametrize("name", parameters())
def test_computes_what_eager_computes(name: str, store: cas.Store, tmp_path: Path) -> None:
    with capture(store, name) as cap:
        built = CASES[name]()
        cap.save(built.program, tmp_path)
    assert built.module is not None
    with torch.no_grad():
        expected = built.module(*built.inputs)
    assert torch.allclose(run(tmp_path, built), expected, atol=TOLERANCE[name], rtol=1e-3)
