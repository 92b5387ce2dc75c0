"""Every write, rename, fsync and unlink that the library does.

Having one home makes two things possible: the rules of durability are stated once, and a test can
kill the process before any single step (`set_step_hook`).

Durability rules. A file becomes visible under its final name only when its bytes are on the disk
(`create_file` with ``sync``, or one sync of many, then `rename`); a name is durable when its
directory was fsynced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cas import filesystems
from cas.errors import NoSpace, PermissionRefused
from cas.modes import process_umask

if TYPE_CHECKING:
    from typing_extensions import Buffer

StepHook = Callable[[str, "Path | str"], None]

_libc = ctypes.CDLL(None, use_errno=True)
_step_hook: StepHook | None = None


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
    if error.errno in _FULL:
        return _no_space(error, subject)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PermissionRefused(subject, action, error.strerror or "permission denied")
    return error


#: What the kernel says when there is no room: on the disk, or for this user.
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DoesNotFit(OSError):
    """An `OSError` of a full disk that knows how many bytes found no room."""

    def __init__(self, error: OSError, needed: int) -> None:
        super().__init__(error.errno, error.strerror)
        self.needed = needed


def _raise_sized(error: OSError, needed: int) -> NoReturn:
    """Raise ``error``; that of a full disk with what did not fit."""
    raise DoesNotFit(error, needed) if error.errno in _FULL else error


def _no_space(error: OSError, subject: Path) -> NoSpace:
    """With what is free now: whoever wrote has given back what it had begun."""
    raised = NoSpace(subject, needed=error.needed if isinstance(error, DoesNotFit) else None)
    place = subject
    while not place.exists() and place != place.parent:
        place = place.parent
    with contextlib.suppress(OSError):  # the first error is the one to report
        raised.free = filesystems.free_bytes(place)
        if error.errno == errno.EDQUOT:
            raised.full_of = "quota"
        elif not filesystems.has_files_left(place):
            raised.full_of = "files"
    return raised


# --- bytes ----------------------------------------------------------------------------------------


def write_all(fd: int, data: Buffer, offset: int | None = None) -> None:
    """Write all of ``data``, at ``offset`` or at the file's position."""
    view = memoryview(data).cast("B")
    done = 0
    try:
        while done < len(view):
            if offset is None:
                done += os.write(fd, view[done:])
            else:
                done += os.pwrite(fd, view[done:], offset + done)
    except OSError as error:
        _raise_sized(error, len(view))


def create_file(path: Path, data: Buffer, *, mode: int, sync: bool) -> None:
    """Create ``path`` (it must not exist) holding ``data``, with exactly ``mode``.

    With ``sync`` it is durable when this returns. If that fails, on a full disk say, nothing stays
    at ``path``, so the caller can try again.
    """
    os.close(_create(path, data, mode, sync))


def create_begun(path: Path, data: Buffer, *, mode: int) -> int:
    """`create_file` without ``sync``, whose bytes are on their way to the disk on return.

    Returns a descriptor for `end_write_out`, which the caller closes.
    """
    fd = _create(path, data, mode, False)
    try:
        begin_write_out(fd, 0, 0)
    except BaseException:
        _discard(fd, path)
        raise
    return fd


def _create(path: Path, data: Buffer, mode: int, sync: bool) -> int:
    step("create", path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)  # the process's umask must not decide who can read a shared store
        write_all(fd, data)
        if sync:
            step("sync", path)
            os.fdatasync(fd)
    except BaseException:
        _discard(fd, path)
        raise
    return fd


def _discard(fd: int, path: Path) -> None:
    os.close(fd)
    with contextlib.suppress(OSError):  # the first error is the one to report
        os.unlink(path)


def append(path: Path, lines: bytes, *, mode: int) -> None:
    """Add whole lines to a file that nobody else writes now; a torn last line is ended first."""
    step("append", path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        with contextlib.suppress(PermissionError):  # another user's file: its mode is right
            os.fchmod(fd, mode)
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        write_all(fd, b"\n" + lines if torn else lines)
    finally:
        os.close(fd)


# --- to the disk ----------------------------------------------------------------------------------


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
    with FilesystemSync(path) as opened:
        opened.sync()


class FilesystemSync:
    """A filesystem to sync. `sync` tells of pages that were lost since this was made.

    Whoever opens the filesystem only then is not told what another syncfs has reported meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> FilesystemSync:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sync(self) -> None:
        """
        Raises:
            OSError: something could not be written, of these or of others' files.
        """
        step("syncfs", self._path)
        if _libc.syncfs(self._fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(self._path))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def begin_write_out(fd: int, offset: int, length: int) -> None:
    """Start to write what is dirty in a range (to the end with length 0), and do not wait.

    The disk works while the next bytes are made; a sync at the end finds less to do.
    """
    _sync_file_range(fd, offset, length, _RANGE_WRITE)


def end_write_out(fd: int) -> None:
    """Write what is dirty of a file and wait for all of it, without its metadata.

    What is left to a later sync of many such files is little but one journal commit.

    Raises:
        OSError: a page could not be written. It may be the only report of that: whoever opens the
            file afterwards counts as knowing.
    """
    _sync_file_range(fd, 0, 0, _RANGE_WAIT_BEFORE | _RANGE_WRITE | _RANGE_WAIT_AFTER)


# The flags of sync_file_range(2).
_RANGE_WAIT_BEFORE, _RANGE_WRITE, _RANGE_WAIT_AFTER = 1, 2, 4


def _sync_file_range(fd: int, offset: int, length: int, flags: int) -> None:
    """sync_file_range(2). Where it is not supported, the later sync does all the work."""
    if _libc.sync_file_range(
        ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(length), ctypes.c_uint(flags)
    ):
        number = ctypes.get_errno()
        if number in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise OSError(number, os.strerror(number))


def map_scratch(directory: Path, size: int) -> mmap.mmap:
    """``size`` zero bytes of memory whose pages are those of a file without a name.

    The file ends with its last user, however that one ends. Its blocks are reserved: on a disk
    that fills up, a write to this memory would otherwise end the process.

    Raises:
        OSError: the disk has no room, say.
    """
    step("scratch", directory)
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            _raise_sized(error, size)
        return mmap.mmap(file.fileno(), size)


# --- names ----------------------------------------------------------------------------------------


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


def unlink(path: Path) -> bool:
    """Remove a file; False if it was gone already."""
    step("unlink", path)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def touch(path: Path, when: float) -> None:
    """Set a file's time of use; not durably, and not at all where that is not permitted.

    Another user's file takes only the present time, and that only if it can be written.
    """
    step("touch", path)
    try:
        os.utime(path, (when, when))
    except PermissionError:
        with contextlib.suppress(OSError):
            os.utime(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            raise


# --- directories ----------------------------------------------------------------------------------


def make_directory(path: Path, mode: int) -> None:
    """Create ``path`` with exactly ``mode`` if it is not there (parents must exist).

    It never has fewer permissions than that: who is killed in between leaves nothing that other
    users of a shared store could not open. At worst an empty ``.<name>.<random>`` is left.
    """
    if path.is_dir():
        return
    step("mkdir", path)
    if mode & process_umask():
        _make_and_rename(path, mode)
        return
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, mode & 0o777)
        _chmod_directory(path, mode)


def _make_and_rename(path: Path, mode: int) -> None:
    """A directory that mkdir(2) alone would make too closed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    os.mkdir(temporary, 0o700)
    try:
        _chmod_directory(temporary, mode)
        os.rename(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.rmdir(temporary)
        if not isinstance(error, OSError) or not path.exists():
            raise  # else somebody has made it, and something in it, meanwhile


def _chmod_directory(path: Path, mode: int) -> None:
    inherited = path.stat().st_mode & 0o2000  # keep setgid from the parent: group stores need it
    if stat.S_IMODE(path.stat().st_mode) != mode | inherited:
        os.chmod(path, mode | inherited)


def set_mode(path: Path | str, mode: int) -> bool:
    """Give a file or directory these permission bits; False if it belongs to somebody else."""
    step("chmod", path)
    try:
        os.chmod(path, mode)
    except PermissionError:
        return False
    return True


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
    """Remove an empty directory; one that is gone, or not empty any more, is left as it is.

    So is a link to one.
    """
    step("rmdir", path)
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise


def remove_tree(path: Path) -> None:
    """Remove a directory that only this process knows; what is gone already is fine."""
    step("rmtree", path)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            # Another user who was killed before they gave it its mode left it empty, and closed.
            os.rmdir(path)
