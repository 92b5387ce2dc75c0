"""Small stores for tests, on a memory filesystem where there is one."""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cas import Commit, Store, gc, verify
from cas.testing.killing import scratch_in_memory

#: The smallest that a store may have, so that tests need little data for many chunks.
CHUNK = 64 << 10


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """An empty directory, where fsync costs nothing if possible; removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="cas-test-", dir=scratch_in_memory()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def open_store(path: Path, **options: Any) -> Store:
    """The store at ``path``, with small chunks and two workers unless ``options`` differ."""
    return Store.open(path, **{"chunk_size": CHUNK, "workers": 2, **options})


def contents(seed: int, size: int) -> bytes:
    """``size`` bytes that no other seed gives."""
    return random.Random(seed).randbytes(size)


def commit(store: Store, name: str, data: bytes, file: str = "f") -> Commit:
    """Record ``data`` as the only file of ``name``."""
    with store.writer() as writer:
        return writer.commit(name, {file: writer.put(data)})


def chunk_files(store: Store) -> list[Path]:
    return sorted(store.context.layout.chunks.glob("*/*"))


def collect(store: Store, grace: float = 0) -> gc.Report:
    return gc.execute(store, gc.plan(store, grace=grace))


def assert_sound(store: Store) -> None:
    """Verify finds nothing wrong, and the index says what the files say."""
    report = verify.verify(store)
    assert report.clean and report.complete, report
    sizes = {path.name: path.stat().st_size for path in chunk_files(store)}
    with store.context.index.read() as txn:
        entries = {digest.hex(): entry.size for digest, entry in txn.items()}
        totals = txn.totals()
    assert entries == sizes
    assert totals == (len(sizes), sum(sizes.values()))


#: What `litter` leaves in a store, and what it leaves of only chunks that nothing uses.
KEPT, OLD = contents(2, 2 * CHUNK), contents(1, 3 * CHUNK)


def litter(store: Store) -> None:
    """One artifact, ``kept``, and the three chunks and one manifest of a removed one."""
    commit(store, "kept", KEPT)
    commit(store, "old", OLD)
    store.remove("old")


def assert_kept(store: Store, root: Path, **expected: bytes) -> None:
    """The artifact of `litter`, and those of ``expected``, are as they were; the store is sound."""
    for name, data in {"kept": KEPT, **expected}.items():
        (path,) = store.assemble(name, root / "out")
        assert path.read_bytes() == data, name
    assert_sound(store)
