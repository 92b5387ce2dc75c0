"""`cas stats`: how much a store holds."""

from __future__ import annotations

from cas_cli import options
from cas_cli.app import current
from cas_cli.render import pairs, size

KEYS = (
    "refs",
    "manifests",
    "chunks",
    "logical_bytes",
    "physical_bytes",
    "garbage_bytes",
    "staged_bytes",
    "quarantined_bytes",
)


@options.command(short_help="Show what the store holds, and how much of it is garbage.")
def command() -> None:
    """Show what the store holds, and how much of it is garbage.

    Logical bytes are what the files of all artifacts hold; physical bytes what their chunks
    occupy, each once; garbage is what the next `cas gc` may delete.
    """
    app = current()
    with app.store() as store:
        stats = store.stats()
    document = {"store": str(app.path), **{key: getattr(stats, key) for key in KEYS}}

    def show() -> None:
        logical, physical = stats.logical_bytes, stats.physical_bytes
        times = f"  ({logical / physical:.2f} x physical)" if physical and logical else ""
        rows = [
            ("store", str(app.path)),
            ("artifacts", f"{stats.refs} generations, {stats.manifests} manifests"),
            ("chunks", str(stats.chunks)),
            ("logical", size(logical) + times),
            ("physical", size(physical)),
            ("garbage", size(stats.garbage_bytes)),
        ]
        if stats.staged_bytes:
            rows.append(("staged", f"{size(stats.staged_bytes)} by running or dead writers"))
        if stats.quarantined_bytes:
            rows.append(("quarantined", f"{size(stats.quarantined_bytes)} of damaged chunks"))
        pairs(rows)

    app.report(document, show)
