"""Why a computation was not found in the store: what differs, in words that a person understands.

Records hold the parts that their keys were made of, by section and name. Two of them are compared
part by part; which record a miss should be compared with is found by how little differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from cas.actions import Actions
from cas.digest import Digest
from cas.errors import ActionDamaged, ActionNotFound, CasError, NotFound, RefNotFound, UsageError
from cas.journal import Event
from cas.records import ActionRecord
from cas.refs import Ref
from cas.store import Store
from cas.strictjson import Json

#: So many records, the last used ones of a kind, are looked at to find the nearest.
_NEAREST_OF: Final = 400
#: So many misses of a run are explained singly.
MAX_MISSES: Final = 200
#: The list of actions in an artifact's provenance.
PROVENANCE_KEY: Final = "actions"

#: Begins the name of a section of dependencies.
_READ: Final = "read "

Facts: TypeAlias = "dict[tuple[str, str], Json]"


class _Absent:
    """The value of a part that one of two records lacks."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()


@dataclass(frozen=True, slots=True)
class Difference:
    """One part of which two records differ.

    ``words`` names it for a person (``the environment variable CC``); ``before`` and ``after`` are
    its values, `ABSENT` where a record lacks it. Values that are digests say only that they
    differ: `shows_values` is False then.
    """

    section: str
    name: str
    words: str
    before: Json | _Absent
    after: Json | _Absent

    @property
    def shows_values(self) -> bool:
        return not any(_is_digest(value) for value in (self.before, self.after))

    def text(self) -> str:
        """One line."""
        if not self.shows_values:
            change = self._without_values()
        else:
            one, other = ("none" if v is ABSENT else _short(v) for v in (self.before, self.after))
            change = f"{one} -> {other}" if one != other else self._without_values()
        return f"{self.words}: {change}"

    def _without_values(self) -> str:
        if ABSENT in (self.before, self.after):
            return "only in the " + ("second" if self.before is ABSENT else "first")
        return "another content"


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_digest(value: object) -> bool:
    if not isinstance(value, str):
        return False
    digits = value.removeprefix("blake3:")
    return len(digits) >= 32 and not set(digits) - set("0123456789abcdef")


# --- two records --------------------------------------------------------------------------------


def compare(before: ActionRecord, after: ActionRecord) -> list[Difference]:
    """What differs between two records, the most telling first.

    The digest of a whole section is left out where its parts say what differs; and so is what only
    one of the computations read, where something that decides what they read differs.
    """
    first, second = _facts(before), _facts(after)
    found = [
        Difference(*part, words_for(*part), first.get(part, ABSENT), second.get(part, ABSENT))
        for part in sorted(first.keys() | second.keys(), key=_rank)
        if first.get(part, ABSENT) != second.get(part, ABSENT)
    ]
    told = {difference.section for difference in found}
    decided = any(not section.startswith(_READ) for section in told)
    return [item for item in found if not _is_told(item, told) and not (decided and _follows(item))]


def _is_told(difference: Difference, told: set[str]) -> bool:
    section = difference.name.removesuffix(" digest")
    return difference.name != section and section in told


def _follows(difference: Difference) -> bool:
    return difference.section.startswith(_READ) and ABSENT in (difference.before, difference.after)


def _facts(record: ActionRecord) -> Facts:
    facts: Facts = {("action", "kind"): record.kind}
    for section, values in record.factors.items():
        facts.update(_flat(section, values))
    for section, values in record.dependencies.items():
        facts.update(_flat(f"{_READ}{section}", values))
    return facts


def _flat(section: str, value: Json, name: str = "") -> Iterator[tuple[tuple[str, str], Json]]:
    if isinstance(value, dict) and (value or not name):
        for key, inner in value.items():
            yield from _flat(section, inner, f"{name}.{key}" if name else key)
    else:
        yield (section, name), value


#: Section, and the beginning of a name in it -> how a person calls it. The rest of the name
#: follows. The first that fits is used; their order is the order in which differences are told.
_WORDS: Final[Sequence[tuple[str, str, str]]] = (
    ("action", "kind", "the kind of action"),
    ("action", "backend", "the backend"),
    ("action", "subject", "the subject"),
    ("action", "policy", "the way keys are made"),
    ("options", "", "the option {}"),
    ("weights", "", "the weight {}"),
    ("action", "graph digest", "the program: its operators, their arguments, shapes or names"),
    ("action", "options digest", "the options"),
    ("action", "configuration digest", "the config of to_executorch"),
    ("action", "weights digest", "the weights: their contents, or which of them share memory"),
    ("graph", "", "the program's {}"),
    ("environment", "version: ", "the version of {}"),
    ("environment", "variable: ", "the environment variable {}"),
    ("environment", "sources: ", "the source files of {}"),
    ("environment", "source: ", "the source file {}"),
    ("environment", "backend: ", "the backend's {}"),
    ("environment", "inductor: ", "the Inductor setting {}"),
    ("environment", "machine: ", "the machine's {}"),
    ("environment", "gpu: ", "the GPU's {}"),
    ("environment", "torch: ", "torch's {}"),
    ("environment", "compiler: ", "the compiler {}"),
    ("environment", "", "the environment: {}"),
    ("read files", "", "the file {}, which the computation read"),
    ("read programs", "", "the program {}, which the computation ran"),
    ("read variables", "", "the environment variable {}, which the computation read"),
)


def words_for(section: str, name: str) -> str:
    """What a person calls one part of a key."""
    for known, beginning, words in _WORDS:
        if section == known and name.startswith(beginning):
            return words.format(name[len(beginning) :])
    return f"{section}: {name}" if name else section


def _rank(part: tuple[str, str]) -> tuple[int, str, str]:
    section, name = part
    for position, (known, beginning, _) in enumerate(_WORDS):
        if section == known and name.startswith(beginning):
            return position, section, name
    return len(_WORDS), section, name


# --- the nearest record -------------------------------------------------------------------------


class Nearest:
    """Finds the record that differs least from another one."""

    def __init__(self, actions: Actions) -> None:
        newest = sorted(actions.entries(), key=lambda entry: -entry.last_used)
        self._records: list[tuple[ActionRecord, Facts]] = []
        for entry in newest[:_NEAREST_OF]:
            with contextlib.suppress(ActionNotFound, ActionDamaged):
                record = actions.read(entry.key)
                self._records.append((record, _facts(record)))

    def to(self, record: ActionRecord, without: frozenset[Digest]) -> ActionRecord | None:
        """The nearest to ``record`` of its kind, not among ``without``; None if there is none."""
        others = [item for item in self._records if item[0].key not in without]
        return _closest(record, others)


def _closest(record: ActionRecord, others: list[tuple[ActionRecord, Facts]]) -> ActionRecord | None:
    """Of other actions of its kind, one of its label if there is, with the least difference."""
    facts = _facts(record)
    distances = [
        (other.label != record.label, _distance(facts, known), other.key)
        for other, known in others
        if other.kind == record.kind and other.key != record.key
    ]
    if not distances:
        return None
    *_, key = min(distances)
    return next(other for other, _ in others if other.key == key)


def _distance(first: Facts, second: Facts) -> int:
    same = sum(1 for part, value in first.items() if part in second and second[part] == value)
    return len(first) + len(second) - 2 * same


# --- the last run -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Miss:
    """One action of a run that was computed.

    ``nearest`` is the record that it was compared with and ``differences`` what differs; None and
    nothing where there is no record of its kind, or of the action itself.
    """

    event: Event
    nearest: ActionRecord | None
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last run that computed something: its hits, and each miss with what it lacked.

    ``later`` runs have looked for actions since, and found all of them.
    """

    time: int
    hits: int
    misses: tuple[Miss, ...]
    uncacheable: tuple[Event, ...]
    later: int


def explain_last(store: Store) -> LastRun:
    """Compare what the last run had to compute with the nearest records of earlier runs.

    Raises:
        NotFound: no run that computed anything is in the journal.
    """
    events = store.actions.events()
    computed = [event for event in events if event.outcome != "hit"]
    if not computed:
        raise NotFound(
            "no action was computed lately: everything came out of the store, or nothing was "
            "asked for; `cas stats -v` shows the counts"
        )
    run = [event for event in events if event.run == computed[-1].run]
    since = events[events.index(computed[-1]) + 1 :]
    missed = [event for event in run if event.outcome in ("miss", "mismatch")]
    new = frozenset(event.key for event in missed if event.key)
    nearest = Nearest(store.actions) if missed else None
    return LastRun(
        time=run[-1].time,
        hits=sum(event.outcome == "hit" for event in run),
        misses=tuple(_miss(store, event, nearest, new) for event in missed[-MAX_MISSES:]),
        uncacheable=tuple(event for event in run if event.outcome == "uncacheable"),
        later=len({event.run for event in since} - {computed[-1].run}),
    )


def _miss(store: Store, event: Event, nearest: Nearest | None, new: frozenset[Digest]) -> Miss:
    # Whatever was there under the same key has been replaced; the event says what was wrong.
    if event.key is None or nearest is None or event.reason != "absent":
        return Miss(event, None, ())
    try:
        record = store.actions.read(event.key)
    except CasError:
        return Miss(event, None, ())
    other = nearest.to(record, new)
    return Miss(event, other, tuple(compare(other, record)) if other else ())


# --- two artifacts, or two actions --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """Two actions that correspond, and what differs. One of them may be missing."""

    before: ActionRecord | None
    after: ActionRecord | None
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What differs between two actions, or between the actions of two artifacts.

    ``same`` counts actions that both have; ``pairs`` are the others; ``origin`` is what differs in
    how two artifacts came to be; ``lost`` are actions whose records are gone.
    """

    before: str
    after: str
    same: int
    pairs: tuple[Pair, ...]
    origin: tuple[Difference, ...] = ()
    lost: tuple[Digest, ...] = ()


def explain(store: Store, before: str, after: str) -> Explanation:
    """Compare two actions (the first digits of their keys) or two artifacts (``NAME[@GEN]``).

    Raises:
        ActionNotFound, RefNotFound, UsageError: neither such an artifact nor such an action, or
            one of each kind.
        ManifestDamaged, ActionDamaged
    """
    first, second = _find(store, before), _find(store, after)
    if isinstance(first, Ref) and isinstance(second, Ref):
        return _explain_artifacts(store, first, second)
    if isinstance(first, Digest) and isinstance(second, Digest):
        pair = _pair(store.actions.read(first), store.actions.read(second))
        same = first == second
        return Explanation(before, after, int(same), () if same else (pair,))
    raise UsageError("give two artifacts or two actions: one of each kind cannot be compared")


def _find(store: Store, text: str) -> Ref | Digest:
    try:
        return store.resolve(text)
    except (RefNotFound, UsageError) as error:
        try:
            return store.actions.resolve(text)
        except ActionNotFound:
            raise error from None
        except UsageError:
            raise error from None


def _explain_artifacts(store: Store, first: Ref, second: Ref) -> Explanation:
    origins = [store.manifest(ref).provenance for ref in (first, second)]
    keys = [_keys(origin) for origin in origins]
    shared = set(keys[0]) & set(keys[1])
    lost: list[Digest] = []
    records = [[*_read(store, [k for k in own if k not in shared], lost)] for own in keys]
    return Explanation(
        str(first),
        str(second),
        len(shared),
        tuple(_pairs(*records)),
        tuple(_compare_origins(*origins)),
        tuple(lost),
    )


def _keys(provenance: Mapping[str, Json]) -> list[Digest]:
    """The actions that an artifact's provenance lists, each once."""
    listed = provenance.get(PROVENANCE_KEY)
    found: dict[Digest, None] = {}
    for text in listed if isinstance(listed, list) else ():
        with contextlib.suppress(UsageError):
            found[Digest.parse(f"blake3:{str(text).removeprefix('blake3:')}")] = None
    return [*found]


def _read(store: Store, keys: Iterable[Digest], lost: list[Digest]) -> Iterator[ActionRecord]:
    for key in keys:
        try:
            yield store.actions.read(key)
        except (ActionNotFound, ActionDamaged):
            lost.append(key)


def _pairs(before: list[ActionRecord], after: list[ActionRecord]) -> Iterator[Pair]:
    """Each of ``after`` with the nearest of ``before`` that is not taken yet."""
    free = [(record, _facts(record)) for record in before]
    for record in after:
        nearest = _closest(record, free)
        free = [item for item in free if item[0] is not nearest]
        yield _pair(nearest, record)
    yield from (_pair(record, None) for record, _ in free)


def _pair(before: ActionRecord | None, after: ActionRecord | None) -> Pair:
    differences = compare(before, after) if before and after else ()
    return Pair(before, after, tuple(differences))


def _compare_origins(first: Mapping[str, Json], second: Mapping[str, Json]) -> Iterator[Difference]:
    facts = [
        {
            part: value
            for section, values in origin.items()
            if section not in (PROVENANCE_KEY, "created", "accounting", "seconds")
            for part, value in _flat(section, values)
        }
        for origin in (first, second)
    ]
    for part in sorted(facts[0].keys() | facts[1].keys()):
        before, after = facts[0].get(part, ABSENT), facts[1].get(part, ABSENT)
        if before != after:
            yield Difference(*part, _origin_words(*part), before, after)


def _origin_words(section: str, name: str) -> str:
    if section == "versions":
        return f"the version of {name}"
    if section == "options":
        return f"the option {name}"
    return f"the {section} {name}".rstrip()
