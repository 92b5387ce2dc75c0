"""What is known about each backend: what its keys may leave out, and what else decides."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import executorch

from cas.digest import Digest
from cas.executorch.actions import aoti, facts, xnnpack
from cas.executorch.actions.errors import Unkeyable
from cas.executorch.actions.lowered import spec_items
from cas.executorch.actions.objects import ObjectEncoder
from cas.executorch.actions.policy import ORIGIN, STRICT, TAGS, KeyPolicy
from cas.executorch.actions.sources import module_digest, tree_digest

Relocate: TypeAlias = Callable[[bytes, Mapping[int, int]], bytes]

#: With these options a backend writes files aside, which a hit would not.
_SIDE_EFFECTS: Final = frozenset({"debug_artifact_path", "dump_debug_info", "intermediate_path"})

#: Sources of the XNNPACK backend under which its payloads were found to depend neither on names
#: nor on values of debug handles (``tests/executorch/actions/test_canonical.py``).
_XNNPACK_SOURCES: Final = frozenset(
    {"72752002b43fc994b716a97e8613e08d74694637f1bf596d78e767138064c0dd"}  # 1.5.1
)
#: The fact that is a backend's methods, and what the code of a user's one refers to.
CODE: Final = "backend: code"
CLASS: Final = "backend: class"
_AOTI: Final = "executorch.backends.aoti.aoti_backend"


@dataclass(frozen=True, slots=True)
class Profile:
    """How one backend's actions are keyed and given back.

    Attributes:
        policy: what its keys leave out.
        relocate: puts other debug handles into a payload; None where payloads hold none.
        aoti: whether it compiles with AOTInductor.
    """

    policy: KeyPolicy = STRICT
    relocate: Relocate | None = None
    aoti: bool = False


#: What else depends on where in a model a partition is: an input has the metadata of the node that
#: makes it, in front of the partition.
_SURROUNDINGS: Final = frozenset({"original_aten", "xnn_partitioner_config"})
CANONICAL: Final = KeyPolicy(names=False, handles="pattern", dropped=ORIGIN | TAGS | _SURROUNDINGS)
_CANONICAL_XNNPACK: Final = Profile(CANONICAL, xnnpack.relocate)
_AOTI_FAMILY: Final = Profile(KeyPolicy(handles="ignored"), aoti=True)
#: Names some of its data by a digest of the program's text, stack traces included.
_MLX: Final = Profile(KeyPolicy(kept=frozenset({"stack_trace"})))


def profile_of(backend: type) -> Profile:
    name, module = backend.__name__, backend.__module__
    if name == "XnnpackBackend" and module == "executorch.backends.xnnpack.xnnpack_preprocess":
        return _CANONICAL_XNNPACK if _is_known_xnnpack() else Profile()
    if name == "MLXBackend":
        return _MLX
    base = getattr(sys.modules.get(_AOTI), "AotiBackend", None)
    if base is not None and issubclass(backend, base):
        return _AOTI_FAMILY
    return Profile()


@functools.cache
def xnnpack_sources() -> Digest:
    """What the XNNPACK backend is made of, on every platform the same."""
    return tree_digest(_package_directory() / "backends" / "xnnpack", (".fbs", ".py"))


def _is_known_xnnpack() -> bool:
    return xnnpack_sources().hex() in _XNNPACK_SOURCES


def check_options(specs: Iterable[Any]) -> None:
    """
    Raises:
        Unkeyable: with one of the options compiling has an effect besides its result.
    """
    for key, _ in spec_items(specs):
        if key in _SIDE_EFFECTS:
            raise Unkeyable(f"the option {key!r} makes the backend write files aside")


def measures_kernels(backend: type, specs: Iterable[Any]) -> bool:
    """Whether the backend chooses kernels by their speed, and so makes other bytes each time."""
    chosen = {key: value for key, value in spec_items(specs)}.get("max_autotune")
    if chosen is not None:
        return chosen.upper() == b"ON"
    config = sys.modules.get("torch._inductor.config")
    return backend.__name__ in ("CudaBackend", "MetalBackend") or bool(
        getattr(config, "max_autotune", False)
    )


# --- facts --------------------------------------------------------------------------------------


def fixed_facts(backend: type) -> dict[str, str]:
    """What no program changes while it runs: versions, sources, compilers, the machine."""
    found = {CLASS: f"{backend.__module__}.{backend.__qualname__}"}
    for root in _source_roots(backend):
        name = root.relative_to(_package_directory()).as_posix()
        found[f"sources: executorch/{name}"] = tree_digest(root).hex()
    if not backend.__module__.startswith("executorch."):
        found["sources: backend"] = module_digest(backend.__module__).hex()
    if profile_of(backend).aoti:
        found.update(_aoti_fixed())
    return found


@functools.cache
def _aoti_fixed() -> Mapping[str, str]:
    return aoti.fixed_facts()


def ambient_facts(backend: type) -> dict[str, str]:
    """What a program, or a compile, can change.

    Raises:
        Unkeyable: something was set that has no stable form.
    """
    found = facts.ambient_facts()
    found[CODE] = _class_digest(backend).hex()
    visitors = sys.modules.get("executorch.backends.xnnpack.operators.node_visitor")
    if backend.__name__ == "XnnpackBackend" and visitors is not None:
        found["backend: operators of the user's"] = _foreign_visitors(visitors)
    if profile_of(backend).aoti:
        found.update(aoti.ambient_facts())
    return found


def _source_roots(backend: type) -> list[Path]:
    """The parts of the executorch package that a backend's code is in, and exir."""
    package = _package_directory()
    roots = [package / "exir", package / "backends" / "transforms"]
    for kind in backend.__mro__:
        parts = kind.__module__.split(".")
        if parts[:2] == ["executorch", "backends"] and len(parts) > 2:
            roots.append(package / "backends" / parts[2])
    return [root for root in dict.fromkeys(roots) if root.is_dir()]


def _package_directory() -> Path:
    return Path(next(iter(executorch.__path__)))


def _class_digest(backend: type) -> Digest:
    """The methods and values that the class has now: replaced ones (monkey patches) count.

    Of a class of the user's, also what its code refers to.

    Raises:
        Unkeyable: it refers to something that has no content to go by.
    """
    encoder = ObjectEncoder(trees=_trees)
    for kind in backend.__mro__[:-1]:
        if kind.__module__.split(".", 1)[0] == "executorch":
            encoder.put_members(kind)  # its sources are facts already
        else:
            encoder.put(kind)
    return encoder.stream.digest()


#: Of this process: sources that are edited while it runs are not what it runs.
_trees: Final[dict[Path, Digest]] = {}


def _foreign_visitors(module: Any) -> str:
    registry = getattr(module, "_node_visitor_dict", {})
    foreign = sorted(
        f"{name}={_class_digest(kind).hex()[:16]}"
        for name, kind in registry.items()
        if not kind.__module__.startswith("executorch.")
    )
    return " ".join(foreign) or "none"
