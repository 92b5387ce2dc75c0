"""What real keys are made of is explained in the words that a person would use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig
from executorch.exir.backend.compile_spec_schema import CompileSpec
from torch.export import ExportedProgram, export

from cas import ActionRecord
from cas.executorch.actions import backends, facts
from cas.executorch.actions.keys import action_key
from cas.executorch.actions.weights import StorageDigests
from cas.executorch.actions.whole_keys import Request, lowering_key
from cas.explain import compare


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return export(Net().eval(), (torch.zeros(2, 8),), strict=False)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return {
        **facts.fixed_facts(),
        **facts.ambient_facts({}),
        **backends.fixed_facts(XnnpackBackend),
    }


@pytest.fixture(scope="module")
def delegate(environment: dict[str, str]) -> Callable[..., ActionRecord]:
    """The record of a delegate, with options and with facts other than those of this machine."""

    def made(
        program: ExportedProgram, facts: Mapping[str, str] | None = None, **specs: bytes
    ) -> ActionRecord:
        listed = [CompileSpec(name, value) for name, value in specs.items()]
        found = {**environment, **(facts or {})}
        key = action_key("XnnpackBackend", {"forward": [program]}, {"forward": [listed]}, found)
        return ActionRecord(key.digest, "delegate", key.factors, None)

    return made


def told(before: ActionRecord, after: ActionRecord) -> list[str]:
    assert before.key != after.key
    return [difference.text() for difference in compare(before, after)]


Delegate = Callable[..., ActionRecord]


def test_a_changed_weight_is_named(program: ExportedProgram, delegate: Delegate) -> None:
    changed = copy.deepcopy(program)
    changed.state_dict["second.weight"].data[0, 0] += 1
    assert told(delegate(program), delegate(changed)) == [
        "the weight second.weight: another content"
    ]


def test_a_changed_option_is_named_with_its_values(
    program: ExportedProgram, delegate: Delegate
) -> None:
    before, after = delegate(program, precision=b"fp32"), delegate(program, precision=b"fp16")
    assert told(before, after) == ["the option precision: fp32 -> fp16"]
    assert told(delegate(program), after) == ["the option precision: none -> fp16"]


def test_a_changed_environment_variable_is_named(
    program: ExportedProgram, delegate: Delegate
) -> None:
    changed = facts.ambient_facts({"TORCH_X": "1"})
    assert told(delegate(program), delegate(program, changed)) == [
        "the environment variable TORCH_X: none -> 1"
    ]


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ("version: torchao", "the version of torchao"),
        ("sources: executorch/backends/xnnpack", "the source files of executorch/backends/xnnpack"),
        ("torch: default dtype", "torch's default dtype"),
        ("machine: architecture", "the machine's architecture"),
        ("backend: class", "the backend's class"),
    ],
)
def test_another_environment_is_named_by_what_differs(
    program: ExportedProgram,
    delegate: Delegate,
    environment: dict[str, str],
    fact: str,
    words: str,
) -> None:
    assert fact in environment
    (text,) = told(delegate(program), delegate(program, {fact: "another"}))
    assert text.startswith(f"{words}: ")


def test_a_changed_graph_is_told_as_the_program(
    program: ExportedProgram, delegate: Delegate
) -> None:
    changed = copy.deepcopy(program)
    node = next(n for n in changed.graph.nodes if n.name.startswith("relu"))
    node.target = torch.ops.aten.neg.default
    assert told(delegate(program), delegate(changed)) == [
        "the program: its operators, their arguments, shapes or names: another content"
    ]


def whole(program: ExportedProgram, config: object = None, **options: object) -> ActionRecord:
    request = Request.of((program,), options)
    assert request is not None
    key = lowering_key(request, StorageDigests()).with_config(config)
    return ActionRecord(key.digest, "whole-export", key.factors, None)


def test_what_a_whole_export_is_configured_with_is_told_apart(program: ExportedProgram) -> None:
    plain = whole(program)
    (text,) = told(plain, whole(program, partitioner=[XnnpackPartitioner()]))[:1]
    assert text.startswith("the option partitioner: ") and "XnnpackPartitioner" in text
    (text,) = told(plain, whole(program, compile_config=EdgeCompileConfig(_skip_dim_order=True)))
    assert text.startswith("the option compile_config: ")
    assert told(plain, whole(program, ExecutorchBackendConfig(segment_alignment=4096))) == [
        "the config of to_executorch: another content"
    ]
