"""Who lacks pages, who has them, and who comes first: what members of a full directory tell each other."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from .host import boot_ns
from .layout import DirectoryLayout
from .members import touch_member
from .session import Session
from .stock import Stock
from .store import Store

#: a want that its member has not repeated for so long counts no more, seconds
FRESH_S = 2.0

_WANT = """INSERT INTO wants VALUES (:member, :pages, :now, :now) ON CONFLICT (member)
           DO UPDATE SET pages = excluded.pages, beat = excluded.beat,
                         since = CASE WHEN beat < excluded.beat - :fresh THEN excluded.beat ELSE since END"""
_WANTED = """SELECT (SELECT total(pages) FROM wants WHERE member <> :member AND beat >= :least),
                    (SELECT member FROM wants WHERE beat >= :least ORDER BY since, member LIMIT 1)"""
# Free pages, published ones that nobody holds, and the members' spare ones (they give them back when others want pages).
_AVAILABLE = "SELECT (SELECT total(free) FROM extents) + (SELECT count(*) FROM pages WHERE state = 2 AND refs = 0)"
_HOLDERS = """SELECT member, name, pid, (SELECT count(*) FROM pages WHERE owner = member),
                     (SELECT count(*) FROM holds WHERE holds.member = members.member) FROM members ORDER BY member"""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What members lack."""

    pages: int  # that the others lack together
    first: int | None  # the member that has lacked pages for longest, perhaps the one that asks; None: nobody lacks any


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One member and its pages."""

    member: int
    name: str
    pid: int
    owned: int  # its own: being written, or in stock
    held: int  # published ones that it reads or keeps

    def __str__(self) -> str:
        return f"member {self.member} ({self.name}, pid {self.pid}): {self.owned} of its own, {self.held} shared ones"


class Pressure:
    """One member's part in it. Calls may come from any thread; errors as those of ``Directory``."""

    def __init__(self, session: Session, store: Store, layout: DirectoryLayout, stock: Stock) -> None:
        self._session, self._store, self._layout, self._stock = session, store, layout, stock

    def want(self, pages: int) -> None:
        """This member lacks ``pages``; to be repeated while it does, 0 once it does not."""
        member, now = self._session.member, boot_ns()
        with self._session.entered() as deadline, self._store.connection.transaction(deadline) as db:
            touch_member(db, member, self._store.lease_ns)
            if pages:
                db.execute(_WANT, {"member": member, "pages": pages, "now": now, "fresh": int(FRESH_S * 1e9)})
            else:
                drop_want(db, member)

    def wanted(self) -> Wanted:
        """What is lacking now."""
        values = {"member": self._session.member, "least": boot_ns() - int(FRESH_S * 1e9)}
        with self._session.entered() as deadline:
            [(pages, first)] = self._store.connection.rows(deadline, _WANTED, values)
        return Wanted(pages=int(pages), first=first)

    def available(self) -> int:
        """Pages that ``allocate`` could give this member now, those that it would have to let go first not counted."""
        with self._session.entered() as deadline:
            [(pages,)] = self._store.connection.rows(deadline, _AVAILABLE)
            return int(pages) + self._stock.n_pages

    def holders(self) -> list[Holder]:
        """All members and what they have."""
        with self._session.entered() as deadline:
            rows = self._store.connection.rows(deadline, _HOLDERS)
        return [Holder(member=row[0], name=row[1], pid=row[2], owned=row[3], held=row[4]) for row in rows]


def drop_want(db: sqlite3.Connection, member: int) -> None:
    """``member`` lacks nothing any more."""
    db.execute("DELETE FROM wants WHERE member = ?", (member,))
