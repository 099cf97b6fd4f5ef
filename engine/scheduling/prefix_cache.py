"""Radix tree over token sequences: which pages hold the KV rows of a prompt's leading tokens."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..plan import I32
from ..serving.routing.kv_log import KvLog
from .prefix_node import PrefixNode


@dataclass(frozen=True, kw_only=True)
class Inserted:
    """What ``PrefixCache.insert`` did with the caller's pages."""

    node: PrefixNode  # where the inserted sequence ends
    adopted: tuple[int, ...]  # pages that the tree holds from now on
    duplicates: tuple[int, ...]  # pages whose tokens the tree already had in other pages; the caller keeps them


class PrefixCache:
    """Page-aligned radix tree. A node is a run of whole pages below its parent; siblings differ in their first page.

    The tree names pages and counts who protects them; it does not own the pool. ``lock`` protects the path from the
    root to a node; leaves that nobody protects are evicted in least-recently-used order, from their end, page by page.
    Lists inside never leave: everything returned is a tuple.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.n_pages = 0  # pages in the tree
        self.evictable_pages = 0  # of these, pages on no locked path
        self.n_nodes = 0
        self._root = PrefixNode(tokens=np.zeros(0, dtype=np.int32), pages=[], parent=None, stamp=0)
        self.log: KvLog | None = None  # who is told of every change
        self._clock = itertools.count(1)
        self._pushes = itertools.count()
        # (stamp, push number, leaf); an entry counts while the leaf is evictable and its stamp is the same.
        self._heap: list[tuple[int, int, PrefixNode]] = []

    def match(self, tokens: I32) -> tuple[tuple[int, ...], PrefixNode]:
        """Pages of the longest cached prefix of ``tokens`` (int32 [n]; only whole pages count), and where it ends.

        The node is only good until the next ``evict`` unless it is locked.
        """
        pages: list[int] = []
        node = self._root
        for child in self._walk(tokens):
            pages.extend(child.pages)
            node = child
        self._touch(node)
        return tuple(pages), node

    def covers(self, tokens: I32) -> bool:
        """Whether all whole pages of ``tokens`` are cached; changes nothing."""
        node, at, n_pages = self._root, 0, len(tokens) // self.page_size
        while at < n_pages:
            child = node.children.get(self._key(tokens, at))
            if child is None:
                return False
            same = self._common_pages(child.tokens, tokens[at * self.page_size : n_pages * self.page_size])
            if same < len(child.pages) and at + same < n_pages:
                return False
            node, at = child, at + same
        return True

    def insert(self, tokens: I32, pages: Sequence[int]) -> Inserted:
        """Add a sequence of whole pages: ``tokens`` int32 [len(pages) * page_size], already computed.

        Where the tree has the tokens, it keeps its own pages; see ``Inserted``.
        """
        assert len(tokens) == len(pages) * self.page_size, f"{len(tokens)} tokens in {len(pages)} pages of {self.page_size}"
        duplicates: list[int] = []
        node, at = self._root, 0
        for child in self._walk(tokens):
            mine = pages[at : at + len(child.pages)]
            duplicates.extend(own for own, kept in zip(mine, child.pages, strict=True) if own != kept)
            node, at = child, at + len(child.pages)
        adopted = tuple(pages[at:])
        if adopted:
            node = self._append(node, tokens[at * self.page_size :].copy(), list(adopted))
        self._touch(node)
        return Inserted(node=node, adopted=adopted, duplicates=tuple(duplicates))

    def lock(self, node: PrefixNode) -> None:
        """Protect the path from the root to ``node`` from eviction; counts."""
        at = node
        while at.parent is not None:
            if at.locks == 0:
                self.evictable_pages -= len(at.pages)
            at.locks += 1
            at = at.parent

    def unlock(self, node: PrefixNode) -> None:
        """Take back one ``lock`` of ``node``."""
        at = node
        while at.parent is not None:
            assert at.locks > 0, "a path is unlocked more often than locked"
            at.locks -= 1
            if at.locks == 0:
                self.evictable_pages += len(at.pages)
            at = at.parent
        self._offer(node)

    def evict(self, count: int) -> tuple[int, ...]:
        """Forget up to ``count`` pages, least recently used leaves first; returns them."""
        evicted: list[int] = []
        while len(evicted) < count and self._heap:
            stamp, _, leaf = self._heap[0]
            if leaf.stamp != stamp or not leaf.evictable:
                heapq.heappop(self._heap)
                continue
            evicted.extend(self._trim(leaf, min(count - len(evicted), len(leaf.pages))))
        return tuple(evicted)

    def flush(self) -> tuple[int, ...]:
        """Forget everything that is not locked; returns those pages."""
        return self.evict(self.evictable_pages)

    # ---- the tree

    def _key(self, tokens: I32, page: int) -> bytes:
        return tokens[page * self.page_size : (page + 1) * self.page_size].tobytes()

    def _walk(self, tokens: I32) -> list[PrefixNode]:
        """Nodes that cover the longest cached prefix, from the top; the last is split where the prefix ends inside it."""
        path: list[PrefixNode] = []
        node, at, n_pages = self._root, 0, len(tokens) // self.page_size
        while at < n_pages:
            child = node.children.get(self._key(tokens, at))
            if child is None:
                break
            same = self._common_pages(child.tokens, tokens[at * self.page_size : n_pages * self.page_size])
            if same < len(child.pages):
                child = self._split(child, same)
            path.append(child)
            node, at = child, at + same
        return path

    def _common_pages(self, a: I32, b: I32) -> int:
        n = min(len(a), len(b))
        differ = a[:n] != b[:n]
        first = int(differ.argmax()) if n else 0
        return (first if n and differ[first] else n) // self.page_size

    def _split(self, node: PrefixNode, pages: int) -> PrefixNode:
        """Put the first ``pages`` pages of ``node`` into a new parent. ``node`` keeps its end, so its holders' locks stay right."""
        assert node.parent is not None and 0 < pages < len(node.pages)
        cut = pages * self.page_size
        upper = PrefixNode(tokens=node.tokens[:cut], pages=node.pages[:pages], parent=node.parent, stamp=node.stamp)
        upper.locks = node.locks
        upper.hashes, node.hashes = node.hashes[:pages], node.hashes[pages:]
        node.parent.children[self._key(node.tokens, 0)] = upper
        node.tokens, node.pages, node.parent = node.tokens[cut:], node.pages[pages:], upper
        upper.children[self._key(node.tokens, 0)] = node
        self.n_nodes += 1
        return upper

    def _append(self, parent: PrefixNode, tokens: I32, pages: list[int]) -> PrefixNode:
        leaf = PrefixNode(tokens=tokens, pages=pages, parent=parent, stamp=0)
        parent.children[self._key(tokens, 0)] = leaf
        self.n_nodes += 1
        self.n_pages += len(pages)
        self.evictable_pages += len(pages)
        if self.log is not None:
            leaf.hash_pages(self.page_size)
            self.log.stored(leaf.hashes)
        return leaf

    def _trim(self, leaf: PrefixNode, count: int) -> list[int]:
        """Cut ``count`` pages off the end of an evictable leaf; an empty leaf leaves the tree."""
        pages = leaf.pages[-count:]
        del leaf.pages[-count:]
        self.n_pages -= count
        self.evictable_pages -= count
        if self.log is not None:
            self.log.removed(leaf.cut_hashes(count))
        if leaf.pages:
            leaf.tokens = leaf.tokens[: len(leaf.pages) * self.page_size]
            return pages
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._key(leaf.tokens, 0)]
        leaf.parent = None
        self.n_nodes -= 1
        self._offer(parent)
        return pages

    # ---- least recently used

    def _touch(self, node: PrefixNode) -> None:
        """Mark the path to ``node`` as used now."""
        now = next(self._clock)
        at: PrefixNode | None = node
        while at is not None:
            at.stamp = now
            at = at.parent
        self._offer(node)

    def _offer(self, node: PrefixNode) -> None:
        """Queue ``node`` for eviction if it is a leaf that nobody protects."""
        if not node.evictable:
            return
        heapq.heappush(self._heap, (node.stamp, next(self._pushes), node))
        if len(self._heap) > 2 * self.n_nodes + 64:  # outdated entries outnumber the leaves
            self._heap = [(n.stamp, next(self._pushes), n) for n in self.nodes() if n.evictable]
            heapq.heapify(self._heap)

    def start_log(self) -> KvLog:
        """Tell all changes from now on, and first what is there; the second time, tell that again."""
        if self.log is None:
            for node in self.nodes():
                node.hash_pages(self.page_size)
            self.log = KvLog(lambda: (value for node in self.nodes() for value in node.hashes))
        self.log.resync()
        return self.log

    def nodes(self) -> list[PrefixNode]:
        """All nodes but the root, parents first."""
        found = list(self._root.children.values())
        for node in found:
            found.extend(node.children.values())
        return found

    def pages(self) -> tuple[int, ...]:
        """All pages in the tree."""
        return tuple(page for node in self.nodes() for page in node.pages)

    def check(self) -> None:
        """AssertionError unless structure, counters and eviction queue agree."""
        nodes, pages = self.nodes(), self.pages()
        assert len(nodes) == self.n_nodes and len(pages) == self.n_pages, "node or page counter is wrong"
        assert len(set(pages)) == len(pages), "a page is in the tree twice"
        assert sum(len(n.pages) for n in nodes if n.locks == 0) == self.evictable_pages, "counter of evictable pages is wrong"
        queued = {id(node) for stamp, _, node in self._heap if node.stamp == stamp}
        for node in [self._root, *nodes]:
            assert node is self._root or (node.pages and len(node.tokens) == len(node.pages) * self.page_size), "malformed node"
            for key, child in node.children.items():
                assert child.parent is node and key == self._key(child.tokens, 0), "a child is filed wrongly"
                assert child.stamp <= node.stamp, "a child was used after its parent"
            if node is not self._root:
                assert node.locks >= sum(child.locks for child in node.children.values()), "a locked node has an unlocked parent"
            assert not node.evictable or id(node) in queued, "an evictable leaf is not queued"
            assert self.log is None or len(node.hashes) == len(node.pages), "a page has no hash"
