"""A delegate inside of a program: by what its backend made, not by how."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from executorch.exir._serialize._cord import FileBackedData
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.export import ExportedProgram

from cas.executorch.actions.encoder import Encoder


def put_lowered(encoder: Encoder, module: LoweredBackendModule) -> None:
    """Append a delegate: backend, options, blob and named data."""
    encoder.stream.put_text(b"lb", str(module.backend_id))
    encoder.put(spec_items(module.compile_specs))
    encoder.put(content_digest(module._processed_bytes))
    data = module.named_data_store_output
    if data is None:
        encoder.put(None)
        return
    encoder.put([content_digest(buffer) for buffer in data.buffers])
    encoder.put(_entries(data.pte_data))
    encoder.put([(tag, _entries(table)) for tag, table in data.external_data.items()])


def backends_of(programs: Iterable[ExportedProgram]) -> set[str]:
    """The backends that parts of edge programs were given to."""
    return {
        str(module.backend_id)
        for program in programs
        for module in program.graph_module.modules()
        if isinstance(module, LoweredBackendModule)
    }


def spec_items(specs: Iterable[Any]) -> list[tuple[str, bytes]]:
    """Compile specs in order."""
    return [(str(spec.key), bytes(spec.value)) for spec in specs]


def content_digest(data: Any) -> bytes:
    """SHA-256, which ExecuTorch's own file-backed data knows of itself."""
    if isinstance(data, FileBackedData):
        return bytes(data.sha256())
    return hashlib.sha256(data).digest()


def _entries(table: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (key, entry.buffer_index, entry.alignment, _layout(entry.tensor_layout))
        for key, entry in table.items()
    ]


def _layout(layout: Any) -> tuple[Any, ...] | None:
    if layout is None:
        return None
    return (int(layout.scalar_type), list(layout.sizes), list(layout.dim_order))
