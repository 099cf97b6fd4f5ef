"""Who takes part: leases, and what becomes of the pages of a member that died."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator

from .connection import Connection
from .errors import MemberLost
from .host import Deadline, boot_ns, start_ticks
from .liveness import LivenessFile

_CHUNK = 1024  # pages a transaction of reclaim changes at most: others wait for it


class Members:
    """Transactions on the table of members; not for two threads at a time."""

    def __init__(self, connection: Connection, live: LivenessFile, lease_s: float) -> None:
        self.connection = connection
        self.live = live
        self.lease_ns = int(lease_s * 1e9)

    def join(self, name: str, deadline: Deadline) -> int:
        """Number of a new member, this process; it is alive before others see it."""
        now, pid = boot_ns(), os.getpid()
        with self.connection.transaction(deadline) as db:
            row = db.execute(
                "INSERT INTO members (name, pid, started, beat, expires) VALUES (?, ?, ?, ?, ?)",
                (name, pid, start_ticks(pid), now, now + self.lease_ns),
            )
            member = row.lastrowid
            assert member is not None
            self.live.hold(member)
        return member

    def renew(self, member: int, deadline: Deadline) -> None:
        """Extend the lease; MemberLost if the member is not there any more."""
        with self.connection.transaction(deadline) as db:
            touch_member(db, member, self.lease_ns)

    def leave(self, member: int, deadline: Deadline) -> None:
        """End ``member``: as ``reclaim`` of one that died, which does what is left at the deadline."""
        while not self._take_back(member, None, deadline) and not deadline.passed:
            pass

    def reclaim(self, own: int, deadline: Deadline) -> list[int]:
        """Take back what dead members held and owned, as far as the deadline allows; the numbers of those that are gone.

        Dead is a member whose lease has ended AND whose process (and companions) no longer exist. The end of the process alone is not
        enough: the device may still be copying into its pages while the kernel tears it down, and the lease covers that. The end of
        the lease alone is not enough either: a process that was stopped or starved would wake up and go on
        reading and writing its pages. Published pages stay.
        """
        now = boot_ns()
        ended = self.connection.rows(deadline, "SELECT member FROM members WHERE expires < ? AND member <> ?", (now, own))
        gone: list[int] = []
        for (member,) in ended:
            while not (deadline.passed or self.live.alive(member) or member in gone):
                if self._take_back(member, now, deadline):
                    gone.append(member)
        return gone

    def _take_back(self, member: int, ended: int | None, deadline: Deadline) -> bool:
        """One transaction's worth; True when nothing is left: the member is gone, or its lease had not ``ended`` by then after all."""
        with self.connection.transaction(deadline) as db:
            if ended is not None and not db.execute("SELECT 1 FROM members WHERE member = ? AND expires < ?", (member, ended)).fetchone():
                return True
            held = [row[0] for row in db.execute("SELECT page FROM holds WHERE member = ? ORDER BY page LIMIT ?", (member, _CHUNK))]
            drop_holds(db, member, held)
            owned = [row[0] for row in db.execute("SELECT page FROM pages WHERE owner = ? LIMIT ?", (member, _CHUNK - len(held)))]
            db.executemany("UPDATE pages SET state = 0, owner = NULL WHERE page = ?", [(page,) for page in owned])
            done = len(held) + len(owned) < _CHUNK
            if done:
                db.execute("DELETE FROM members WHERE member = ?", (member,))
                db.execute("DELETE FROM wants WHERE member = ?", (member,))
        return done


def touch_member(db: sqlite3.Connection, member: int, lease_ns: int) -> None:
    """Extend the lease as a part of a transaction; MemberLost if the member is not there any more."""
    now = boot_ns()
    if db.execute("UPDATE members SET beat = ?, expires = ? WHERE member = ?", (now, now + lease_ns, member)).rowcount != 1:
        raise MemberLost(f"member {member} is not in the prefix directory any more; stop using its pages and open it again")


def drop_holds(db: sqlite3.Connection, member: int, pages: Iterable[int]) -> None:
    """Take back references of ``member``; withdrawn pages that lose their last one become free."""
    for first, last in page_runs(pages):
        gone = db.execute("DELETE FROM holds WHERE member = ? AND page BETWEEN ? AND ?", (member, first, last))
        assert gone.rowcount == last - first + 1, f"member {member} drops pages {first} to {last} that it does not all hold"
        db.execute(
            "UPDATE pages SET refs = refs - 1, state = CASE WHEN state = 3 AND refs = 1 THEN 0 ELSE state END WHERE page BETWEEN ? AND ?",
            (first, last),
        )


def page_runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of the consecutive runs in ``pages``, ascending: few statements where pages are neighbours."""
    first = last = None
    for page in sorted(pages):
        if first is None or last is None:
            first = last = page
        elif page == last + 1:
            last = page
        else:
            yield first, last
            first = last = page
    if first is not None and last is not None:
        yield first, last
