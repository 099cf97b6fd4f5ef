"""Opening a pool file together: the first creates it, the others wait and check; whoever holds it keeps a lock on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from . import header as headers
from .header import PoolHeader

#: start of the names of pool files that belong to a job
PREFIX = "rorqual-pool-"
_POLL_S = 0.01


class PoolFile:
    """An open pool file. ``fresh``: this process created it and must ``publish`` once its memory is there.

    Locks are the kernel's (flock), so they end with their process: exclusive while the file is made, shared while it is used.
    A file that nobody has locked is nobody's: one that belonged to a job is removed and made anew, a kept one is taken over.
    """

    def __init__(self, path: Path, fd: int, wanted: PoolHeader, fresh: bool) -> None:
        self.path, self.fd, self.wanted, self.fresh = path, fd, wanted, fresh

    @classmethod
    def open(cls, path: Path, wanted: PoolHeader, *, check: Callable[[], None], deadline_s: float) -> PoolFile:
        """Create ``path`` or join those who use it; ``check`` raises if there is no room, before it is created.

        Raises:
            ValueError: no room, no permission, another model, layout or version, a damaged header, in use by another job,
                or the deadline passed while another process was making the file.
        """
        until = time.monotonic() + deadline_s
        while True:
            fd, created = _open(path, check)
            try:
                file = cls._create(path, fd, wanted) if created else cls._join(path, fd, wanted)
            except BaseException:
                os.close(fd)
                raise
            if file is not None:
                return file
            os.close(fd)
            if time.monotonic() > until:
                raise ValueError(f"{path}: a process has been making this host pool file for {deadline_s:.0f} s; end it, then try again")
            time.sleep(_POLL_S)

    @classmethod
    def _create(cls, path: Path, fd: int, wanted: PoolHeader) -> PoolFile | None:
        if not _lock(fd, fcntl.LOCK_EX) or not _linked(path, fd):
            return None  # somebody took it for a leftover in the instant before the lock
        try:
            os.ftruncate(fd, wanted.file_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ValueError(f"{path}: the host pool file cannot have {wanted.file_bytes} bytes: {error.strerror}") from error
        return cls(path, fd, replace(wanted, identity=secrets.token_hex(8)), True)

    @classmethod
    def _join(cls, path: Path, fd: int, wanted: PoolHeader) -> PoolFile | None:
        if _lock(fd, fcntl.LOCK_EX):  # nobody has it
            return cls._take_over(path, fd, wanted) if _linked(path, fd) else None
        if not _lock(fd, fcntl.LOCK_SH) or not _linked(path, fd):
            return None  # being made, or being removed
        found = headers.read(fd, str(path))
        headers.compare(found, wanted, str(path))
        if found["job"] != wanted.job:
            raise ValueError(f"{path}: in use by another job ({found['job'] or 'a shared pool'}); wait for its end or name another path")
        return cls(path, fd, replace(wanted, identity=found.get("identity", "")), False)

    @classmethod
    def _take_over(cls, path: Path, fd: int, wanted: PoolHeader) -> PoolFile | None:
        if not wanted.kept or os.fstat(fd).st_size == 0:  # empty: its maker has not come to lock it, and will see that it is gone
            path.unlink(missing_ok=True)
            return None
        found = headers.read(fd, str(path))
        headers.compare(found, wanted, str(path))
        wanted = replace(wanted, identity=found.get("identity") or secrets.token_hex(8))
        headers.write(fd, wanted)
        return cls(path, fd, wanted, False) if _lock(fd, fcntl.LOCK_SH) and _linked(path, fd) else None

    def publish(self) -> None:
        """Finish the header and let the others in. ValueError: the file was removed meanwhile."""
        headers.write(self.fd, self.wanted)
        if not _lock(self.fd, fcntl.LOCK_SH) or not _linked(self.path, self.fd):
            raise ValueError(f"{self.path}: the host pool file was removed while it was made; try again")

    def joined(self, member: int, members: int) -> None:
        """Count this process in; the last of ``members`` takes the name away, so that nothing is left however they end."""
        if headers.mark(self.fd, member, members):
            self.path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Give up a file that is being made."""
        if self.fresh and _linked(self.path, self.fd):
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Give up the lock; mappings stay. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def sweep(folder: Path) -> list[Path]:
    """Remove the files of jobs that died before all of their ranks had joined; those removed."""
    removed = []
    for path in sorted(folder.glob(PREFIX + "*")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _lock(fd, fcntl.LOCK_EX) and _linked(path, fd):
                    path.unlink()
                    removed.append(path)
            finally:
                os.close(fd)
    return removed


def _open(path: Path, check: Callable[[], None]) -> tuple[int, bool]:
    """(descriptor, whether this call created the file)."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            return _regular(os.open(path, flags), path), False
        except FileNotFoundError:
            check()
        except OSError as error:
            raise ValueError(f"{path}: the host pool file cannot be opened: {error.strerror}; name another path") from error
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
        except FileExistsError:
            continue  # another was faster: join it
        except OSError as error:
            raise ValueError(f"{path}: the host pool file cannot be created: {error.strerror}; name another path") from error


def _regular(fd: int, path: Path) -> int:
    """``fd``. ValueError: it is a device or a pipe."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{path}: a host pool file is wanted, and this is a device or a pipe; name another path")
    return fd


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _linked(path: Path, fd: int) -> bool:
    """Whether ``path`` still is the name of the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
