"""Copying, hashing and writing go on at the same time, in a bounded number of buffers."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

import cas
from cas.errors import UsageError
from cas.manifest import ChunkPart, Recipe, ZeroPart
from cas.testing.steps import step_hook
from cas.testing.stores import CHUNK, assert_sound, collect, open_store, scratch
from cas.writer import Writer

torch = pytest.importorskip("torch")
from cas.torch import put_storage, put_tensor, ring  # noqa: E402
from cas.torch.ring import Ring, put_through_ring  # noqa: E402
from cas.torch.testing import SlowDevice  # noqa: E402

#: Enough that a wait which ends in it means that the thing never happens.
NEVER = 300.0


@pytest.fixture
def store() -> Iterator[cas.Store]:
    with scratch() as path, open_store(path / "store", workers=3) as opened:
        yield opened


def make_tensor(chunks: float, seed: int = 0) -> Any:
    data = bytearray(random.Random(seed).randbytes(int(chunks * CHUNK)))
    return torch.frombuffer(data, dtype=torch.uint8)


def put(writer: Writer, device: SlowDevice, tensor: Any, buffers: int = 4) -> tuple[Recipe, Ring]:
    """Put through a ring of so many buffers."""
    ring = Ring(device, buffer_bytes=writer.chunk_size, buffers=buffers)
    with ring.stream(tensor) as pieces:
        return writer.put_pieces(pieces), ring


@pytest.mark.parametrize("chunks", [0.5, 1, 4, 4.25, 11.75])
def test_gives_the_chunks_that_host_memory_gives(chunks: float, writer: Writer) -> None:
    tensor = make_tensor(chunks)
    recipe = put_through_ring(writer, tensor, copier=SlowDevice())
    assert recipe == writer.put(tensor.numpy())
    assert writer.counters.logical_bytes == 2 * len(tensor)
    assert writer.counters.new_bytes == len(tensor)


def test_nothing_is_begun_for_an_empty_tensor(writer: Writer) -> None:
    device = SlowDevice()
    assert put_through_ring(writer, torch.empty(3, 0), copier=device) == Recipe()
    assert device.buffers == 0


def test_zeros_stay_zero_runs(writer: Writer) -> None:
    tensor = torch.cat([make_tensor(1), torch.zeros(2 * CHUNK + 5, dtype=torch.uint8)])
    recipe = put_through_ring(writer, tensor, copier=SlowDevice())
    assert [type(part) for part in recipe.parts] == [ChunkPart, ZeroPart]
    assert recipe.size == len(tensor)


@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_no_more_buffers_are_in_flight_than_the_ring_has(buffers: int, writer: Writer) -> None:
    in_use: list[int] = []
    device = SlowDevice(lambda number, nbytes: in_use.append(ring.in_use))
    tensor = make_tensor(20)
    ring = Ring(device, buffer_bytes=CHUNK, buffers=buffers)
    with ring.stream(tensor) as pieces:
        recipe = writer.put_pieces(pieces)
    assert writer.read(recipe) == tensor.numpy().tobytes()
    assert len(in_use) == 20
    assert max(in_use) <= ring.peak <= buffers
    assert device.buffers <= buffers
    assert ring.in_use == 0


def test_a_ring_holds_few_bytes_whatever_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    class Sink:
        chunk_size = 0

        def put_pieces(self, pieces: Any) -> Recipe:
            return Recipe()

    class Noted(Ring):
        def __init__(self, copier: Any, *, buffer_bytes: int, buffers: int) -> None:
            made.append((buffer_bytes, buffers))
            super().__init__(copier, buffer_bytes=buffer_bytes, buffers=buffers)

    monkeypatch.setattr(ring, "Ring", Noted)
    sink = Sink()
    tensor = torch.empty(1, dtype=torch.uint8).expand(1 << 30)
    for sink.chunk_size in (64 << 10, 4 << 20, 64 << 20):
        put_through_ring(sink, tensor)
    put_through_ring(sink, tensor[:100])
    assert made == [(64 << 10, 16), (4 << 20, 8), (64 << 20, 3), (100, 3)]


def on_staging(action: Callable[[int], None]) -> Any:
    """Call ``action`` with 0, 1, ... before each chunk file is written."""
    counter = iter(range(1 << 20))
    mutex = threading.Lock()

    def hook(operation: str, path: Path | str) -> None:
        if "create" in operation:
            with mutex:
                number = next(counter)
            action(number)

    return step_hook(hook)


@contextlib.contextmanager
def on_hashing(action: Callable[[int], None]) -> Iterator[None]:
    """Call ``action`` with 0, 1, ... before each chunk is hashed."""
    counter = iter(range(1 << 20))
    mutex = threading.Lock()
    original = cas.Digest.of

    def of(data: Any) -> cas.Digest:
        with mutex:
            number = next(counter)
        action(number)
        return original(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cas.Digest, "of", of)
        yield


@pytest.mark.parametrize("stage", [on_hashing, on_staging])
def test_copies_go_on_while_chunks_are_hashed_and_written(stage: Any, writer: Writer) -> None:
    """The first chunk is not done until the device has begun with the last buffer's copy."""
    begun = [threading.Event() for _ in range(8)]
    device = SlowDevice(lambda number, nbytes: begun[number].set())
    in_time: list[bool] = []

    def before(number: int) -> None:
        if number == 0:
            in_time.append(begun[3].wait(NEVER))

    tensor = make_tensor(8)
    with stage(before):
        recipe, _ = put(writer, device, tensor, buffers=4)
    assert in_time == [True]
    assert writer.read(recipe) == tensor.numpy().tobytes()


def test_chunks_are_hashed_and_written_while_a_copy_is_under_way(writer: Writer) -> None:
    """The device does not end the last copy until all chunks before it are written."""
    written = [threading.Event() for _ in range(6)]
    in_time: list[bool] = []

    def before_copy(number: int, nbytes: int) -> None:
        if number == 5:
            in_time.extend(event.wait(NEVER) for event in written[:5])

    with on_staging(lambda number: written[number].set()):
        put(writer, SlowDevice(before_copy), make_tensor(6), buffers=2)
    assert in_time == [True] * 5


@pytest.mark.parametrize("buffers", [1, 3, 8])
@pytest.mark.parametrize("failing", [0, 4, 9])
def test_an_error_in_a_copy_is_the_callers(failing: int, buffers: int, store: cas.Store) -> None:
    class DeviceLost(RuntimeError):
        pass

    def before_copy(number: int, nbytes: int) -> None:
        if number == failing:
            raise DeviceLost("the device fell off the bus")

    device = SlowDevice(before_copy)
    with store.writer() as writer:
        with pytest.raises(DeviceLost, match="fell off"):
            put(writer, device, make_tensor(10), buffers)
        assert device.done == device.begun, "no copy runs on into memory that is not its own"
        # The writer is as good as before.
        assert writer.read(put(writer, SlowDevice(), make_tensor(3), buffers)[0])
    collect(store)
    assert_sound(store)
    assert not list(store.context.layout.tmp.iterdir())


def test_an_error_in_a_write_ends_the_copies(store: cas.Store) -> None:
    device = SlowDevice()

    def before_write(number: int) -> None:
        if number == 3:
            raise OSError(5, "Input/output error")

    with store.writer() as writer:
        with on_staging(before_write), pytest.raises(OSError, match="Input/output"):
            put(writer, device, make_tensor(40))
        assert device.done == device.begun < 40
    collect(store)
    assert_sound(store)


def test_an_interrupt_waits_for_the_copies_under_way(store: cas.Store) -> None:
    """As Ctrl-C while the next buffer is waited for: everything begun ends before it goes on."""
    going_on = threading.Event()
    device = SlowDevice(lambda number, nbytes: number < 2 or going_on.wait(NEVER))

    class Interrupted(Ring):
        def _take(self) -> Any:
            if device.begun == 4:
                threading.Timer(0.05, going_on.set).start()
                raise KeyboardInterrupt
            return super()._take()

    with store.writer() as writer:
        ring = Interrupted(device, buffer_bytes=CHUNK, buffers=6)
        with pytest.raises(KeyboardInterrupt), ring.stream(make_tensor(10)) as pieces:
            writer.put_pieces(pieces)
        assert device.begun == device.done == 4
        assert ring.in_use == 0
    collect(store)
    assert_sound(store)


def test_a_writer_that_is_closed_meanwhile_ends_the_stream(store: cas.Store) -> None:
    """Closing drops the pieces that no worker has begun with; nobody may wait for those."""
    going_on = threading.Event()
    device = SlowDevice(lambda number, nbytes: going_on.wait(NEVER))
    outcome: list[BaseException | None] = []

    def work(writer: Writer) -> None:
        try:
            put(writer, device, make_tensor(20), buffers=6)  # twice the workers of the store
        except (RuntimeError, CancelledError) as error:
            outcome.append(error)

    with store.writer() as writer:
        putting = threading.Thread(target=work, args=(writer,), daemon=True)
        putting.start()
        while device.begun < 6:
            time.sleep(0.001)
        closing = threading.Thread(target=writer.close, daemon=True)
        closing.start()
        while not writer._ingest._pool._shutdown:
            time.sleep(0.001)
        going_on.set()
        putting.join(NEVER)
        closing.join(NEVER)
    assert not putting.is_alive() and not closing.is_alive()
    assert len(outcome) == 1
    assert device.begun == device.done < 20


def test_pieces_that_nobody_takes_are_settled(writer: Writer) -> None:
    device = SlowDevice()
    ring = Ring(device, buffer_bytes=CHUNK, buffers=4)
    with pytest.raises(ZeroDivisionError), ring.stream(make_tensor(10)) as pieces:
        held = [next(pieces), next(pieces)]
        raise ZeroDivisionError
    assert device.done == 2
    assert ring.in_use == 0
    held[0].release()  # a second time, which counts for nothing
    with ring.stream(make_tensor(10)) as pieces:
        assert len([next(pieces) for _ in range(4)]) == 4


def test_a_copy_that_cannot_begin_gives_its_buffer_back(writer: Writer) -> None:
    class Refusing(SlowDevice):
        def begin(self, *arguments: Any) -> Any:
            if self.begun == 2:
                raise RuntimeError("no more copies")
            return super().begin(*arguments)

    ring = Ring(Refusing(), buffer_bytes=CHUNK, buffers=2)
    with pytest.raises(RuntimeError, match="no more copies"), ring.stream(make_tensor(9)) as pieces:
        writer.put_pieces(pieces)
    assert ring.in_use == 0
    assert ring._permits._value == 2


def test_pieces_must_fit_chunks(writer: Writer) -> None:
    ring = Ring(SlowDevice(), buffer_bytes=2 * CHUNK, buffers=2)
    with pytest.raises(UsageError, match="chunk size"), ring.stream(make_tensor(5)) as pieces:
        writer.put_pieces(pieces)


def test_several_threads_put_at_the_same_time(writer: Writer) -> None:
    tensors = [make_tensor(6, seed) for seed in range(4)]
    recipes: dict[int, Recipe] = {}

    def work(number: int) -> None:
        recipes[number] = put(writer, SlowDevice(), tensors[number], buffers=2)[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NEVER)
    assert [writer.read(recipes[number]) for number in range(4)] == [
        tensor.numpy().tobytes() for tensor in tensors
    ]


def test_strided_host_memory_is_not_copied_whole(writer: Writer) -> None:
    made: list[int] = []

    class Noted(ring.Ring):
        def _take(self) -> Any:
            buffer = super()._take()
            made.append(buffer.tensor.data_ptr())
            return buffer

    tensor = make_tensor(64).view(2048, 2048).t()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "Ring", Noted)
        recipe = put_tensor(writer, tensor)
    assert writer.read(recipe) == tensor.contiguous().numpy().tobytes()
    assert len(made) == 64
    assert len(set(made)) <= 16


def test_tied_weights_and_aliases_are_stored_once(writer: Writer) -> None:
    tensor = make_tensor(3)
    device = SlowDevice()
    whole = put_through_ring(writer, tensor, copier=device)
    alias = put_through_ring(writer, tensor.view(torch.int32).detach(), copier=device)
    assert whole == alias == put_storage(writer, tensor.untyped_storage())
    assert writer.counters.new_bytes == 3 * CHUNK
