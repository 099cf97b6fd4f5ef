"""One connection to the store's file: explicit transactions, and no wait without a deadline."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import DirectoryBusy, DirectoryError
from .host import Deadline

_SETTINGS = (
    # Readers go on beside a writer, and a writer killed at any point leaves a log that ends at its last commit.
    "PRAGMA journal_mode = WAL",
    # Nothing is ever flushed to a disk. A killed process loses nothing by that, since the kernel keeps what it wrote; a
    # crashed kernel does, and with its boot the store's contents end anyway (see schema.py).
    "PRAGMA synchronous = OFF",
    "PRAGMA cache_size = -65536",  # KiB
    "PRAGMA mmap_size = 268435456",
    "PRAGMA wal_autocheckpoint = 2048",  # pages of 8 KiB; normally the heartbeat's checkpoints keep the log far below
    "PRAGMA temp_store = MEMORY",
    "PRAGMA trusted_schema = OFF",
)


class Connection:
    """Not for two threads at a time."""

    def __init__(self, path: Path, deadline: Deadline) -> None:
        """Open ``path``, made if it is not there; sqlite3.DatabaseError if it is no database, ValueError if SQLite is too old."""
        if sqlite3.sqlite_version_info < (3, 35):
            raise ValueError(f"the prefix directory needs SQLite 3.35 or newer, this Python has {sqlite3.sqlite_version}")
        # SQLite's own waiting sleeps up to 100 ms at a time; ours is finer, see _until.
        self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=256)
        try:
            for setting in _SETTINGS:
                self._until(deadline, setting)
        except BaseException:
            self._db.close()
            raise
        self.most_variables = self._db.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)

    @contextmanager
    def transaction(self, deadline: Deadline) -> Iterator[sqlite3.Connection]:
        """Hold the write lock: all of the block's changes or, if it raises, none.

        Raises:
            DirectoryBusy: another process kept the lock until the deadline; the block did not run.
            DirectoryError: the store is damaged, or its file system is full; nothing was changed.
        """
        with self._translated():
            self._until(deadline, "BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def rows(self, deadline: Deadline, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """All rows of one query, at one point in time; errors as in ``transaction``."""
        with self._translated():
            return self._until(deadline, sql, values)

    def checkpoint(self) -> None:
        """Move the log's pages into the file as far as no reader is in the way. Waits for nobody."""
        with self._translated():
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        """Idempotent."""
        self._db.close()

    def _until(self, deadline: Deadline, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        pause = 50e-6
        while True:
            try:
                return self._db.execute(sql, values).fetchall()
            except sqlite3.OperationalError as error:
                # BUSY: another writer, or a log that is being recovered after a kill; LOCKED does not occur here
                if (error.sqlite_errorcode or 0) & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if deadline.passed:
                    raise DirectoryBusy(f"the prefix directory was locked by another process for {deadline.seconds:g} s") from error
            time.sleep(min(pause * random.uniform(0.5, 1.5), deadline.left))
            pause = min(2 * pause, 2e-3)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise AssertionError(f"a transaction breaks the prefix directory's rules: {error}") from error
        except sqlite3.Error as error:
            raise DirectoryError(f"the prefix directory does not work any more: {error}; stop its members and remove it") from error
