"""An export completes under a hard limit on memory that counts the page cache too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
MIB = 1 << 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_1_gib_xnnpack_export_completes_in_512_mib_where_stock_is_killed_in_1500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("executorch")
    monkeypatch.syspath_prepend(str(BENCH))
    sys.modules.pop("ceiling", None)
    import ceiling
    from workload import write_checkpoint

    try:
        with ceiling.limited(512 * MIB):
            pass
    except ceiling.CgroupUnavailable as error:
        pytest.skip(str(error))
    layers = 16
    write_checkpoint(ceiling.WIDTH, layers, tmp_path / "weights.safetensors")

    code, ours = ceiling.run_under(512 * MIB, ceiling.spec_for("cas", layers, tmp_path))
    assert code == 0 and ours is not None
    code, stock = ceiling.run_under(8192 * MIB, ceiling.spec_for("stock", layers, tmp_path))
    assert code == 0 and stock is not None
    assert ours["sha256"] == stock["sha256"]

    code, _ = ceiling.run_under(1500 * MIB, ceiling.spec_for("stock", layers, tmp_path))
    assert code == -9
