"""The same export without `cas`: the three calls of any ExecuTorch script.

python examples/minilm_stock.py LENGTH BACKEND DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import minilm_model
import torch
from executorch.exir import to_edge_transform_and_lower


def main(length: str, backend: str, directory: Path) -> None:
    module, inputs = getattr(minilm_model, f"length_{length}")()
    partitioners = []
    if backend == "xnnpack":
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        partitioners = [XnnpackPartitioner()]
    exported = torch.export.export(module, inputs)
    program = to_edge_transform_and_lower(exported, partitioner=partitioners).to_executorch()
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "model.pte", "wb") as file:
        program.write_to_file(file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
