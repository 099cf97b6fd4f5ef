"""Whether a store is whole, and how its pages are used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .connection import Connection
from .host import Deadline
from .layout import DirectoryLayout
from .schema import PageState

_WRONG = {  # what a row of each query means
    "page {0} has {1} references, {2} members hold it": """
        SELECT page, refs, count(member) FROM pages LEFT JOIN holds USING (page) GROUP BY page HAVING refs <> count(member)""",
    "page {0} is held by member {1}, who is not there": """
        SELECT page, member FROM holds WHERE member NOT IN (SELECT member FROM members)""",
    "page {0} is owned by member {1}, who is not there": """
        SELECT page, owner FROM pages WHERE owner IS NOT NULL AND owner NOT IN (SELECT member FROM members)""",
    "page {0} is held by member {1}, but is not in the pool": """
        SELECT page, member FROM holds WHERE page NOT IN (SELECT page FROM pages)""",
    "extent {0} counts {1} free pages, it has {2}": """
        SELECT extent, free, n FROM extents
        JOIN (SELECT page / {extent_pages} AS extent, sum(state = 0) AS n FROM pages GROUP BY 1) USING (extent) WHERE free <> n""",
    "{1} pages have hash {0}": """
        SELECT key, count(*) FROM pages WHERE key IS NOT NULL GROUP BY key HAVING count(*) > 1""",
    "there are {0} pages, not {n_pages}": """SELECT count(*) FROM pages HAVING count(*) <> {n_pages}""",
}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Pages of a store by state, and its members, at one point in time."""

    free: int
    owned: int
    published: int  # ready, of which ``evictable`` nobody holds
    evictable: int
    withdrawn: int
    members: int

    @property
    def n_pages(self) -> int:
        """All of the pool."""
        return self.free + self.owned + self.published + self.withdrawn


def usage(connection: Connection, deadline: Deadline) -> Usage:
    """Count everything; reads the whole table, so not for every step."""
    rows = connection.rows(
        deadline, "SELECT state, count(*), sum(refs = 0), (SELECT count(*) FROM members) FROM pages GROUP BY state ORDER BY state"
    )
    counts = {state: count for state, count, _, _ in rows}
    idle = {state: unused for state, _, unused, _ in rows}
    return Usage(
        free=counts.get(PageState.FREE, 0),
        owned=counts.get(PageState.OWNED, 0),
        published=counts.get(PageState.READY, 0),
        evictable=idle.get(PageState.READY, 0),
        withdrawn=counts.get(PageState.WITHDRAWN, 0),
        members=rows[0][3],
    )


def problems(
    connection: Connection, layout: DirectoryLayout, deadline: Deadline, member: int, owned: Iterable[int], held: Iterable[int]
) -> list[str]:
    """Everything that is wrong with the store, or with what ``member`` believes to own and hold in it; empty if it is whole."""
    found: list[str] = []
    with connection.transaction(deadline) as db:
        found += [row[0] for row in db.execute("PRAGMA integrity_check(10)") if row[0] != "ok"]
        for text, query in _WRONG.items():
            numbers = {"extent_pages": layout.extent_pages, "n_pages": layout.n_pages}
            found += [text.format(*row, **numbers) for row in db.execute(query.format(**numbers)).fetchmany(10)]
        for what, query, mine in (
            ("owns", "SELECT page FROM pages WHERE owner = ?", set(owned)),
            ("holds", "SELECT page FROM holds WHERE member = ?", set(held)),
        ):
            theirs = {row[0] for row in db.execute(query, (member,))}
            if theirs != mine:
                found.append(
                    f"member {member} {what} {sorted(mine - theirs)[:10]} only for itself, {sorted(theirs - mine)[:10]} only in the store"
                )
    return found
