"""The policy, as a pure function: what it gives up, in which order, and what it never does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas.digest import Digest
from cas.retention import Action, Generation, Holdings, Policy, Root, choose
from cas.testing.strategies import no_deadlines

no_deadlines()

NOW = 1000.0


def digest(text: object) -> Digest:
    return Digest.of(str(text).encode())


class World:
    """Roots with their chunks: document -> chunk -> size."""

    def __init__(
        self,
        generations: Iterable[tuple[Generation, set[int]]],
        actions: Iterable[tuple[Action, set[int]]],
    ) -> None:
        self.generations = [item for item, _ in generations]
        self.actions = [item for item, _ in actions]
        self.chunks = {
            root.document: {bytes(digest(chunk)): 10 + chunk for chunk in chunks}
            for root, chunks in [*generations, *actions]
        }

    @property
    def roots(self) -> list[Root]:
        return [*self.generations, *self.actions]

    def holdings(self, roots: Iterable[Root]) -> Holdings:
        holdings = Holdings(self.chunks.__getitem__)
        for root in roots:
            holdings.hold(root.document)
        return holdings

    def size(self, roots: Iterable[Root]) -> int:
        """Counted in the simplest way."""
        held: dict[bytes, int] = {}
        for root in roots:
            held |= self.chunks[root.document]
        return sum(held.values())

    def choose(self, policy: Policy) -> list[Root]:
        return choose(policy, self.generations, self.actions, NOW, self.holdings(self.roots))


chunk_sets = st.sets(st.integers(0, 12), max_size=5)
times = st.integers(0, 1100).map(float)  # some of them in the future


@st.composite
def worlds(draw: st.DrawFn) -> World:
    generations = []
    for name in ("a", "b", "c/d"):
        for number in draw(st.sets(st.integers(1, 9), max_size=5)):
            # Few different manifests, so that some generations have the same one.
            chunks = draw(chunk_sets)
            manifest = digest(sorted(chunks))
            generations.append((Generation(name, number, manifest, draw(times)), chunks))
    actions = [
        (Action(digest(f"action {number}"), draw(times)), draw(chunk_sets))
        for number in range(draw(st.integers(0, 4)))
    ]
    return World(generations, actions)


counts = st.none() | st.integers(1, 4)
ages = st.none() | st.integers(0, 1000)
limits = st.none() | st.integers(0, 200)
policies = st.builds(Policy, counts, ages, limits, st.booleans())


def ranks(world: World) -> dict[Root, int]:
    """How many newer generations of its name each one has."""
    return {
        item: sum(o.name == item.name and o.generation > item.generation for o in world.generations)
        for item in world.generations
    }


@given(worlds(), policies)
def test_what_is_protected_is_never_given_up(world: World, policy: Policy) -> None:
    rank = ranks(world)
    for root in world.choose(policy):
        if policy.older_than:
            assert NOW - root.last_used >= policy.older_than
        if isinstance(root, Generation):
            assert rank[root] >= (policy.keep_last or 0)
            assert rank[root] >= 1 or policy.include_current


@given(worlds(), policies)
def test_nothing_is_chosen_twice_and_only_what_is_there(world: World, policy: Policy) -> None:
    chosen = world.choose(policy)
    assert max(Counter(chosen).values(), default=1) == 1
    assert set(chosen) <= set(world.roots)


@given(worlds(), counts, ages, st.booleans())
def test_without_a_size_everything_that_is_not_protected_goes(
    world: World, keep_last: int | None, older_than: int | None, include_current: bool
) -> None:
    policy = Policy(keep_last, older_than, None, include_current)
    newest = max(keep_last or 0, 0 if include_current else 1)
    expected: set[Root] = set()
    if keep_last is not None or older_than is not None:
        expected = {item for item, rank in ranks(world).items() if rank >= newest}
    if older_than is not None:
        expected |= set(world.actions)
    old = {root for root in expected if not older_than or NOW - root.last_used >= older_than}
    assert set(world.choose(policy)) == old


@given(worlds(), policies, st.integers(0, 200))
def test_a_size_is_kept_if_what_is_protected_allows_it(
    world: World, policy: Policy, limit: int
) -> None:
    policy = Policy(policy.keep_last, policy.older_than, limit, policy.include_current)
    chosen = world.choose(policy)
    left = [root for root in world.roots if root not in chosen]
    all_that_may_go = choose(
        Policy(policy.keep_last, policy.older_than or 0, None, policy.include_current),
        world.generations,
        world.actions,
        NOW,
    )
    least = world.size(root for root in world.roots if root not in all_that_may_go)
    assert world.size(left) <= max(limit, least)


@given(worlds(), policies, st.integers(0, 200))
def test_nothing_goes_for_a_size_that_could_have_stayed(
    world: World, policy: Policy, limit: int
) -> None:
    policy = Policy(policy.keep_last, policy.older_than, limit, policy.include_current)
    chosen = world.choose(policy)
    left = [root for root in world.roots if root not in chosen]
    for root in chosen:
        assert world.size([*left, root]) > max(limit, world.size(left))


@given(worlds(), st.integers(0, 200))
def test_action_records_go_first_and_the_least_recently_used_of_each_kind(
    world: World, limit: int
) -> None:
    """What goes is a part of some beginning of the order: the rest of that made no difference."""
    chosen = world.choose(Policy(max_bytes=limit))
    order: list[Root] = sorted(world.actions, key=lambda root: (root.last_used, str(root)))
    old = [item for item, rank in ranks(world).items() if rank >= 1]
    order += sorted(old, key=lambda root: (root.last_used, str(root)))
    if chosen:
        last = order.index(chosen[-1])
        before = [root for root in world.roots if root not in order[:last]]
        assert world.size(before) > limit, "the last one was not needed"
    assert chosen == [root for root in order if root in chosen]


@given(worlds(), limits)
def test_the_holdings_say_at_each_time_what_is_held(world: World, limit: int | None) -> None:
    holdings = world.holdings(world.roots)
    assert holdings.bytes == world.size(world.roots)
    chosen = choose(Policy(max_bytes=limit), world.generations, world.actions, NOW, holdings)
    left = [root for root in world.roots if root not in chosen]
    assert holdings.bytes == world.size(left)
    expected = Counter(
        chunk for document in {root.document for root in left} for chunk in world.chunks[document]
    )
    assert {chunk: count for chunk, count, _ in holdings.uses()} == expected
    assert set(holdings.chunks) == set(expected)
    assert set(holdings.documents) == {root.document for root in left}


# --- examples that a person can follow ----------------------------------------------------------


def generation(number: int, *, used: float = 0, name: str = "m") -> Generation:
    return Generation(name, number, digest(f"{name}{number}"), used)


def names(roots: Iterable[Root]) -> list[str]:
    return [str(root) for root in roots]


def test_keep_last_keeps_the_newest_of_each_name() -> None:
    items = [generation(n, name=name) for name in "mn" for n in (1, 2, 3)]
    assert names(choose(Policy(keep_last=2), items, [], NOW)) == ["m@1", "n@1"]


def test_older_than_looks_at_the_last_use_and_not_at_the_number() -> None:
    items = [generation(1, used=990), generation(2, used=10), generation(3, used=0)]
    assert names(choose(Policy(older_than=100), items, [], NOW)) == ["m@2"]


def test_both_together_drop_what_both_allow() -> None:
    items = [generation(n, used=used) for n, used in ((1, 0), (2, 990), (3, 0), (4, 0))]
    assert names(choose(Policy(keep_last=2, older_than=100), items, [], NOW)) == ["m@1"]


def test_the_current_generation_goes_only_when_asked_for() -> None:
    items = [generation(1)]
    assert choose(Policy(older_than=0), items, [], NOW) == []
    assert names(choose(Policy(older_than=0, include_current=True), items, [], NOW)) == ["m@1"]
    assert choose(Policy(keep_last=1, include_current=True), items, [], NOW) == []


def test_a_generation_that_shares_everything_stays_however_old_it_is() -> None:
    old, middle, new = generation(1, used=1), generation(2, used=2), generation(3, used=3)
    world = World([(old, {1, 2}), (middle, {1, 5}), (new, {1, 2})], [])
    assert names(world.choose(Policy(max_bytes=30))) == ["m@2"]


def test_two_that_share_go_together_where_one_alone_frees_nothing() -> None:
    one, two = generation(1, used=1), generation(2, used=2)
    world = World([(one, {1, 2}), (two, {1, 2}), (generation(3, used=3), {3})], [])
    assert names(world.choose(Policy(max_bytes=20))) == ["m@1", "m@2"]


def test_records_go_before_generations_even_when_they_were_used_later() -> None:
    record = Action(digest("r"), 500)
    world = World([(generation(1), {1}), (generation(2), {2})], [(record, {3})])
    assert world.choose(Policy(max_bytes=25)) == [record]
    assert names(world.choose(Policy(max_bytes=12))) == [str(record), "m@1"]


@pytest.mark.parametrize("policy", [Policy(), Policy(include_current=True)])
def test_no_policy_gives_up_nothing(policy: Policy) -> None:
    assert choose(policy, [generation(1), generation(2)], [], NOW) == []
