"""`cas export`: a model, through ExecuTorch and the store, to files."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cas.assemble import check_targets
from cas.errors import Refused
from cas.exportspec import (
    DEFAULT_TAG,
    DTYPES,
    ExportOptions,
    Source,
    parse_source,
    parse_specs,
)
from cas.layout import check_file_name, check_ref_name
from cas.refs import check_collision
from cas_cli import completion, options
from cas_cli.app import App, current
from cas_cli.outputs import OutputDirectory, require_directory
from cas_cli.quiet import quiet, stdout_to_stderr
from cas_cli.render import count, ratio, size

if TYPE_CHECKING:
    from cas.executorch.saving import SaveResult
    from cas.progress import Progress

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class MissingExtra(Refused):
    """ExecuTorch is an extra of the distribution, and not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"{package} is not installed; install it with: pip install 'cas-artifacts[executorch]'"
        )


def config_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that correspond one to one to arguments of torch.export and ExecuTorch."""
    decorators: list[Decorator] = [
        click.option(
            "--strict/--no-strict",
            default=None,
            help="Trace with TorchDynamo (torch.export's strict).",
        ),
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            help="Convert floating point weights and inputs first.",
        ),
        click.option(
            "--skip-ir-check",
            is_flag=True,
            help="Do not validate the edge program (quantized models may need it).",
        ),
        click.option("--no-dim-order", is_flag=True, help="Skip the dim order operators."),
        click.option(
            "--segment-alignment",
            type=int,
            metavar="BYTES",
            help="A power of two; ExecuTorch's own by default.",
        ),
        click.option(
            "--constant-alignment",
            type=int,
            metavar="BYTES",
            help="A power of two; ExecuTorch's own by default.",
        ),
        click.option(
            "--delegate-alignment",
            type=int,
            metavar="BYTES",
            help="A power of two; ExecuTorch's own by default.",
        ),
        click.option(
            "--no-extract-delegate-segments",
            is_flag=True,
            help="Keep delegate data inside the program's flatbuffer.",
        ),
        click.option(
            "--no-remove-view-copy", is_flag=True, help="Keep view_copy operators as they are."
        ),
        click.option(
            "--quant-fusion", is_flag=True, help="Run quantization fusion and constant propagation."
        ),
        click.option(
            "--no-alloc-graph-input",
            is_flag=True,
            help="Leave input buffers to the caller of the runtime.",
        ),
        click.option(
            "--no-alloc-graph-output",
            is_flag=True,
            help="Leave output buffers to the caller of the runtime.",
        ),
    ]
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


@options.command(short_help="Export a model with ExecuTorch through the store.")
@click.argument("source", shell_complete=completion.files)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    required=True,
    type=OutputDirectory(),
    help="Where the files go; created if it is not there.",
)
@click.option("--name", metavar="NAME", help="The artifact's name; made from SOURCE by default.")
@click.option(
    "--basename",
    metavar="NAME",
    default="model",
    show_default=True,
    help="The program's file name, without .pte.",
)
@click.option(
    "--backend",
    default="portable",
    show_default=True,
    metavar="portable|xnnpack|cuda|PKG.MOD:PARTITIONER",
    shell_complete=completion.backends,
    help="What to lower to.",
)
@click.option(
    "--spec",
    "specs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A compile spec for the CUDA backend, such as low_memory_mode=ON; repeatable.",
)
@click.option(
    "--external-weights", is_flag=True, help="Write the weights to a .ptd file beside the .pte."
)
@click.option(
    "--external-tag",
    metavar="TAG",
    help="The same, to TAG.ptd instead of ExecuTorch's default name.",
)
@click.option(
    "--spill/--no-spill",
    default=True,
    show_default=True,
    help="Keep the model in the store instead of in memory while it is exported.",
)
@options.action_options
@config_options
def command(
    source: str,
    output: Path,
    name: str | None,
    basename: str,
    spill: bool,
    no_actions: bool,
    recheck: str | None,
    **flags: Any,
) -> None:
    """Export SOURCE and record the result as an artifact.

    \b
    SOURCE is one of
      file.pt2        an exported program
      FILE.py:ATTR    an attribute of a Python file
      PKG.MOD:ATTR    an attribute of a module
    ATTR is a callable that gives (module, args[, kwargs][, dynamic_shapes]), an
    ExportedProgram, or a dict of method name to either.

    Without further options this is torch.export.export, to_edge_transform_and_lower
    and to_executorch with their defaults, and the files have the very bytes that a
    script of these three calls writes.
    """
    app = current()
    wanted = _request(app.path, source, output, name, basename, _options(flags))
    actions = app.actions(no_actions, recheck)
    began = time.monotonic()
    result = _export(app, wanted, spill, actions)
    _report(app, result, output, time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request; only now do the seconds begin that importing ExecuTorch takes."""

    source: Source
    output: Path
    name: str
    basename: str
    options: ExportOptions


def _request(
    store: Path,
    text: str,
    output: Path,
    name: str | None,
    basename: str,
    export_options: ExportOptions,
) -> Request:
    source = parse_source(text)
    source.check_file()
    export_options.validate()
    files = [check_file_name(f"{basename}.pte"), *export_options.data_files()]
    chosen = source.default_name() if name is None else check_ref_name(name)
    require_directory(output, store)
    check_targets(output, files)
    for package in ("torch", "executorch"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package)
    return Request(source, output, chosen, basename, export_options)


def _export(app: App, wanted: Request, spill: bool, actions: tuple[bool, float]) -> SaveResult:
    with app.store(create=True, write=True) as store:
        check_collision(store.context.layout, wanted.name)
        with app.progress() as progress, _frameworks(app, progress):
            from cas.executorch.exporting import export_source

            return export_source(
                store,
                wanted.source,
                wanted.output,
                name=wanted.name,
                basename=wanted.basename,
                options=wanted.options,
                spill=spill,
                reuse=actions[0],
                recheck=actions[1],
                progress=progress,
                command=["cas", *sys.argv[1:]],
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            )


@contextlib.contextmanager
def _frameworks(app: App, progress: Progress) -> Iterator[None]:
    """Import what takes seconds, and keep it quiet then and for the length of the block."""

    def hush() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if app.given.verbose else quiet()

    progress.start("import torch and executorch", None)
    with stdout_to_stderr(), hush():
        importlib.import_module("torch")
        with hush():  # again: importing torch sets up its loggers
            importlib.import_module("cas.executorch.exporting")
            progress.finish()
            yield


def _options(flags: dict[str, Any]) -> ExportOptions:
    """A flag that was not given leaves ExecuTorch's own default."""

    def off(flag: str) -> bool | None:
        return False if flags[flag] else None

    return ExportOptions(
        backend=flags["backend"],
        specs=parse_specs(flags["specs"]),
        external_weights=flags["external_weights"] or flags["external_tag"] is not None,
        external_tag=DEFAULT_TAG if flags["external_tag"] is None else flags["external_tag"],
        strict=flags["strict"],
        dtype=flags["dtype"],
        check_ir=off("skip_ir_check"),
        dim_order=off("no_dim_order"),
        segment_alignment=flags["segment_alignment"],
        constant_alignment=flags["constant_alignment"],
        delegate_alignment=flags["delegate_alignment"],
        extract_delegate_segments=off("no_extract_delegate_segments"),
        remove_view_copy=off("no_remove_view_copy"),
        quant_fusion=True if flags["quant_fusion"] else None,
        alloc_graph_input=off("no_alloc_graph_input"),
        alloc_graph_output=off("no_alloc_graph_output"),
    )


def _report(app: App, result: SaveResult, output: Path, seconds: float) -> None:
    commit = result.commit
    document = {
        "ref": str(commit.ref),
        "manifest": str(commit.ref.manifest),
        "files": [
            {"path": str(output / f.name), "size": f.size, "blake3": f.digest.hex()}
            for f in commit.files
        ],
        "logical_bytes": commit.logical_bytes,
        "new_bytes": commit.new_bytes,
        "chunks": commit.chunks,
        "new_chunks": commit.new_chunks,
        "seconds": round(seconds, 3),
    }

    def show() -> None:
        for file in commit.files:
            click.echo(f"{output / file.name}  {size(file.size)}")
        click.echo(
            f"recorded as {document['ref']} in {seconds:.1f} s: {size(commit.logical_bytes)} in "
            f"the files, {size(commit.new_bytes)} new in the store "
            f"({ratio(commit.new_bytes, commit.logical_bytes)}, "
            f"{commit.new_chunks} of {count(commit.chunks, 'chunk')})"
        )

    app.report(document, show)
