"""The sections of `gpu_check.py`; each runs as ``gpu_sections.py NAME SETTINGS RESULT_FILE``.

A section's findings are in the file as soon as it has them, so that a crash keeps what there is.
The process that exports without `cas` imports nothing of it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CHUNK = 4 << 20
#: In the memory section: wide layers, so that compiling stays short whatever the size.
LAYER_WIDTH = 8192
STARTED = time.monotonic()


class Report:
    """What a section found, kept on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = {"status": "failed", "checks": {}}
        self._save()

    def add(self, **facts: Any) -> None:
        self.found.update(facts)
        self._save()

    def check(self, promise: str, holds: bool) -> None:
        self.found["checks"][promise] = holds
        self._save()

    def skip(self, reason: str) -> None:
        self.add(status="skipped", reason=reason)

    def end(self) -> None:
        """The section came to its end; it is ok if all its checks held."""
        if self.found["status"] != "skipped":
            good = all(self.found["checks"].values())
            self.add(status="ok" if good else "failed")
            if not good:
                bad = [name for name, holds in self.found["checks"].items() if not holds]
                self.add(error="does not hold: " + "; ".join(bad))

    def _save(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.found))
        temporary.replace(self._path)


@dataclass(frozen=True)
class Settings:
    """``seconds`` is the time the section has; ``engine`` is for processes that export."""

    stand_in: bool
    gib: float
    work: Path
    seconds: float
    engine: str = ""

    @classmethod
    def parse(cls, text: str) -> Settings:
        fields = json.loads(text)
        return cls(**{**fields, "work": Path(fields["work"])})

    def has_time_for(self, seconds: float) -> bool:
        """Whether so much is likely to be left of the section's time."""
        return time.monotonic() - STARTED + 1.2 * seconds < self.seconds

    @property
    def devices(self) -> list[torch.device]:
        if self.stand_in:
            return [torch.device("cpu")]
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


# --- environment --------------------------------------------------------------------------------


def environment(settings: Settings, report: Report) -> None:
    from importlib import metadata

    names = ("torch", "executorch", "triton", "torchao", "cas-artifacts")
    report.add(
        python=platform.python_version(),
        packages={name: _version(metadata, name) for name in names},
        cores=os.cpu_count(),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        disk_free_gib=round(shutil.disk_usage(settings.work).free / 2**30, 1),
        compiler=_first_line(["g++", "--version"]),
    )
    if settings.stand_in:
        return
    report.add(
        cuda=torch.version.cuda,
        driver=_first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        devices=[
            {"name": found.name, "gib": round(found.total_memory / 2**30, 1)}
            for found in (torch.cuda.get_device_properties(d) for d in settings.devices)
        ],
    )


def _version(metadata: Any, name: str) -> str | None:
    try:
        return str(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]
    except FileNotFoundError:
        return None


# --- copies -------------------------------------------------------------------------------------


def copies(settings: Settings, report: Report) -> None:
    from cas.torch.devices import PageableCopier
    from cas.torch.testing import CONTRACT

    for device in settings.devices:
        for kind, copier in (("best", _copier(settings, device)), ("pageable", PageableCopier())):
            for check in CONTRACT:
                check(copier, device)
                report.check(f"{device}, {kind}: {check.__name__}", True)
        buffer = _copier(settings, device).allocate(CHUNK)
        report.check(f"{device}: host memory can be pinned", buffer.pinned)
        if not settings.stand_in:
            _check_order(device, report)
            _check_device_memory(device, report)


def _copier(settings: Settings, device: torch.device) -> Any:
    from cas.torch.devices import CudaCopier, copier_for
    from cas.torch.testing import FakeCuda

    return CudaCopier(device, FakeCuda()) if settings.stand_in else copier_for(device)


def _check_order(device: torch.device, report: Report) -> None:
    """A copy sees what the caller's stream has queued, whichever device is the current one."""
    from cas.torch.devices import copier_for

    for other in range(torch.cuda.device_count()):
        with torch.cuda.device(other):
            stream = torch.cuda.Stream(device)
            tensor = torch.zeros(CHUNK, dtype=torch.uint8, device=device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                torch.cuda._sleep(500_000_000)
                tensor.fill_(1)
                copier = copier_for(device)
                buffer = copier.allocate(CHUNK)
                copier.open(tensor).begin(0, CHUNK, buffer).wait()
                unchanged = torch.cuda.current_stream(device) == stream
            report.check(
                f"{device}, while {other} is current: a copy sees what was queued before it",
                bytes(buffer.view) == b"\1" * CHUNK,
            )
            report.check(
                f"{device}, while {other} is current: streams and devices stay as they were",
                unchanged and torch.cuda.current_device() == other,
            )


def _check_device_memory(device: torch.device, report: Report) -> None:
    from cas import Store
    from cas.torch import put_storage

    tensor = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    directory = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).with_name("copies-store")
    with Store.open(directory) as store, store.writer() as writer:
        recipe = put_storage(writer, tensor.untyped_storage())
        same = writer.read(recipe) == tensor.cpu().numpy().tobytes()
    report.check(f"{device}: a storage comes out of the store as it went in", same)
    peak = torch.cuda.max_memory_allocated(device)
    report.check(f"{device}: no memory is taken on the device", peak == before)
    shutil.rmtree(directory)


# --- throughput ---------------------------------------------------------------------------------


def throughput(settings: Settings, report: Report) -> None:
    """Seconds for the same number of bytes, in rounds that do every step once."""
    nbytes = (32 << 20) if settings.stand_in else (1 << 30)
    rounds = 1 if settings.stand_in else 3
    report.add(bytes=nbytes, rounds=rounds)
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, seconds in _Throughput(settings, nbytes).run():
            taken.setdefault(name, []).append(seconds)
            median = {step: statistics.median(values) for step, values in taken.items()}
            report.add(
                seconds_of={step: round(value, 4) for step, value in median.items()},
                gib_per_second={
                    step: round(nbytes / 2**30 / value, 2) for step, value in median.items()
                },
            )
    slowest_known = max(median["pinned copy alone"], median["blake3 alone"])
    slowest_new = max(slowest_known, median["durable write alone"])
    in_turn = median[".cpu() loop, hash and write in turn"]
    report.add(
        ratios={
            "put new / slowest stage": round(median["put, new"] / slowest_new, 2),
            "put known / slowest stage": round(median["put, known"] / slowest_known, 2),
            "put new / in turn": round(median["put, new"] / in_turn, 2),
            "put new / .cpu() loop": round(median["put, new"] / median[".cpu() loop"], 2),
        }
    )


class _Throughput:
    """One round, on bytes that no earlier round had."""

    def __init__(self, settings: Settings, nbytes: int) -> None:
        self.settings = settings
        self.device = settings.devices[0]
        self.copier = _copier(settings, self.device)
        self.tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=self.device)
        self.host = memoryview(self.tensor.cpu().numpy())
        self.offsets = range(0, nbytes, CHUNK)

    def run(self) -> Iterator[tuple[str, float]]:
        from cas import Store

        work = self.settings.work
        yield ".cpu() loop", self.timed(self.cpu_loop)
        yield "pinned copy alone", self.timed(self.pinned_copies)
        yield "blake3 alone", self.timed(self.hash_alone)
        yield "durable write alone", self.timed(lambda: self.write(work / "alone"))
        yield ".cpu() loop, hash and write in turn", self.timed(lambda: self.in_turn(work / "turn"))
        yield from self.stock(work / "stock")
        with Store.open(work / "throughput-store") as store:
            yield "put, new", self.timed(lambda: self.put(store))
            yield "put, known", self.timed(lambda: self.put(store))
        shutil.rmtree(work / "throughput-store")

    def timed(self, step: Callable[[], object]) -> float:
        os.sync()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    def cpu_loop(self) -> None:
        for offset in self.offsets:
            self.tensor[offset : offset + CHUNK].cpu()

    def pinned_copies(self) -> None:
        """Nothing but copies, two under way at a time."""
        source = self.copier.open(self.tensor)
        buffers = [self.copier.allocate(CHUNK) for _ in range(2)]
        under_way: list[Any] = []
        for number, offset in enumerate(self.offsets):
            if len(under_way) == 2:
                under_way.pop(0).wait()
            nbytes = min(CHUNK, source.nbytes - offset)
            under_way.append(source.begin(offset, nbytes, buffers[number % 2]))
        for copy in under_way:
            copy.wait()

    def hash_alone(self) -> None:
        from blake3 import blake3

        from cas.context import DEFAULT_WORKERS

        with ThreadPoolExecutor(DEFAULT_WORKERS) as pool:
            digests = pool.map(lambda o: blake3(self.host[o : o + CHUNK]).digest(), self.offsets)
            assert len(list(digests)) == len(self.offsets)

    def write(self, path: Path) -> None:
        with open(path, "wb", buffering=0) as file:
            for offset in self.offsets:
                file.write(self.host[offset : offset + CHUNK])
            os.fsync(file.fileno())
        path.unlink()

    def in_turn(self, path: Path) -> None:
        from blake3 import blake3

        with open(path, "wb", buffering=0) as file:
            for offset in self.offsets:
                piece = memoryview(self.tensor[offset : offset + CHUNK].cpu().numpy())
                blake3(piece).digest()
                file.write(piece)
            os.fsync(file.fileno())
        path.unlink()

    def stock(self, path: Path) -> Iterator[tuple[str, float]]:
        """What ExecuTorch's own weight collector does, where it is installed."""
        try:
            from executorch.backends.cuda.cuda_weight_collector import _write_tensor_storage
        except ImportError:
            return
        yield (
            "ExecuTorch's collector",
            self.timed(lambda: _write_tensor_storage(self.tensor, str(path))),
        )
        path.unlink()

    def put(self, store: Any) -> None:
        from cas.torch.ring import put_through_ring

        with store.writer() as writer:
            put_through_ring(writer, self.tensor, copier=self.copier)
            writer.barrier()


# --- memory -------------------------------------------------------------------------------------


def memory(settings: Settings, report: Report) -> None:
    """One model in host memory, exported in fresh processes that are watched from outside."""
    width = 512 if settings.stand_in else LAYER_WIDTH
    layers = 3 if settings.stand_in else max(1, round(settings.gib * 2**30 / (width * width * 4)))
    weights = layers * (width * width + width) * 4
    needed = 4 * weights
    if shutil.disk_usage(settings.work).free < needed:
        report.skip(f"{needed >> 20} MiB of free disk are needed in {settings.work}; see --dir")
        return
    report.add(weights_mib=round(weights / 2**20, 1), layers=layers, width=width)
    # The first export tunes kernels, which takes memory of its own and leaves its findings in a
    # cache. It is not one of those that are compared.
    tuned = _measured(
        settings, "stock", {"low_memory": False, "width": width, "layers": 1}, weights
    )
    report.add(tuning_seconds=tuned["seconds"])
    took = 0.0
    for mode, engines in (("default", ("stock", "cas", "spill")), ("low memory", ("stock", "cas"))):
        if not settings.has_time_for(took):
            report.add(**{mode: "left out: no time"})
            break
        began = time.monotonic()
        spec = {"low_memory": mode == "low memory", "width": width, "layers": layers}
        rows = {engine: _measured(settings, engine, spec, weights) for engine in engines}
        _compare(mode, rows, report)
        took = time.monotonic() - began


def _compare(mode: str, rows: dict[str, dict[str, Any]], report: Report) -> None:
    digests = [row.pop("sha256") for row in rows.values()]
    report.add(**{mode: rows})
    report.check(f"{mode}: byte-identical", digests.count(digests[0]) == len(digests))
    device = [row.get("vram_allocated_mib") for row in rows.values()]
    if any(device):
        no_more = None not in device and max(device) <= 1.01 * device[0]
        report.check(f"{mode}: no more device memory than stock", no_more)


def _measured(
    settings: Settings, engine: str, extra: dict[str, Any], weights: int
) -> dict[str, Any]:
    from measure import measure

    out, store, log = (settings.work / f"memory-{name}" for name in ("out", "store", "log"))
    spec = {
        "engine": engine, "backend": "cuda", "external": False, "strict": False, "source": "ram",
        "stand_in": settings.stand_in, "out": str(out), "store": str(store), **extra,
    }  # fmt: skip
    measured = measure(spec, log=log)
    if measured.result is None:
        raise RuntimeError(f"the {engine} export ended with {measured.returncode}:\n{_end_of(log)}")
    for path in settings.work.glob("memory-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    row: dict[str, Any] = {
        "seconds": round(measured.result["seconds"], 2),
        "host_anon_ratio": round(measured.ratio(weights), 3),
        "host_anon_peak_mib": measured.peak.anon >> 20,
        "host_anon_base_mib": measured.base.anon >> 20,
        "host_rss_peak_mib": measured.peak.total >> 20,
        "host_rss_base_mib": measured.base.total >> 20,
        "sha256": measured.result["sha256"],
    }
    if engine == "spill":
        row["host_anon_ratio_after_spill"] = round(measured.ratio_after("spill", weights), 3)
    for name in ("vram_allocated", "vram_reserved"):
        if name in measured.result:
            row[f"{name}_mib"] = measured.result[name] >> 20
    return row


def _end_of(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-1500:]


# --- identity -----------------------------------------------------------------------------------


def identity(settings: Settings, report: Report) -> None:
    """Small models through CudaBackend: one process without `cas`, one with it, case by case."""
    from cuda_flow import CASES

    found: dict[str, dict[str, Any]] = {}
    with _Exporter(settings, "stock") as stock, _Exporter(settings, "cas") as ours:
        longest = 0.0
        for name in CASES:
            if not settings.has_time_for(longest):
                report.add(left_out=[name for name in CASES if name not in found])
                break
            began = time.monotonic()
            found[name] = {"stock": stock.export(name), "cas": ours.export(name)}
            longest = max(longest, time.monotonic() - began)
            report.add(exports=found)
            # A model that ExecuTorch itself cannot export says nothing about us.
            if "files" in found[name]["stock"]:
                files = [found[name][engine].get("files") for engine in ("stock", "cas")]
                report.check(f"{name}: byte-identical", files[0] == files[1])
        report.check("the process without cas imported nothing of it", not stock.ask("cas?"))
    compared = [name for name in found if "files" in found[name]["stock"]]
    report.check("stock exports models of each mode", _covers_modes(compared))
    shared = found.get("two methods", {}).get("cas", {})
    if "files" in shared:
        report.check("two methods share one copy of the weights", _one_copy(shared))


def _covers_modes(names: list[str]) -> bool:
    low = [name for name in names if "low memory" in name]
    return 0 < len(low) < len(names) and any("two methods" in name for name in names)


def _one_copy(export: dict[str, Any]) -> bool:
    """Whether the data file has not much more than the weights of one method."""
    sizes = [size for name, (size, _) in export["files"].items() if name.endswith(".ptd")]
    return len(sizes) == 1 and sizes[0] < 1.5 * export["weights"]


class _Exporter:
    """A fresh process that exports, with one engine, the cases that it is told."""

    def __init__(self, settings: Settings, engine: str) -> None:
        spec = {**settings.__dict__, "engine": engine, "work": str(settings.work)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "exports", json.dumps(spec), os.devnull],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> _Exporter:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def export(self, case: str) -> dict[str, Any]:
        """Each file's size and SHA-256 by name, and more; or what went wrong."""
        answer: dict[str, Any] = self.ask(case)
        return answer

    def ask(self, question: str) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):  # a compiler may print something too
                return json.loads(line.removeprefix("answer "))
        raise RuntimeError(f"the process that exports ended with {self._process.wait()}")


def exports(settings: Settings) -> None:
    """The other side of `_Exporter`."""
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        question = line.rstrip("\n")
        answer: Any
        if question == "cas?":
            answer = any(name == "cas" or name.startswith("cas.") for name in sys.modules)
        else:
            try:
                answer = _export(settings, question)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        print("answer " + json.dumps(answer), flush=True)


def _export(settings: Settings, name: str) -> dict[str, Any]:
    from cuda_flow import lower_to_cuda, make_case
    from workload import save_stock, sha256

    model, inputs, spec = make_case(name)
    spec["stand_in"] = settings.stand_in
    out = settings.work / f"identity-{settings.engine}"
    began = time.monotonic()
    if settings.engine == "stock":
        save_stock(lower_to_cuda(model, inputs, spec), out)
        new_bytes = None
    else:
        new_bytes = _save_cas(settings, lambda: lower_to_cuda(model, inputs, spec), out)
    seconds = time.monotonic() - began
    files = {path.name: (path.stat().st_size, sha256(path)) for path in sorted(out.iterdir())}
    shutil.rmtree(out)
    storages = {t.untyped_storage()._cdata: t.nbytes for t in model.state_dict().values()}
    return {
        "seconds": round(seconds, 1),
        "files": files,
        "weights": sum(storages.values()),
        "new_bytes": new_bytes,
    }


def _save_cas(settings: Settings, lower: Callable[[], Any], out: Path) -> int:
    from cas import Store
    from cas.executorch import capture

    # The smallest thresholds, so that small weights take the way of large ones.
    with (
        Store.open(settings.work / "identity-store", chunk_size=64 << 10) as store,
        capture(store, "identity", threshold=1, map_threshold=1) as cap,
    ):
        return cap.save(lower(), out).commit.new_bytes


# --- run ----------------------------------------------------------------------------------------


def run(settings: Settings, report: Report) -> None:
    """Export two layers with `cas`, run the files, and compare with PyTorch.

    The stand-in takes XNNPACK, since what it compiles for "CUDA" runs nowhere.
    """
    from executorch.runtime import Runtime, Verification

    backend = "XnnpackBackend" if settings.stand_in else "CudaBackend"
    registered = list(Runtime.get().backend_registry.registered_backend_names)
    report.add(registered_backends=registered, backend=backend)
    if backend not in registered:
        report.skip(f"the ExecuTorch runtime that is installed here has no {backend}")
        return
    import workload

    spec = {
        "backend": "xnnpack" if settings.stand_in else "cuda",
        "strict": False, "external": False, "width": 256, "layers": 2,
    }  # fmt: skip
    model = workload.random_stack(256, 2)
    out = settings.work / "run"
    _save_cas(settings, lambda: workload.lower(model, spec), out)
    data = next(out.glob("*.ptd"), None)
    program = Runtime.get().load_program(
        out / "model.pte", verification=Verification.InternalConsistency, data_path=data
    )
    x = torch.randn(1, 256)
    found = program.load_method("forward").execute([x])[0].cpu()
    expected = model(x).detach()
    error = float((found - expected).abs().max() / expected.abs().max())
    report.add(relative_error=error)
    report.check("the output is PyTorch's", error < 1e-3)


SECTIONS: dict[str, Callable[[Settings, Report], None]] = {
    function.__name__: function
    for function in (environment, copies, throughput, memory, identity, run)
}


def main() -> int:
    name, settings, path = sys.argv[1:]
    if name == "exports":
        exports(Settings.parse(settings))
        return 0
    report = Report(Path(path))
    try:
        parsed = Settings.parse(settings)
        if not (parsed.stand_in or torch.cuda.is_available()):
            raise RuntimeError(
                "torch finds no CUDA device; --stand-in proves this script on a machine without one"
            )
        SECTIONS[name](parsed, report)
    except Exception as error:
        traceback.print_exc()
        report.add(status="failed", error=f"{type(error).__name__}: {error}"[:2000])
        return 1
    report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
