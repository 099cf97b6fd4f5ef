"""Pages and slots of one DP rank: the free lists, the prefix tree, and returns that must wait for a launched step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ...attention.kv.ids import HostPage
from ..offload.residency import Residency
from ..offload.stay import Stay
from ..plan import I32
from ..request import Request
from ..sharing.prefix_share import PrefixShare
from .page_allocator import PageAllocator
from .prefix_cache import Inserted, PrefixCache
from .prefix_node import PrefixNode
from .scheduler_config import SchedulerConfig
from .seat import Seat
from .slots import SlotPool

#: pages that leave the prefix tree at a time when host pages run out: each time costs a question to the directory
_SEVERAL = 4


def known_tokens(request: Request) -> I32:
    """int32 [known_len]: the tokens of a request that the host knows."""
    return np.array(request.prompt_ids + request.output_ids, dtype=np.int32)


class Pool:
    """Gives pages and slots to seats and takes them back.

    A device step reads what it names: pages in page tables, slots in the device tables. So a seat that ends gives its
    things back only when the last launched step that names it has completed (``complete``). Every page has one holder
    per seat that reads it and one for the prefix tree; it is free when the last of them lets go, whatever the order.
    """

    def __init__(self, config: SchedulerConfig, tier: Residency | None = None, share: PrefixShare | None = None) -> None:
        self.tier = tier  # where pages are, with offloading
        self.share = share  # pages that others have too, with a prefix directory
        self.lacks_host = False  # the last ``grab`` got fewer pages than wanted because others have the host's
        self.page_size = config.page_size
        self._pp = config.pp
        self.pages = PageAllocator(config.n_pages)
        self.slots = SlotPool(config.max_num_seqs)
        self.cache = PrefixCache(config.page_size)
        self.caching = config.prefix_caching
        self.evictions = 0  # pages dropped from the prefix tree
        self.completed = -1  # last step whose results have been handled
        self._freed: list[int] = []  # since the last plan
        self._leaving: dict[int, list[Seat]] = {}  # ended seats by the last step that names them

    def count_pages(self, tokens: int) -> int:
        """Pages that hold ``tokens`` rows."""
        return -(-tokens // self.page_size)

    @property
    def available(self) -> int:
        """Pages that can be had now: free, or in the prefix tree and evictable (of the last, some may still be read by a seat)."""
        return self.pages.n_free + self.cache.evictable_pages

    @property
    def leaving(self) -> bool:
        """Some ended seat still waits for a launched step, and will give back what it holds."""
        return bool(self._leaving)

    # ---- taking

    def grab(self, count: int, stay: Stay | None) -> list[int]:
        """Up to ``count`` pages for the end of ``stay``, evicting from the prefix tree when the free ones do not do."""
        if self.tier is not None:  # nothing is evicted for pages that the device has no room for
            count = self.tier.room(min(count, self.available))
        if self.share is not None and stay is not None:
            count = self._secure(self.share, count, stay)
        while self.pages.n_free < count:
            evicted = self.cache.evict(count - self.pages.n_free)
            if not evicted:
                break
            self.evictions += len(evicted)
            self._drop(evicted)
        pages = self.pages.take(min(count, self.pages.n_free))
        if self.tier is not None:
            assert stay is not None
            self.tier.take(stay, pages)
        return pages

    def _secure(self, share: PrefixShare, count: int, stay: Stay) -> int:
        """How many of ``count`` host pages for the end of ``stay`` are there, after letting go of the prefix tree's if need be."""
        assert self.tier is not None
        last = HostPage(self.tier.book.host[stay.pages[-1]]) if stay.pages else None
        found = share.pages.secure(count, last)
        if found < count and not share.pages.busy and share.questions.drop_answers():
            found = share.pages.secure(count, last)
        while found < count and not share.pages.busy and (evicted := self.cache.evict(max(count - found, _SEVERAL))):
            self.evictions += len(evicted)
            self._drop(evicted)
            found = share.pages.secure(count, last)
        self.lacks_host = found < count
        return found

    def has_host(self, count: int) -> bool:
        """Whether ``count`` host pages more can probably be had."""
        return self.share is None or self.share.has(count, self.cache.evictable_pages)

    def relieve(self, count: int) -> None:
        """Let go of ``count`` pages that nobody reads, because others lack some."""
        evicted = self.cache.evict(count)
        self.evictions += len(evicted)
        self._drop(evicted)

    def bring(self, tokens: I32, hosts: Sequence[HostPage]) -> None:
        """Put finished host pages, which hold ``tokens`` and are held for us, into the prefix tree behind what it has of them."""
        assert self.tier is not None and self.share is not None
        found, node = self.cache.match(tokens)
        self.cache.lock(node)
        count = max(0, min(len(hosts) - len(found), self.available))
        if (short := count - self.pages.n_free) > 0:
            self.relieve(short)
        self.cache.unlock(node)
        count = min(count, self.pages.n_free)  # some that left the tree may still be read
        pages, end = self.pages.take(count), len(found) + count
        self.share.bring(hosts[len(found) : end], [*hosts[: len(found)], *hosts[end:]])
        if pages:
            self.tier.book.bring(pages, hosts[len(found) : end])
            inserted = self.cache.insert(tokens[: end * self.page_size], [*found, *pages])
            assert inserted.adopted == tuple(pages), "the prefix tree has changed meanwhile"

    def match(self, tokens: I32) -> tuple[list[int], PrefixNode]:
        """Cached pages of the longest prefix of ``tokens``, held for the caller and protected from eviction."""
        found, node = self.cache.match(tokens)
        self.cache.lock(node)
        self.pages.share(found)
        return list(found), node

    def unmatch(self, pages: Iterable[int], node: PrefixNode | None) -> None:
        """Undo ``match`` (and ``grab``): let go of ``pages`` and of the path to ``node``."""
        if node is not None:
            self.cache.unlock(node)
        self._drop(pages)

    # ---- keeping

    def store(self, seat: Seat) -> None:
        """Put the whole pages known at admission into the prefix tree; every step that wrote them has completed."""
        tokens, seat.tokens = seat.tokens, None
        if not self.caching or tokens is None:
            return
        inserted = self._insert(tokens, seat.pages)
        # With duplicates the tree's path is not what this seat reads: protecting it would pin pages for nothing.
        if not inserted.duplicates and seat.node is not None:
            self.cache.lock(inserted.node)
            self.cache.unlock(seat.node)
            seat.node = inserted.node

    def _insert(self, tokens: I32, pages: list[int]) -> Inserted:
        whole = len(tokens) // self.page_size
        inserted = self.cache.insert(tokens[: whole * self.page_size], pages[:whole])
        self.pages.share(inserted.adopted)
        if self.share is not None and self.tier is not None and inserted.adopted:
            hosts = [HostPage(self.tier.book.host[page]) for page in inserted.adopted]
            self.share.publish(tokens, hosts, whole - len(hosts))
        return inserted

    # ---- giving back

    def release(self, seat: Seat) -> None:
        """Take back what an ended seat holds, as soon as no launched step names it."""
        assert not seat.live
        if self.tier is not None:
            assert seat.stay is not None
            self.tier.leave(seat.stay)
        if seat.last_step > self.completed:
            self._leaving.setdefault(seat.last_step, []).append(seat)
        else:
            self._free(seat)

    def complete(self, step: int) -> None:
        """Step ``step`` and all before it have completed."""
        assert step == self.completed + 1, f"step {step} completed after {self.completed}"
        self.completed = step
        for seat in self._leaving.pop(step, ()):
            self._free(seat)

    def _free(self, seat: Seat) -> None:
        """Store what was computed of tokens the host knows, then let go of everything."""
        if self.caching:
            self._insert(known_tokens(seat.request)[: seat.computed], seat.pages)
        self.unmatch(seat.pages, seat.node)
        self.slots.give(seat.slot, seat.last_step + self._pp)
        seat.pages, seat.node, seat.tokens = [], None, None

    def flush(self) -> int:
        """Forget all cached prefixes that nobody reads; returns their number of pages."""
        pages = self.cache.flush()
        self._drop(pages)
        return len(pages)

    def _drop(self, pages: Iterable[int]) -> None:
        freed = self.pages.drop(pages)
        if self.tier is not None:
            self.tier.release(freed)
        self._freed.extend(freed)

    def pop_freed(self) -> list[int]:
        """Pages that became free since the last call (some may be in use again)."""
        freed, self._freed = self._freed, []
        return freed

    # ---- checking

    def check(self, live: Iterable[Seat]) -> None:
        """AssertionError unless free + cached + in use is everything, and every page has exactly its holders."""
        seats = [*live, *(seat for group in self._leaving.values() for seat in group)]
        self.pages.check()
        self.slots.check()
        self.cache.check()
        cached = set(self.cache.pages())
        holders = Counter(page for seat in seats for page in seat.pages)
        for page in range(self.pages.n_pages):
            expected = holders[page] + (page in cached)
            assert self.pages.refs(page) == expected, f"page {page} has {self.pages.refs(page)} holders, {expected} expected"
        in_use = len(set(holders) - cached)
        total = self.pages.n_free + len(cached) + in_use
        assert total == self.pages.n_pages, f"{self.pages.n_free} free + {len(cached)} cached + {in_use} in use != {self.pages.n_pages}"
        held = [seat.slot for seat in seats]
        assert len(set(held)) == len(held) and not any(map(self.slots.is_free, held)), "a seat's slot is free or shared"
        if self.tier is not None:
            self.tier.check([page for page in range(self.pages.n_pages) if self.pages.refs(page)])
        assert self.slots.n_free + len(held) == self.slots.n_slots, "slots are lost"
