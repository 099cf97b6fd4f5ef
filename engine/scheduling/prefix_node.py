"""One node of the prefix tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..plan import I32
from ..serving.routing.hashes import page_hashes


@dataclass(eq=False, kw_only=True, slots=True)
class PrefixNode:
    """A run of whole pages below ``parent``. Only ``PrefixCache`` changes it; others hold it as a handle for ``lock``."""

    tokens: I32  # int32 [len(pages) * page_size]
    pages: list[int]  # one page per page_size tokens
    parent: PrefixNode | None  # None: the root, or not in the tree
    stamp: int  # when it was last used; never later than its parent
    locks: int = 0  # paths through this node that are protected
    children: dict[bytes, PrefixNode] = field(default_factory=dict)  # by the tokens of their first page
    hashes: list[int] = field(default_factory=list)  # of its pages (routing.hashes), when changes are logged; else empty

    @property
    def evictable(self) -> bool:
        """A leaf of the tree that nobody protects."""
        return self.parent is not None and self.locks == 0 and not self.children

    def hash_pages(self, page_size: int) -> None:
        """Compute ``hashes``; the parent has its own, or is the root."""
        above = self.parent.hashes if self.parent is not None else []
        self.hashes = page_hashes(self.tokens.tobytes(), page_size, above[-1] if above else 0)

    def cut_hashes(self, count: int) -> list[int]:
        """Take the last ``count`` hashes away."""
        cut = self.hashes[-count:]
        del self.hashes[-count:]
        return cut
