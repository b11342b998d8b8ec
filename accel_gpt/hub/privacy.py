"""What may be told of a run to everybody: names without the places where they lie, no secrets."""

import hashlib
import re
import urllib.parse
from pathlib import Path

from accel_gpt.errors import UserError
from accel_gpt.hub.client import full_repo_name, parse_repo
from accel_gpt.redact import SECRET

HOMES = ("home", "users")  # folders whose children are named for people
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DATASET_URL = re.compile(r"hf://datasets/([^/@?#]+/[^/@?#]+)")
LONGEST_NAME = 80  # characters; assumption: what is longer was not named by a person


def place_name(place: str) -> str | None:
    """The last part of a path or URL; None where that is a person, a machine or maybe a secret.

    A word that is no place stays as it is. The name holds letters, digits and `._+*-` only.
    """
    text = place.strip()
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        try:
            text = urllib.parse.urlsplit(text).path
        except ValueError:
            return None
        if not text.strip("/"):
            return None  # nothing but a host or a bucket
        text = urllib.parse.unquote(text)
    parts = [part for part in re.split(r"[/\\:]+", re.split(r"[?#;&]", text)[0]) if part]
    if not parts or parts[-1] in (".", ".."):
        return None
    name, parent = parts[-1], parts[-2] if len(parts) > 1 else ""
    if parent.lower() in HOMES or name.startswith("~") or "@" in name or "=" in name:
        return None
    if is_secret(name):
        return None
    return re.sub(r"[^\w.+*-]+", "-", name)


def is_secret(name: str) -> bool:
    """Whether a name could be a token or key: by its prefix, or long, unbroken and random."""
    random = re.search(r"(?=[A-Za-z_]*\d)(?=\d*[A-Za-z])[A-Za-z0-9_]{28,}", name)
    return len(name) > LONGEST_NAME or bool(SECRET.search(name) or random)


def hub_dataset(place: str | None) -> str | None:
    """The id in `hf://datasets/OWNER/NAME`, or `OWNER/NAME` where no folder has that name."""
    if not place:
        return None
    found = DATASET_URL.match(place)
    name = found[1] if found else place
    if is_secret(name) or not HUB_ID.fullmatch(name) or (not found and Path(name).exists()):
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
    if Path(source).exists() or is_secret(name):
        return None
    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return name if isinstance(found, str) else None


def public_key(key: str) -> str:
    """A key of the metrics; the name of a source at its end, maybe a path, without its place."""
    parts = key.split("/", 2)
    if len(parts) < 3:
        return "/".join(place_name(part) or "hidden" for part in parts)
    return "/".join([*(place_name(part) or "hidden" for part in parts[:2]), source_name(parts[2])])


def source_name(place: str) -> str:
    """The name of a source of a mixture; where that was a place, with a hash that tells it apart.

    A run names its sources by their whole paths where the last parts are the same.
    """
    name = place_name(place) or "data"
    return name if name == place else f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:4]}"


def without_tokens(text: str) -> str:
    """`text` with whatever looks like an access token starred."""
    return SECRET.sub("***", text)
