"""`cas assemble`: an artifact's files, written to a directory."""

from __future__ import annotations

from pathlib import Path

import click

from cas_cli import completion, options
from cas_cli.app import current
from cas_cli.outputs import OutputDirectory, require_directory
from cas_cli.render import size


@options.command(short_help="Write the files of an artifact.")
@click.argument("name", metavar="NAME[@GEN]", shell_complete=completion.artifacts)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    required=True,
    type=OutputDirectory(),
    help="Where the files go; created if it is not there.",
)
@click.option(
    "--no-verify",
    is_flag=True,
    help="Do not check the chunks' digests; lets the filesystem share blocks.",
)
def command(name: str, output: Path, no_verify: bool) -> None:
    """Write the files of artifact NAME, of its current generation or of generation GEN, to DIR.

    Files of the same name are replaced, each at once when it is complete; a missing or damaged
    chunk leaves what was there.
    """
    app = current()
    require_directory(output, app.path)
    with app.store() as store, app.progress() as progress:
        ref = store.resolve(name)
        manifest = store.manifest(ref)
        store.assemble(str(ref), output, verify=not no_verify, progress=progress)
    files = [
        {"path": str(output / file.name), "size": file.size, "blake3": file.digest.hex()}
        for file in manifest.files
    ]
    document = {
        "ref": str(ref),
        "manifest": str(ref.manifest),
        "files": files,
        "logical_bytes": sum(file.size for file in manifest.files),
        "verified": not no_verify,
    }

    def show() -> None:
        for file in manifest.files:
            click.echo(f"{output / file.name}  {size(file.size)}")

    app.report(document, show)
