"""How far a preparation has come: progress.json, in the folder that is being made.

It is written after the shards that it tells of are safe on disk, so that whatever stops the
preparation, the folder can be brought back to what the journal says and continued from there.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accel_gpt.files import read_json, sync, write_file
from accel_gpt.prepare.shard_writer import Stale
from accel_gpt.text.documents import Position

JOURNAL = "progress.json"
VERSION = 1


@dataclass
class Journal:
    """What is made, from what, and what of it is already on disk."""

    asked: Mapping[str, Any]
    """The settings that the content depends on."""
    source: str
    """Fingerprint of what is read."""
    tokenizer: str = ""
    """Fingerprint of tokenizer.json."""
    position: Position = (0, 0, 0)
    """Where reading goes on."""
    documents: int = 0
    """Documents that the dedupe database holds."""
    dropped: int = 0
    """Documents left out as equal to an earlier one."""
    skipped: int = 0
    """What could not be decoded and was left out."""
    splits: dict[str, Any] = field(default_factory=dict)
    """What `ShardWriter.save` gave, by split."""

    @property
    def tokens(self) -> int:
        """Tokens on disk."""
        return sum(
            state["tokens"] + sum(shard["tokens"] for shard in state["shards"])
            for state in self.splits.values()
        )

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of text that these tokens stand for."""
        return sum(
            state["bytes"] + sum(shard["bytes"] for shard in state["shards"])
            for state in self.splits.values()
        )

    def check(self) -> None:
        """`ValueError` where a count is no number that can be."""
        if min(self.tokens, self.bytes, self.documents, self.dropped, *self.position) < 0:
            raise ValueError("a count is negative")

    def write(self, folder: Path) -> None:
        """Make the names in `folder` and then the journal survive a power cut."""
        sync(folder)
        content = json.dumps({"version": VERSION, **asdict(self)})
        write_file(folder / JOURNAL, [content.encode()])


def read_journal(folder: Path) -> Journal:
    """The journal in `folder`; `Stale` when there is none that can be understood, `OSError` when it
    cannot be read now.
    """
    try:
        content = read_json(folder / JOURNAL)
        if content.pop("version") != VERSION:
            raise Stale("another version of accel_gpt made it")
        journal = Journal(**content)
        first, second, third = map(int, journal.position)
        journal.position = first, second, third
        journal.check()
    except FileNotFoundError:
        raise Stale(f"it has no {JOURNAL} yet") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Stale(f"its {JOURNAL} is damaged ({error!r:.80})") from None
    return journal
