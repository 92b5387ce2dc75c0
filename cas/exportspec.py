"""What an export is asked for: its source, backend and options.

Nothing here imports torch, so that a typo is answered at once and not after the seconds that
importing ExecuTorch takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from cas.errors import Damaged, NotFound, Refused, UsageError
from cas.layout import check_file_name, check_ref_name
from cas.strictjson import Json

FORMS = "file.pt2, PKG.MOD:ATTR or FILE.py:ATTR"
BACKENDS = "portable, xnnpack, cuda or PKG.MOD:PARTITIONER"
#: A larger alignment would only fill files with padding.
MAX_ALIGNMENT = 1 << 30
DTYPES = ("float32", "float16", "bfloat16", "float64")

#: The compile specs that ExecuTorch's CUDA backend and partitioner read, and which are ON or OFF.
CUDA_SWITCHES = (
    "autotune_at_compile_time",
    "emulate_precision_casts",
    "low_memory_mode",
    "max_autotune",
    "triton_kernel_mode",
)
CUDA_SPECS = (*CUDA_SWITCHES, "platform", "shim_library_path", "target_device")
#: Where the CUDA backend puts weights.
CUDA_WEIGHTS = "aoti_cuda_blob.ptd"

#: Where ExecuTorch itself puts external constants when no tag is given.
DEFAULT_TAG = "_default_external_constant"


class SourceInvalid(UsageError):
    """The source is not of a form, or does not give a value, that can be exported."""


class SourceNotFound(NotFound):
    """The file, module or attribute does not exist."""


class SourceDamaged(Damaged):
    """A ``.pt2`` file that cannot be read."""


class BackendUnavailable(Refused):
    """A backend that this version, or this installation, cannot lower to."""


class BackendNotFound(NotFound):
    """The module of a backend, or its partitioner, does not exist."""


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed, not yet loaded source. ``attr`` is empty for a ``.pt2`` file."""

    text: str
    location: str
    attr: str = ""

    @property
    def is_file(self) -> bool:
        return self.location.endswith((".py", ".pt2"))

    def default_name(self) -> str:
        """A ref name made from the source: ``model.py:small`` gives ``model/small``.

        Raises:
            SourceInvalid: nothing usable is left of it.
        """
        stem = Path(self.location).stem if self.is_file else self.location.rpartition(".")[2]
        parts = [re.sub(r"[^A-Za-z0-9._+=,-]+", "-", part) for part in (stem, self.attr)]
        name = "/".join(part.lstrip(".-") for part in parts if part.lstrip(".-"))
        if not name:
            raise SourceInvalid(f"no artifact name can be made from {self.text!r}; give --name")
        return check_ref_name(name)

    def check_file(self) -> None:
        """See that the file is there, if the source is one.

        Raises:
            SourceNotFound, SourceInvalid
        """
        if not self.is_file:
            return
        if not Path(self.location).exists():
            raise SourceNotFound(f"source file {self.location} does not exist")
        if not Path(self.location).is_file():
            raise SourceInvalid(f"source {self.location} is not a file")


def parse_source(text: str) -> Source:
    """Split a source as written on the command line; nothing is read yet.

    Raises:
        SourceInvalid: it has none of the three forms.
    """
    if text.endswith(".pt2"):
        return Source(text, text)
    location, colon, attr = text.rpartition(":")
    if not colon or not location or not attr:
        looks_like_file = (location or text).endswith(".py")
        hint = f"; which attribute of {text.rstrip(':')}?" if looks_like_file else ""
        raise SourceInvalid(f"{text!r} is not a source: expected {FORMS}{hint}")
    if not all(part.isidentifier() for part in attr.split(".")):
        raise SourceInvalid(f"{attr!r} in {text!r} is not an attribute name: expected {FORMS}")
    if not location.endswith(".py"):
        if "/" in location:
            raise SourceInvalid(
                f"{location!r} is neither a .py file nor a module: expected {FORMS}"
            )
        if not all(part.isidentifier() for part in location.split(".")):
            raise SourceInvalid(f"{location!r} is not a module name: expected {FORMS}")
    return Source(text, location, attr)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What an export does other than ExecuTorch's defaults; None leaves ExecuTorch's own."""

    backend: str = "portable"
    #: Compile specs for the CUDA backend: (key, value).
    specs: tuple[tuple[str, str], ...] = ()
    external_weights: bool = False
    external_tag: str = DEFAULT_TAG
    strict: bool | None = None
    dtype: str | None = None
    # EdgeCompileConfig
    check_ir: bool | None = None
    dim_order: bool | None = None
    # ExecutorchBackendConfig
    segment_alignment: int | None = None
    constant_alignment: int | None = None
    delegate_alignment: int | None = None
    extract_delegate_segments: bool | None = None
    remove_view_copy: bool | None = None
    quant_fusion: bool | None = None
    alloc_graph_input: bool | None = None
    alloc_graph_output: bool | None = None

    def changed(self) -> dict[str, Json]:
        """The backend, and each option that is not left to ExecuTorch, for the provenance."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["specs"] = {key: value for key, value in self.specs} or None
        if not self.external_weights:
            values.pop("external_tag")
        return {key: value for key, value in values.items() if value is not None}

    def external_file(self) -> str:
        """The file that ExecuTorch writes for the tag."""
        tag = self.external_tag
        return tag if tag.endswith(".ptd") else f"{tag}.ptd"

    def data_files(self) -> list[str]:
        """The files that may come out beside the program."""
        files = [CUDA_WEIGHTS] if self.backend == "cuda" else []
        return [*files, self.external_file()] if self.external_weights else files

    def validate(self) -> None:
        """Refuse what ExecuTorch would only trip over at the end of a long export.

        Raises:
            UsageError: with the option and what it may be.
        """
        for name in ("segment_alignment", "constant_alignment", "delegate_alignment"):
            value = getattr(self, name)
            if value is None:
                continue
            if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
                raise UsageError(
                    f"{name} must be a power of two of at most {MAX_ALIGNMENT}, got {value}"
                )
        check_backend(self.backend)
        check_specs(self.backend, self.specs)
        if not self.external_tag:
            raise UsageError("the external tag is empty; give a name, or leave it out")
        check_file_name(self.external_file())
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


def check_backend(spec: str) -> None:
    """See that a backend is one of `BACKENDS`.

    Raises:
        UsageError: it is not.
    """
    if spec in ("portable", "xnnpack", "cuda"):
        return
    module, colon, attr = spec.partition(":")
    dotted = [*module.split("."), attr] if colon else [""]
    if not all(part.isidentifier() for part in dotted):
        raise UsageError(f"unknown backend {spec!r}: expected {BACKENDS}")


def parse_specs(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Compile specs as written on the command line, ``KEY=VALUE`` each.

    Raises:
        UsageError: one has no key, or no ``=``.
    """
    specs = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{text!r} is not a compile spec: expected KEY=VALUE")
        specs.append((key, value))
    return tuple(specs)


def check_specs(backend: str, specs: Iterable[tuple[str, str]]) -> None:
    """See that compile specs mean something: the backend ignores what it does not know.

    Raises:
        UsageError: with the spec, and what there is.
    """
    seen: set[str] = set()
    for key, value in specs:
        if backend != "cuda":
            raise UsageError(f"backend {backend} takes no compile specs, got {key}={value}")
        if key == "method_name":
            raise UsageError("the compile spec method_name is filled in for each method; leave it")
        if key not in CUDA_SPECS:
            known = ", ".join(CUDA_SPECS)
            raise UsageError(f"unknown compile spec {key!r}: the CUDA backend reads {known}")
        if key in CUDA_SWITCHES and value.upper() not in ("ON", "OFF"):
            raise UsageError(f"the compile spec {key} is ON or OFF, got {value!r}")
        if key in seen:
            raise UsageError(f"the compile spec {key} is given twice")
        seen.add(key)
