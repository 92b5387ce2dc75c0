"""Power cuts on a real filesystem, and what must hold after each.

A machine in one process: children write to a store on a loop mount and report what has returned;
the filesystem is shut down under them at a random moment; then it is mounted again and checked
against the reports. One image lives through several cuts, so that what one cut leaves behind is
there for the next.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from cas import Digest, Store, verify
from cas.errors import RefNotFound
from cas.layout import Layout
from cas.testing import disks
from cas.testing.processes import forked
from cas.testing.stores import collect, contents, scratch

#: Above the size from which a chunk is synced by itself, so that both ways are taken.
CHUNK = 512 << 10
_RECORD = struct.Struct("<cI")
#: Kinds of records: two said before a call, the others when it has returned, or raised.
BEGUN, REMOVING = b"b", b"r"
COMMITTED, ASSEMBLED, REMOVED, COLLECTED, FAILED = b"c", b"a", b"R", b"g", b"f"
RECORDED = b"k"


def bytes_of(seed: int) -> list[bytes]:
    """The pieces that artifact ``seed`` is put from: few and large, many and tiny, or mixed."""
    chooser = random.Random(seed)
    shared = contents(seed % 5, 40_000)  # other artifacts have it too
    kind = seed % 4
    if kind == 0:
        sizes = [chooser.randrange(CHUNK, 3 * CHUNK)]
    elif kind == 1:
        sizes = [chooser.randrange(1, 3000) for _ in range(chooser.randrange(20, 60))]
    elif kind == 2:
        sizes = [chooser.randrange(1, CHUNK // 4) for _ in range(chooser.randrange(1, 12))]
    else:
        sizes = [CHUNK, 17, CHUNK + 1]
    return [shared, *(chooser.randbytes(size) for size in sizes), bytes(10_000)]


def name_of(seed: int) -> str:
    return f"artifact/{seed}"


def key_of(seed: int) -> Digest:
    """The key of an action that gives the bytes of artifact ``seed``."""
    return Digest.of(b"action %d" % seed)


@dataclass(slots=True)
class History:
    """What the children said, over all cuts of one image."""

    begun: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    assembled: set[int] = field(default_factory=set)
    removing: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    recorded: set[int] = field(default_factory=set)
    collections: int = 0
    failures: int = 0

    def add(self, kind: bytes, seed: int) -> None:
        sets = {
            BEGUN: self.begun,
            COMMITTED: self.committed,
            ASSEMBLED: self.assembled,
            REMOVING: self.removing,
            REMOVED: self.removed,
            RECORDED: self.recorded,
        }
        if kind in sets:
            sets[kind].add(seed)
        self.collections += kind == COLLECTED
        self.failures += kind == FAILED

    def start_over(self, kept: set[int]) -> None:
        """After a check: only ``kept`` is known to be there."""
        self.begun, self.committed = set(kept), set(kept)
        self.assembled, self.removing, self.removed = set(), set(), set()
        self.recorded = set()
        self.collections = self.failures = 0


@dataclass(slots=True)
class Totals:
    """What a series of cuts did and checked."""

    cuts: int = 0
    commits: int = 0
    cut_commits: int = 0
    removals: int = 0
    collections: int = 0
    artifacts_checked: int = 0
    files_hashed: int = 0


class Machine:
    """One image, its store, and its power switch.

    Args:
        directory: where the image and the mount point lie; not in the image's own filesystem.
        fstype: ``ext4`` or ``xfs``.
        seed: of everything random here.
        with_gc: run a loop of gc and of removals beside the writer.
    """

    def __init__(self, directory: Path, fstype: str, *, seed: int, with_gc: bool) -> None:
        self.log = directory / f"{fstype}.log"
        self.image = directory / f"{fstype}.img"
        self.point = directory / f"{fstype}.mount"
        self.with_gc = with_gc
        self.random = random.Random(seed)
        self.history = History()
        self.totals = Totals()
        self._next = seed * 100_000
        disks.make_image(self.image, fstype, max(256 << 20, disks.SMALLEST[fstype]))

    @property
    def store(self) -> Path:
        return self.point / "store"

    @property
    def out(self) -> Path:
        return self.point / "out"

    def cut(self, after: float) -> None:
        """Run for ``after`` seconds, cut the power, mount again, check.

        Raises:
            AssertionError: something was lost, or needs a hand.
            PermissionError: this process may not mount.
        """
        disks.mount_image(self.image, self.point)
        try:
            self._run_until_cut(after)
        finally:
            disks.unmount(self.point)
        with disks.mounted_image(self.image, self.point):
            try:
                checked, hashed, kept = forked(self._check)
            except AssertionError as error:
                raise AssertionError(f"after cut {self.totals.cuts + 1}: {error}") from None
        self.history.start_over(kept)
        self.totals.cuts += 1
        self.totals.artifacts_checked += checked
        self.totals.files_hashed += hashed
        self._next += 1000

    # --- before the cut -------------------------------------------------------------------------

    def _run_until_cut(self, after: float) -> None:
        workers: list[Callable[[int], None]] = [self._write_loop]
        if self.with_gc:
            workers += [self._remove_and_collect_loop]
        receive, send = os.pipe()
        pids = [_start(worker, send, receive, self.log) for worker in workers]
        os.close(send)
        try:
            _records(receive, self.history.add, until=time.monotonic() + after)
            failed = self.history.failures
            disks.cut_power(self.point)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        assert not failed, f"failed before the power did: {self.log.read_text()}"
        _records(receive, self.history.add, until=None)  # what returned just before the cut
        os.close(receive)
        self._count()

    def _count(self) -> None:
        history, totals = self.history, self.totals
        totals.commits += sum(seed >= self._next for seed in history.committed)
        totals.cut_commits += len(history.begun - history.committed)
        totals.removals += len(history.removed)
        totals.collections += history.collections

    def _write_loop(self, pipe: int) -> None:
        with Store.open(self.store, chunk_size=CHUNK, workers=2) as store:
            seed = self._next
            while True:
                seed += 1
                _say(pipe, BEGUN, seed)
                with store.writer() as writer:
                    recipes = []
                    for number, piece in enumerate(bytes_of(seed)):
                        recipes.append(writer.put(piece))
                        if number == seed % 7:
                            writer.barrier()
                    whole = recipes[0].concat(recipes)
                    files = {"f": whole}
                    if seed % 2:
                        writer.put_action(
                            key_of(seed),
                            kind="test",
                            factors={"seed": seed},
                            result=seed,
                            recipes=[whole],
                            seconds=0,
                        )
                        _say(pipe, RECORDED, seed)
                    directory = self.out / str(seed) if seed % 3 == 0 else None
                    writer.commit(name_of(seed), files, directory=directory)
                _say(pipe, COMMITTED, seed)
                if directory is not None:
                    _say(pipe, ASSEMBLED, seed)

    def _remove_and_collect_loop(self, pipe: int) -> None:
        chooser = random.Random(self._next)
        with Store.open(self.store, chunk_size=CHUNK, workers=2) as store:
            while True:
                names = sorted({ref.name for ref in store.refs()})
                if len(names) > 2:
                    name = chooser.choice(names)
                    seed = int(name.rpartition("/")[2])
                    _say(pipe, REMOVING, seed)
                    with contextlib.suppress(RefNotFound):
                        store.remove(name)
                    _say(pipe, REMOVED, seed)
                collect(store)
                _say(pipe, COLLECTED, 0)

    # --- after it -------------------------------------------------------------------------------

    def _check(self) -> tuple[int, int, set[int]]:
        """(artifacts assembled, files hashed, artifacts left for the next cut)."""
        hashed = _final_names_tell_the_truth(Layout(self.store))
        with Store.open(self.store, chunk_size=CHUNK, workers=2) as store:
            report = verify.verify(store)
            assert report.clean, f"verify is not clean: {report}"
            checked = self._everything_committed_is_there(store)
            self._everything_recorded_is_there(store)
            for seed in sorted(self.history.assembled):
                self._is_whole(self.out / str(seed) / "f", seed)
            shutil.rmtree(self.out, ignore_errors=True)
            self._works_again(store)
            kept = self._thin_out(store)
            collect(store)
            assert not [*store.context.layout.leases.iterdir()], "a dead lease stayed"
            assert not [*store.context.layout.tmp.iterdir()], "dead staging stayed"
            report = verify.verify(store)
            assert report.clean, f"after gc: {report}"
            checked += self._everything_committed_is_there(store, kept)
        return checked, hashed, kept

    def _everything_committed_is_there(self, store: Store, only: set[int] | None = None) -> int:
        names = {ref.name for ref in store.refs()}
        history = self.history
        if only is None:
            back = [s for s in history.removed if name_of(s) in names]
            assert not back, f"came back after their removal: {back}"
            lost = [s for s in history.committed - history.removing if name_of(s) not in names]
            assert not lost, f"lost: {lost}"
        seeds = {int(name.rpartition("/")[2]) for name in names} if only is None else only
        for seed in sorted(seeds):  # those whose commit was cut off, but is there, too
            with scratch() as directory:
                store.assemble(name_of(seed), directory)
                self._is_whole(directory / "f", seed)
        return len(seeds)

    def _everything_recorded_is_there(self, store: Store) -> None:
        with store.writer() as writer:
            for seed in sorted(self.history.recorded):
                found = writer.find_action(key_of(seed))
                assert found.record is not None, f"action {seed} is lost: {found.reason}"
                data = writer.read(found.record.recipes[0])
                assert data == b"".join(bytes_of(seed)), f"action {seed} is not what it was"

    def _is_whole(self, path: Path, seed: int) -> None:
        data = path.read_bytes()
        assert data == b"".join(bytes_of(seed)), (
            f"{path.name} of artifact {seed} is not what it was"
        )

    def _works_again(self, store: Store) -> None:
        """An artifact whose commit was cut off, or a new one, can be committed now."""
        cut_off = sorted(self.history.begun - self.history.committed)
        seed = cut_off[-1] if cut_off else self._next
        with store.writer() as writer:
            recipes = [writer.put(piece) for piece in bytes_of(seed)]
            writer.commit(name_of(seed), {"f": recipes[0].concat(recipes)})
        with scratch() as directory:
            store.assemble(name_of(seed), directory)
            self._is_whole(directory / "f", seed)
        store.remove(name_of(seed))

    def _thin_out(self, store: Store) -> set[int]:
        """Remove all but a few artifacts, so that the image does not fill up."""
        seeds = sorted({int(ref.name.rpartition("/")[2]) for ref in store.refs()})
        self.random.shuffle(seeds)
        for seed in seeds[6:]:
            store.remove(name_of(seed))
        for record in list(store.actions.list()):
            store.actions.drop(record.key)
        return set(seeds[:6])


def _final_names_tell_the_truth(layout: Layout) -> int:
    """Hash every file that has a final name; return their number. Knows only the format."""
    hashed = 0
    for top in (layout.chunks, layout.manifests):
        for path in top.glob("*/*"):
            assert blake3(path.read_bytes()).hexdigest() == path.name, f"half a file: {path}"
            hashed += 1
    for path in layout.actions.glob("*/*"):
        body, seal = path.read_bytes()[:-72], path.read_bytes()[-72:]
        assert seal == f"blake3:{blake3(body).hexdigest()}\n".encode(), f"half a record: {path}"
        hashed += 1
    for path in layout.refs.glob("*/*"):
        if path.suffix == ".gone":
            continue  # only its number counts
        text = path.read_text("ascii")
        assert len(text) == 72 and text.endswith("\n"), f"half a ref: {path}"
        assert (layout.manifests / text[7:9] / text[7:71]).exists(), f"a ref to nothing: {path}"
        hashed += 1
    return hashed


# --- children that report by records, in which nothing can be torn ------------------------------


def _start(worker: Callable[[int], None], send: int, receive: int, log: Path) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.close(receive)
            worker(send)
        except BaseException:  # as it should, once the power is gone
            log.write_text(traceback.format_exc())
            _say(send, FAILED, 0)
        finally:
            while True:
                signal.pause()  # to be killed, as the machine would have it
    return pid


def _say(pipe: int, kind: bytes, seed: int) -> None:
    os.write(pipe, _RECORD.pack(kind, seed))  # shorter than PIPE_BUF: one piece


def _records(pipe: int, add: Callable[[bytes, int], None], *, until: float | None) -> None:
    """Take records until a moment, or (None) until every writer has gone."""
    while True:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return
        record = os.read(pipe, _RECORD.size)
        if not record:
            return
        kind, seed = _RECORD.unpack(record)
        add(kind, seed)


@contextlib.contextmanager
def image_directory() -> Iterator[Path]:
    """Where images may lie: on a disk, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="cas-power-") as name:
        yield Path(name)
