"""Mutated input for every parser of what lies in a store: refused or accepted, never a surprise.

Mutations start from a corpus of small files, ``<target>/<anything>``. An input that brings out a
message not seen before joins the pool that later ones are made from, so that the fuzzer works its
way past the first check of each parser.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cas import filestat, header, refs
from cas.config import Config
from cas.digest import Digest
from cas.errors import CasError, UsageError
from cas.journal import parse_event, parse_tally
from cas.layout import Layout, check_file_name, parse_ref, unescape_ref_name
from cas.leases import Leased
from cas.manifest import Manifest
from cas.records import ActionRecord
from cas.refs import RefId

#: An input is at most so large, and may take so long of the processor: a thousand times the usual.
MAX_INPUT = 64 << 10
SECONDS_PER_INPUT = 2.0
#: What parsing such inputs may add to the process's memory, all together.
MAX_GROWTH = 128 << 20
_POOL = 400

Parse = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that a parser did not take as it must."""

    target: str
    data: bytes
    problem: str


@dataclass(slots=True)
class Counts:
    """What one target's parser did."""

    inputs: int = 0
    accepted: int = 0
    messages: int = 0
    slowest: float = 0.0


@dataclass(slots=True)
class Outcome:
    counts: dict[str, Counts]
    findings: list[Finding] = field(default_factory=list)
    grown: int = 0

    def count_findings(self, target: str, problem: str) -> int:
        return sum((f.target, f.problem) == (target, problem) for f in self.findings)


# --- the parsers --------------------------------------------------------------------------------


def parsers(directory: Path) -> dict[str, Parse]:
    """Each target's parser. Those that read files get them in ``directory``."""
    layout = Layout(directory)
    generation = layout.ref("n", 1)
    generation.parent.mkdir(parents=True)

    def from_file(path: Path, parse: Callable[[], object]) -> Parse:
        def run(data: bytes) -> object:
            path.write_bytes(data)
            return parse()

        return run

    return {
        "manifest": parse_manifest,
        "record": parse_record,
        "event": parse_event,
        "source": filestat.parse,
        "counters": parse_tally,
        "ref": from_file(generation, lambda: refs.read(layout, RefId("n", 1))),
        "header": from_file(layout.header, lambda: header.read(layout)),
        "config": from_file(layout.config, lambda: Config.load(layout)),
        "lease": parse_lease,
        "name": parse_name,
    }


def parse_manifest(data: bytes) -> Manifest:
    """Also: what was accepted can be written again, and says the same then."""
    found = Manifest.parse(data)
    assert Manifest.parse(found.encode()) == found
    assert found.size >= 0 and all(size > 0 for size in found.chunks().values())
    for entry in found.files:
        assert Path(entry.name).name == entry.name
        assert sum(part.length for part in entry.recipe.parts) == entry.size
    return found


def parse_record(data: bytes) -> ActionRecord:
    """Under a seal that fits, or nothing would get past it."""
    key = Digest(bytes(32))
    body = data + b"\n"
    found = ActionRecord.parse(body + f"{Digest.of(body)}\n".encode(), key)
    assert ActionRecord.parse(found.encode(), key) == found
    assert all(size > 0 for size in found.chunks().values())
    return found


def parse_lease(data: bytes) -> Leased:
    leased = Leased()
    leased.add_records(data)
    assert len(leased.chunks) + len(leased.manifests) <= len(data) // 33
    return leased


def parse_name(data: bytes) -> object:
    """Names come from the command line and from directories: each one is checked by all three."""
    text = data.decode("utf-8", "surrogateescape")
    accepted, refused = False, UsageError("no check was made")
    for check in (parse_ref, check_file_name, unescape_ref_name, Digest.parse):
        try:
            found = check(text)
        except UsageError as error:
            refused = error
        else:
            accepted = True
            name = found[0] if isinstance(found, tuple) else str(found)
            assert not name.startswith((".", "/")) or check is check_file_name
            assert ".." not in name.split("/") and "\0" not in name
    if not accepted:
        raise refused
    return text


# --- mutations ----------------------------------------------------------------------------------

_DEEP: Any = "deep"  # stands for nesting that json.dumps itself could not write
# fmt: off
_EXTREMES: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 1.5, -0.0, 1e308,
    float("nan"), float("inf"), True, False, None, "", "x", "..", "../x", "/etc/passwd", "a/b",
    "a\\b", "a\0b", "\ud800", "\u202e", "e\u0301", "x" * 5000, "0" * 64, "blake3:" + "0" * 64,
    [], {}, [[]], [None] * 100, {"": 0}, "chunk", "slice", "zero", "data", _DEEP,
)
_TOKENS = (
    b"\0", b"\n", b'"', b"{", b"[" * 3000, b"]", b"}", b",", b":", b"-", b"\xff", b"\xef\xbb\xbf",
    b"null", b"NaN", b"1e999", b"9" * 5000, b"\\u0000", b"\\ud800", b"blake3:", b"../", b"%2F",
    b"@", b"= '0777'\n", b"umask = 7\n", b"[a.b]\n", b"grace = '99w'\n", b"\r\n", b"{'a'=1}",
)
# fmt: on


def mutate(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """A changed copy of ``data``; ``other`` is a second member of the pool."""
    if dice.random() < 0.5:
        with contextlib.suppress(ValueError, RecursionError):
            return mutate_json(data, dice)[:MAX_INPUT]
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        data = _mutate_bytes(data, other, dice)[:MAX_INPUT]
    return data


def _mutate_bytes(data: bytes, other: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data) + 1)
    end = min(len(data), at + dice.choice([1, 1, 2, 8, 33, 64]))
    match dice.randrange(6):
        case 0 if at < len(data):
            return data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:end] + data[at:]
        case 3:
            return data[:at] + dice.choice(_TOKENS) + data[end:]
        case 4:
            cut = dice.randrange(len(other) + 1)
            return data[:at] + other[cut:]
    return data[:at] + dice.choice(_TOKENS) + data[at:]


def mutate_json(data: bytes, dice: random.Random) -> bytes:
    """Change one value, or two, anywhere in a document, or repeat one of its keys."""
    document = json.loads(data)
    for _ in range(dice.choice([1, 1, 2])):
        document = _changed(document, dice)
    text = json.dumps(document, separators=(",", ":"), sort_keys=dice.random() < 0.8)
    text = text.replace('"deep"', "[" * 3000 + "]" * 3000)
    if dice.random() < 0.1:
        key = dice.choice(re.findall(r'"\w+":', text) or [""])
        text = text.replace(key, f"{key}0,{key}", 1)
    return text.encode("utf-8", "surrogatepass")


def _changed(value: Any, dice: random.Random) -> Any:
    """``value`` with one part of it, chosen by walking down, replaced, removed or repeated."""
    if dice.random() < 0.2 or not isinstance(value, (dict, list)) or not value:
        return dice.choice(_EXTREMES)
    if isinstance(value, dict):
        copy = dict(value)
        key = dice.choice(list(copy))
        if dice.random() < 0.1:
            copy[dice.choice(["x", "", key.upper()])] = copy.pop(key)
        else:
            copy[key] = _changed(copy[key], dice)
        return copy
    items = list(value)
    at = dice.randrange(len(items))
    action = dice.random()
    if action < 0.1:
        del items[at]
    elif action < 0.2:
        items.insert(at, items[at])
    else:
        items[at] = _changed(items[at], dice)
    return items


# --- running ------------------------------------------------------------------------------------


class Fuzzer:
    """Runs mutations of ``corpus`` through the parsers. In the main thread: it sets alarms."""

    def __init__(self, corpus: Path, scratch: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.parsers = parsers(scratch)
        self.pools = {
            name: [path.read_bytes() for path in sorted((corpus / name).iterdir())]
            for name in self.parsers
        }
        self.good = {name: list(pool) for name, pool in self.pools.items()}
        self.seen: dict[str, set[str]] = {name: set() for name in self.parsers}
        self.outcome = Outcome({name: Counts() for name in self.parsers})

    def run(self, seconds: float, least: int = 100) -> Outcome:
        """The corpus as it is, then mutations until the time is over, and of each ``least``."""
        for name, pool in self.pools.items():
            for data in list(pool):
                self.feed(name, data)
        before = _peak_bytes()
        deadline = time.monotonic() + seconds
        rounds = 0
        while time.monotonic() < deadline or rounds < least:
            rounds += 1
            for name, pool in self.pools.items():
                # Half of them from what is nearly right: two mistakes hide each other.
                start = self.dice.choice(self.dice.choice([pool, self.good[name]]))
                data = mutate(start, self.dice.choice(pool), self.dice)
                self.feed(name, data)
        self.outcome.grown = _peak_bytes() - before
        return self.outcome

    def feed(self, name: str, data: bytes) -> None:
        counts = self.outcome.counts[name]
        counts.inputs += 1
        began = time.perf_counter()
        try:
            with _alarm(SECONDS_PER_INPUT):
                self.parsers[name](data)
        except CasError as error:
            self._remember(name, data, _kind_of(str(error)))
        except Exception as error:  # this is what is looked for
            self._report(name, data, f"{type(error).__name__}: {str(error)[:100]}")
        else:
            counts.accepted += 1
            if counts.accepted < _POOL:
                self.good[name].append(data)
            self._remember(name, data, f"accepted, {len(data).bit_length()}")
        counts.slowest = max(counts.slowest, time.perf_counter() - began)

    def _remember(self, name: str, data: bytes, message: str) -> None:
        if message not in self.seen[name] and len(self.pools[name]) < _POOL:
            self.seen[name].add(message)
            self.pools[name].append(data)
            self.outcome.counts[name].messages += 1

    def _report(self, name: str, data: bytes, problem: str) -> None:
        if self.outcome.count_findings(name, problem) == 0:
            self.outcome.findings.append(Finding(name, data, problem))


def _kind_of(message: str) -> str:
    """A message without the digests and numbers in it."""
    return re.sub("[^a-z ]+", "#", re.sub(r"[0-9a-f]{9,}|'[^']*'", "", message))[:80]


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Counts the processor's time: a busy machine is no reason to ring."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} seconds for one input")

    old = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def _peak_bytes() -> int:
    """The most memory that this process has had so far."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024
