"""One flipped bit anywhere in a store: noticed or harmless, never a crash, never a wrong output.

The bit rots: the file's times stay as they were, and so does the stamp that the index was closed
with. Batches run in children, since a damaged index could take the whole process with it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cas import Store, verify
from cas.digest import Digest
from cas.errors import CasError
from cas.journal import Event
from cas.layout import Layout
from cas.stamps import state
from cas.stats import stats
from cas.strictjson import Json
from cas.testing.damage import flip_bit
from cas.testing.processes import forked
from cas.testing.stores import CHUNK, collect, commit, contents, open_store, scratch

DATA = {
    "big": contents(1, 2 * CHUNK + 100) + bytes(CHUNK) + b"end",
    "small": contents(2, 700),
    "small/twin": contents(2, 700) + b"and more",
}
#: Key of an action -> what it gave.
RESULTS = {
    Digest.of(b"shares a chunk"): DATA["big"][:CHUNK] + contents(11, 500),
    Digest.of(b"small"): contents(12, 900),
}
BATCH = 50


def record(store: Store, key: Digest, data: bytes) -> None:
    with store.writer() as writer:
        recipe = writer.put(data)
        facts: dict[str, Json] = {"variables": {"CC": "gcc", "CFLAGS": None}}
        writer.put_action(
            key, kind="test", factors=facts, result=["blob", 0], recipes=[recipe], seconds=1.5
        )
    store.actions.note(
        [Event("miss", "test", "forward", "absent", key=key, microseconds=1_500_000)]
    )


def make(root: Path) -> None:
    with open_store(root / "store") as store:
        for name, data in DATA.items():
            commit(store, name, data)
        commit(store, "removed", contents(3, 3000))
        store.remove("removed")
        with store.writer() as writer:  # garbage, for an index of more than one page
            for number in range(300):
                writer.put(contents(5000 + number, 30))
            writer.barrier()
        for key, data in RESULTS.items():
            record(store, key, data)
        store.set_config("umask", "0022")
    layout = Layout(root / "store")
    dead = "d" * 32  # left by a writer that was killed
    layout.lease(dead).write_bytes(b"c" + bytes(32) + b"m" + bytes(32))
    layout.staging(dead).mkdir()
    (layout.staging(dead) / "half").write_bytes(b"half a chunk")


class Rotting:
    """A copy of a store, and the store as it was, to go back to between two flips."""

    def __init__(self, root: Path) -> None:
        self.store = root / "store"
        self.out = root / "out"
        self.files = {
            path.relative_to(self.store): (path.read_bytes(), path.stat().st_mode)
            for path in sorted(self.store.rglob("*"))
            if path.is_file() and "locks" not in path.parts
        }

    def matters(self, file: Path) -> bool:
        """Whether every bit of the file is needed, or at least checked by verify."""
        named = {
            data[7:71].decode() for path, (data, _) in self.files.items() if "refs" in path.parts
        }
        known = {key.hex() for key in RESULTS} | named
        return file.parts[0] in ("chunks", "refs") or file.name in known

    def restore(self) -> None:
        """Make every file what it was; only the few that differ are written."""
        for path in self.store.rglob("*"):
            known = path.relative_to(self.store) in self.files or "locks" in path.parts
            if path.is_file() and not known:
                path.unlink()
        for relative, (data, mode) in self.files.items():
            path = self.store / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_bytes() != data:
                path.unlink(missing_ok=True)
                path.write_bytes(data)
                path.chmod(mode)
        shutil.rmtree(self.out, ignore_errors=True)

    def stamp(self) -> None:
        """Let the index look as if it had not been written to since it was closed."""
        index = self.store / "index"
        whole, _ = self.files[Path("index/data.mdb")]
        checksum = Digest.of(whole).hex()
        (index / "stamp").write_text(json.dumps([*state(index / "data.mdb"), checksum]))


@dataclass(frozen=True)
class Flip:
    file: Path
    offset: int
    bit: int


def choose(files: dict[Path, tuple[bytes, int]], count: int, dice: random.Random) -> list[Flip]:
    """Places all over the store: each kind of file as often as every other."""
    kinds: dict[str, list[Path]] = {}
    for path, (data, _) in files.items():
        if data and path.name not in ("stamp", "lock.mdb"):
            kinds.setdefault(path.parts[0], []).append(path)
    assert {"chunks", "manifests", "refs", "actions", "leases", "cas.json", "config.toml"} < set(
        kinds
    )
    flips = []
    for number in range(count):
        kind = sorted(kinds)[number % len(kinds)]
        path = dice.choice(kinds[kind])
        flips.append(Flip(path, dice.randrange(len(files[path][0])), dice.randrange(8)))
    return flips


# --- one flip -----------------------------------------------------------------------------------


class Noticed(CasError):
    """A finding that is no error by itself."""


def replay(store: Store, key: Digest) -> None:
    with store.writer() as writer:
        found = writer.find_action(key)
        if found.record is None:
            raise Noticed(str(found.reason))
        assert found.record.result == ["blob", 0], "a wrong result"
        assert writer.read(found.record.recipes[0]) == RESULTS[key], "a wrong output"


def look(store: Store) -> None:
    report = verify.verify(store)
    if not report.clean:
        raise Noticed(str(report))


def use(rotting: Rotting) -> set[str]:
    """Everything that one does with a store; the names of what was noticed."""
    noticed: set[str] = set()

    def attempt(name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except CasError as error:
            assert str(error)
            noticed.add(name)

    def assemble(store: Store, name: str) -> None:
        shutil.rmtree(rotting.out, ignore_errors=True)
        try:
            (path,) = store.assemble(name, rotting.out)
        except CasError:
            assert not [*rotting.out.glob("*")], "an output file in spite of the error"
            raise
        assert path.read_bytes() == DATA[name], "a wrong output file"

    def work() -> None:
        with open_store(rotting.store) as store:
            for name in DATA:
                attempt("assemble", lambda name=name: assemble(store, name))
            for key in RESULTS:
                attempt("replay", lambda key=key: replay(store, key))
            attempt("tally", lambda: [store.actions.tally(), store.actions.events()])
            attempt("stats", lambda: stats(store))
            attempt("verify", lambda: look(store))
            attempt("gc", lambda: collect(store))
            attempt("commit", lambda: commit(store, "new", contents(9, 500)))
            for name in DATA:
                attempt("assemble", lambda name=name: assemble(store, name))
            attempt("export again", lambda: repair(store))

    attempt("open", work)
    return noticed


def repair(store: Store) -> None:
    """The next export puts back what was damaged."""
    for name, data in DATA.items():
        commit(store, f"again/{name}", data)
        with scratch() as directory:
            (path,) = store.assemble(f"again/{name}", directory)
            assert path.read_bytes() == data, "wrong after the repair"
    for key, data in RESULTS.items():
        record(store, key, data)
        with store.writer() as writer:
            found = writer.find_action(key).record
            assert found is not None and writer.read(found.recipes[0]) == data


def run_batch(rotting: Rotting, flips: list[Flip]) -> dict[str, int]:
    """How many flips of each kind of file were noticed, and where; harmless ones as well."""
    seen: Counter[str] = Counter()
    for flip in flips:
        rotting.restore()
        flip_bit(rotting.store / flip.file, flip.offset, flip.bit)
        rotting.stamp()
        (rotting.store.parent / "now").write_text(repr(flip))
        try:
            noticed = use(rotting)
        except Exception as error:
            raise AssertionError(f"{flip}: {type(error).__name__}: {error}") from error
        seen[f"{flip.file.parts[0]}: {'noticed' if noticed else 'harmless'}"] += 1
        assert noticed or not rotting.matters(flip.file), f"{flip} went unnoticed"
    return dict(seen)


@pytest.mark.parametrize("count", [70, pytest.param(300, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_noticed_or_harmless(count: int, seed: int) -> None:
    with scratch() as root:
        forked(lambda: make(root))
        rotting = Rotting(root)
        flips = choose(rotting.files, count, random.Random(seed))
        seen: Counter[str] = Counter()
        for first in range(0, count, BATCH):
            try:
                seen.update(forked(lambda first=first: run_batch(rotting, flips[first:][:BATCH])))
            except AssertionError as error:
                where = (root / "now").read_text()
                raise AssertionError(f"{where}: {error}") from None
        print(dict(sorted(seen.items())))
        assert seen.total() == count
