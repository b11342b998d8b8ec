"""Ids of data sets and models on the Hub, which may be told of a run to everybody."""

import re
from pathlib import Path

from accel_gpt.errors import UserError
from accel_gpt.hub.client import full_repo_name, parse_repo
from accel_gpt.redact import may_be_secret

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DATASET_URL = re.compile(r"hf://datasets/([^/@?#]+/[^/@?#]+)")


def hub_dataset(place: str | None) -> str | None:
    """The id in `hf://datasets/OWNER/NAME`, or `OWNER/NAME` where no folder has that name."""
    if not place:
        return None
    found = DATASET_URL.match(place)
    name = found[1] if found else place
    if may_be_secret(name) or not HUB_ID.fullmatch(name) or (not found and Path(name).exists()):
        return None
    return name


def hub_model(source: str) -> str | None:
    """`source` without a revision where the Hub's cache shows that it is the id of a model.

    A folder `runs/gpt` looks like an id, so what is not in the cache is not taken for one.
    """
    from huggingface_hub import try_to_load_from_cache

    try:
        name, revision = parse_repo(full_repo_name(source))
    except UserError:
        return None
    if Path(source).exists() or may_be_secret(name):
        return None
    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return name if isinstance(found, str) else None
