"""`cas show`: what one artifact consists of."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from cas_cli import completion, options
from cas_cli.app import current
from cas_cli.render import pairs, size, table

if TYPE_CHECKING:
    from cas.manifest import FileEntry, Manifest, TensorEntry
    from cas.refs import Ref

#: Tensors listed without --tensors; a large model has thousands.
FEW = 10


@options.command(short_help="Show an artifact's files, tensors and origin.")
@click.argument("name", metavar="NAME[@GEN]", shell_complete=completion.artifacts)
@click.option("--files", "only_files", is_flag=True, help="Only the files.")
@click.option("--tensors", "only_tensors", is_flag=True, help="Only the tensors, all of them.")
def command(name: str, only_files: bool, only_tensors: bool) -> None:
    """Show artifact NAME: its files and tensors, and what made it."""
    app = current()
    with app.store() as store:
        ref = store.resolve(name)
        manifest = store.manifest(ref)
    everything = not (only_files or only_tensors)

    def show() -> None:
        if everything:
            _head(ref, manifest)
        if everything or only_files:
            _files(manifest.files)
        if everything or only_tensors:
            _tensors(manifest.tensors, FEW if everything else None)
        if everything:
            _provenance(manifest.provenance)

    app.report(_document(ref, manifest), show)


def _document(ref: Ref, manifest: Manifest) -> dict[str, Any]:
    return {
        "ref": str(ref),
        "name": ref.name,
        "generation": ref.generation,
        "manifest": str(ref.manifest),
        "logical_bytes": sum(file.size for file in manifest.files),
        "files": [
            {
                "path": file.name,
                "size": file.size,
                "blake3": file.digest.hex(),
                "parts": len(file.recipe.parts),
            }
            for file in manifest.files
        ],
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": None if tensor.shape is None else list(tensor.shape),
                "file": tensor.file,
                "offset": tensor.offset,
                "nbytes": tensor.nbytes,
            }
            for tensor in manifest.tensors
        ],
        "provenance": dict(manifest.provenance),
    }


def _head(ref: Ref, manifest: Manifest) -> None:
    pairs(
        [
            ("artifact", str(ref)),
            ("manifest", str(ref.manifest)),
            ("size", size(sum(file.size for file in manifest.files)) + " in the files"),
        ]
    )
    click.echo()


def _files(files: tuple[FileEntry, ...]) -> None:
    table(
        ("FILE", ">SIZE", ">PARTS", "BLAKE3"),
        [(f.name, size(f.size), str(len(f.recipe.parts)), f.digest.hex()) for f in files],
    )


def _tensors(tensors: tuple[TensorEntry, ...], limit: int | None) -> None:
    if not tensors:
        return
    if limit is not None:
        click.echo()
    chosen = tensors[:limit]
    table(
        ("TENSOR", "DTYPE", "SHAPE", ">SIZE", "FILE", ">OFFSET"),
        [
            (
                t.name,
                t.dtype or "?",
                "?" if t.shape is None else "x".join(map(str, t.shape)) or "scalar",
                size(t.nbytes),
                t.file,
                str(t.offset),
            )
            for t in chosen
        ],
    )
    if len(chosen) < len(tensors):
        click.echo(f"... and {len(tensors) - len(chosen)} more (--tensors)")


def _provenance(provenance: Any) -> None:
    if not provenance:
        return
    click.echo()
    pairs(
        (str(key), value if isinstance(value, str) else json.dumps(value))
        for key, value in provenance.items()
    )
