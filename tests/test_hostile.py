"""Files in a store that somebody made to do harm: a clear error, in little time and memory.

What is in a manifest is checked case by case in test_manifest.py, and mutated in test_fuzz.py; here
are the sizes that those do not reach, and names.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cas import Digest, gc, verify
from cas.errors import CasError, Refused
from cas.layout import Layout
from cas.stats import stats
from cas.strictjson import MAX_DOCUMENT_BYTES
from cas.testing import forked
from cas.testing.damage import writable
from cas.testing.stores import assert_sound, commit, contents, open_store

MANY = 100 << 20
DATA = contents(1, 100_000)


@pytest.fixture
def layout(root: Path) -> Layout:
    """A closed store with one good artifact."""
    with open_store(root / "s") as store:
        commit(store, "good", DATA)
    return Layout(root / "s")


def overwrite(path: Path, data: bytes) -> None:
    if path.exists():
        writable(path)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def add_manifest(layout: Layout, data: bytes, *, name: Digest | None = None) -> None:
    digest = Digest.of(data) if name is None else name
    overwrite(layout.manifest(digest), data)
    overwrite(layout.ref("bad", 1), f"{digest}\n".encode())


def within(seconds: float, nbytes: int, work: Callable[[], None]) -> None:
    """Run ``work`` in a child that may take so much more memory than it has, and time to compute.

    Not to wait: of that, a busy machine gives as much as it likes.
    """

    def measure() -> tuple[float, int]:
        before, began = _peak(), time.process_time()
        work()
        return time.process_time() - began, _peak() - before

    took, grown = forked(measure)
    assert took < seconds and grown < nbytes, (took, grown)


def _peak() -> int:
    # The peak of a forked child begins at what its parent had resident then.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def json_of(unit: bytes, size: int) -> bytes:
    """A document in the form of a manifest with ``unit`` over and over for its files."""
    before, after = b'{"files":[', b'],"format":1,"provenance":{},"tensors":[]}'
    count = (size - len(before) - len(after)) // len(unit)
    return before + (unit * count)[:-1] + after


# --- size ---------------------------------------------------------------------------------------


def use_with_a_bad_artifact(layout: Layout) -> None:
    """Everything names the bad one, and the good one is as it was."""
    with open_store(layout.root) as store:
        with pytest.raises(CasError) as caught:
            store.assemble("bad", layout.root.parent / "out")
        assert caught.value.exit_code == 4 and len(str(caught.value)) < 1000
        assert len(stats(store).problems) == 1
        assert gc.plan(store).chunks == ()
        report = verify.verify(store)
        assert report.affected_refs == ("bad@1",) and len(report.problems) == 1
        (path,) = store.assemble("good", layout.root.parent / "out")
        assert path.read_bytes() == DATA


@pytest.mark.parametrize(
    "unit, size",
    [(b"[],", MANY), (b"[],", 8 << 20), (b'"ab",', MAX_DOCUMENT_BYTES)],
    ids=["100 MiB", "lists", "texts"],
)
def test_a_huge_manifest_costs_little_time_and_memory(
    layout: Layout, unit: bytes, size: int
) -> None:
    add_manifest(layout, json_of(unit, size))
    within(60, 400 << 20, lambda: use_with_a_bad_artifact(layout))


def test_a_manifest_under_another_name_is_not_used(layout: Layout) -> None:
    with open_store(layout.root) as store:
        good = layout.manifest(store.resolve("good").manifest).read_bytes()
    add_manifest(layout, good, name=Digest.of(b"something else"))
    use_with_a_bad_artifact(layout)


HEADERS: dict[str, Callable[[Layout], Path]] = {
    "header": lambda layout: layout.header,
    "config": lambda layout: layout.config,
}


@pytest.mark.parametrize("which", HEADERS)
@pytest.mark.parametrize(
    "unit", [b"[", b'a="b"\n', b'{"format":1,'], ids=["nested", "lines", "keys"]
)
def test_a_huge_header_or_configuration_is_refused_at_once(
    layout: Layout, which: str, unit: bytes
) -> None:
    overwrite(HEADERS[which](layout), unit * (MANY // len(unit)))

    def use() -> None:
        with pytest.raises(CasError) as caught:
            open_store(layout.root)
        assert str(layout.root) in str(caught.value) and len(str(caught.value)) < 1000

    within(30, 64 << 20, use)


def test_a_sparse_header_of_a_terabyte_is_not_read(layout: Layout) -> None:
    writable(layout.header)
    try:
        os.truncate(layout.header, 1 << 40)
    except OSError as error:
        pytest.skip(f"no such large files here: {error}")

    def use() -> None:
        with pytest.raises(CasError):
            open_store(layout.root)

    within(30, 64 << 20, use)


def test_a_huge_ref_is_read_as_far_as_a_ref_goes(layout: Layout) -> None:
    overwrite(layout.ref("bad", 1), b"blake3:" + b"0" * MANY)
    within(30, 64 << 20, lambda: use_with_a_bad_artifact(layout))


def test_a_huge_stamp_is_none(layout: Layout) -> None:
    overwrite(layout.index / "stamp", b"[" * MANY)

    def use() -> None:
        with open_store(layout.root) as store:
            assert_sound(store)

    within(30, 64 << 20, use)


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["...", ".hidden", "%2e%2e", "%2F", "a%2F..%2Fb", "-rf", " "])
def test_a_directory_among_the_refs_whose_name_is_none_is_no_artifact(
    layout: Layout, name: str
) -> None:
    (layout.refs / name).mkdir()
    overwrite(layout.refs / name / "00000001", f"{Digest.of(b'')}\n".encode())
    with open_store(layout.root) as store:
        assert [str(ref) for ref in store.refs()] == ["good@1"]
        (path,) = store.assemble("good", layout.root.parent / "out")
        assert path.read_bytes() == DATA


def test_a_generation_that_no_number_follows_is_refused_not_overflowed(layout: Layout) -> None:
    last = 10**18 - 1
    overwrite(layout.ref("good", last), layout.ref("good", 1).read_bytes())
    with open_store(layout.root) as store:
        assert store.resolve("good").generation == last
        with pytest.raises(Refused, match="no generation left"):
            commit(store, "good", b"more")
        store.remove(f"good@{last}")
        assert commit(store, "good", b"more").ref.generation == 2


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../../etc/passwd", "/dev/zero"])
def test_a_link_in_the_place_of_a_chunk_gives_nothing_of_what_it_points_to(
    layout: Layout, root: Path, target: str
) -> None:
    victim = next(layout.chunks.glob("*/*"))
    victim.unlink()
    victim.symlink_to(target)

    def use() -> None:
        with open_store(layout.root) as store:
            with pytest.raises(CasError) as caught:
                store.assemble("good", root / "out")
            assert caught.value.exit_code == 4
            assert not list((root / "out").iterdir())
            assert verify.verify(store).affected_refs == ("good@1",)

    within(30, 64 << 20, use)
    assert Path("/etc/passwd").exists()
