"""Kill every operation of the store at every step. Run by test_kill.py, and by hand:

    python tests/kill_matrix.py SCRATCH [--stride N] [OPERATION...]

A process of its own, small and without threads, because it forks a few times per step. It prints
one line of JSON per operation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cas import Digest, Store, gc, quarantine, repair, verify
from cas.journal import Event
from cas.layout import Layout
from cas.retention import Policy
from cas.stats import stats
from cas.testing.damage import flip_bit
from cas.testing.killing import KillMatrix

CHUNK = 64 << 10


def contents(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


#: What is committed before the operation, and must come back byte by byte after any kill.
KEPT = {"kept/one": contents(1, 3 * CHUNK + 5), "kept/two": contents(2, CHUNK) + b"tail"}
OLD = Digest.of(b"an old action")
GARBAGE = contents(3, 2 * CHUNK)
#: What an action gave before the operation; in part the same bytes as an artifact's.
ACTION = Digest.of(b"an action")
RESULT = contents(1, CHUNK) + contents(7, 99)
NEW = contents(1, CHUNK) + contents(4, 2 * CHUNK + 77) + b"\0" * CHUNK + contents(5, 10)


def open_store(root: Path, *, clock: Callable[[], float] = time.time) -> Store:
    return Store.open(root / "store", chunk_size=CHUNK, workers=2, clock=clock)


def commit(store: Store, name: str, data: bytes) -> None:
    with store.writer() as writer:
        recipe = writer.put(data)
        writer.commit(name, {"f": recipe, "g": writer.put(data[:100])}, provenance={"n": 1})


def record(store: Store, key: Digest, data: bytes) -> None:
    """Compute an action as a session does: look, be the only one, look again, record, count."""
    with store.writer() as writer:
        if writer.find_action(key).record is None:
            with store.actions.flight(key):
                writer.find_action(key)
                recipe = writer.put(data)
                writer.put_action(
                    key, kind="test", factors={"n": 1}, result=0, recipes=[recipe], seconds=1
                )
        store.actions.note([Event("miss", "test", key=key)])


def prepare(root: Path) -> None:
    with open_store(root) as store:
        for name, data in KEPT.items():
            commit(store, name, data)
        record(store, ACTION, RESULT)
        commit(store, "lost", GARBAGE)
        commit(store, "lost", GARBAGE + b"3")
        commit(store, "kept/one", GARBAGE + b"2")
        store.remove("kept/one@2")
    (root / "out").mkdir()
    (root / "out" / "f").write_bytes(b"old output")


def prepare_with_garbage(root: Path) -> None:
    """Six dead chunks, two dead manifests, and what a killed writer staged and leased."""
    prepare(root)
    with open_store(root) as store:
        commit(store, "lost/too", contents(8, 4 * CHUNK))
        store.remove("lost")
        store.remove("lost/too")
    layout = Layout(root / "store")
    dead = "0" * 32
    layout.lease(dead).write_bytes(b"c" + bytes(32) + b"torn")
    layout.staging(dead).mkdir()
    (layout.staging(dead) / "half").write_bytes(b"half a chunk")


def prepare_with_damage(root: Path) -> None:
    """Garbage of which two chunks have a flipped bit, and nothing verified yet."""
    prepare_with_garbage(root)
    with open_store(root) as store:
        with store.context.index.read() as txn:
            entries = dict(txn.items())
        manifests = [store.manifest(store.read_ref(ref)) for ref in store.refs()]
        live = {digest for manifest in manifests for digest in manifest.chunks()}
        live |= {digest for found in store.actions.list() for digest in found.chunks()}
        for digest in sorted(set(entries) - live)[:2]:
            flip_bit(store.context.layout.chunk(digest))


def ingest_and_commit(root: Path) -> None:
    with open_store(root) as store, store.writer() as writer:
        first = writer.put(NEW)
        writer.barrier()
        second = writer.put(contents(6, CHUNK + 1))
        writer.commit("new", {"a": first, "b": second, "c": writer.put(b"small")})


def record_an_action(root: Path) -> None:
    with open_store(root) as store:
        record(store, Digest.of(b"new"), NEW)
        record(store, ACTION, RESULT)


def record_anew(root: Path) -> None:
    """A damaged record is replaced, one with a missing chunk healed, another forgotten."""
    with open_store(root) as store:
        layout = store.context.layout
        for found in store.actions.list():
            if found.key == Digest.of(b"incomplete"):
                for digest in set(found.chunks()) - {Digest.of(contents(1, CHUNK))}:
                    layout.chunk(digest).unlink(missing_ok=True)
        record(store, Digest.of(b"damaged"), NEW)
        record(store, Digest.of(b"incomplete"), NEW)
        store.actions.drop(Digest.of(b"dropped"))


def prepare_records(root: Path) -> None:
    prepare(root)
    with open_store(root) as store:
        for name in (b"damaged", b"incomplete", b"dropped"):
            record(store, Digest.of(name), NEW)
        flip_bit(store.context.layout.action(Digest.of(b"damaged")))


def create(root: Path) -> None:
    with Store.open(root / "fresh", chunk_size=CHUNK) as store:
        assert store.chunk_size == CHUNK


def assemble(root: Path) -> None:
    with open_store(root) as store:
        store.assemble("kept/one", root / "out")


def prepare_generations(root: Path) -> None:
    """Besides a name to remove, one whose newest generations go; it lost its fourth before."""
    prepare(root)
    with open_store(root) as store:
        for seed in (11, 12, 13, 14):
            commit(store, "newest", contents(seed, CHUNK))
        store.remove("newest@4")
        commit(store, "newest", contents(15, CHUNK))


def remove(root: Path) -> None:
    with open_store(root) as store:
        found = {str(ref) for ref in store.refs()}
        for target in ("newest@5", "newest@3"):
            if target in found:
                store.remove(target)
        if any(ref.startswith("lost@") for ref in found):
            store.remove("lost")


def collect(root: Path) -> None:
    with open_store(root) as store:
        gc.execute(store, gc.plan(store))


def prepare_with_old_ones(root: Path) -> None:
    """Three old generations of a name, and an old record, all counted; then one more artifact."""
    prepare(root)
    with open_store(root) as store:
        for seed in (11, 12, 13):
            commit(store, "old", contents(seed, CHUNK))
        with store.writer() as writer:
            recipe = writer.put(contents(14, CHUNK))
            writer.put_action(OLD, kind="test", factors={}, result={}, recipes=[recipe], seconds=1)
        layout = store.context.layout
        for path in (*layout.ref_dir("old").iterdir(), layout.action(OLD)):
            os.utime(path, (1e9, 1e9))
        stats(store)
        commit(store, "late", contents(15, CHUNK))


def collect_by_policy(root: Path) -> None:
    with open_store(root) as store:
        gc.collect(store, policy=Policy(keep_last=1, older_than=86400))


def count(root: Path) -> None:
    with open_store(root) as store:
        stats(store)


def check_all(root: Path) -> None:
    with open_store(root) as store:
        verify.verify(store)


def prepare_with_losses(root: Path) -> None:
    """Of what is kept, one chunk has a flipped bit, another and a manifest are gone; copies of all
    are outside."""
    prepare(root)
    layout = Layout(root / "store")
    data = KEPT["kept/one"]
    flip_bit(layout.chunk(Digest.of(data[:CHUNK])))
    layout.chunk(Digest.of(data[CHUNK : 2 * CHUNK])).unlink()
    (root / "copy").write_bytes(data)
    with open_store(root) as store:
        manifest = layout.manifest(store.resolve("kept/two").manifest)
    manifest.rename(root / "manifest")


def mend(root: Path) -> None:
    with open_store(root) as store:
        repair.repair(store, verify.verify(store), [root / "copy", root / "manifest"])
        quarantine.execute(store, quarantine.plan(store))


def rebuild(root: Path) -> None:
    index = root / "store" / "index" / "data.mdb"
    with contextlib.suppress(FileNotFoundError):
        index.write_bytes(b"garbage" * 1000)
    with open_store(root) as store, store.context.index.read() as txn:
        txn.totals()


def rebuild_on_request(root: Path) -> None:
    with open_store(root) as store:
        store.context.index.rebuild()


def configure(root: Path) -> None:
    with open_store(root) as store:
        store.set_config("grace", "1h")


# --- what must hold after any kill --------------------------------------------------------------


def check_store(root: Path) -> None:
    """What was committed is there, nothing needs a hand, and gc leaves no trace of the dead."""
    with open_store(root) as store:
        report = verify.verify(store)
        assert not report.missing and not report.affected_refs and not report.problems, report
        for name, data in KEPT.items():
            store.assemble(name, root / "again")
            assert (root / "again" / "f").read_bytes() == data, name
            assert (root / "again" / "g").read_bytes() == data[:100], name
        _check_record(store, ACTION, RESULT)
        gc.execute(store, gc.plan(store))
        _check_record(store, ACTION, RESULT)
        layout = store.context.layout
        left = [*layout.tmp.iterdir(), *layout.leases.iterdir(), *layout.flights.iterdir()]
        assert not left, f"left behind: {left}"
        report = verify.verify(store)
        assert report.clean and report.complete, report
        _check_totals(store)


def _check_totals(store: Store) -> None:
    files = [path for path in store.context.layout.chunks.glob("*/*")]
    with store.context.index.read() as txn:
        totals = txn.totals()
        entries = {digest: entry.size for digest, entry in txn.items()}
    sizes = {path.name: path.stat().st_size for path in files}
    assert {digest.hex(): size for digest, size in entries.items()} == sizes
    assert totals == (len(sizes), sum(sizes.values())), totals


def _check_record(store: Store, key: Digest, data: bytes) -> None:
    with store.writer() as writer:
        found = writer.find_action(key).record
        assert found is not None, "a record is lost"
        assert writer.read(found.recipes[0]) == data


def check_record(root: Path) -> None:
    keys = [Digest.of(name) for name in (b"new", b"damaged", b"incomplete")]
    with open_store(root) as store:
        for key in keys:
            assert store.actions.find(key).reason != "damaged" or key == keys[1]
            if store.actions.get(key):  # then all of it is there
                _check_record(store, key, NEW)
        verify.verify(store)  # sets aside what was damaged before
    check_store(root)
    record_an_action(root)
    record_anew(root)
    with open_store(root) as store:
        for key in keys:
            _check_record(store, key, NEW)
    check_store(root)


def check_ingest(root: Path) -> None:
    with open_store(root) as store:
        new = [ref for ref in store.refs() if ref.name == "new"]
        for ref in new:  # the kill came after the commit point: then all of it is there
            store.assemble(str(ref), root / "early")
            assert (root / "early" / "a").read_bytes() == NEW
    check_store(root)
    ingest_and_commit(root)
    with open_store(root) as store:
        store.assemble("new", root / "late")
        assert (root / "late" / "a").read_bytes() == NEW
        assert (root / "late" / "b").read_bytes() == contents(6, CHUNK + 1)
        assert (root / "late" / "c").read_bytes() == b"small"
    check_store(root)


def check_assemble(root: Path) -> None:
    output = (root / "out" / "f").read_bytes()
    assert output in (b"old output", KEPT["kept/one"]), "a half written output has the final name"
    check_store(root)
    assemble(root)
    assert (root / "out" / "f").read_bytes() == KEPT["kept/one"]


def check_remove(root: Path) -> None:
    check_store(root)
    remove(root)
    with open_store(root) as store:
        found = [str(ref) for ref in store.refs() if ref.name in ("lost", "newest")]
        assert found == ["newest@1", "newest@2"], found
        commit(store, "newest", contents(16, CHUNK))
        assert store.resolve("newest").generation == 6, "a number means two things"
    check_store(root)


def check_then_again(operation: Callable[[Path], None]) -> Callable[[Path], None]:
    def check(root: Path) -> None:
        check_store(root)
        operation(root)
        check_store(root)

    return check


def check_gc(root: Path) -> None:
    check_store(root)
    collect(root)
    with open_store(root) as store:
        count, _ = gc.chunkfiles.total_size(store.context.layout)
        manifests = [store.manifest(store.read_ref(ref)) for ref in store.refs()]
        live = {digest for manifest in manifests for digest in manifest.chunks()}
        live |= {digest for found in store.actions.list() for digest in found.chunks()}
        assert count == len(live), "garbage is left after a second gc"


def check_policy(root: Path) -> None:
    check_counts(root)
    check_store(root)
    collect_by_policy(root)
    with open_store(root) as store:
        assert [str(ref) for ref in store.refs() if ref.name == "old"] == ["old@3"]
        assert not store.context.layout.action(OLD).exists()
        store.assemble("old", root / "old")
        assert (root / "old" / "f").read_bytes() == contents(13, CHUNK)
    check_gc(root)
    check_counts(root)


def check_counts(root: Path) -> None:
    """What the index counts, and what the files say."""
    with open_store(root) as store:
        store.context.index.reconcile()
        found = stats(store)
        assert found.garbage_bytes == gc.plan(store).dead_bytes
    with Store.open(root / "store", read_only=True) as store:
        assert stats(store) == found


def check_repair(root: Path) -> None:
    mend(root)
    assert not list(Layout(root / "store").quarantine.iterdir())
    check_store(root)


@dataclass(frozen=True)
class Operation:
    prepare: Callable[[Path], None]
    operate: Callable[[Path], None]
    check: Callable[[Path], None]
    counts: Callable[[str, str], bool] = lambda operation, path: True


def _one_fan_out_of_each(operation: str, path: str) -> bool:
    """Of the 512 equal directories of a new store, the first and the last of both kinds."""
    name = path.rsplit("/", 1)[-1]
    return operation != "mkdir" or len(name) != 2 or name in ("00", "ff")


OPERATIONS = {
    "create": Operation(prepare, create, check_then_again(create), _one_fan_out_of_each),
    "ingest": Operation(prepare, ingest_and_commit, check_ingest),
    "assemble": Operation(prepare, assemble, check_assemble),
    "record": Operation(prepare, record_an_action, check_record),
    "record-anew": Operation(prepare_records, record_anew, check_record),
    "remove": Operation(prepare_generations, remove, check_remove),
    "gc": Operation(prepare_with_garbage, collect, check_gc),
    "gc-by-policy": Operation(prepare_with_old_ones, collect_by_policy, check_policy),
    "stats": Operation(prepare_with_old_ones, count, check_then_again(check_counts)),
    "verify": Operation(prepare_with_damage, check_all, check_then_again(check_all)),
    "repair": Operation(prepare_with_losses, mend, check_repair),
    "rebuild": Operation(prepare, rebuild, check_then_again(rebuild)),
    "rebuild-index": Operation(prepare, rebuild_on_request, check_then_again(rebuild_on_request)),
    "configure": Operation(prepare, configure, check_then_again(configure)),
}


def main() -> None:
    logging.disable(logging.WARNING)  # rebuilding the index is what is being tested
    parser = argparse.ArgumentParser()
    parser.add_argument("scratch", type=Path)
    parser.add_argument("operations", nargs="*", default=list(OPERATIONS))
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--first", type=int, default=1)
    arguments = parser.parse_args()
    for name in arguments.operations:
        operation = OPERATIONS[name]
        scratch = arguments.scratch / name
        scratch.mkdir(parents=True)
        began = time.monotonic()
        matrix = KillMatrix(
            name,
            prepare=operation.prepare,
            operate=operation.operate,
            check=operation.check,
            scratch=scratch,
            counts=operation.counts,
        )
        outcome = matrix.run(first=arguments.first, stride=arguments.stride)
        found = {
            "operation": name,
            "kill_points": outcome.kill_points,
            "torn_points": outcome.torn_points,
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
