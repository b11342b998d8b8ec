"""The documents seen so far, as 64-bit digests in a database on disk.

Two different documents have equal digests by chance with a probability below n^2 / 2^65 for n
documents: 0.03 that one is wrongly dropped among 1e9. About 25 bytes of disk for each document;
memory is `CACHE_KIB`. The database is committed before each journal; rows later than the journal
are deleted when a preparation is resumed.
"""

import sqlite3
from pathlib import Path

from accel_gpt.errors import DataError

DATABASE = "seen.sqlite3"
CACHE_KIB = 131_072  # of the database's pages in memory


class Seen:
    """The documents kept so far, numbered in the order in which they came.

    Opens the database in `folder`, made if need be, with its first `documents` rows; `DataError`
    when it does not hold that many.
    """

    def __init__(self, folder: Path, documents: int, dropped: int) -> None:
        self.documents, self.dropped = documents, dropped
        self.database = sqlite3.connect(folder / DATABASE)
        try:
            self.database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            table = "seen (key INTEGER PRIMARY KEY, document INTEGER NOT NULL)"
            self.database.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            self.database.execute("DELETE FROM seen WHERE document >= ?", (documents,))
            found = self.database.execute("SELECT count(*) FROM seen").fetchone()[0]
            if found != documents:
                raise DataError(f"its {DATABASE} holds {found} documents, expected {documents}")
        except (DataError, sqlite3.Error) as error:
            self.database.close()
            if isinstance(error, DataError | sqlite3.OperationalError):  # a full disk, for example
                raise
            raise DataError(f"its {DATABASE}: {error}") from None

    def is_new(self, key: bytes, split: str) -> bool:
        """Add a document; False when one with this key was in this split before."""
        number = int.from_bytes(key, "big", signed=True) ^ (split == "val")
        row = (number, self.documents)
        added = self.database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", row).rowcount
        self.documents += added
        self.dropped += 1 - added
        return bool(added)
