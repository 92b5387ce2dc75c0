"""The key of a whole export: programs, and everything they are lowered with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import executorch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig
from executorch.exir.backend.backend_details import BackendDetails
from torch._decomp import global_decomposition_table
from torch.export import ExportedProgram

from cas.digest import Digest
from cas.executorch.actions import backends, drift, facts
from cas.executorch.actions.encoder import KNOWN_PACKAGES
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.keys import combine
from cas.executorch.actions.objects import ObjectEncoder
from cas.executorch.actions.policy import WHOLE_EXPORT
from cas.executorch.actions.sources import tree_digest
from cas.executorch.actions.stream import Stream
from cas.executorch.actions.weights import StorageDigests
from cas.strictjson import Json

#: Change it with anything about what a record of a whole export holds.
SUBJECT: Final = "whole export 1"

_NO_WEIGHTS: Final = Digest.of(b"")


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``to_edge_transform_and_lower``, each under its name.

    ``given_config`` is the compile config of the caller's own, if there is one. ``trees`` are the
    sources of packages that its options were found to refer to, each looked at once.
    """

    programs: Mapping[str, ExportedProgram]
    transform_passes: Any
    partitioner: Any
    constant_methods: Any
    compile_config: Any
    generate_etrecord: Any
    given_config: Any = None
    trees: dict[Path, Digest] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Request | None:
        """None where they are not what the function takes: then it shall say so itself."""
        try:
            bound = _SIGNATURE.bind(*arguments, **keywords)
        except TypeError:
            return None
        bound.apply_defaults()
        given = dict(bound.arguments)
        given["given_config"] = given["compile_config"]
        if given["compile_config"] is None:
            given["compile_config"] = EdgeCompileConfig()
        programs = given.pop("programs")
        if isinstance(programs, ExportedProgram):
            programs = {"forward": programs}
        if not isinstance(programs, dict):
            return None
        if not all(isinstance(program, ExportedProgram) for program in programs.values()):
            return None
        return cls(dict(programs), **given)

    @property
    def label(self) -> str:
        return f"export of {', '.join(map(str, self.programs)) or 'nothing'}"

    def workers_digest(self, trees: dict[Path, Digest] | None = None) -> Digest:
        """What the partitioners and passes are now.

        Args:
            trees: sources that were looked at just before, such as `trees`.

        Raises:
            Unkeyable
        """
        encoder = ObjectEncoder(trees=trees)
        encoder.put([self.partitioner, self.transform_passes])
        return encoder.stream.digest()

    def is_compiled_by_aoti(self) -> bool:
        """Whether AOTInductor may be part of it, which does not make the same bytes twice."""
        return any(backends.profile_of(backend).aoti for backend, _ in _backends(self))

    def partitioners(self) -> Iterator[Any]:
        lists = self.partitioner
        for part in lists.values() if isinstance(lists, dict) else (lists,):
            yield from part if isinstance(part, (list, tuple)) else () if part is None else (part,)


def _parameters(
    programs: Any,
    transform_passes: Any = None,
    partitioner: Any = None,
    constant_methods: Any = None,
    compile_config: Any = None,
    generate_etrecord: Any = False,
) -> None:
    """The parameters of ``to_edge_transform_and_lower``, whose own are hidden by a decorator."""


_SIGNATURE: Final = inspect.signature(_parameters)


@dataclass(frozen=True, slots=True)
class WholeKey:
    """The key of lowering some programs, or with a configuration, of the whole export.

    ``inputs`` is what `inputs_digest` gave then.
    """

    digest: Digest
    factors: Mapping[str, Json]
    inputs: Digest

    def knows(self, backend: str) -> bool:
        """Whether all that decides what a backend makes is part of the key."""
        found = self.factors.get("environment")
        return isinstance(found, dict) and f"{backends.CLASS} of {backend}" in found

    def with_config(self, config: Any) -> WholeKey:
        """The key of what ``to_executorch(config)`` makes of it.

        Raises:
            Unkeyable
        """
        encoder = ObjectEncoder()
        encoder.put(ExecutorchBackendConfig() if config is None else config)
        if getattr(config, "emit_stacktrace", False):
            raise Unkeyable("stack traces in the program, which keys leave out")
        stream = Stream()
        stream.put(b"wl", self.digest)
        stream.put(b"wc", encoder.stream.digest())
        stream.put(b"ww", encoder.weights.digest())
        action = self.factors.get("action")
        parts = dict(action) if isinstance(action, dict) else {}
        parts["configuration digest"] = encoder.stream.digest().hex()
        return replace(self, digest=stream.digest(), factors={**self.factors, "action": parts})


def lowering_key(request: Request, digests: StorageDigests) -> WholeKey:
    """The key of lowering ``request``.

    Raises:
        Unkeyable: something has no form that is the same in every process.
    """
    if request.generate_etrecord:
        raise Unkeyable("an ETRecord, which holds the programs on the way")
    encoder = ObjectEncoder(digests, request.trees)
    constant_methods = _put_inputs(encoder, request)
    inputs = _inputs_digest(encoder, constant_methods)
    options: dict[str, Json] = {}
    parts = Stream()
    for name in ("transform_passes", "partitioner", "constant_methods", "compile_config"):
        if name == "constant_methods":
            digest = constant_methods
        else:
            digest = _digest_aside(encoder, getattr(request, name))
        parts.put_text(b"on", name)
        parts.put(b"od", digest)
        options[name] = _described(getattr(request, name), digest)
    found = environment(request, encoder.backends)
    names = {"subject": SUBJECT, "policy": WHOLE_EXPORT.describe()}
    digest, sections = combine(encoder, names, found, parts.digest())
    return WholeKey(
        digest,
        {
            "action": {**names, **sections},
            "options": options,
            "weights": {**encoder.named_weights},
            "environment": {**found},
        },
        inputs,
    )


def inputs_digest(request: Request) -> Digest:
    """What `WholeKey.inputs` would be now; no weight is read for it.

    Raises:
        Unkeyable
    """
    encoder = ObjectEncoder(_Unread())
    return _inputs_digest(encoder, _put_inputs(encoder, request))


def _put_inputs(encoder: ObjectEncoder, request: Request) -> Digest:
    """Write the programs into the encoder's stream, and give the digest of the constant methods.

    They come before all that the caller may use up, so that they can be compared without it.
    """
    constant_methods = _digest_aside(encoder, request.constant_methods)
    for name, program in request.programs.items():
        encoder.put_name(name)
        encoder.put_program(program)
    return constant_methods


def _inputs_digest(encoder: ObjectEncoder, constant_methods: Digest) -> Digest:
    stream = Stream()
    stream.put(b"im", constant_methods)
    stream.put(b"ip", encoder.stream.digest())
    return stream.digest()


def _digest_aside(encoder: ObjectEncoder, value: Any) -> Digest:
    outer = encoder.aside()
    encoder.put(value)
    digest = encoder.aside().digest()
    encoder.stream = outer
    return digest


class _Unread(StorageDigests):
    """For who compares everything but the weights."""

    def of(self, storage: Any, version: int = 0) -> Digest:
        return _NO_WEIGHTS


def _described(value: Any, digest: Digest) -> str:
    """An option for a person to compare: what it is, and that it differs."""
    listed = value if isinstance(value, (list, tuple)) else (value,)
    return f"{', '.join(type(item).__name__ for item in listed) or 'empty'} {digest.hex()[:16]}"


def weights_digest(programs: Mapping[str, ExportedProgram], digests: StorageDigests) -> Digest:
    """What the weights of the programs are now.

    Raises:
        Unkeyable
    """
    encoder = ObjectEncoder(digests)
    for program in programs.values():
        encoder.put([*program.state_dict.values(), *program.constants.values()])
    return encoder.weights.digest()


def environment(request: Request, named: Iterable[str] = ()) -> dict[str, str]:
    """What decides an export besides its arguments, without what compiling itself changed.

    Args:
        named: backends that the arguments name somewhere.

    Raises:
        Unkeyable
    """
    exir = Path(next(iter(executorch.__path__))) / "exir"
    found = {**facts.fixed_facts(), **facts.ambient_facts()}
    found["sources: executorch/exir"] = tree_digest(exir).hex()
    found["torch: decompositions of the user's"] = _foreign_decompositions()
    found = drift.FACTS.rebase(found)
    for backend, is_named in _backends(request, named):
        try:
            own = {**backends.fixed_facts(backend), **backends.ambient_facts(backend)}
        except Unkeyable:
            if is_named:
                raise
            continue  # nothing is kept if it gets a part after all
        for name, value in drift.FACTS.rebase(own).items():
            shared = not name.startswith("backend: ")
            found[name if shared else f"{name} of {backend.__name__}"] = value
    return found


def _foreign_decompositions() -> str:
    """Decompositions that code outside of torch has registered, for any operator."""
    found = []
    for table in global_decomposition_table.values():
        for operator, function in table.items():
            module = str(getattr(function, "__module__", ""))
            if module.split(".", 1)[0] not in KNOWN_PACKAGES:
                encoder = ObjectEncoder()
                encoder.put(function)
                found.append(f"{operator}={encoder.stream.digest().hex()[:16]}")
    return " ".join(sorted(found)) or "none"


def _backends(request: Request, named: Iterable[str] = ()) -> list[tuple[Any, bool]]:
    """The backends that the partitioners are for, and whether they name them.

    If one does not tell, they are all that are loaded.
    """
    loaded = {backend.__name__: backend for backend in BackendDetails.__subclasses__()}
    wanted = dict.fromkeys((name for name in named if name in loaded), True)
    for partitioner in request.partitioners():
        name = getattr(getattr(partitioner, "delegation_spec", None), "backend_id", None)
        if isinstance(name, str) and name in loaded:
            wanted[name] = True
        else:
            wanted = {**dict.fromkeys(loaded, False), **wanted}
    return [(loaded[name], wanted[name]) for name in sorted(wanted)]
