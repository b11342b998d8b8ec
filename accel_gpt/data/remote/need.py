"""What is asked of a remote folder: what somebody waits for, and what the cache has room for."""

import time
from collections.abc import Callable, Sequence

from accel_gpt.data.shards import Shard
from accel_gpt.errors import DataError, UserError


class Closed(DataError):
    """The folder was closed while something was fetched."""


class Request:
    """A shard that somebody waits for."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.since = shard, time.monotonic()
        self.done = False
        self.error: UserError | None = None


def fitting(
    now: Sequence[Shard],
    then: Sequence[Shard],
    size: Callable[[Shard], int],
    limit: int,
    shown: str,
) -> dict[str, Shard]:
    """By name those needed now, and of the next ones those before the first that has no room.

    Raises `UserError` when those needed now, of the folder `shown`, are more than `limit` bytes.
    """
    wanted = {shard.name: shard for shard in now}
    needed = sum(map(size, wanted.values()))
    if needed > limit:
        raise UserError(
            f"data.cache_gb is {limit / 1e9:g}, but {needed / 1e9:g} GB of {shown} are needed at "
            "once; set it above that"
        )
    for shard in then:
        if shard.name not in wanted:
            needed += size(shard)
            if needed > limit:
                break
            wanted[shard.name] = shard
    return wanted
