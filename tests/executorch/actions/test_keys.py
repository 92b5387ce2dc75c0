"""Keys are the same for the same action, and different for every other one."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir.backend.compile_spec_schema import CompileSpec
from functorch.experimental.control_flow import map as map_over
from torch import nn
from torch.export import Dim, ExportedProgram, export

from cas.executorch.actions.backends import CANONICAL
from cas.executorch.actions.encoder import Encoder
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.keys import ActionKey, action_key, facts_digest
from cas.executorch.actions.policy import STRICT, WHOLE_EXPORT, KeyPolicy
from cas.executorch.actions.programs import ProgramEncoder
from cas.executorch.actions.weights import StorageDigests

Mutate = Callable[[ExportedProgram], Any]


class Net(nn.Module):
    """A weight with a zero, an operator with an argument, and two operands to swap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(8, 8)
        with torch.no_grad():
            self.linear.bias[0] = 0.0
        self.register_buffer("gap", torch.arange(40.0)[::5])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sub(torch.relu(self.linear(x)), y, alpha=1) + self.gap


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.ones(4, 8), torch.zeros(4, 8)


def make(module: nn.Module | None = None, **options: Any) -> ExportedProgram:
    program = export((module or Net()).eval(), inputs(), strict=False, **options)
    for n, node in enumerate(program.graph.nodes):
        node.meta["debug_handle"] = n + 1
    return program


@pytest.fixture(scope="module")
def base() -> ExportedProgram:
    return make()


def key(
    program: ExportedProgram,
    specs: list[CompileSpec] | None = None,
    facts: dict[str, str] | None = None,
    policy: KeyPolicy = STRICT,
    method: str = "forward",
    backend: str = "Backend",
) -> ActionKey:
    return action_key(backend, {method: [program]}, {method: [specs or []]}, facts or {}, policy)


def same(one: ExportedProgram, other: ExportedProgram, policy: KeyPolicy = STRICT) -> bool:
    return key(one, policy=policy).digest == key(other, policy=policy).digest


def node(program: ExportedProgram, name: str) -> torch.fx.Node:
    return next(n for n in program.graph.nodes if n.name.startswith(name))


# --- sensitive ----------------------------------------------------------------------------------


def flip_lowest_bit(program: ExportedProgram) -> None:
    weight = program.state_dict["linear.weight"]
    weight.detach().view(torch.int32)[-1, -1] ^= 1


def negate_zero(program: ExportedProgram) -> None:
    program.state_dict["linear.bias"].detach()[0] = -0.0


def fill_gap(program: ExportedProgram) -> None:
    storage = program.constants.get("gap", program.state_dict.get("gap")).untyped_storage()
    storage[4] = (storage[4] + 1) % 256


def change_argument(program: ExportedProgram) -> None:
    node(program, "sub").kwargs = {"alpha": 2}


def swap_operands(program: ExportedProgram) -> None:
    subtract = node(program, "sub")
    subtract.args = tuple(reversed(subtract.args))


def change_operator(program: ExportedProgram) -> None:
    node(program, "relu").target = torch.ops.aten.neg.default


def tag_constant(program: ExportedProgram) -> None:
    node(program, "p_linear_weight").meta["custom"] = {"delegate_constant_tag": "file"}


def add_meta(program: ExportedProgram) -> None:
    node(program, "relu").meta["something new"] = 1


def share_handle(program: ExportedProgram) -> None:
    node(program, "relu").meta["debug_handle"] = node(program, "sub").meta["debug_handle"]


def change_dtype(program: ExportedProgram) -> None:
    relu = node(program, "relu")
    relu.meta["val"] = relu.meta["val"].to(torch.float16)


def change_strides(program: ExportedProgram) -> None:
    x = node(program, "x")
    x.meta["val"] = x.meta["val"].t().contiguous().t()


def require_grad(program: ExportedProgram) -> None:
    program.state_dict["linear.weight"].requires_grad_(False)


def rename_parameter(program: ExportedProgram) -> None:
    for spec in program.graph_signature.input_specs:
        if spec.target == "linear.weight":
            spec.target = "renamed"
    program.state_dict["renamed"] = program.state_dict.pop("linear.weight")


def persist_less(program: ExportedProgram) -> None:
    for spec in program.graph_signature.input_specs:
        if spec.persistent:
            spec.persistent = False


def add_unused_weight(program: ExportedProgram) -> None:
    program.state_dict["unused"] = torch.ones(3)


@pytest.mark.parametrize(
    "mutate",
    [
        flip_lowest_bit,
        negate_zero,
        fill_gap,
        change_argument,
        swap_operands,
        change_operator,
        tag_constant,
        add_meta,
        share_handle,
        change_dtype,
        change_strides,
        require_grad,
        rename_parameter,
        persist_less,
        add_unused_weight,
    ],
)
def test_a_change_of_the_program_gives_another_key(base: ExportedProgram, mutate: Mutate) -> None:
    changed = copy.deepcopy(base)
    assert same(base, changed)
    mutate(changed)
    assert not same(base, changed)


@pytest.mark.parametrize(
    "mutate",
    [flip_lowest_bit, fill_gap, change_argument, tag_constant, share_handle, change_strides],
)
def test_the_canonical_key_is_as_sensitive(base: ExportedProgram, mutate: Mutate) -> None:
    changed = copy.deepcopy(base)
    mutate(changed)
    assert not same(base, changed, CANONICAL)


OPTIONS = [CompileSpec("a", b"1"), CompileSpec("b", b"2")]


@pytest.mark.parametrize(
    "specs",
    [
        [],
        OPTIONS[:1],
        OPTIONS[::-1],
        [CompileSpec("a", b"1"), CompileSpec("b", b"3")],
        [*OPTIONS, CompileSpec("c", b"")],
        [CompileSpec("a", b"1b"), CompileSpec("", b"2")],
    ],
)
def test_other_options_give_another_key(base: ExportedProgram, specs: list[CompileSpec]) -> None:
    assert key(base, specs).digest != key(base, OPTIONS).digest


def test_backend_method_policy_and_facts_count(base: ExportedProgram) -> None:
    keys = [
        key(base),
        key(base, backend="Other"),
        key(base, method="encode"),
        key(base, policy=KeyPolicy(hints=False)),
        key(base, facts={"compiler": "12"}),
        key(base, facts={"compiler": "13"}),
    ]
    assert len({found.digest for found in keys}) == len(keys)


def test_one_section_tells_which_part_differs(base: ExportedProgram) -> None:
    def differing(one: ActionKey, other: ActionKey) -> list[str]:
        first, second = one.factors["action"], other.factors["action"]
        assert isinstance(first, dict) and isinstance(second, dict)
        return [name for name in first if first[name] != second[name]]

    changed, argument = copy.deepcopy(base), copy.deepcopy(base)
    flip_lowest_bit(changed)
    change_argument(argument)
    assert differing(key(base), key(changed)) == ["weights digest"]
    assert differing(key(base), key(argument)) == ["graph digest"]
    assert differing(key(base), key(base, OPTIONS)) == ["options digest"]
    assert differing(key(base), key(base, facts={"a": "b"})) == ["environment digest"]
    weights = key(base).factors["weights"], key(changed).factors["weights"]
    assert [n for n in weights[0] if weights[0][n] != weights[1][n]] == ["linear.weight"]


# --- programs that have to be exported anew -----------------------------------------------------


class Twice(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one = nn.Linear(8, 8, bias=False)
        self.two = nn.Linear(8, 8, bias=False)
        if tied:
            self.two.weight = self.one.weight
        else:
            self.two.load_state_dict(self.one.state_dict())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)) + y


def test_tied_weights_are_not_equal_ones() -> None:
    assert not same(make(Twice(True)), make(Twice(False)))
    assert same(make(Twice(True)), make(Twice(True)))


class Counting(nn.Module):
    def __init__(self, mutating: bool) -> None:
        super().__init__()
        self.mutating = mutating
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = self.state + x
        if self.mutating:
            self.state.copy_(total)
        return total


def test_a_buffer_that_is_written_counts() -> None:
    assert not same(make(Counting(True)), make(Counting(False)))


class Branching(nn.Module):
    def __init__(self, constant: float, over: str) -> None:
        super().__init__()
        self.constant, self.over = constant, over

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.over == "cond":
            return torch.cond(x.sum() > 0, lambda a: a * self.constant, lambda a: a - 1.0, (x + y,))
        return map_over(lambda row, z: row * self.constant + z, x, y[0])


@pytest.mark.parametrize("over", ["cond", "map"])
def test_constants_inside_of_control_flow_count(over: str) -> None:
    assert not same(make(Branching(2.0, over)), make(Branching(3.0, over)))
    assert same(make(Branching(2.0, over)), make(Branching(2.0, over)))


def dynamic(top: int) -> ExportedProgram:
    batch = Dim("batch", min=2, max=top)
    return make(Twice(False), dynamic_shapes=({0: batch}, {0: batch}))


def test_the_range_of_a_dimension_counts() -> None:
    assert not same(dynamic(64), dynamic(128))
    assert same(dynamic(64), dynamic(64))


def test_values_of_example_inputs_count_only_where_somebody_could_read_them() -> None:
    one, other = make(), make()
    other.example_inputs[0][0].fill_(7.0)  # type: ignore[index]
    assert not same(one, other)
    assert same(one, other, WHOLE_EXPORT)


# --- insensitive --------------------------------------------------------------------------------


def scrub(program: ExportedProgram) -> None:
    for found in program.graph.nodes:
        for noise in ("stack_trace", "from_node", "seq_nr"):
            found.meta.pop(noise, None)


def test_where_a_node_came_from_does_not_count(base: ExportedProgram) -> None:
    scrubbed = copy.deepcopy(base)
    scrub(scrubbed)
    assert same(base, scrubbed)
    assert not same(base, scrubbed, KeyPolicy(kept=frozenset({"stack_trace"})))


def test_grouping_of_nodes_counts_for_whole_exports() -> None:
    grouped = make().run_decompositions({})
    scrubbed = copy.deepcopy(grouped)
    scrub(scrubbed)
    assert not same(grouped, scrubbed, WHOLE_EXPORT)
    # Graphs have other ids in another export, or process.
    assert same(grouped, make().run_decompositions({}), WHOLE_EXPORT)


def rename(program: ExportedProgram) -> None:
    for n, found in enumerate(program.graph.nodes):
        found.meta["debug_handle"] += 100
        found.meta.pop("nn_module_stack", None)
        if found.op == "call_function":
            old, found.name = found.name, f"renamed_{n}"
            for spec in program.graph_signature.output_specs:
                if spec.arg.name == old:
                    spec.arg.name = found.name
    rename_parameter(program)


def test_the_canonical_key_ignores_names_handles_and_classes(base: ExportedProgram) -> None:
    renamed = copy.deepcopy(base)
    rename(renamed)
    assert same(base, renamed, CANONICAL)
    assert not same(base, renamed)
    handles = key(renamed, policy=CANONICAL).handles
    assert handles == tuple(h + 100 for h in key(base, policy=CANONICAL).handles)


# --- refused ------------------------------------------------------------------------------------


class Opaque:
    pass


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        Opaque(),
        lambda: 1,
        Opaque,
        torch.ones(2, 2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
        {"deep": [Opaque()]},
        {torch.ones(1)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_stable_form_is_refused(value: Any) -> None:
    with pytest.raises(Unkeyable):
        ProgramEncoder().put(value)


def test_an_opaque_value_in_a_program_is_refused_with_a_reason(base: ExportedProgram) -> None:
    changed = copy.deepcopy(base)
    node(changed, "relu").meta["secret"] = Opaque()
    with pytest.raises(Unkeyable, match="Opaque"):
        key(changed)


def test_a_fact_with_an_address_is_refused() -> None:
    with pytest.raises(Unkeyable, match="'isa'"):
        facts_digest({"isa": repr(Opaque())})


def test_operators_of_the_user_need_a_source(base: ExportedProgram) -> None:
    with torch.library._scoped_library("unknown_of_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        with pytest.raises(Unkeyable, match="unknown_of_test"):
            Encoder().put(torch.ops.unknown_of_test.twice.default)


# --- values -------------------------------------------------------------------------------------


def encoded(value: Any) -> bytes:
    encoder = Encoder()
    encoder.put(value)
    return encoder.stream.bytes() + encoder.weights.bytes()


DISTINCT: list[Any] = [
    None,
    False,
    0,
    0.0,
    -0.0,
    "",
    b"",
    (),
    [],
    {},
    set(),
    "0",
    b"0",
    [0],
    (0,),
    [[0]],
    [0, 0],
    {"a": 1, "b": 2},
    {"b": 2, "a": 1},
    {"a": 2, "b": 1},
    slice(0, 1),
    float("nan"),
    1,
    True,
    1.0,
    1 + 0j,
    Ellipsis,
    torch.float32,
    torch.strided,
    torch.contiguous_format,
    torch.device("cpu"),
    torch.ones(2),
    torch.ones(2, 1),
    torch.ones(2).to(torch.int32),
    torch.nn.Parameter(torch.ones(2)),
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add.Scalar,
]


def test_different_values_have_different_bytes() -> None:
    assert len({encoded(value) for value in DISTINCT}) == len(DISTINCT)


def test_sets_have_no_order() -> None:
    assert encoded({"a", "b", "c", "d"}) == encoded({"d", "c", "b", "a"})


def test_memory_that_is_shared_counts() -> None:
    one = torch.ones(3)
    assert encoded([one, one]) != encoded([one, torch.ones(3)])
    assert encoded([torch.ones(0), torch.ones(0)]) == encoded([torch.ones(0)] * 2)


def test_a_storage_is_hashed_once_per_lowering_and_again_when_it_changed() -> None:
    digests, tensor = StorageDigests(), torch.zeros(1000)
    first = digests.of(tensor.untyped_storage(), tensor._version)
    assert digests.of(tensor[5:].untyped_storage(), tensor._version) == first
    assert digests.hashed_bytes == 4000
    tensor.add_(1)
    assert digests.of(tensor.untyped_storage(), tensor._version) != first


def test_wrapped_tensors_count_by_what_they_hold() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def quantized(change: float) -> bytes:
        torch.manual_seed(3)
        layer = nn.Sequential(nn.Linear(32, 32))
        layer[0].weight.detach()[0, 0] += change
        quantize_(layer, Int8WeightOnlyConfig())
        return encoded(layer[0].weight)

    assert quantized(0.0) == quantized(0.0)
    assert quantized(0.0) != quantized(5.0)
