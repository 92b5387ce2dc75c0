"""Why a capture refuses."""

from __future__ import annotations

from collections.abc import Iterable

from cas.errors import CasError, NotFound, Refused, UsageError


class CaptureActive(Refused):
    """The process is already inside a capture, in this thread or in another one."""

    def __init__(self) -> None:
        super().__init__(
            "a capture is already active in this process; leave it before you start another one "
            "(captures change ExecuTorch process-wide, so they can neither nest nor run in "
            "parallel threads; use one process each)"
        )


class UnsupportedVersion(Refused):
    """The installed ExecuTorch, or torch, is not one whose internals this version of cas knows."""

    def __init__(self, package: str, found: str, supported: Iterable[str]) -> None:
        self.package = package
        self.found = found
        self.supported = tuple(supported)
        known = ", ".join(self.supported)
        super().__init__(
            f"capture supports {package} {known}, found {found}; install a supported version "
            f"(pip install '{package}=={self.supported[-1]}'), use a newer cas, or export "
            "without capture"
        )


class SeamMismatch(Refused):
    """ExecuTorch or torch has the right version, but not the function that capture relies on."""

    def __init__(self, seam: str, where: str, version: str, detail: str) -> None:
        self.seam = seam
        self.where = where
        self.version = version
        self.detail = detail
        super().__init__(
            f"cannot capture: the seam {seam!r} ({where}, {version}) is not as expected: "
            f"{detail}; nothing was changed. Is the installation patched? Reinstall it, or export "
            "without capture"
        )


class CaptureEnded(CasError):
    """Something made inside a capture was used after it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}, but the capture that stored it has ended; do this inside the "
            "`with capture(...)` block, after `cap.save(...)` use the assembled files"
        )


class ForeignBytes(UsageError):
    """A program holds bytes of another capture than the one that is to save it."""

    def __init__(self, file: str) -> None:
        self.file = file
        super().__init__(
            f"{file!r} holds weights that another capture stored; save a program in the capture "
            "in which `to_executorch()` made it"
        )


class PackageIncomplete(NotFound):
    """AOTInductor's outputs lack a file without which they are of no use."""

    def __init__(self, missing: str, found: Iterable[str]) -> None:
        self.missing = missing
        self.found = tuple(found)
        listed = ", ".join(self.found) if self.found else "nothing"
        super().__init__(
            f"there is no {missing} among the outputs of AOTInductor; there was: {listed}"
        )
