"""Secrets and private paths out of text: what may be printed, recorded in a run and published."""

import hashlib
import re
import shlex
import urllib.parse
from collections.abc import Sequence
from pathlib import PurePath

SECRET = re.compile(  # access tokens, by their makers' prefix; AWS key ids; JSON web tokens
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:ghp|gho|github_pat|glpat|sk|xox[a-z])[_-][\w-]{16,}"
    r"|\bAKIA[A-Z0-9]{12,}|\beyJ[\w-]{8,}\.[\w.-]+"
)
SCHEME = r"[A-Za-z][\w+.-]{0,31}://"  # bounded: the time is linear in the length of a text
USER = re.compile(rf"({SCHEME})[^\s/?#\"']*@")  # user and password in a URL
QUERY = re.compile(rf"({SCHEME}[^\s?\"']*\?)[^\s\"']+")  # signed URLs carry keys there
HOMES = ("home", "users")  # folders whose children are named for people
LONGEST_NAME = 80  # characters; assumption: what is longer was not named by a person


def redact(text: str) -> str:
    """Replace access tokens, and users, passwords and queries in URLs, by `***`."""
    return QUERY.sub(r"\1***", USER.sub(r"\1***@", redact_tokens(text)))


def redact_tokens(text: str) -> str:
    """Replace access tokens by `***`."""
    return SECRET.sub("***", text)


def redact_url(path: str) -> str:
    """A URL without user, password, query, fragment and final slash; any other path as it is."""
    if "://" not in path:
        return path
    parts = urllib.parse.urlsplit(path)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")


def command_line(words: Sequence[str]) -> str:
    """The command `words` as it would be typed, redacted, without the folder of the program."""
    program = PurePath(words[0]).name if words else ""
    return " ".join(shlex.quote(redact(word)) for word in (program, *words[1:]))


# --------------------------------------------------------------------------- what is published


def public_name(path: str) -> str | None:
    """The last part of a path or URL; None where it names a person, a machine or a secret.

    A word that is not a path stays as it is. The name has letters, digits and `._+*-` only.
    """
    text = path.strip()
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
    return None if may_be_secret(name) else re.sub(r"[^\w.+*-]+", "-", name)


def may_be_secret(name: str) -> bool:
    """Whether a name could be a token or key: by its prefix, or long, unbroken and random."""
    random = re.search(r"(?=[A-Za-z_]*\d)(?=\d*[A-Za-z])[A-Za-z0-9_]{28,}", name)
    return len(name) > LONGEST_NAME or bool(SECRET.search(name) or random)


def public_source(path: str) -> str:
    """The public name of a data source; a hash is appended where it is only part of its path.

    A run names its sources by their whole paths where their last parts are equal.
    """
    name = public_name(path) or "data"
    return name if name == path else f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:4]}"


def public_metric(key: str) -> str:
    """The key of a metric; the third part, a data source and maybe a path, by its public name."""
    *parts, last = key.split("/", 2)
    known = [public_name(part) or "hidden" for part in parts]
    return "/".join(
        [*known, public_source(last) if len(parts) == 2 else public_name(last) or "hidden"]
    )
