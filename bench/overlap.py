"""Does copying from a device overlap with hashing and writing? A slow device made of threads.

    python bench/overlap.py [--mib 256] [--rounds 5] [--dir DIR] [--json FILE]

The device copies into host buffers at a bandwidth of its own, which takes time but hardly any
processor. It is set to half, once and twice as fast as the store takes in the same bytes from
memory. Each round measures, for new random bytes: the copy alone (into the same ring of buffers,
which are given back at once), BLAKE3 alone on all cores, a durable write of one file alone, the
ingest from memory (hash and write together), one stage after the other for each chunk, and the
ring. The ring should take about as long as the slowest stage, not as their sum, and never hold
more buffers than it has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

import cas
from cas.context import DEFAULT_WORKERS
from cas.torch.devices import view_memory
from cas.torch.ring import MAX_BUFFERS, MIN_BUFFERS, RING_BYTES, Ring
from cas.torch.testing import SlowDevice
from cas.writer import Writer

CHUNK = 4 << 20
PACES = {"slow device": 2.0, "even": 1.0, "fast device": 0.5}
STAGES = ("copy", "hash", "write", "ingest", "in turn", "ring")


def timed(work: Callable[[], object]) -> float:
    os.sync()  # nobody pays for the step before
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def random_tensor(nbytes: int) -> torch.Tensor:
    data = bytearray()
    while len(data) < nbytes:
        data += os.urandom(min(64 << 20, nbytes - len(data)))
    return torch.frombuffer(data, dtype=torch.uint8)


def bytes_in(tensor: torch.Tensor) -> memoryview:
    return view_memory(tensor.data_ptr(), len(tensor), tensor)


def hash_alone(view: memoryview) -> None:
    with ThreadPoolExecutor(DEFAULT_WORKERS) as pool:
        list(pool.map(lambda o: blake3(view[o : o + CHUNK]).digest(), range(0, len(view), CHUNK)))


def write_alone(view: memoryview, path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for offset in range(0, len(view), CHUNK):
            file.write(view[offset : offset + CHUNK])
        os.fsync(file.fileno())


def copy_alone(device: SlowDevice, tensor: torch.Tensor) -> Ring:
    """Through the ring to nobody; the pieces are given back in order, as soon as they are there."""
    ring = new_ring(device)
    with ring.stream(tensor) as pieces, ThreadPoolExecutor(1) as consumer:

        def consume(piece: Any) -> None:
            piece.ready()
            piece.release()

        for piece in pieces:
            consumer.submit(consume, piece)
    return ring


def new_ring(device: SlowDevice) -> Ring:
    buffers = max(MIN_BUFFERS, min(MAX_BUFFERS, RING_BYTES // CHUNK))
    return Ring(device, buffer_bytes=CHUNK, buffers=buffers)


def ring_to_store(writer: Writer, device: SlowDevice, tensor: torch.Tensor) -> Ring:
    ring = new_ring(device)
    with ring.stream(tensor) as pieces:
        writer.put_pieces(pieces)
    writer.barrier()
    return ring


def in_turn(writer: Writer, device: SlowDevice, tensor: torch.Tensor) -> None:
    """Copy a chunk, hash and write it, copy the next: what a plain ``.cpu()`` loop does."""
    source = device.open(tensor)
    buffer = device.allocate(CHUNK)
    for offset in range(0, len(tensor), CHUNK):
        nbytes = min(CHUNK, len(tensor) - offset)
        source.begin(offset, nbytes, buffer).wait()
        writer.put(buffer.view[:nbytes])
    writer.barrier()


class Round:
    """One pass over all stages and paces, in a store of its own."""

    def __init__(self, work: Path, nbytes: int) -> None:
        self.work = work
        self.nbytes = nbytes

    def run(self) -> list[dict[str, Any]]:
        with cas.Store.open(self.work / "store", chunk_size=CHUNK) as store:
            return [self.row(store, name, pace) for name, pace in PACES.items()]

    def row(self, store: cas.Store, name: str, pace: float) -> dict[str, Any]:
        tensor = random_tensor(self.nbytes)
        seconds = {
            "hash": timed(lambda: hash_alone(bytes_in(tensor))),
            "write": timed(lambda: write_alone(bytes_in(tensor), self.work / "file")),
        }
        (self.work / "file").unlink()
        seconds["ingest"] = self.new(store, lambda writer, data: self.plain(writer, data))
        device = SlowDevice.of_bandwidth(self.nbytes / (pace * seconds["ingest"]))
        seconds["copy"] = timed(lambda: copy_alone(device, tensor))
        seconds["in turn"] = self.new(store, lambda writer, data: in_turn(writer, device, data))
        rings: list[Ring] = []
        seconds["ring"] = self.new(
            store, lambda writer, data: rings.append(ring_to_store(writer, device, data))
        )
        device.close()
        peak, buffers = rings[0].peak, rings[0].buffers
        return {"device": name, **seconds, "peak_buffers": peak, "buffers": buffers}

    def new(self, store: cas.Store, work: Callable[[Writer, torch.Tensor], object]) -> float:
        """Seconds to take in bytes that the store has not seen."""
        tensor = random_tensor(self.nbytes)
        with store.writer() as writer:
            return timed(lambda: work(writer, tensor))

    @staticmethod
    def plain(writer: Writer, tensor: torch.Tensor) -> None:
        writer.put(bytes_in(tensor))
        writer.barrier()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each stage, and what the ring took against them, round by round."""
    median: dict[str, Any] = {
        stage: statistics.median(row[stage] for row in rows) for stage in STAGES
    }
    median["ring / slowest stage"] = statistics.median(
        row["ring"] / max(row["copy"], row["ingest"]) for row in rows
    )
    median["ring / sum of stages"] = statistics.median(
        row["ring"] / (row["copy"] + row["ingest"]) for row in rows
    )
    median["ring / in turn"] = statistics.median(row["ring"] / row["in turn"] for row in rows)
    median["peak_buffers"] = max(row["peak_buffers"] for row in rows)
    median["buffers"] = rows[0]["buffers"]
    return median


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary directory)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            rounds.append(Round(Path(directory), options.mib << 20).run())
    rows = {
        name: summary([row for rows in rounds for row in rows if row["device"] == name])
        for name in PACES
    }
    print(f"{options.mib} MiB, {options.rounds} rounds, median seconds")
    print(
        f"{'':12}" + "".join(f"{stage:>9}" for stage in STAGES) + "   ring / slowest, sum, in turn"
    )
    for name, row in rows.items():
        print(
            f"{name:12}"
            + "".join(f"{row[stage]:9.2f}" for stage in STAGES)
            + f"   {row['ring / slowest stage']:.2f} x, {row['ring / sum of stages']:.2f} x, "
            f"{row['ring / in turn']:.2f} x;  at most {row['peak_buffers']} of "
            f"{row['buffers']} buffers in flight"
        )
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "summary": rows}) + "\n")
    return 0 if all(row["peak_buffers"] <= row["buffers"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
