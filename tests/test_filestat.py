"""A mapped file that was put before is not read again, unless anything at all may have changed."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cas import Digest, Store, filestat, filesystems
from cas.errors import NoSpace, UsageError
from cas.filestat import DISKS, Identity, Known, Sources, decode, encode
from cas.ingest import Ingest
from cas.manifest import Recipe, ZeroPart
from cas.mappings import (
    FileRange,
    Mappings,
    address_of,
    find_range,
    is_unwritten,
    mappings_from,
)
from cas.strictjson import canonical_json
from cas.testing.steps import step_hook
from cas.testing.stores import contents, open_store

SIZE = 3 << 20
DATA = contents(1, SIZE)
LATER = 3600.0
#: `_CLEAN` needs what only Linux tells; a container may hide it.
on_disk = pytest.mark.skipif(
    not os.access("/proc/self/pagemap", os.R_OK), reason="/proc/self/pagemap cannot be read here"
)


class Mapped:
    """A private mapping of a file, as torch.load(mmap=True) makes it."""

    def __init__(self, path: Path, flags: int = mmap.MAP_PRIVATE) -> None:
        with open(path, "r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0, flags=flags)
        self.view = memoryview(self.map)

    def close(self) -> None:
        self.view.release()
        self.map.close()


def later() -> float:
    return time.time() + LATER


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with open_store(root / "store", chunk_size=1 << 20, clock=later) as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Path:
    if filesystems.type_of(tmp_path) not in DISKS:
        pytest.skip("temporary files are not on a disk's filesystem here")
    path = tmp_path / "weights.bin"
    path.write_bytes(DATA)
    let_the_files_clock_tick(tmp_path)
    return path


def let_the_files_clock_tick(directory: Path) -> None:
    """From now on, changes of files show in their times; the kernel's clock for them is coarse."""
    probe = directory / "probe-of-the-clock"
    probe.touch()
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == before:
        probe.touch()
    probe.unlink()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what was hashed."""
    seen: list[int] = []
    real = Ingest.put

    def put(self: Ingest, data: memoryview) -> Recipe:
        seen.append(len(data))
        return real(self, data)

    monkeypatch.setattr(Ingest, "put", put)
    return seen


def put(store: Store, path: Path, start: int = 0, end: int = SIZE) -> bytes:
    """Put a mapped file, and give back what the store then has."""
    mapped = Mapped(path)
    try:
        with store.writer() as writer:
            recipe = writer.put(mapped.view[start:end])
            writer.barrier()
            return writer.read(recipe)
    finally:
        mapped.close()


@on_disk
def test_what_was_put_before_is_not_read_again(
    store: Store, file: Path, reads: list[int], tmp_path: Path
) -> None:
    assert put(store, file) == DATA and reads == [SIZE]
    mapped = Mapped(file)
    with store.writer() as writer:
        recipe = writer.put(mapped.view)
        assert writer.counters.logical_bytes == SIZE and writer.counters.new_bytes == 0
        commit = writer.commit("again", {"f": recipe})
    assert reads == [SIZE] and commit.chunks == len(list(recipe.chunks()))
    (path,) = store.assemble("again", tmp_path / "out")
    assert path.read_bytes() == DATA
    mapped.close()


@on_disk
def test_parts_of_a_file_are_known_by_their_place(
    store: Store, file: Path, reads: list[int]
) -> None:
    half = 5000
    assert put(store, file, half) == DATA[half:]
    assert put(store, file, half) == DATA[half:] and reads == [SIZE - half]
    assert put(store, file) == DATA and reads == [SIZE - half, SIZE]
    assert put(store, file, half) == DATA[half:] and put(store, file) == DATA
    assert len(reads) == 2


@on_disk
def test_short_memory_and_memory_of_no_file_are_read(
    store: Store, file: Path, reads: list[int]
) -> None:
    for _ in range(2):
        put(store, file, 0, 1 << 20)
        with store.writer() as writer:
            writer.put(DATA)
    assert len(reads) == 4 and not store.context.layout.sources.exists()


@on_disk
def test_a_digest_is_remembered_beside_the_chunks(
    store: Store, file: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    real = Digest.of_stream

    def of_stream(pieces: Iterable[memoryview]) -> Digest:
        listed = list(pieces)
        hashed.append(sum(map(len, listed)))
        return real(listed)

    monkeypatch.setattr(Digest, "of_stream", staticmethod(of_stream))

    def digest(path: Path) -> Digest:
        mapped = Mapped(path)
        try:
            with store.writer() as writer:
                return writer.digest(mapped.view)
        finally:
            mapped.close()

    assert digest(file) == Digest.of(DATA) == digest(file) and hashed == [SIZE]
    assert put(store, file) == DATA == put(store, file) and reads == [SIZE]
    assert digest(file) == Digest.of(DATA) and hashed == [SIZE]
    change_a_byte(file)
    assert digest(file) == Digest.of(file.read_bytes()) != Digest.of(DATA)
    mapped = Mapped(file)
    mapped.view[9] ^= 1
    with store.writer() as writer:
        assert writer.digest(mapped.view) == Digest.of(mapped.view)
        assert writer.digest(b"short") == Digest.of(b"short")
    mapped.close()


def change_a_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), b"!", SIZE // 2)


def change_and_hide_it(path: Path) -> None:
    before = path.stat()
    change_a_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(DATA[: SIZE // 2] + b"!" + DATA[SIZE // 2 + 1 :])
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(other, path)


@on_disk
@pytest.mark.parametrize("change", [change_a_byte, change_and_hide_it, replace])
def test_a_changed_file_is_read(store: Store, file: Path, reads: list[int], change: object) -> None:
    put(store, file)
    change(file)  # type: ignore[operator]
    assert put(store, file) == file.read_bytes() != DATA
    assert len(reads) == 2


@on_disk
def test_memory_that_was_written_to_is_read_and_never_taken_for_the_file(
    store: Store, file: Path, reads: list[int]
) -> None:
    mapped = Mapped(file)
    mapped.view[SIZE - 1] ^= 1
    with store.writer() as writer:
        assert writer.read(writer.put(mapped.view)) == bytes(mapped.view) != DATA
    assert put(store, file) == DATA and len(reads) == 2
    with store.writer() as writer:
        assert writer.read(writer.put(mapped.view)) == bytes(mapped.view)
    assert len(reads) == 3
    mapped.close()


@on_disk
def test_memory_written_to_while_it_is_put_is_not_remembered(
    store: Store, file: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = Mapped(file)
    inner = Ingest.put

    def put_then_write(self: Ingest, data: memoryview) -> Recipe:
        recipe = inner(self, data)
        mapped.view[0] ^= 1
        return recipe

    monkeypatch.setattr(Ingest, "put", put_then_write)
    with store.writer() as writer:
        writer.put(mapped.view)
    assert not store.context.layout.sources.exists()
    mapped.close()


@on_disk
def test_a_mapping_of_a_file_whose_name_another_has_now_is_read(
    store: Store, file: Path, reads: list[int]
) -> None:
    put(store, file)
    mapped = Mapped(file)
    replace(file)
    with store.writer() as writer:
        assert writer.read(writer.put(mapped.view)) == DATA
    file.unlink()
    with store.writer() as writer:
        assert writer.read(writer.put(mapped.view)) == DATA
    assert len(reads) == 3
    mapped.close()


@on_disk
def test_a_writable_shared_mapping_is_read(store: Store, file: Path, reads: list[int]) -> None:
    for _ in range(2):
        mapped = Mapped(file, mmap.MAP_SHARED)
        with store.writer() as writer:
            writer.put(mapped.view)
        mapped.close()
    assert reads == [SIZE, SIZE]


@on_disk
def test_a_file_changed_a_moment_ago_is_read_again(
    root: Path, file: Path, reads: list[int]
) -> None:
    now = file.stat().st_mtime
    with open_store(root / "s", clock=lambda: now) as store:
        put(store, file)
        put(store, file)
    assert reads == [SIZE, SIZE]


@on_disk
def test_a_page_that_stays_dirty_while_it_is_read_does_not_hide_a_write(
    store: Store, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Ingest.put
    other = Mapped(file, mmap.MAP_SHARED)
    other.view[4096:4099] = b"one"  # the times of the file change now

    def put_and_write(self: Ingest, data: memoryview) -> Recipe:
        recipe = real(self, data)
        let_the_files_clock_tick(file.parent)
        other.view[4096:4099] = b"two"  # and would not now, were the page still dirty
        return recipe

    monkeypatch.setattr(Ingest, "put", put_and_write)
    assert put(store, file)[4096:4099] == b"one"
    assert put(store, file)[4096:4099] == b"two"
    other.close()


@on_disk
def test_a_file_must_have_settled_before_it_is_read(
    tmp_path: Path, file: Path, reads: list[int]
) -> None:
    now = time.time()
    with open_store(tmp_path / "store", chunk_size=1 << 20, clock=lambda: now) as store:
        real = Ingest.put

        def slow(self: Ingest, data: memoryview) -> Recipe:
            nonlocal now
            now += LATER
            return real(self, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ingest, "put", slow)
            put(store, file)
        put(store, file)
        put(store, file)
    assert len(reads) == 2


@on_disk
def test_any_error_while_saving_loses_what_was_learnt_and_nothing_else(
    store: Store, file: Path, reads: list[int]
) -> None:
    def broken(operation: str, path: Path | str) -> None:
        if "source-" in str(path):
            raise OSError(errno.EIO, "Input/output error")

    with step_hook(broken):
        assert put(store, file) == DATA
    assert put(store, file) == DATA and len(reads) == 2


@on_disk
def test_a_missing_chunk_is_written_again(store: Store, file: Path, reads: list[int]) -> None:
    put(store, file)
    next(store.path.glob("chunks/*/*")).unlink()
    assert put(store, file) == DATA
    assert len(reads) == 2 and put(store, file) == DATA and len(reads) == 2


@on_disk
def test_damage_and_loss_of_what_is_known_cost_a_read(
    store: Store, file: Path, reads: list[int]
) -> None:
    put(store, file)
    (known,) = store.context.layout.sources.iterdir()
    whole = known.read_bytes()
    for number, rotten in enumerate([b"", whole[:-1], whole[:50] + b"x" + whole[51:], b"{}"], 2):
        known.write_bytes(rotten)
        assert put(store, file) == DATA and len(reads) == number
    assert known.read_bytes() == whole
    known.unlink()
    assert put(store, file) == DATA and len(reads) == 6


@on_disk
def test_a_full_disk_loses_what_was_learnt_and_nothing_else(
    store: Store, file: Path, reads: list[int]
) -> None:
    def full(operation: str, path: Path | str) -> None:
        if "source-" in str(path):
            raise NoSpace(Path(path))

    with step_hook(full):
        assert put(store, file) == DATA
    assert put(store, file) == DATA and len(reads) == 2


@on_disk
def test_only_so_many_files_are_remembered(
    store: Store, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filestat, "MAX_FILES", 3)
    for number in range(5):
        (tmp_path / f"{number}").write_bytes(DATA)
        put(store, tmp_path / f"{number}")
    assert len(list(store.context.layout.sources.iterdir())) == 3


@on_disk
@pytest.mark.parametrize("linked", [False, True])
def test_a_mapped_chunk_is_no_source(tmp_path: Path, file: Path, linked: bool) -> None:
    if linked:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "store").symlink_to(tmp_path / "elsewhere")
    with open_store(tmp_path / "store", chunk_size=4 << 20, clock=later) as store:
        put(store, file)
        (chunk,) = store.path.glob("chunks/*/*")
        os.chmod(chunk, 0o644)
        assert put(store, chunk) == DATA
        assert len(list(store.context.layout.sources.iterdir())) == 1


# --- what the kernel tells ----------------------------------------------------------------------


@on_disk
def test_only_unwritten_pages_of_a_file_count(file: Path) -> None:
    mapped = Mapped(file)
    found = Mappings("/nowhere").find(mapped.view[4096:])
    assert found is not None and (found.offset, found.length) == (4096, SIZE - 4096)
    assert found.path == str(file) and found.inode == file.stat().st_ino
    assert mapped.view[5] == DATA[5] and is_unwritten(found)
    mapped.view[SIZE - 1] = 0
    assert not is_unwritten(found) and Mappings("/nowhere").find(mapped.view) is None
    assert Mappings("/nowhere").find(mapped.view[: SIZE // 2]) is not None
    assert Mappings("/nowhere").find(memoryview(bytearray(SIZE))) is None
    mapped.close()


def test_where_the_kernel_does_not_tell_nothing_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(b"x" * 8192)
    address = address_of(memoryview(data))
    assert address is not None
    found = FileRange(address, 4096, 0, 1, 2, "/f")
    assert not is_unwritten(found)  # a page of no file

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert not is_unwritten(found)


def test_addresses_are_those_of_the_bytes() -> None:
    data = bytearray(100)
    address = address_of(memoryview(data))
    assert address is not None and address_of(memoryview(data)[7:]) == address + 7
    assert address_of(b"read only") is not None


MAPS = b"""\
10000-20000 r--p 00000000 08:01 77                         /data/w
20000-30000 rw-p 00010000 08:01 77                         /data/w
40000-50000 rw-s 00000000 08:01 78                         /data/shared file
50000-60000 r--s 00000000 08:01 79                         /data/new\\012line
60000-70000 rw-p 00000000 00:00 0
70000-80000 r-xp 00000000 08:01 80                         /gone (deleted)
90000-98000 r--p 00002000 08:01 77                         /data/w
98000-a0000 r--p 00009000 08:01 77                         /data/w
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0    [vsyscall]
"""


def test_mappings_are_read_as_proc_prints_them() -> None:
    found = list(mappings_from(MAPS, 0))
    assert [(m.start, m.offset, m.path, m.may_be_written, m.shared) for m in found] == [
        (0x10000, 0, "/data/w", False, False),
        (0x20000, 0x10000, "/data/w", True, False),
        (0x40000, 0, "/data/shared file", True, True),
        (0x50000, 0, "/data/new\nline", False, True),
        (0x90000, 0x2000, "/data/w", False, False),
        (0x98000, 0x9000, "/data/w", False, False),
    ]
    assert found[0].device == os.makedev(8, 1) and found[0].inode == 77
    for address in [0, 0x10000, 0x1FFFF, 0x20000, 0x30000, 0x5FFFF, 0x60000, 0x9FFFF, 0xA0000]:
        assert list(mappings_from(MAPS, address)) == [m for m in found if m.end > address]
    assert list(mappings_from(b"", 5)) == [] and list(mappings_from(MAPS[:-1], 1 << 64)) == []


@pytest.mark.parametrize(
    ("start", "length", "offset"),
    [
        (0x10000, 0x20000, 0),
        (0x18000, 0x10000, 0x8000),
        (0x2FFFF, 1, 0x1FFFF),
        (0x50010, 0x10, 0x10),
        (0x0FFFF, 2, None),  # begins before it
        (0x2FFFF, 2, None),  # goes on behind it
        (0x40000, 1, None),  # shared, and written to through it
        (0x30000, 0x10, None),  # in a gap
        (0x5FFFF, 2, None),  # two files
        (0x60000, 5, None),  # no file
        (0x70000, 5, None),  # a file without a name
        (0x90000, 0x10000, None),  # adjacent in memory and not in the file
        (0x90000, 0x8000, 0x2000),
    ],
)
def test_a_range_is_one_piece_of_one_file_or_none(
    start: int, length: int, offset: int | None
) -> None:
    found = find_range(MAPS, start, length)
    assert (None if found is None else found.offset) == offset


# --- what is remembered -------------------------------------------------------------------------

IDENTITY = Identity(1, 2, 1000, 3, 4)


def test_ranges_read_back_as_they_were_written() -> None:
    ranges = {
        (0, 9): Known(Recipe((ZeroPart(9),)), Digest.of(b"nine")),
        (9, 3): Known(Recipe.literal(b"abc")),
        (12, 5): Known(digest=Digest.of(b"five")),
    }
    assert decode(encode(IDENTITY, ranges)) == (IDENTITY, ranges)


@pytest.mark.parametrize(
    "ranges",
    [
        [[0, 9, [["zero", 8]], None]],
        [[995, 9, [["zero", 9]], None]],
        [[-1, 9, [["zero", 9]], None]],
        [[0, 9, None, "00"]],
        [[0, 9, None, 7]],
        [[0, 9, 7, None]],
        [[0, 9]],
        [7],
        {},
        [[0, True, [["zero", 1]], None]],
    ],
)
def test_ranges_are_not_believed(ranges: object) -> None:
    keys = ("device", "inode", "size", "modified", "changed")
    body = canonical_json({**dict(zip(keys, (1, 2, 1000, 3, 4), strict=True)), "ranges": ranges})
    with pytest.raises(UsageError):
        filestat.parse(body)


def test_other_filesystems_than_disks_are_not_trusted(store: Store, file: Path) -> None:
    stat = file.stat()
    found = FileRange(0, 10, 0, stat.st_dev, stat.st_ino, str(file))
    layout, modes = store.context.layout, store.context.modes
    assert Sources(layout, modes, now=time.time_ns).locate(found) is not None
    elsewhere = Sources(layout, modes, now=time.time_ns, disks=frozenset(("tmpfs",)))
    assert elsewhere.locate(found) is None
    assert (
        Sources(layout, modes, now=time.time_ns).locate(
            FileRange(0, SIZE, 1, stat.st_dev, stat.st_ino, str(file))
        )
        is None
    )
