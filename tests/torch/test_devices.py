"""Every copier keeps the promises of the protocol; the one for CUDA orders its copies rightly."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas.testing.strategies import no_deadlines

torch = pytest.importorskip("torch")
from cas.torch import devices  # noqa: E402
from cas.torch.devices import (  # noqa: E402
    CudaCopier,
    PageableCopier,
    RowMajor,
    TorchCuda,
    copier_for,
    slabs,
    synchronize,
)
from cas.torch.testing import CONTRACT, FakeCuda, SlowDevice, check_contract  # noqa: E402

no_deadlines()

CPU = torch.device("cpu")
COPIERS = {
    "pageable": PageableCopier,
    "slow": SlowDevice,
    "cuda": lambda: CudaCopier(CPU, FakeCuda()),
    "cuda, nothing can be pinned": lambda: CudaCopier(CPU, FakeCuda(pinned_buffers=0)),
    "cuda, one buffer can be pinned": lambda: CudaCopier(CPU, FakeCuda(pinned_buffers=1)),
}


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices._PinningFailed, "said", False)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("copier", COPIERS)
def test_keeps_the_contract(copier: str, check: Any) -> None:
    check(COPIERS[copier](), CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_keeps_the_contract_on_a_gpu() -> None:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        check_contract(copier_for(device), device)
        check_contract(PageableCopier(), device)


def test_the_contract_notices_a_copier_that_does_not_wait() -> None:
    class Hasty(FakeCuda):
        def synchronize(self, event: Any) -> None:
            pass

    with pytest.raises(AssertionError, match="breaks a promise"):
        CONTRACT[0](CudaCopier(CPU, Hasty()), CPU)


def test_a_copy_sees_what_was_queued_before_and_not_what_comes_after() -> None:
    cuda = FakeCuda()
    copier = CudaCopier(CPU, cuda)
    weights = torch.zeros(1000, dtype=torch.uint8)
    cuda.queue(lambda: weights.fill_(1))
    source = copier.open(weights)
    buffers = [copier.allocate(600) for _ in range(2)]
    copies = [source.begin(at, 500, buffer) for at, buffer in zip((0, 500), buffers, strict=True)]
    assert not weights.any(), "nothing has happened yet, as on a busy GPU"
    for copy, buffer in zip(copies, buffers, strict=True):
        copy.wait()
        assert bytes(buffer.view[:500]) == b"\1" * 500


def test_a_failed_copy_leaves_nothing_queued_behind() -> None:
    class Failing(FakeCuda):
        def copy(self, stream: Any, target: Any, source: Any) -> None:
            if len(stream.queued) == 2:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            super().copy(stream, target, source)

    cuda = Failing()
    copier = CudaCopier(CPU, cuda)
    source = copier.open(torch.ones(6, 10, 10)[:, 1:, ::2])
    buffer = copier.allocate(source.nbytes)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        source.begin(100, source.nbytes - 100, buffer)
    buffer.tensor.zero_()
    cuda.synchronize(cuda.record(copier._stream))
    assert not any(buffer.view)


def test_pageable_memory_stands_in_where_pinning_fails(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        copier = CudaCopier(CPU, FakeCuda(pinned_buffers=1))
        buffers = [copier.allocate(100) for _ in range(3)]
        CudaCopier(CPU, FakeCuda(pinned_buffers=0)).allocate(100)
    assert [buffer.pinned for buffer in buffers] == [True, False, False]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "cannot pin 100 bytes" in message
    assert "out of memory" in message
    assert "LAUNCH_BLOCKING" not in message


def test_a_device_gets_the_copier_that_suits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(TorchCuda, "new_stream", lambda self, device: seen.append(device))
    assert isinstance(copier_for(torch.device("cuda", 1)), CudaCopier)
    assert seen == [torch.device("cuda", 1)], "whatever device is the current one"
    for other in ("cpu", "xpu", "mps"):
        assert isinstance(copier_for(torch.device(other)), PageableCopier)


def test_pageable_copies_wait_for_the_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    class Stream:
        def synchronize(self) -> None:
            done.append("synchronized")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: done.append(str(device)) or Stream()
    )
    synchronize(CPU)
    assert done == []
    synchronize(torch.device("xpu", 1))
    assert done == ["xpu:1", "synchronized"]


def test_torch_is_asked_for_what_a_copy_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which calls reach torch.cuda, and in which order; what they do needs a GPU to see."""
    calls: list[Any] = []

    class Stream:
        def __init__(self, device: Any = "current") -> None:
            self.device = device

        def wait_stream(self, other: Stream) -> None:
            calls.append(("wait", self.device, other.device))

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Stream) -> None:
            calls.append(("record", stream.device))

        def synchronize(self) -> None:
            calls.append("synchronize")

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        calls.append(("enter", chosen.device))
        yield
        calls.append(("leave", chosen.device))

    for name, value in {"Stream": Stream, "Event": Event, "stream": stream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(f"current {device}"))
    copier = CudaCopier(torch.device("cuda", 1))
    source = copier.open(torch.tensor([1 + 2j, 3 - 4j]).conj())
    buffer = PageableCopier().allocate(16)
    source.begin(0, 16, buffer).wait()
    assert calls == [
        ("wait", torch.device("cuda", 1), "current cuda:1"),
        ("enter", torch.device("cuda", 1)),
        ("leave", torch.device("cuda", 1)),
        ("record", torch.device("cuda", 1)),
        "synchronize",
    ]
    assert buffer.tensor.view(torch.complex64).tolist() == [1 - 2j, 3 + 4j]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch without a GPU")
def test_memory_that_torch_cannot_pin_here_is_pageable(caplog: pytest.LogCaptureFixture) -> None:
    class Streamless(TorchCuda):
        def new_stream(self, device: Any) -> None:
            return None

        def pinned(self, device: Any, nbytes: int) -> Any:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    buffer = CudaCopier(CPU, Streamless()).allocate(100)
    assert not buffer.pinned
    assert len(buffer.view) == 100
    assert "cannot pin" in caplog.text


@given(
    st.lists(st.integers(1, 4), min_size=0, max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.integers(0, math.prod(shape)),
            st.integers(0, math.prod(shape)),
            st.permutations(range(len(shape))),
        )
    )
)
def test_slabs_are_the_elements_in_order(drawn: Any) -> None:
    shape, one, other, order = drawn
    tensor = torch.arange(math.prod(shape)).view(shape).permute(order)
    first, end = sorted((one, other))
    found = list(slabs(tensor, first, end))
    elements = [element for slab in found for element in slab.reshape(-1).tolist()]
    assert elements == tensor.reshape(-1).tolist()[first:end]
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(slab.numel() for slab in found)


def test_a_contiguous_tensor_is_one_range_of_its_memory() -> None:
    tensor = torch.arange(100, dtype=torch.bfloat16).view(10, 10)[3:7]
    seen: list[int] = []
    copier = PageableCopier()
    RowMajor(tensor).copy_to(
        copier.allocate(64), 16, 64, lambda target, source: seen.append(source.data_ptr())
    )
    assert seen == [tensor.data_ptr() + 16]
