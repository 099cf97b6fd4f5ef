"""What all members of a directory must agree on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from .checksum import best_checksum, check_name
from .hashing import PageHasher

_MOST_PAGES = 1 << 31  # host page ids are int32


@dataclass(frozen=True, kw_only=True)
class DirectoryLayout:
    """The pool's pages and what is in them. Two layouts that differ in any field share nothing.

    Raises:
        ValueError: a number is out of range, a name is empty, or the checksum cannot be computed here.
    """

    model: str  # whose rows these are
    revision: str  # of its weights
    rows: str  # layers, widths, storage format and pitch of the rows, as text
    page_size: int  # tokens a page
    n_pages: int  # of the pool
    extent_pages: int = 64  # pages that are handed to a member at a time, consecutive where possible
    checksum: str = field(default_factory=best_checksum)

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"a page holds at least one token, got page_size {self.page_size}")
        if not 1 <= self.n_pages < _MOST_PAGES:
            raise ValueError(f"a host pool has 1 to {_MOST_PAGES - 1} pages, got {self.n_pages}")
        if not 1 <= self.extent_pages <= 4096:
            raise ValueError(f"an extent has 1 to 4096 pages, got {self.extent_pages}")
        for name in ("model", "revision", "rows"):
            if not getattr(self, name):
                raise ValueError(f"the directory's {name} is empty; name it, or pages of different origin are taken for equal")
        check_name(self.checksum)

    @property
    def n_extents(self) -> int:
        """The last one may be short."""
        return -(-self.n_pages // self.extent_pages)

    def hasher(self, extra: str = "") -> PageHasher:
        """Hashes of pages with this layout; ``extra``: see ``PageHasher``."""
        return PageHasher(model=self.model, revision=self.revision, rows=self.rows, page_size=self.page_size, extra=extra)

    def fields(self) -> dict[str, str | int]:
        """All fields by name."""
        return dataclasses.asdict(self)
