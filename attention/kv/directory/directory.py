"""A member of the prefix directory: what one engine does with the pages it shares with others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from ..ids import HostPage
from .audit import Usage, problems, usage
from .checksum import PageBytes, PageChecker
from .counts import DirectoryCounts
from .errors import DirectoryBusy, DirectoryError, DirectoryFull
from .hashing import split_hashes
from .host import Deadline
from .layout import DirectoryLayout
from .limits import DirectoryLimits
from .links import Links
from .pressure import Pressure
from .session import Session
from .stock import Stock
from .store import Entry
from .verifier import Verifier

_FLUSH = 256  # references dropped in one transaction, while calls of the engine wait
_SPARE_EXTENTS = 2  # kept in stock over a heartbeat


class Directory:
    """One member. Calls may come from any thread of the process that opened it; each ends by its deadline.

    A page that ``allocate`` gave out is the member's to write until ``publish`` or ``release``. A page that ``publish`` accepted or
    ``match`` returned is held: nobody writes or recycles it until it is released as often as it was taken, which must
    not be before the last launched step that reads it has completed.
    """

    def __init__(self, session: Session, layout: DirectoryLayout, pool: PageBytes) -> None:
        """Not for callers: see ``open``."""
        self.layout, self.member, self.limits = layout, session.member, session.limits
        self.counts = DirectoryCounts()
        self.pool, self._session, self._store = pool, session, session.store
        self._checker = PageChecker(pool, layout.checksum, self.limits.threads)
        self._stock = Stock(layout.extent_pages)
        self._writing: set[int] = set()  # given out, not published
        self._links = Links()
        self._verifier = Verifier(self._checker, self._links, self.counts, self._withdraw)
        self.pressure = Pressure(session, session.store, layout, self._stock)
        if self.limits.heartbeat:
            session.start_heart(self.renew)

    @classmethod
    def open(
        cls,
        path: str | Path,
        layout: DirectoryLayout,
        pool: PageBytes,
        *,
        pool_id: str,
        name: str = "",
        limits: DirectoryLimits | None = None,
    ) -> Directory:
        """Join the directory whose store is at ``path``, made if it is not there; next to it lies ``<path>-live``.

        Args:
            path: on a file system of this host, best next to the pool's file.
            layout: what the pool holds.
            pool: its bytes.
            pool_id: changes whenever the pool's memory is made anew (``host.file_identity``); a store of another pool starts empty.
            name: of this member, for people.
            limits: of waiting.

        Raises:
            ValueError: the place is not writable, or holds a torn store or one of another version, layout or pool.
            DirectoryBusy: another process kept it locked for ``limits.opening`` seconds.
        """
        return cls(Session.open(Path(path), layout, pool_id, name, limits or DirectoryLimits()), layout, pool)

    def allocate(self, count: int, after: HostPage | None = None, *, least: int | None = None) -> tuple[HostPage, ...]:
        """``count`` pages to write, consecutive and right after page ``after`` where possible; usually without a transaction.

        With ``least`` so few will do, if there are no more.

        Raises:
            DirectoryFull: not that many are free or published and unused; none is taken.
            DirectoryBusy, DirectoryError: see errors.py.
        """
        least = count if least is None else least
        with self._entered() as deadline:
            missing, there = count - self._stock.n_pages, self._stock.n_pages
            if missing > 0:
                try:
                    granted = self._store.grant(self.member, missing, after, deadline, missing)
                except DirectoryFull:
                    self._drop_all_idle(deadline)  # what this member has let go, and what dead ones left, may do
                    self.counts.reclaimed += self._session.reclaim(deadline)
                    granted = self._store.grant(self.member, missing, after, deadline, max(0, least - there))
                self._stock.put(granted)
            pages = self._stock.take(min(count, self._stock.n_pages), after)
            self._writing.update(pages)
        return tuple(pages)

    def checksums(self, hashes: Sequence[bytes], pages: Sequence[HostPage]) -> tuple[int, ...]:
        """What ``publish`` wants, computed from the pool's bytes of ``pages``: their copies must have finished."""
        return tuple(self._checker.sums(hashes, pages))

    def publish(self, hashes: Sequence[bytes], pages: Sequence[HostPage], checksums: Sequence[int], *, first: int = 0) -> tuple[bool, ...]:
        """Offer written pages to all members; ``pages[i]`` has hash ``hashes[i]`` and is page ``first + i`` of its prompt.

        True: the page is published and held by this member once. False: the hash has a page already; this one stays the member's own.

        Raises:
            DirectoryBusy: nothing was published; try again later.
            DirectoryError: see errors.py.
        """
        halves = split_hashes(hashes).tolist()
        assert len(hashes) == len(pages) == len(checksums), f"{len(hashes)} hashes, {len(pages)} pages, {len(checksums)} checksums"
        with self._entered() as deadline:
            own = self._writing.issuperset(pages) and len(set(pages)) == len(pages)
            assert own, "a page is published that is not the member's to write"
            entries = [
                Entry(page=page, key=key, tail=tail, checksum=checksum, tokens=(first + place + 1) * self.layout.page_size)
                for place, (page, (key, tail), checksum) in enumerate(zip(pages, halves, checksums, strict=True))
            ]
            generations = self._store.publish(self.member, entries, deadline)
            for entry, generation in zip(entries, generations, strict=True):
                if generation:
                    self._writing.remove(entry.page)
                    self._links.add(entry.page, generation, entry.tail, entry.checksum)
                    self._links.verified(entry.page)  # its checksum is of these bytes
        done = tuple(generation > 0 for generation in generations)
        self.counts.published += sum(done)
        self.counts.present += len(done) - sum(done)
        return done

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of the first pages of chain ``hashes`` are published now. A hint: nothing is held. 0 if the store is locked."""
        try:
            with self._entered() as deadline:
                return len(self._store.lookup(split_hashes(hashes)[:, 0], deadline))
        except DirectoryBusy:
            return 0

    def match(self, hashes: Sequence[bytes]) -> tuple[HostPage, ...]:
        """Take the pages of the longest published prefix of chain ``hashes``, each held once more by this member.

        A page that this member takes for the first time is read and compared with its checksum; one that is wrong is
        withdrawn for everybody, and the prefix ends before it. It also ends where ``limits.verify`` has passed: the rest
        can be had by asking again. A store that is locked by others for ``limits.call`` has no pages.
        """
        self.counts.asked += len(hashes)
        halves = split_hashes(hashes)
        tails = halves[:, 1].tolist()
        try:
            with self._entered() as deadline:
                found = self._links.usable(self._store.lookup(halves[:, 0], deadline), tails)
                new = [place for place, (_, page, _) in enumerate(found) if page not in self._links]
                checksums = self._store.acquire(self.member, [found[place] for place in new], halves[new], deadline) if new else []
                if len(checksums) < len(new):
                    found = found[: new[len(checksums)]]
                self._links.take(found, tails, checksums)
        except DirectoryBusy:
            self.counts.busy += 1
            return ()
        pages = tuple(HostPage(page) for _, page, _ in found)
        sound = self._verifier.sound(pages, hashes, self.limits.verify)
        if sound < len(pages):
            self.release(pages[sound:])
        self.counts.matched += sound
        return pages[:sound]

    def release(self, pages: Sequence[HostPage]) -> None:
        """Give up pages: one hold of each page that is held; a page to write goes back to the stock.

        References are dropped in the store by the next ``renew``, or when pages run short.
        """
        with self._session.entered(patient=True):
            mine = [page for page in pages if page in self._writing]
            self._links.let_go([page for page in pages if page not in self._writing])
            self._writing.difference_update(mine)
            self._stock.put(mine)
            idle = len(self._links.idle)
        if idle >= _FLUSH:
            self._session.wake_heart()

    def renew(self) -> None:
        """One heartbeat: extend the lease, take dead members apart, drop references, give back spare pages, trim the log."""
        self.counts.reclaimed += self._session.renew()
        more = True
        while more:  # the engine's calls may come in between
            with self._entered() as deadline:
                more = self._drop_idle(deadline)
        self.trim(_SPARE_EXTENTS * self.layout.extent_pages)

    def trim(self, keep: int = 0) -> None:
        """Give back what is in stock, but for about ``keep`` pages."""
        with self._entered() as deadline:
            spare = self._stock.surplus(keep)
            try:
                if spare:
                    self._store.give_back(self.member, spare, deadline)
            except DirectoryError:
                self._stock.put(spare)
                raise

    def usage(self) -> Usage:
        """Pages by state, of all members."""
        with self._entered() as deadline:
            return usage(self._store.connection, deadline)

    def check(self) -> None:
        """AssertionError unless the store is whole and agrees with this member."""
        with self._entered() as deadline:
            owned = [*self._stock.pages(), *self._writing]
            found = problems(self._store.connection, self.layout, deadline, self.member, owned, self._links.pages())
        assert not found, "; ".join(found)

    def close(self) -> None:
        """Leave: drop all references and free unpublished pages; the device must have finished with them. A second call does nothing."""
        self._session.close()
        self._checker.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entered(self) -> contextlib.AbstractContextManager[Deadline]:
        return self._session.entered()

    def _withdraw(self, page: HostPage) -> None:
        with contextlib.suppress(DirectoryBusy), self._entered() as deadline:  # if not now: every member looks for itself
            self._store.withdraw(self.member, page, self._links.generation(page), deadline)

    def _drop_idle(self, deadline: Deadline) -> bool:
        """Drop some references that are held no more; whether there may be others."""
        idle = self._links.idle_pages(_FLUSH)
        if idle:
            self._store.drop(self.member, idle, deadline)
            self._links.forget(idle)
        return len(idle) == _FLUSH

    def _drop_all_idle(self, deadline: Deadline) -> None:
        while self._drop_idle(deadline):
            pass
