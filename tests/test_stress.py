"""Many processes on one store at once: everything that was committed is there at the end."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from cas import Digest, Store, Writer, actions, gc, verify
from cas.errors import Busy, ManifestDamaged, NotFound
from cas.refs import RefId
from cas.retention import Policy
from cas.testing import Child
from cas.testing.processes import children
from cas.testing.stores import CHUNK, assert_sound, contents, open_store


def blob(seed: int) -> bytes:
    """Some of its chunks are those of other seeds."""
    pieces = [contents(seed % 5, CHUNK), contents(1000 + seed % 3, 2 * CHUNK)]
    return b"".join([*pieces, contents(seed, CHUNK // 2 + seed % 100)])


Kept = dict[str, int]
#: A limit that is never kept, since everything was used within the hour.
TOO_LARGE = {"max_size": "1", "older_than": "1h"}
#: Seconds after the end in which a process may still come to what it has not done at all so far.
PATIENCE = 300


def going_on(until: float, counts: Counter[str], *wanted: str) -> bool:
    """Whether there is time, or a slow machine has not come to all that the process is for."""
    late = time.monotonic() - until
    return late < 0 or (late < PATIENCE and not all(counts[what] for what in wanted))


def writer(root: Path, number: int, until: float) -> tuple[Kept, Counter[str]]:
    """Commits, overwrites, abandons and removes; returns what must exist at the end."""
    dice = random.Random(number)
    kept: Kept = {}
    counts: Counter[str] = Counter()
    with open_store(root / "s", workers=1) as store:
        while going_on(until, counts, "committed", "removed"):
            seed = dice.randrange(40)
            with store.writer() as w:
                recipe = w.put(blob(seed))
                if dice.random() < 0.2:
                    counts["abandoned"] += 1
                    continue
                if dice.random() < 0.3:
                    w.barrier()
                done = w.commit(f"w{number}/{seed % 4}", {"f": recipe})
            kept[str(done.ref)] = seed
            counts["committed"] += 1
            counts["new bytes"] += done.new_bytes
            while len(kept) > 6:  # so that chunks die, and come to life again
                victim = dice.choice(list(kept))
                store.remove(victim)
                del kept[victim]
                counts["removed"] += 1
    return kept, counts


def same_name(root: Path, until: float) -> tuple[Kept, Counter[str]]:
    """Several processes commit the same name: each gets a generation of its own.

    The store is always too large for them, so each of their commits runs a gc, beside all others.
    """
    kept: Kept = {}
    with open_store(root / "s", workers=1, settings=TOO_LARGE) as store:
        while time.monotonic() < until:
            with store.writer() as w:
                done = w.commit("shared", {"f": w.put(blob(77))})
            assert str(done.ref) not in kept
            kept[str(done.ref)] = 77
            time.sleep(0.02)
    return kept, Counter({"committed": len(kept)})


def collector(root: Path, until: float) -> tuple[Kept, Counter[str]]:
    counts: Counter[str] = Counter()
    with open_store(root / "s") as store:
        while going_on(until, counts, "gcs"):
            try:
                if counts["gcs"] % 2:
                    report = gc.execute(store, gc.plan(store))
                else:
                    report = gc.collect(store, policy=Policy(older_than=3600, max_bytes=1))
            except Busy:
                counts["busy gcs"] += 1
                time.sleep(0.01)
                continue
            assert not report.problems and not report.dropped, report
            counts["gcs"] += 1
            counts["freed bytes"] += report.freed_bytes
    return {}, counts


def verifier(root: Path, until: float) -> tuple[Kept, Counter[str]]:
    counts: Counter[str] = Counter()
    with open_store(root / "s") as store:
        while going_on(until, counts, "verified chunks"):
            report = verify.verify(store)
            assert report.clean, report
            counts["verified chunks"] += report.checked_chunks
    return {}, counts


def assemble_one(store: Store, ref: RefId, target: Path) -> str:
    """Only a generation that was removed may be refused; it may be there anew by then.

    While its file is open, no other gets its inode.
    """
    path = store.context.layout.ref(ref.name, ref.generation)
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return "removed before"
    try:
        store.assemble(str(ref), target)
        return "assembled"
    except (NotFound, ManifestDamaged) as error:
        with contextlib.suppress(FileNotFoundError):
            assert not os.path.samestat(path.stat(), os.fstat(fd)), error
        return "removed while asked for"
    finally:
        os.close(fd)


def assembler(root: Path, until: float) -> tuple[Kept, Counter[str]]:
    counts: Counter[str] = Counter()
    with open_store(root / "s", workers=1) as store:
        while going_on(until, counts, "assembled"):
            refs = list(store.refs())
            for ref in random.sample(refs, min(3, len(refs))):
                counts[assemble_one(store, ref, root / f"out-{os.getpid()}")] += 1
    return {}, counts


def computer(root: Path, number: int, until: float) -> tuple[Kept, Counter[str]]:
    """Looks for actions, computes each alone, and now and then forgets or evicts one."""
    dice = random.Random(number)
    counts: Counter[str] = Counter()
    with open_store(root / "s", workers=1) as store:
        while going_on(until, counts, "computed", "hits"):
            seed = dice.randrange(6)
            key = Digest.of(b"action %d" % seed)
            with store.writer() as w:
                counts["computed" if _compute(store, w, key, seed) else "hits"] += 1
            if dice.random() < 0.2:
                entry = next(iter(store.actions.entries()), None)
                if entry is not None and dice.random() < 0.5:
                    with store.context.index.exclude():
                        actions.evict(store.context.layout, entry)
                else:
                    store.actions.drop(key)
    return {}, counts


def _compute(store: Store, w: Writer, key: Digest, seed: int) -> bool:
    found = w.find_action(key).record
    if found is None:
        with store.actions.flight(key):
            found = w.find_action(key).record
            if found is None:
                w.put_action(
                    key,
                    kind="test",
                    factors={},
                    result=seed,
                    recipes=[w.put(blob(seed))],
                    seconds=0,
                )
                return True
    assert found.result == seed and w.read(found.recipes[0]) == blob(seed)
    return False


def suicide(root: Path, until: float) -> tuple[Kept, Counter[str]]:
    """Writers that are killed at a random moment, one after the other."""
    dice = random.Random(4)
    counts: Counter[str] = Counter()
    while going_on(until, counts, "killed writers"):
        work = dice.choice([writer, computer])
        victim = Child(lambda child, work=work: work(root, 99, until + 60))
        time.sleep(dice.uniform(0.05, 0.3))
        victim.kill()
        counts["killed writers"] += 1
    return {}, counts


def stress(root: Path, seconds: float, writers: int) -> None:
    open_store(root / "s").close()
    until = time.monotonic() + seconds
    works = [lambda _, n=n: writer(root, n, until) for n in range(writers)]
    works += [lambda _: same_name(root, until)] * 2 + [lambda _: collector(root, until)] * 2
    works += [lambda _, n=n: computer(root, n, until) for n in (100, 101)]
    works += [lambda _, f=f: f(root, until) for f in (verifier, assembler, suicide)]
    kept: Kept = {}
    counts: Counter[str] = Counter()
    with children(*works) as started:
        for child in started:
            found, counted = child.result()
            assert not kept.keys() & found.keys(), "two processes were given one generation"
            kept |= found
            counts += counted
    with open_store(root / "s") as store:
        present = {str(ref) for ref in store.refs() if not ref.name.startswith("w99/")}
        assert present == kept.keys()
        for _ in range(2):
            for ref, seed in kept.items():
                (path,) = store.assemble(ref, root / "out")
                assert path.read_bytes() == blob(seed), ref
            gc.execute(store, gc.plan(store))
        assert_sound(store)
        assert list(store.context.layout.leases.iterdir()) == []
        assert list(store.context.layout.tmp.iterdir()) == []
        assert list(store.context.layout.flights.iterdir()) == []
    print(f"{len(kept)} artifacts intact after", dict(counts))
    wanted = ("committed", "removed", "gcs", "verified chunks", "assembled", "killed writers")
    for what in (*wanted, "computed", "hits"):
        assert counts[what], f"nothing was {what}"


def test_processes_that_write_collect_verify_and_die_lose_nothing(root: Path) -> None:
    stress(root, seconds=5, writers=3)


@pytest.mark.slow
def test_half_a_minute_of_many_processes_loses_nothing(root: Path) -> None:
    stress(root, seconds=30, writers=8)
