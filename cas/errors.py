"""The one error tree of the library.

Every error carries its facts as attributes, says in its message what to do about it, and belongs
to a class whose ``exit_code`` the command line uses as it stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar


class CasError(Exception):
    """Base of every error that the library raises on purpose."""

    exit_code: ClassVar[int] = 1


# --- 2: the request itself is wrong -------------------------------------------------------------


class UsageError(CasError):
    """An argument does not make sense."""

    exit_code = 2


class InvalidName(UsageError):
    """A ref or file name that could escape, collide or confuse."""

    def __init__(self, name: str, reason: str, *, kind: str = "name") -> None:
        self.name = name
        self.reason = reason
        shown = name if len(name) <= 60 else name[:57] + "..."
        super().__init__(f"{kind} {shown!r} is not allowed: {reason}")


# --- 3: nothing there ---------------------------------------------------------------------------


class NotFound(CasError):
    """What was asked for is not in the store."""

    exit_code = 3


class StoreNotFound(NotFound):
    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"there is no store at {path}; an export or `Store.open` creates one")


class RefNotFound(NotFound):
    def __init__(self, name: str, generation: int | None = None, known: Iterable[str] = ()) -> None:
        self.name = name
        self.generation = generation
        self.known = tuple(known)
        shown = name if generation is None else f"{name}@{generation}"
        if self.known:
            hint = "there is " + ", ".join(self.known[:5]) + (" ..." if self.known[5:] else "")
        else:
            hint = "`cas ls` lists what the store holds"
        super().__init__(f"no artifact {shown!r} in this store; {hint}")


class ActionNotFound(NotFound):
    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        super().__init__(
            f"no action record {wanted!r} in this store; `cas ls --actions` lists their keys, and "
            "the first digits of one will do"
        )


# --- 4: data is damaged -------------------------------------------------------------------------


class Damaged(CasError):
    """Bytes on disk are not what they must be."""

    exit_code = 4


class ManifestDamaged(Damaged):
    """A manifest is missing, does not match its digest, or does not parse."""

    def __init__(self, subject: str, reason: str) -> None:
        self.subject = subject
        self.reason = reason
        super().__init__(
            f"manifest {subject} {reason}; `cas verify` names the artifacts that need it and how "
            "to remove them, after an export has made them again; from a copy of the store, "
            "`cas verify --repair --from COPY` brings it back"
        )


class ActionDamaged(Damaged):
    """An action record cannot be read. Whoever looks for it does without."""

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        self.reason = reason
        super().__init__(
            f"action record {key} {reason}; `cas verify` sets it aside, and the next run records "
            "the action again"
        )


class RefDamaged(Damaged):
    """The file of one generation, ``ref``, does not tell its manifest."""

    def __init__(self, path: Path, reason: str, ref: str) -> None:
        self.path = path
        self.reason = reason
        self.ref = ref
        super().__init__(
            f"ref file {path} {reason}; restore it from a copy, or export the artifact again and "
            f"run `cas rm {ref}`"
        )


class StoreDamaged(Damaged):
    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path} {reason}")


class ChunkError(Damaged):
    """A chunk cannot be used. ``file``, ``offset`` and ``length`` say what needed it, if known."""

    what: ClassVar[str] = "cannot be used"

    def __init__(
        self,
        digest: str,
        path: Path,
        *,
        detail: str = "",
        file: str | None = None,
        offset: int | None = None,
        length: int | None = None,
    ) -> None:
        self.digest = digest
        self.path = path
        self.detail = detail
        self.file = file
        self.offset = offset
        self.length = length
        where = ""
        if file is not None and offset is not None and length is not None:
            where = f", needed for bytes {offset}..{offset + length} of {file!r},"
        super().__init__(
            f"chunk {digest}{where} {self.what}{': ' + detail if detail else ''} ({path}); run "
            "`cas verify` to see what is affected, then export the artifact again to restore it, "
            "or `cas verify --repair --from PATH` with a file that has the bytes"
        )


class ChunkMissing(ChunkError):
    what = "is missing"


class ChunkDamaged(ChunkError):
    what = "is damaged"


# --- 5: refused ---------------------------------------------------------------------------------


class Refused(CasError):
    """Understood, but unsafe or unsupported here."""

    exit_code = 5


class NotAStore(Refused):
    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(
            f"{path} is not a cas store: {reason}; choose an empty or new directory with --store"
        )


class UnknownFormat(Refused):
    def __init__(self, path: Path, found: object, known: int) -> None:
        self.path = path
        self.found = found
        self.known = known
        super().__init__(
            f"the store at {path} has format {found!r}, this version of cas reads format {known}; "
            "use the version that wrote it, or another store"
        )


class ReadOnlyStore(Refused):
    """``asked_by`` names the setting that asked for it, where the store itself could be written."""

    def __init__(self, path: Path, operation: str, asked_by: str | None = None) -> None:
        self.path = path
        self.operation = operation
        self.asked_by = asked_by
        if asked_by is None:
            reason = "here; use a store you may write, or ask for write permission"
        else:
            reason = f"because of {asked_by}; leave that out to write to it"
        super().__init__(f"cannot {operation}: the store at {path} is read-only {reason}")


class NetworkFilesystem(Refused):
    def __init__(self, path: Path, fstype: str) -> None:
        self.path = path
        self.fstype = fstype
        super().__init__(
            f"{path} lies on a network filesystem ({fstype}), where file locks and LMDB are not "
            "safe; put the store on a local disk (--store)"
        )


class Busy(Refused):
    """Somebody else holds what is needed; trying again later is right."""


class SourceChanged(Refused):
    """Somebody wrote to the memory or file that was being taken in."""

    def __init__(self, length: int) -> None:
        self.length = length
        super().__init__(
            f"the source changed while it was read (in a piece of {length} bytes); nothing of "
            "that piece was stored; make sure that nobody writes to the model or checkpoint, and "
            "run again"
        )


class PermissionRefused(Refused):
    def __init__(self, path: Path, action: str, reason: str) -> None:
        self.path = path
        self.action = action
        super().__init__(f"cannot {action} {path}: {reason}")


# --- 6, 7 ---------------------------------------------------------------------------------------


class NoSpace(CasError):
    """The disk is full.

    Who has more to say than the write that failed sets the attributes; the message follows them.

    Attributes:
        needed: bytes of what did not fit; None if not known.
        free: bytes that were free then, for who is not root; None if not known.
        remaining: bytes that the whole operation had still to write at most; None if not known.
        full_of: ``"files"`` if there was room for bytes but for no further file, ``"quota"`` if
            there was more than this user may have, else ``"bytes"``.
        kept: what of the operation's work stays, in a few words.
        advice: what to do.
    """

    exit_code = 6

    def __init__(
        self,
        path: Path,
        *,
        needed: int | None = None,
        free: int | None = None,
        full_of: str = "bytes",
    ) -> None:
        super().__init__(path)
        self.path = path
        self.needed = needed
        self.free = free
        self.full_of = full_of
        self.remaining: int | None = None
        self.kept = "nothing committed was lost"
        self.advice = "free space there, or run `cas gc`"

    def __str__(self) -> str:
        what = {"files": "inode", "quota": "quota"}.get(self.full_of, "space")
        amounts = [f"{self.needed} bytes needed"] if self.needed is not None else []
        if self.free is not None:
            amounts.append(f"{self.free} {'free' if amounts else 'bytes free'}")
        if self.remaining is not None and self.remaining != self.needed:
            amounts.append(f"up to {self.remaining} bytes were still to be written")
        amount = f" ({', '.join(amounts)})" if amounts else ""
        return (
            f"no {what} left on the filesystem of {self.path}{amount}; {self.kept}; {self.advice}"
        )


class RemoteError(CasError):
    exit_code = 7
