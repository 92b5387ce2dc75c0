"""A content-addressed artifact store for model export.

This module is the library's public surface; it loads neither torch nor executorch. What reaches
into those lives in `cas.torch` and `cas.executorch`.
"""

from cas.actions import Actions, Lookup
from cas.digest import Digest
from cas.errors import CasError
from cas.manifest import FileEntry, Manifest, Recipe, TensorEntry
from cas.progress import Progress
from cas.records import ActionRecord
from cas.refs import Ref, RefId
from cas.store import Store
from cas.version import __version__
from cas.writer import Commit, Writer

__all__ = [
    "ActionRecord",
    "Actions",
    "CasError",
    "Commit",
    "Digest",
    "FileEntry",
    "Lookup",
    "Manifest",
    "Progress",
    "Recipe",
    "Ref",
    "RefId",
    "Store",
    "TensorEntry",
    "Writer",
    "__version__",
]
