"""The shared prefix directory of a host: finished host pages by chained hash, for every engine that maps the same pool."""

from __future__ import annotations

from .counts import DirectoryCounts
from .directory import Directory
from .errors import DirectoryBusy, DirectoryError, DirectoryFull, MemberLost
from .hashing import PageHasher
from .layout import DirectoryLayout
from .limits import DirectoryLimits
from .liveness import Companion
from .pool_bytes import HostPoolBytes
from .pressure import FRESH_S, Holder, Wanted
from .session import remove_unused

__all__ = [
    "FRESH_S",
    "Companion",
    "Directory",
    "DirectoryBusy",
    "DirectoryCounts",
    "DirectoryError",
    "DirectoryFull",
    "DirectoryLayout",
    "DirectoryLimits",
    "Holder",
    "HostPoolBytes",
    "MemberLost",
    "PageHasher",
    "Wanted",
    "remove_unused",
]
