"""Locks on files that end with the process, however that one ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


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
        """The lock at ``path``; the file is made, with exactly ``mode``, if there is none."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                return cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC))
            made = cls.create(path, mode)
            if made is not None:
                return made

    @classmethod
    def create(cls, path: Path, mode: int, *, locked: bool = False) -> FileLock | None:
        """A new file for a lock, with exactly ``mode``; None if ``path`` is taken.

        With ``locked`` it is held exclusively, from the moment that others can see it where the
        filesystem has unnamed files. There, too, a process that is killed leaves no file that
        other users of a shared store could not open.
        """
        fd = _open_unnamed(path.parent)
        if fd is None:
            return cls._create_named(path, mode, locked)
        lock = cls(path, fd)
        try:
            os.fchmod(fd, mode)
            if locked:
                lock.exclusive()
            if _link_unnamed(fd, path):
                return lock
        except OSError as error:
            lock.close()
            if error.errno in _CANNOT_LINK and path.parent.is_dir():
                return cls._create_named(path, mode, locked)
            raise
        except BaseException:
            lock.close()
            raise
        lock.close()
        return None

    @classmethod
    def find(cls, path: Path) -> FileLock:
        """The lock at ``path``, for who only asks for it; reading is all the permission it takes.

        Raises:
            FileNotFoundError: there is none, or what is there is no regular file.
        """
        if not stat.S_ISREG(os.lstat(path).st_mode):  # a pipe, say, would be waited for
            raise FileNotFoundError(errno.ENOENT, "it is no regular file", str(path))
        return cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    @classmethod
    def _create_named(cls, path: Path, mode: int, locked: bool) -> FileLock | None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            return None
        lock = cls(path, fd)
        os.fchmod(fd, mode)
        if locked and not lock.try_exclusive():  # somebody who looks whether it is held
            lock.close()
            return None
        return lock

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


def _open_unnamed(directory: Path) -> int | None:
    """A file without a name in ``directory`` (O_TMPFILE); None where that is not supported."""
    if not os.path.isdir("/proc/self/fd"):  # what gives it a name later
        return None
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL) and directory.is_dir():
            return None
        raise


def _link_unnamed(fd: int, path: Path) -> bool:
    """Give a file of `_open_unnamed` its name; False if that is taken.

    By linkat(2) with AT_SYMLINK_FOLLOW, as open(2) has it: the way that needs no privilege.
    """
    source = os.fsencode(f"/proc/self/fd/{fd}")
    if _libc.linkat(_AT_FDCWD, source, _AT_FDCWD, os.fsencode(path), _AT_SYMLINK_FOLLOW) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    raise OSError(number, os.strerror(number), str(path))


_AT_FDCWD, _AT_SYMLINK_FOLLOW = -100, 0x400
#: What linkat may say where unnamed files can be made, but not named: odd layers, a closed /proc.
_CANNOT_LINK = frozenset(
    (errno.ENOENT, errno.EPERM, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
)
