"""Backends for tests: each hands its weights to ExecuTorch in another way."""

from __future__ import annotations

import os
import tempfile
from typing import Any, final

import torch
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_partitions_from_list_of_nodes,
)
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data
from torch.fx.passes.operator_support import OperatorSupportBase


def _plain(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


@final
class WeightsInBlob(BackendDetails):
    """All weights inside ``processed_bytes``."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        weights = b"".join(_plain(tensor) for tensor in edge_program.state_dict.values())
        return PreprocessResult(processed_bytes=weights)


@final
class WeightsByName(BackendDetails):
    """Tensors, bytes and file-backed data, in the .pte and in an external file."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        store = NamedDataStore()
        for index, (key, parameter) in enumerate(edge_program.state_dict.items()):
            tensor = parameter.detach()
            store.add_named_data(f"{key}.tensor", tensor, 16)
            store.add_named_data(f"{key}.half", tensor.to(torch.bfloat16), 16)
            store.add_named_data(f"{key}.bytes", _plain(tensor), 64, external_tag="ext")
            if tensor.dim() == 2:
                last = tensor.reshape(1, *tensor.shape, 1).to(memory_format=torch.channels_last)
                store.add_named_data(f"{key}.channels_last", last, 16)
            data = _file_backed(b"x" * (5000 + index))
            store.add_named_data(f"{key}.file", data)
            store.add_named_data(f"{key}.file_again", data)
        output = store.get_named_data_store_output()
        return PreprocessResult(processed_bytes=b"names", data_store_output=output)


def _file_backed(data: bytes) -> FileBackedData:
    handle, path = tempfile.mkstemp()
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    return FileBackedData(path, cleanup=True)


@final
class Mutating(BackendDetails):
    """Changes its copy of the weights in place, out of sight of the version counter."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        store = NamedDataStore()
        for key, tensor in edge_program.state_dict.items():
            tensor.data.mul_(2.0)
            store.add_named_data(key, tensor.detach(), 16)
        output = store.get_named_data_store_output()
        return PreprocessResult(processed_bytes=b"changed", data_store_output=output)


class _Linear(OperatorSupportBase):
    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        names = ("addmm", "permute_copy", "linear")
        return node.op == "call_function" and any(name in str(node.target) for name in names)


class LinearPartitioner(Partitioner):
    """Gives every linear layer to one of the backends above."""

    def __init__(self, backend: type[BackendDetails]) -> None:
        super().__init__()
        self._spec = DelegationSpec(backend.__name__, [])

    def partition(self, exported_program: Any) -> PartitionResult:
        tags: dict[str, DelegationSpec] = {}
        partitions = generate_partitions_from_list_of_nodes(
            exported_program.graph_module, op_support=_Linear()
        )
        for part in partitions:
            tag = f"part{part.id}"
            tags[tag] = self._spec
            for node in part.nodes:
                node.meta["delegation_tag"] = tag
        tag_constant_data(exported_program)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)
