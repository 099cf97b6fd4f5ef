"""A replica that lacks host pages because others have them: it says so, waits, and tells who has what."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...attention.kv.directory import Directory

log = logging.getLogger("rorqual")

_REPEAT_S = 0.25  # a want is repeated so often
_TELL_S = 1.0  # nothing runs for so long until it is logged
_AGAIN_S = 10.0  # and then so often


class Shortage:
    """What the request that is first in rank among those who lack host pages lacks, step by step."""

    def __init__(self, directory: Directory, do: Callable[[Callable[[], None]], None], timeout_s: float) -> None:
        """``do`` runs a job on another thread. ``timeout_s``: longest time that nothing may run for want of host pages."""
        self.waits = 0  # times that nothing ran for so long that it was logged
        self._directory, self._do, self._timeout_s = directory, do, timeout_s
        self._lacking: tuple[str, int] | None = None  # in this step: who, how many pages
        self._posted = ""  # who others know of
        self._post_at = 0.0
        self._since: float | None = None  # when nothing ran any more
        self._tell_at = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._lacking = None

    def lack(self, name: str, pages: int) -> None:
        """Request ``name`` lacks ``pages``; the first to say so in a step counts."""
        if self._lacking is None:
            self._lacking = (name, pages)

    @property
    def now(self) -> bool:
        """Somebody lacks pages in this step."""
        return self._lacking is not None

    def end(self, *, runs: bool) -> None:
        """The step stands; ``runs``: something runs in it.

        Raises:
            TimeoutError: nothing has run for too long; the message names who has the pages.
        """
        self._post()
        if runs or self._lacking is None:
            self._since = None
            return
        now = time.monotonic()
        if self._since is None:
            self._since, self._tell_at = now, now + _TELL_S
        waited = now - self._since
        if now < self._tell_at and waited < self._timeout_s:
            return
        self._tell_at = now + _AGAIN_S
        self.waits += waited < _AGAIN_S
        name, pages = self._lacking
        said = f"request {name} has waited {waited:.1f} s for {pages} host pages; {self._holders()}"
        if waited >= self._timeout_s:
            raise TimeoutError(f"{said}; end one of them, enlarge the pool (kv_host_memory), or send fewer requests at a time")
        log.warning("%s", said)

    def _holders(self) -> str:
        directory = self._directory
        try:
            return "of the prefix directory's pages have " + ", ".join(map(str, directory.pressure.holders()))
        except RuntimeError as error:
            return f"who has the others is not known: {error}"

    def _post(self) -> None:
        """Let the others know, now and again; one request's want is no longer than it waits."""
        pressure, now = self._directory.pressure, time.monotonic()
        name, pages = self._lacking or ("", 0)
        if self._posted and self._posted != name:
            self._do(lambda: pressure.want(0))
            self._posted, self._post_at = "", 0.0
        if name and now >= self._post_at:
            self._do(lambda: pressure.want(pages))
            self._posted, self._post_at = name, now + _REPEAT_S
