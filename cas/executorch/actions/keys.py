"""The key of an action: everything that decides what a backend makes of some programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch.export import ExportedProgram

from cas.digest import Digest
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.lowered import spec_items
from cas.executorch.actions.policy import STRICT, KeyPolicy
from cas.executorch.actions.programs import ProgramEncoder
from cas.executorch.actions.stream import Stream
from cas.executorch.actions.weights import StorageDigests
from cas.strictjson import Json

#: Change it with anything about how keys are made: older records are then no longer found.
SCHEMA: Final = "cas action key 2"

#: Facts about the environment, by name. Text only, so that a person can compare two of them.
Facts: TypeAlias = "Mapping[str, str]"
Programs: TypeAlias = "Mapping[str, Sequence[ExportedProgram]]"
Specs: TypeAlias = "Mapping[str, Sequence[Sequence[Any]]]"


@dataclass(frozen=True, slots=True)
class ActionKey:
    """A key, the parts that it was made of, and what it may leave out of the programs.

    ``factors`` are for people (`cas explain`): nothing is decided by them. ``handles`` are the
    debug handles, ``constants`` the names of weights in the order of inputs.
    """

    digest: Digest
    factors: Mapping[str, Json]
    handles: tuple[int, ...]
    constants: tuple[str, ...]


def action_key(
    backend: str,
    programs: Programs,
    specs: Specs,
    facts: Facts,
    policy: KeyPolicy = STRICT,
    digests: StorageDigests | None = None,
) -> ActionKey:
    """The key of compiling ``programs`` (method -> partitions) with ``specs`` (likewise).

    Raises:
        Unkeyable: something has no form that is the same in every process.
    """
    encoder = ProgramEncoder(policy, digests)
    options = _encode_specs(encoder, [specs[method] for method in programs])
    for method, partitions in programs.items():
        encoder.put_name(method)
        encoder.stream.put_count(b"pr", len(partitions))
        for program in partitions:
            encoder.put_program(program)
    digest, sections = combine(
        encoder, {"subject": backend, "policy": policy.describe()}, facts, options
    )
    factors: dict[str, Json] = {
        "action": {"backend": backend, "policy": policy.describe(), **sections},
        "options": _option_texts(specs),
        "weights": {**encoder.named_weights},
        "environment": {**facts},
    }
    constants = (
        spec.target
        for partitions in programs.values()
        for program in partitions
        for spec in program.graph_signature.input_specs
    )
    names = tuple(name for name in constants if name is not None)
    return ActionKey(digest, factors, encoder.handles.in_order, names)


def combine(
    encoder: ProgramEncoder, names: Mapping[str, str], facts: Facts, options: Digest
) -> tuple[Digest, dict[str, Json]]:
    """One digest of everything that was encoded, and the digests of its parts in hex.

    Raises:
        Unkeyable: a fact is not one of those that are the same in every process.
    """
    parts = {
        "environment": facts_digest(facts),
        "options": options,
        "graph": encoder.stream.digest(),
        "weights": encoder.weights.digest(),
    }
    whole = Stream()
    whole.put_text(b"ks", SCHEMA)
    for name, text in names.items():
        whole.put_text(b"kn", name)
        whole.put_text(b"kt", text)
    for name, digest in parts.items():
        whole.put_text(b"kp", name)
        whole.put(b"kd", digest)
    return whole.digest(), {f"{name} digest": digest.hex() for name, digest in parts.items()}


def facts_digest(facts: Facts) -> Digest:
    """
    Raises:
        Unkeyable: a fact holds an address, so it is another one in every process.
    """
    stream = Stream()
    for name in sorted(facts):
        if " at 0x" in facts[name]:
            raise Unkeyable(f"the fact {name!r} holds an address")
        stream.put_text(b"fn", name)
        stream.put_text(b"fv", facts[name])
    return stream.digest()


def _encode_specs(encoder: ProgramEncoder, specs: Sequence[Sequence[Sequence[Any]]]) -> Digest:
    """Of the methods in the order of the programs."""
    outer = encoder.aside()
    for partitions in specs:
        encoder.put([spec_items(part) for part in partitions])
    written = encoder.aside()
    encoder.stream = outer
    return written.digest()


def _option_texts(specs: Specs) -> dict[str, Json]:
    """What each option was, by its first value; binary ones by digest."""
    texts: dict[str, Json] = {}
    for partitions in specs.values():
        for part in partitions:
            for key, value in spec_items(part):
                texts.setdefault(key, _option_text(value))
    return texts


def _option_text(value: bytes) -> str:
    try:
        text = value.decode("ascii")
    except UnicodeDecodeError:
        text = ""
    if text and len(text) <= 80 and text.isprintable() and "/" not in text:
        return text
    return str(Digest.of(value))
