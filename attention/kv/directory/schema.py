"""The store's file: tables, and which files are taken for one.

A store lives next to its pool's file and is worth exactly as much as the pool's bytes. It belongs to one boot of the machine,
one pool and one layout; members that see another boot or a new pool start it empty, another layout they refuse.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from enum import IntEnum
from pathlib import Path
from urllib.parse import quote

from .connection import Connection
from .errors import DirectoryBusy, DirectoryError
from .host import Deadline, boot_id
from .layout import DirectoryLayout
from .liveness import LivenessFile

VERSION = 2  # of the tables and of the meaning of what is in them
_APPLICATION = 0x72517064  # of SQLite's header: this file is a prefix directory
_LEAST_BYTES = 512  # of any SQLite database


class PageState(IntEnum):
    """Of a host page, in ``pages.state``."""

    FREE = 0  # nobody's
    #: one member's: in its stock or being written. Which of the two only the member knows: a transaction a page is saved
    OWNED = 1
    READY = 2  # published: found by its hash, never written again; evictable while nobody has a reference
    WITHDRAWN = 3  # was published, failed its checksum; found no more, free when the last reference goes


_TABLES = """
CREATE TABLE header (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE members (
    member INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice
    name TEXT NOT NULL, pid INTEGER NOT NULL,
    started INTEGER NOT NULL,                  -- clock ticks from boot to the process's start
    beat INTEGER NOT NULL,                     -- ns since boot of the last heartbeat
    expires INTEGER NOT NULL                   -- ns since boot, end of the lease
);
CREATE TABLE wants (
    member INTEGER PRIMARY KEY, pages INTEGER NOT NULL,
    since INTEGER NOT NULL, beat INTEGER NOT NULL  -- ns since boot: when it began to lack pages, when it last said so
);
CREATE TABLE extents (extent INTEGER PRIMARY KEY, free INTEGER NOT NULL CHECK (free >= 0));
CREATE INDEX extents_by_free ON extents (free DESC, extent);
CREATE TABLE pages (
    page INTEGER PRIMARY KEY,
    state INTEGER NOT NULL DEFAULT 0,
    generation INTEGER NOT NULL DEFAULT 0,     -- publications of this page so far
    refs INTEGER NOT NULL DEFAULT 0,           -- members that hold it: rows of holds
    owner INTEGER,                             -- member, while OWNED
    key INTEGER, tail INTEGER,                 -- the two halves of the hash, while READY
    checksum INTEGER, tokens INTEGER,          -- tokens from the start of the chain to the end of this page
    used INTEGER,                              -- ns since boot when it was last taken
    CHECK (state BETWEEN 0 AND 3 AND refs >= 0),
    CHECK ((state = 1) = (owner IS NOT NULL) AND (state = 2) = (key IS NOT NULL)),
    CHECK (refs = 0 OR state >= 2),
    CHECK (refs > 0 OR state < 3)
);
CREATE INDEX pages_by_hash ON pages (key, generation) WHERE key IS NOT NULL;
CREATE INDEX pages_by_use ON pages (used, tokens DESC) WHERE state = 2 AND refs = 0;
CREATE INDEX pages_by_owner ON pages (owner) WHERE owner IS NOT NULL;
CREATE TABLE holds (member INTEGER NOT NULL, page INTEGER NOT NULL, PRIMARY KEY (member, page)) WITHOUT ROWID;
CREATE TRIGGER page_taken AFTER UPDATE OF state ON pages WHEN old.state = 0 AND new.state <> 0 BEGIN
    UPDATE extents SET free = free - 1 WHERE extent = old.page / {extent_pages};
END;
CREATE TRIGGER page_freed AFTER UPDATE OF state ON pages WHEN old.state <> 0 AND new.state = 0 BEGIN
    UPDATE extents SET free = free + 1 WHERE extent = old.page / {extent_pages};
END;
INSERT INTO pages (page) WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {n_pages}) SELECT i FROM n;
INSERT INTO extents SELECT page / {extent_pages}, count(*) FROM pages GROUP BY 1;
"""


def prepare(path: Path, layout: DirectoryLayout, pool_id: str, live: LivenessFile, deadline: Deadline) -> Connection:
    """A connection to the store at ``path``, made or emptied if need be. ``live`` is being opened.

    Raises:
        ValueError: the file is torn or no store, or is one of another version, layout or pool; or it was removed while
            members run.
        DirectoryBusy: the deadline passed.
    """
    if live.boot not in ("", boot_id()):
        _remove(path, live, "another boot of the machine")
    if live.boot != boot_id():
        live.write_boot(boot_id())
    _check_file(path, live)
    connection = _connect(path, deadline)
    try:
        found = _header(connection, path, deadline)
        if found and found["pool"] != pool_id:
            connection.close()
            _remove(path, live, f"pool {found['pool']}, and the pool is now {pool_id}")
            _stamp(path)
            connection, found = _connect(path, deadline), {}
        if found:
            _check_header(connection, found, layout, live, path, deadline)
        else:
            _create(connection, layout, pool_id, live, deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _remove(path: Path, live: LivenessFile, belongs: str) -> None:
    if live.any_alive():
        raise ValueError(f"{path} belongs to {belongs}, but members of it are running; stop them first")
    for name in store_files(path):
        name.unlink(missing_ok=True)


def store_files(path: Path) -> list[Path]:
    """The store at ``path`` and what SQLite puts beside it."""
    return [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal"))]


def _check_file(path: Path, live: LivenessFile) -> None:
    """Look at the header without changing a file that may not be ours; stamp a new one.

    Through SQLite, not ``open``: closing a file drops all locks this process has on it, those of its other connections too.
    """
    size = path.stat().st_size if path.exists() else 0
    if size == 0:
        if live.any_alive():
            raise ValueError(f"{path} was removed while members of it are running; stop them before a new store is made")
        _stamp(path)
        return
    application = version = None
    if size >= _LEAST_BYTES:
        with contextlib.suppress(sqlite3.DatabaseError), contextlib.closing(_peek(path)) as db:
            application = db.execute("PRAGMA application_id").fetchone()[0]
            version = db.execute("PRAGMA user_version").fetchone()[0]
    if application is None or version is None:
        raise ValueError(f"{path} is no prefix directory, or a torn one; remove it or choose another path")
    if application != _APPLICATION:
        raise ValueError(f"{path} is the SQLite database of another program (application id {application:#x}); choose another path")
    if version != VERSION:
        raise ValueError(f"{path} is a prefix directory of version {version}, this is version {VERSION}; stop its members and remove it")


def _peek(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)


def _stamp(path: Path) -> None:
    """Make an empty file that says what it is going to be; before WAL, so that the first bytes say it."""
    try:
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("PRAGMA page_size = 8192")
        db.execute(f"PRAGMA application_id = {_APPLICATION}")
        db.execute(f"PRAGMA user_version = {VERSION}")
        db.close()
    except sqlite3.Error as error:
        raise ValueError(f"cannot make the prefix directory {path}: {error}; choose a path in a writable folder with room") from error


def _connect(path: Path, deadline: Deadline) -> Connection:
    try:
        return Connection(path, deadline)
    except sqlite3.OperationalError as error:
        raise ValueError(f"cannot open the prefix directory {path}: {error}; choose a path that can be written to") from error
    except sqlite3.Error as error:
        raise _torn(path, error) from error


def _torn(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is a torn prefix directory ({why}); stop its members and remove it")


def _header(connection: Connection, path: Path, deadline: Deadline) -> dict[str, str]:
    """The header table; empty if the store was never finished."""
    try:
        if not connection.rows(deadline, "SELECT 1 FROM sqlite_master WHERE name = 'header'"):
            return {}
        verdict = connection.rows(deadline, "PRAGMA quick_check(1)")[0][0]
        found = dict(connection.rows(deadline, "SELECT name, value FROM header"))
    except DirectoryBusy:
        raise
    except DirectoryError as error:
        raise _torn(path, error.__cause__) from error
    if verdict != "ok" or not {"layout", "pool", "lock file"} <= found.keys():
        raise _torn(path, f"{verdict}, header {sorted(found)}")
    return found


def _check_header(
    connection: Connection, found: dict[str, str], layout: DirectoryLayout, live: LivenessFile, path: Path, deadline: Deadline
) -> None:
    theirs, ours = json.loads(found["layout"]), layout.fields()
    differ = [f"{name} is {theirs.get(name)!r}, not {ours[name]!r}" for name in ours if theirs.get(name) != ours[name]]
    if differ:
        raise ValueError(f"{path} is a prefix directory of another layout: {'; '.join(differ)}; use another pool, or remove both")
    if found["lock file"] != live.identity and connection.rows(deadline, "SELECT 1 FROM members LIMIT 1"):
        raise ValueError(f"{live.path} was removed, so nobody knows which members of {path} run; stop them all and remove both files")


def _create(connection: Connection, layout: DirectoryLayout, pool_id: str, live: LivenessFile, deadline: Deadline) -> None:
    """All tables and rows in one transaction: a store is finished or not there."""
    text = _TABLES.format(extent_pages=layout.extent_pages, n_pages=layout.n_pages)
    header = {"layout": json.dumps(layout.fields(), sort_keys=True), "pool": pool_id, "lock file": live.identity}
    with connection.transaction(deadline) as db:
        for statement in _statements(text):
            db.execute(statement)
        db.executemany("INSERT INTO header VALUES (?, ?)", header.items())


def _statements(text: str) -> list[str]:
    """``executescript`` would commit first; so the statements one by one."""
    found: list[str] = []
    current = ""
    for line in text.splitlines():
        current += line + "\n"
        if sqlite3.complete_statement(current):
            found.append(current)
            current = ""
    return found
