"""Every write, rename, fsync, lock and unlink that the library does.

Having one home makes two things possible: the rules of durability are stated once, and a test can
kill the process before any single step (`set_step_hook`).

Durability rules. A file becomes visible under its final name only when its bytes are on the disk
(`write_file` + `sync_fd`, then `rename`); a name is durable when its directory was fsynced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cas.errors import NoSpace, PermissionRefused

if TYPE_CHECKING:
    from typing_extensions import Buffer

StepHook = Callable[[str, "Path | str"], None]

_libc = ctypes.CDLL(None, use_errno=True)
_step_hook: StepHook | None = None

# fmt: off
_NETWORK_TYPES = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs",
    "nfs", "nfs4", "ocfs2", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs",
))
# fmt: on
_LOCAL_FUSE = frozenset(("fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.encfs"))


def set_step_hook(hook: StepHook | None) -> None:
    """Call ``hook(operation, path)`` before each step from now on (tests only)."""
    global _step_hook
    _step_hook = hook


def step(operation: str, path: Path | str) -> None:
    """Announce a step that changes the disk; a hook may end the process here."""
    if _step_hook is not None:
        _step_hook(operation, path)


@contextlib.contextmanager
def os_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turn a full disk or a missing permission into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raised = translate(error, path, action)
        if raised is error:
            raise
        raise raised from error


def translate(error: OSError, path: Path, action: str = "write") -> Exception:
    """The library's error for ``error``, or ``error`` itself when it has no better name."""
    subject = Path(error.filename) if isinstance(error.filename, str) else path
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(subject)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionRefused(subject, action, error.strerror or "permission denied")
    return error


# --- files --------------------------------------------------------------------------------------


def write_all(fd: int, data: Buffer, offset: int | None = None) -> None:
    """Write all of ``data``, at ``offset`` or at the file's position."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        if offset is None:
            done += os.write(fd, view[done:])
        else:
            done += os.pwrite(fd, view[done:], offset + done)


def create_file(
    path: Path, data: Buffer, *, mode: int, sync: bool, write_out: bool = False
) -> None:
    """Create ``path`` (it must not exist) holding ``data``, with exactly ``mode``.

    With ``sync`` it is durable when this returns. With ``write_out`` only its bytes are on their
    way through the disk, which leaves little but one journal commit to a later sync of many files.

    If that fails, on a full disk say, nothing stays at ``path``, so the caller can try again.
    """
    step("create", path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)  # the process's umask must not decide who can read a shared store
        write_all(fd, data)
        if sync:
            step("sync", path)
            os.fdatasync(fd)
        elif write_out:
            write_out_range(fd)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            os.unlink(path)
        raise
    finally:
        os.close(fd)


def sync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's entries, durable."""
    step("sync", path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directories(paths: Iterable[Path]) -> None:
    """Make the entries of each distinct directory durable."""
    for path in sorted(set(paths)):
        sync_path(path)


def sync_filesystem(path: Path) -> None:
    """syncfs(2): cheaper than many fdatasyncs when thousands of small files are staged."""
    step("syncfs", path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def write_out_range(fd: int) -> None:
    """Write all dirty pages of a file and wait for them, without its metadata.

    sync_file_range(2) with all three flags. Its error is the only report of a lost write that
    there may be: whoever opens the file afterwards counts as knowing. Where the call is not
    supported, the later sync does all the work.
    """
    if _libc.sync_file_range(
        ctypes.c_int(fd), ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(7)
    ):
        number = ctypes.get_errno()
        if number in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise OSError(number, os.strerror(number))


def rename(source: Path, target: Path) -> None:
    step("rename", target)
    os.rename(source, target)


def link_exclusive(source: Path, target: Path) -> bool:
    """Give ``source`` the second name ``target``; False if that name is taken."""
    step("link", target)
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    return True


def unlink(path: Path) -> bool:
    """Remove a file; False if it was gone already."""
    step("unlink", path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def make_directory(path: Path, mode: int) -> None:
    """Create ``path`` with exactly ``mode`` if it is not there (parents must exist)."""
    if path.is_dir():
        return
    step("mkdir", path)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    inherited = path.stat().st_mode & 0o2000  # keep setgid from the parent: group stores need it
    os.chmod(path, mode | inherited)


def make_parents(path: Path, mode: int = 0o777) -> None:
    """`make_directory` for ``path`` and what is missing above it, each durable in its parent.

    The mode is for ``path`` itself; what is above it is made as the process's umask has it.
    """
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_parents(path.parent, 0o777 & ~process_umask())
    make_directory(path, mode)
    sync_path(path.parent)


def remove_directory(path: Path) -> None:
    """Remove an empty directory; one that is gone, or not empty any more, is left as it is."""
    step("rmdir", path)
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise


def remove_tree(path: Path) -> None:
    """Remove a directory that only this process knows; what is gone already is fine."""
    step("rmtree", path)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)


def replace_file(path: Path, data: Buffer, *, mode: int, temporary: Path) -> None:
    """Durably put ``data`` at ``path``, whole or not at all, by way of ``temporary``."""
    create_file(temporary, data, mode=mode, sync=True)
    try:
        rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_path(path.parent)


# --- locks --------------------------------------------------------------------------------------


class FileLock:
    """An flock(2) on a file of its own; the kernel drops it when the process ends.

    The file is never unlinked, except by who holds it exclusively: a lease's owner or the gc.
    """

    __slots__ = ("fd", "path")

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, path: Path, mode: int) -> FileLock:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        with contextlib.suppress(PermissionError):  # another user's file: its mode is right
            os.fchmod(fd, mode)
        return cls(path, fd)

    def shared(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def exclusive(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_EX)

    def try_exclusive(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def is_current(self) -> bool:
        """Whether the path still names the locked file."""
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            return False
        held = os.fstat(self.fd)
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


# --- the filesystem -----------------------------------------------------------------------------


def _unescape_mount(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def filesystem_type(path: Path, mountinfo: str | None = None) -> str:
    """The type of the filesystem that holds ``path``, as proc_pid_mountinfo(5) names it.

    An unknown one is ``"unknown"`` (no /proc, say).
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return "unknown"
    target = os.path.realpath(path)
    best, found = -1, "unknown"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = _unescape_mount(fields[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # a later mount on the same point hides the earlier
            best, found = len(point), after.split(" ")[0]
    return found


def is_network_filesystem(fstype: str) -> bool:
    """Whether a filesystem may be elsewhere. One in user space is, unless known to be local."""
    if fstype == "fuse" or fstype.startswith("fuse."):
        return fstype not in _LOCAL_FUSE
    return fstype in _NETWORK_TYPES


def free_bytes(path: Path) -> int:
    """What an unprivileged user may still write to the filesystem of ``path``."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


# --- modes --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Modes:
    """Permission bits of what a store creates, under its umask."""

    umask: int

    @property
    def data(self) -> int:
        """Chunks, manifests and refs: nobody edits them in place."""
        return 0o444 & ~self.umask

    @property
    def file(self) -> int:
        """Leases, locks and the index."""
        return 0o666 & ~self.umask

    @property
    def directory(self) -> int:
        return 0o777 & ~self.umask


def process_umask() -> int:
    """This process's umask, read without changing it (os.umask would, for every thread)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except OSError:
        return 0o022
    return 0o022
