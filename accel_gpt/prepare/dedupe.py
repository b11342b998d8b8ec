"""Which documents were already seen: their 64-bit digests, in a database on disk.

Two different documents have equal digests by chance with a probability below n^2 / 2^65 for n
documents: 0.03 that one is wrongly dropped among 1e9. About 25 bytes of disk for each document;
memory is `CACHE_KIB`. It is committed before each journal, and rows later than the journal are
deleted when a preparation goes on.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel_gpt.prepare.shard_writer import Stale

DATABASE = "seen.sqlite3"
CACHE_KIB = 131_072  # of the database's pages in memory


class Seen:
    """The documents kept so far, numbered in the order in which they came."""

    def __init__(self, database: sqlite3.Connection, documents: int, dropped: int) -> None:
        self.database = database
        self.documents, self.dropped = documents, dropped

    def is_new(self, key: bytes, split: str) -> bool:
        """Remember a document; False when one with this key was in this split before."""
        number = int.from_bytes(key, "big", signed=True) ^ (split == "val")
        with disk_errors():
            row = (number, self.documents)
            added = self.database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", row).rowcount
        self.documents += added
        self.dropped += 1 - added
        return bool(added)

    def commit(self) -> None:
        """Make what is remembered survive a power cut."""
        with disk_errors():
            self.database.execute("COMMIT")
            self.database.execute("BEGIN")

    def close(self) -> None:
        """Close the database; what was not committed is forgotten."""
        self.database.close()


def open_seen(folder: Path, documents: int, dropped: int) -> Seen:
    """The database in `folder`, brought back to its first `documents` rows; `close` it.

    Raises `Stale` when it does not hold that many.
    """
    database = sqlite3.connect(folder / DATABASE, isolation_level=None)
    try:
        with disk_errors():
            found = rewind(database, documents)
    except OSError as error:
        database.close()
        if isinstance(error.__cause__, sqlite3.OperationalError):
            raise
        raise Stale(f"its {error}") from None
    if found != documents:
        database.close()
        raise Stale(f"its {DATABASE} knows {found} documents, expected {documents}")
    return Seen(database, documents, dropped)


def rewind(database: sqlite3.Connection, documents: int) -> int:
    """Make the table if need be, and delete what came after `documents`; the rows that are left."""
    database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    database.execute(
        "CREATE TABLE IF NOT EXISTS seen (key INTEGER PRIMARY KEY, document INTEGER NOT NULL)"
    )
    database.execute("BEGIN")
    database.execute("DELETE FROM seen WHERE document >= ?", (documents,))
    return int(database.execute("SELECT count(*) FROM seen").fetchone()[0])


@contextmanager
def disk_errors() -> Iterator[None]:
    """Tell a full or failing disk as an `OSError`, as for any other file."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"{DATABASE}: {error}") from error
