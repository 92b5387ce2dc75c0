"""From a backend's name to its partitioners, and what a machine lacks for it."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec

from cas.errors import Refused, UsageError
from cas.executorch.backends import Cuda, Given, require_cuda, resolve_backend
from cas.exportspec import BackendUnavailable, ExportOptions


@pytest.fixture
def equipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has all that CUDA exports need, as far as is asked."""
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_a_machine_with_everything_is_accepted(equipped: None) -> None:
    require_cuda()
    assert isinstance(resolve_backend(ExportOptions(backend="cuda")), Cuda)


def test_a_torch_without_cuda_is_named(equipped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(BackendUnavailable, match="build of torch with CUDA, and this is") as caught:
        require_cuda()
    assert torch.__version__ in str(caught.value)
    assert isinstance(caught.value, Refused)
    assert caught.value.exit_code == 5


def test_a_machine_without_a_gpu_is_told_so(
    equipped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="compiles on a GPU, and torch finds none"):
        resolve_backend(ExportOptions(backend="cuda"))


def test_a_machine_without_triton_is_told_what_to_install(
    equipped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="pip install triton"):
        resolve_backend(ExportOptions(backend="cuda"))


def test_each_method_gets_its_name_and_the_specs() -> None:
    pytest.importorskip("triton")
    found = Cuda([("low_memory_mode", "ON"), ("target_device", "cuda:1")]).partitioners(["a", "b"])
    assert isinstance(found, dict)
    for name, (partitioner,) in found.items():
        spec = partitioner.delegation_spec
        assert spec.backend_id == "CudaBackend"
        assert spec.compile_specs == [
            CompileSpec("method_name", name.encode()),
            CompileSpec("low_memory_mode", b"ON"),
            CompileSpec("target_device", b"cuda:1"),
        ]
    assert list(found) == ["a", "b"]


def test_the_portable_backend_has_no_partitioner() -> None:
    assert resolve_backend(ExportOptions()).partitioners(["a"]) == []
    assert Given().edge_config == {}


def test_specs_for_another_backend_are_refused() -> None:
    with pytest.raises(UsageError, match="takes no compile specs"):
        resolve_backend(ExportOptions(backend="xnnpack", specs=(("max_autotune", "ON"),)))
