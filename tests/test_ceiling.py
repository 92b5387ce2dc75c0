"""An export completes under a hard limit on memory that counts the page cache too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cas import filesystems

BENCH = Path(__file__).resolve().parent.parent / "bench"
MIB = 1 << 20

pytestmark = pytest.mark.slow


def test_a_1_gib_xnnpack_export_completes_in_512_mib_where_stock_is_killed_in_1500(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("executorch")
    if filesystems.type_of(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are in memory here, and would count as the export's")
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
    write_checkpoint(ceiling.WIDTH, layers, tmp_path / ceiling.CHECKPOINT)

    code, ours = ceiling.run_cas(512 * MIB, layers, tmp_path)
    assert code == 0 and ours
    code, stock = ceiling.run_stock(8192 * MIB, layers, tmp_path)
    assert code == 0
    assert ours == stock

    code, _ = ceiling.run_stock(1500 * MIB, layers, tmp_path)
    assert code == -9
