"""AOTInductor's weights through CudaBackend's collector, without compiling anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from executorch.backends.cuda import cuda_weight_collector
from executorch.backends.cuda.cuda_weight_collector import CudaWeightCollector
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir._serialize.data_serializer import DataPayload
from executorch.exir.backend.backend_details import PreprocessResult
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
from torch.export.pt2_archive._package_weights import TensorProperties, Weights

#: Bytes of what stands for the compiled code of a method.
LIBRARY = 9000


def weights_of(**tensors: torch.Tensor) -> Weights:
    return Weights({name: (tensor, TensorProperties(tensor)) for name, tensor in tensors.items()})


def example() -> dict[str, torch.Tensor]:
    """Every kind of storage; ``big`` has several chunks of a test store and an odd tail."""
    torch.manual_seed(0)
    big = torch.randn(300, 301)
    return {
        "big": big,
        "view": big[10:50],
        "tied": big,
        "transposed": torch.randn(33, 40).t(),
        "bf16": torch.randn(70, 33).to(torch.bfloat16),
        "int4": torch.randint(0, 255, (33, 170), dtype=torch.uint8),
        "bias": torch.randn(5),
        "empty": torch.zeros(0, 33),
        "cache": torch.zeros(64, 64),
        "_tensor_constant0": torch.arange(2000.0),
    }


@dataclass(frozen=True)
class Collected:
    """What the collector made of some methods' weights."""

    metadata: list[bytes]
    buffers: list[Any]
    data: Any


def collect(directory: Path, *methods: Weights) -> Collected:
    """Let the collector take the weights of each method; ``data`` is the cord of the ``.ptd``."""
    collector = CudaWeightCollector()
    results = []
    for index, weights in enumerate(methods):
        # It collects garbage twice per method, which takes longer than all else together.
        with mock.patch.object(cuda_weight_collector, "trim_host_memory"):
            artifact = collector.materialize(weights, str(directory), lambda tensor: 1)
        store = NamedDataStore()
        store.add_named_data(f"{index}_so_blob", bytes([index + 1]) * LIBRARY)
        store.add_named_data(f"{index}_weights_blob", b"")
        result = PreprocessResult(
            processed_bytes=f"{index}_so_blob\n{index}_weights_blob".encode(),
            data_store_output=store.get_named_data_store_output(),
        )
        collector.add_preprocess_result(result, artifact, "cuda")
        results.append(result)
    collector.finish()
    output: Any = results[0].data_store_output
    cord = FlatTensorSerializer().serialize(
        DataPayload(output.buffers, output.external_data["aoti_cuda_blob"])
    )
    return Collected([result.processed_bytes for result in results], output.buffers, cord)
