"""One node of the prefix tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..plan import I32


@dataclass(eq=False, kw_only=True, slots=True)
class PrefixNode:
    """A run of whole pages below ``parent``. Only ``PrefixCache`` changes it; others hold it as a handle for ``lock``."""

    tokens: I32  # int32 [len(pages) * page_size]
    pages: list[int]  # one page per page_size tokens
    parent: PrefixNode | None  # None: the root, or no longer in the tree
    stamp: int  # when it was last used; never later than its parent
    locks: int = 0  # paths through this node that are protected
    children: dict[bytes, PrefixNode] = field(default_factory=dict)  # by the tokens of their first page

    @property
    def evictable(self) -> bool:
        """A leaf of the tree that nobody protects."""
        return self.parent is not None and self.locks == 0 and not self.children
