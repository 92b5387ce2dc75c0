"""Copies of where nodes came from are those that `copy.deepcopy` makes, made with less ado."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx.traceback import NodeSource, NodeSourceAction

from cas.executorch import hooks_provenance
from cas.executorch.patches import Patches

ACTIONS = [NodeSourceAction.CREATE, NodeSourceAction.REPLACE]


@pytest.fixture
def patches() -> Iterator[Patches]:
    patches = Patches()
    yield patches
    patches.undo()


def history(links: int) -> NodeSource:
    """What ``links`` passes leave in the metadata of a node, newest first."""
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for n in range(links):
        source = NodeSource(node, f"pass {n}", ACTIONS if n % 2 else NodeSourceAction.CREATE)
        node = graph.placeholder(f"x{n}")
        node.meta["from_node"] = [source]
    return source


def described(value: Any) -> Any:
    """All that can be reached, by types and values."""
    if isinstance(value, list):
        return [described(item) for item in value]
    if isinstance(value, (NodeSource, NodeSource.NodeInfo)):
        return type(value), {name: described(held) for name, held in vars(value).items()}
    return type(value), value


def parts(value: Any) -> Iterator[Any]:
    """Every object in a history that could be changed."""
    if isinstance(value, (NodeSource, NodeSource.NodeInfo, list, dict)):
        yield value
    if isinstance(value, list):
        for item in value:
            yield from parts(item)
    elif isinstance(value, (NodeSource, NodeSource.NodeInfo)):
        for held in vars(value).values():
            yield from parts(held)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "with what it computed once"])
def test_a_copy_is_the_stock_copy(patches: Patches, used: bool) -> None:
    original = history(6)
    if used:
        original.from_node[0].to_dict()
    stock = copy.deepcopy([original])
    hooks_provenance.install(patches)
    made = copy.deepcopy([original])
    assert described(made) == described(stock) == described([original])
    assert made == stock
    assert not {*map(id, parts(made))} & {*map(id, parts([original]))}


def test_what_two_links_share_their_copies_share(patches: Patches) -> None:
    one, other = history(2), history(2)
    other.node_info, other.action = one.node_info, one.action
    hooks_provenance.install(patches)
    first, second, again = copy.deepcopy([one, other, one])
    assert again is first is not second
    assert second.node_info is first.node_info is not one.node_info
    assert second.action is first.action is not one.action


def test_a_history_that_contains_itself_is_copied_too(patches: Patches) -> None:
    original = history(1)
    original.from_node.append(original)
    hooks_provenance.install(patches)
    made = copy.deepcopy(original)
    assert made is not original
    assert made.from_node[0] is made


def test_what_others_keep_there_is_copied(patches: Patches) -> None:
    class Own(NodeSource):
        pass

    original: Any = Own(None)
    vars(original).update(vars(history(2)), note={"held": [1, 2]})
    hooks_provenance.install(patches)
    made: Any = copy.deepcopy(original)
    assert type(made) is type(original)
    assert made.note == {"held": [1, 2]}
    assert made.note["held"] is not original.note["held"]


def test_the_class_is_stock_again_afterwards(patches: Patches) -> None:
    hooks_provenance.install(patches)
    assert "__deepcopy__" in vars(NodeSource)
    patches.undo()
    assert "__deepcopy__" not in vars(NodeSource)


def test_a_copy_takes_a_fraction_of_the_steps(patches: Patches) -> None:
    original = history(20)

    def calls() -> int:
        counted = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            copy.deepcopy(original)
        finally:
            sys.setprofile(None)
        return counted

    stock = calls()
    hooks_provenance.install(patches)
    assert calls() < stock / 3
