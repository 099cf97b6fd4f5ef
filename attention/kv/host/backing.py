"""What a host pool can stand on, and choosing it by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .layout import HostLayout
from .region import Region


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Memory of a pool, ready for use."""

    region: Region
    offset: int  # of the first layer in the region
    about: str  # for people
    found: bool = False  # contents may be from before
    identity: str = ""  # of these contents, where they can outlive a process: another for every pool that is made


class Backing(Protocol):
    """Where the memory of a pool comes from."""

    @property
    def kind(self) -> str:
        """``pinned``, ``shm``, ``cxl`` or ``file``: what ``host_pool_bytes`` wants."""

    def room(self, share: float) -> int:
        """Bytes of a pool for which no size was asked: ``share`` of what is available to it, less where there is less."""

    def check(self, layout: HostLayout) -> None:
        """Refuse a pool that does not fit, before anything is allocated: all ranks do it before the first of them opens its pool.

        Raises:
            ValueError: what was asked for, what there is, what to do.
        """

    def open(self, layout: HostLayout, model: str) -> Opened:
        """Memory for a pool of ``layout``, which was checked, whose rows belong to ``model`` (a fingerprint).

        Raises:
            ValueError: it cannot be had; nothing is allocated then.
        """
