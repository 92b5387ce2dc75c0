"""Delegates of AOTInductor out of the store that `export_cuda.py` filled, and tuned ones.

Each process says in its report what it compiled; run with an Inductor cache that nothing is in::

    python action_cuda.py STORE OUT RECHECK CASE-MODE...    ->  OUT/<case>-<mode>/*, OUT/report.json

The mode "tuned" chooses kernels by measuring them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import export_cuda
import torch
from executorch.backends.cuda.cuda_backend import CudaBackend

import cas
from cas.executorch import capture
from cas.executorch.actions.outcomes import ActionOptions


@contextlib.contextmanager
def tuning() -> Iterator[None]:
    """The backend's own default, with the candidates that there are without a GPU."""
    options = CudaBackend.get_aoti_compile_options

    def with_candidates(cls: Any, compile_specs: Any) -> dict[str, Any]:
        return {**options(compile_specs), "max_autotune_gemm_backends": "ATEN,CPP"}

    specs = {**export_cuda.SPECS, "max_autotune": "ON"}
    with (
        mock.patch.object(CudaBackend, "get_aoti_compile_options", classmethod(with_candidates)),
        mock.patch.object(export_cuda, "SPECS", specs),
    ):
        yield


@contextlib.contextmanager
def counting() -> Iterator[list[str]]:
    """Gets an item whenever AOTInductor compiles something."""
    real, calls = torch._inductor.aot_compile, []

    @functools.wraps(real)
    def compile_and_count(*args: Any, **kwargs: Any) -> Any:
        calls.append("compiled")
        return real(*args, **kwargs)

    with mock.patch.object(torch._inductor, "aot_compile", compile_and_count):
        yield calls


# The classes of a model are in its key. That of the script's own model was one of ``__main__``.
export_cuda.Decoder.__module__ = "__main__"


def export_one(name: str) -> Any:
    case, _, mode = name.rpartition("-")
    methods = export_cuda.CASES[case]()
    if mode != "tuned":
        return export_cuda.lower(methods, mode)
    # One method: of two, tuning may pack the weights differently, and then stock's keys collide.
    first = dict([next(iter(methods.items()))])
    with tuning():
        return export_cuda.lower(first, "OFF")


def main(store: Path, out: Path, names: list[str], recheck: float) -> None:
    report: dict[str, Any] = {}
    options = ActionOptions(recheck=recheck)
    with cas.Store.open(store) as opened, export_cuda.stand_in():
        for name in names:
            with (
                counting() as compiles,
                capture(opened, name, threshold=1, map_threshold=1, actions=options) as captured,
            ):
                began = time.monotonic()
                captured.save(export_one(name), out / name)
            outcomes = captured.outcomes
            report[name] = {
                "compiles": len(compiles),
                "hits": outcomes.hits,
                "misses": dict(outcomes.misses),
                "uncacheable": dict(outcomes.uncacheable),
                "mismatches": outcomes.mismatches,
                "notes": outcomes.notes(),
                "seconds": time.monotonic() - began,
            }
    (out / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:], float(sys.argv[3]))
