"""ExecuTorch exports whose weights go through a store: same code, same files, little memory."""

from __future__ import annotations

from cas.executorch.errors import (
    CaptureActive,
    CaptureEnded,
    ForeignBytes,
    PackageIncomplete,
    SeamMismatch,
    UnsupportedVersion,
)
from cas.executorch.seams import SUPPORTED_VERSIONS, check_version

try:
    from cas.executorch.blob import LargeReadWarning, StoredBytes
    from cas.executorch.capture import Capture, capture
    from cas.executorch.saving import SaveResult
except ImportError:
    # An ExecuTorch so different that not even the imports work is refused as what it is.
    check_version()
    raise

__all__ = [
    "SUPPORTED_VERSIONS",
    "Capture",
    "CaptureActive",
    "CaptureEnded",
    "ForeignBytes",
    "LargeReadWarning",
    "PackageIncomplete",
    "SaveResult",
    "SeamMismatch",
    "StoredBytes",
    "UnsupportedVersion",
    "capture",
]
