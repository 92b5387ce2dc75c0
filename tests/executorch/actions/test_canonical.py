"""XNNPACK's payloads depend neither on names nor on the values of debug handles.

That is why its keys leave them out. The proof holds for the sources of the backend that it was made
with: with others, `backends.profile_of` falls back to keys that leave nothing out.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir.backend import backend_api
from export_cases import CASES
from torch.export import ExportedProgram

from cas.errors import UsageError
from cas.executorch.actions import backends, xnnpack
from cas.executorch.actions.backends import CANONICAL
from cas.executorch.actions.compare import differences
from cas.executorch.actions.errors import Unrecordable
from cas.executorch.actions.keys import action_key
from cas.executorch.actions.policy import STRICT
from cas.executorch.actions.relocation import check_relocatable, relocate
from cas.executorch.actions.xnnpack import UNSET

#: Between them all kinds of partition that the cases have.
FUZZED = (
    "mlp_xnnpack",
    "mlp_xnnpack_dynamic",
    "mlp_int8_dynamic_xnnpack",
    "conv_int8_xnnpack",
    "attention_xnnpack",
)

Partition = tuple[ExportedProgram, list[Any]]


def partitions_of(case: str) -> list[Partition]:
    found: list[Partition] = []
    real = backend_api.lower_all_submodules_to_backend

    def look(backend_id: str, nodes: Any, programs: Any) -> None:
        for method in nodes.values():
            found.extend(
                (copy.deepcopy(node.meta["submodule_program"]), node.meta["compile_spec"])
                for node in method
            )
        real(backend_id, nodes, programs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend_api, "lower_all_submodules_to_backend", look)
        CASES[case]()
    return found


def scramble(program: ExportedProgram, chance: random.Random) -> dict[int, int]:
    """Other names and other handles, and nothing of where a node came from."""
    names: dict[str, str] = {}
    handles: dict[int, int] = {}
    others = iter(chance.sample(range(1, 60_000), 1000))
    for node in program.graph.nodes:
        for key in ("stack_trace", "from_node", "seq_nr", *CANONICAL.dropped):
            node.meta.pop(key, None)
        if node.op == "placeholder":
            node.meta["debug_handle"] = next(others)
        elif "debug_handle" in node.meta:
            handle = node.meta["debug_handle"]
            handles.setdefault(handle, next(others))
            node.meta["debug_handle"] = handles[handle]
        if node.op == "output":
            continue
        new = f"{chance.choice('zyxab')}{chance.randrange(10**6)}_{len(names)}"
        names[node.name], node.name = new, new
        if node.op == "placeholder":
            node.target = new
    scramble_signature(program, names, chance)
    return handles


def scramble_signature(
    program: ExportedProgram, names: dict[str, str], chance: random.Random
) -> None:
    targets: dict[str, str] = {}
    signature = program.graph_signature
    for spec in [*signature.input_specs, *signature.output_specs]:
        if dataclasses.is_dataclass(spec.arg) and spec.arg.name in names:
            spec.arg = dataclasses.replace(spec.arg, name=names[spec.arg.name])
        if spec.target:
            spec.target = targets.setdefault(
                spec.target, f"q{chance.randrange(10**6)}.{len(targets)}"
            )
    program._state_dict = {targets.get(k, k): v for k, v in program.state_dict.items()}
    program._constants = {targets.get(k, k): v for k, v in program.constants.items()}


def canonical_key(partition: Partition) -> Any:
    program, specs = partition
    return action_key("X", {"": [program]}, {"": [specs]}, {}, CANONICAL)


@pytest.mark.slow
@pytest.mark.parametrize("fuzzed", FUZZED)
def test_a_scrambled_partition_gives_the_relocated_payload(fuzzed: str) -> None:
    profile = backends.profile_of(XnnpackBackend)
    assert profile.policy is CANONICAL, "these sources are not among those that were tested"
    chance = random.Random(fuzzed)
    partitions = partitions_of(fuzzed)
    assert partitions
    for program, specs in partitions:
        scrambled = copy.deepcopy(program)
        handles = scramble(scrambled, chance)
        first, second = canonical_key((program, specs)), canonical_key((scrambled, specs))
        assert first.digest == second.digest
        assert [handles[handle] for handle in first.handles] == list(second.handles)
        recorded = XnnpackBackend.preprocess(copy.deepcopy(program), specs)
        check_relocatable(profile, [recorded], first.handles)
        before = recorded.processed_bytes
        relocate(profile, [recorded], first.handles, second.handles)
        assert recorded.processed_bytes != before
        fresh = XnnpackBackend.preprocess(scrambled, specs)
        assert differences([recorded], [fresh], exact=True) == []


def test_other_sources_of_the_backend_get_strict_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_XNNPACK_SOURCES", frozenset({"0" * 64}))
    assert backends.profile_of(XnnpackBackend).policy is STRICT
    assert backends.profile_of(XnnpackBackend).relocate is None


# --- relocation by itself -----------------------------------------------------------------------


def payload(handles: list[int]) -> bytes:
    """A header and a flatbuffer with as many nodes, as flatc lays them out."""
    nodes = b""
    vector = struct.pack("<I", len(handles))
    start = 4 * len(handles)
    for n, handle in enumerate(handles):
        # A table's offset to its vtable, its handle, and the vtable behind it.
        table = struct.pack("<iI", -8, handle) + struct.pack("<HHHHHH", 10, 8, 0, 0, 4, 0)
        vector += struct.pack("<I", start - 4 * n + len(nodes))
        nodes += table
    graph = struct.pack("<iI", -8, 16) + struct.pack("<HHHHHH", 8, 8, 0, 4, 0, 0)
    buffer = struct.pack("<I", 4) + graph + vector + nodes
    header = b"\0\0\0\0XH00" + struct.pack("<HII", 30, 30, len(buffer)) + bytes(12)
    return header + buffer


def test_handles_are_replaced_in_place() -> None:
    before = payload([3, UNSET, 5, 3])
    after = xnnpack.relocate(before, {3: 300, 5: 70_000})
    assert after == payload([300, UNSET, 70_000, 300])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:4] + b"XXXX" + data[8:],
        lambda data: data[:-30],
        lambda data: data[:10] + b"\xff\xff\xff\x7f" + data[14:],
        lambda data: b"",
        lambda data: data[:30] + b"\xff" * (len(data) - 30),
    ],
)
def test_a_damaged_payload_is_refused(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(Unrecordable):
        xnnpack.relocate(damage(payload([1, 2])), {1: 1, 2: 2})


def test_random_damage_never_gets_further_than_a_refusal() -> None:
    chance, good = random.Random(5), payload([1, 2, 3])
    for _ in range(2000):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            changed = xnnpack.relocate(bytes(data), {1: 1, 2: 2, 3: 3})
        except Unrecordable:
            continue
        assert changed == data


def test_an_unknown_handle_is_refused() -> None:
    with pytest.raises(Unrecordable, match="2"):
        xnnpack.relocate(payload([1, 2]), {1: 9})


class Result:
    def __init__(self) -> None:
        self.debug_handle_map: dict[int, tuple[int, ...]] = {}
        self.processed_bytes = payload([1, 2])


def test_what_could_not_be_relocated_is_not_recorded() -> None:
    profile = backends.Profile(CANONICAL, xnnpack.relocate)
    check_relocatable(profile, [Result()], [1, 2])
    with pytest.raises(Unrecordable, match="65535"):
        check_relocatable(profile, [Result()], [1, 2, UNSET])
    with pytest.raises(Unrecordable, match="unknown debug handle"):
        check_relocatable(profile, [Result()], [1])
    own = Result()
    own.debug_handle_map = {1: (1,)}
    with pytest.raises(Unrecordable, match="map of its own"):
        check_relocatable(profile, [own], [1, 2])
    with pytest.raises(UsageError, match="other debug handles"):
        relocate(profile, [Result()], [1, 2], [1])
