"""Which members' processes are alive: each holds a shared lock on a byte of one file, which the kernel drops with the process.

The locks belong to the open file, not to the process (``F_OFD_SETLK``): they work between containers that do not see each
other's pids, between two members of one process, and a pid used twice does not matter. A child that was forked with the
file open keeps its parent's lock for as long as it lives, which errs on the side of the living.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

from .errors import DirectoryBusy
from .host import Deadline, file_identity

_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length (0: to the end), pid
_POLL_S = 0.002
_TITLE = "rorqual prefix directory, boot "


class LivenessFile:
    """Byte 0 is held while a store is opened, byte ``m`` by member ``m``. The text names the boot the store belongs to."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            ValueError: it cannot be opened for writing, or is no such file.
        """
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        except OSError as error:
            raise ValueError(
                f"cannot open {path} for the prefix directory: {error.strerror}; choose a path in a writable folder"
            ) from error
        text = os.pread(self._fd, 256, 0).decode("ascii", errors="replace")
        if text and not text.startswith(_TITLE):
            os.close(self._fd)
            raise ValueError(f"{path} is in the place of the prefix directory's lock file but holds something else; move it away")
        self.path = path

    @property
    def boot(self) -> str:
        """Boot that the store was made in; empty before the first."""
        return os.pread(self._fd, 256, 0).decode("ascii", errors="replace").removeprefix(_TITLE).strip()

    def write_boot(self, boot: str) -> None:
        """Name the boot."""
        text = f"{_TITLE}{boot}\n".encode("ascii")
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))

    @property
    def identity(self) -> str:
        """Differs after the file was removed and made anew."""
        return file_identity(self._fd)

    @classmethod
    def opening(cls, path: Path, deadline: Deadline) -> LivenessFile:
        """The file at ``path`` with byte 0 held until ``end_opening`` or ``close``; DirectoryBusy if another has it until the deadline."""
        while True:
            live = cls(path)
            try:
                while not live._set(fcntl.F_WRLCK, 0):
                    if deadline.passed:
                        raise DirectoryBusy(f"another process has been opening {path} for {deadline.seconds:g} s")
                    time.sleep(_POLL_S)
                if live._linked():  # else it was removed in the meantime
                    return live
            except BaseException:
                live.close()
                raise
            live.close()

    def end_opening(self) -> None:
        """Let others open."""
        self._set(fcntl.F_UNLCK, 0)

    def hold(self, member: int) -> None:
        """Be alive as ``member``; several may."""
        if not self._set(fcntl.F_RDLCK, member):
            raise AssertionError(f"byte {member} of {self.path} has an exclusive lock, which members do not take")

    def alive(self, member: int) -> bool:
        """Whether another open file holds ``member``; not for one's own."""
        return self._held(member, 1)

    def any_alive(self) -> bool:
        """Whether any member of another open file lives."""
        return self._held(1, 0)

    def close(self) -> None:
        """Also ends all that is held."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _linked(self) -> bool:
        try:
            return file_identity(self.path) == self.identity
        except OSError:
            return False

    def _set(self, kind: int, start: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, start, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _held(self, start: int, length: int) -> bool:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
        kind: int = struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK


class Companion:
    """A process that reads or writes a member's pages beside it, as the other ranks of its engine do.

    The member's pages are not taken from it before all its companions have ended too.
    """

    def __init__(self, path: str | Path, member: int) -> None:
        """Join ``member`` of the directory whose store is at ``path``; ValueError if that is not possible."""
        self._live = LivenessFile(live_path(Path(path)))
        if not self._live.alive(member):
            self._live.close()
            raise ValueError(f"member {member} of the prefix directory {path} is not alive; open the directory first, and join it then")
        self._live.hold(member)

    def close(self) -> None:
        """End; the device must have finished with the pages. A second call does nothing."""
        self._live.close()


def live_path(path: Path) -> Path:
    """The lock file of the store at ``path``."""
    return path.with_name(path.name + "-live")
