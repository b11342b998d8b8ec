"""The Hugging Face Hub, and what goes wrong with it in one sentence each.

The token is the client's own affair (`hf auth login`, or HF_TOKEN): it is never seen here.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from accel_gpt.errors import UserError, require

SCHEME = "hf://"
REPOSITORY = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def parse_place(place: str) -> tuple[str, str | None]:
    """`hf://user/name@revision`, also without scheme or revision -> (user/name, revision).

    Raises `UserError` for what cannot be a repository's name.
    """
    repo, _, revision = place.removeprefix(SCHEME).partition("@")
    require(
        bool(REPOSITORY.fullmatch(repo)),
        f"{place} is neither a folder nor a repository on the Hub (user/name, user/name@revision)",
    )
    return repo, revision or None


def fetch(place: str, patterns: Sequence[str]) -> Path:
    """The folder with those files of a repository that match `patterns`, from cache or network.

    Raises `UserError` where there is no such repository or it cannot be reached.
    """
    from huggingface_hub import snapshot_download

    repo, revision = parse_place(place)
    with told(repo, "read", revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))


def remote_files(place: str) -> list[str]:
    """Names of all files of a repository."""
    from huggingface_hub import HfApi

    repo, revision = parse_place(place)
    with told(repo, "read", revision):
        return list(HfApi().list_repo_files(repo, revision=revision))


@contextmanager
def told(repo: str, doing: str, revision: str | None = None) -> Iterator[None]:
    """Turn the errors of the client into one `UserError`; `doing` is read or written."""
    from huggingface_hub import errors

    try:
        yield
    except errors.RevisionNotFoundError:
        raise UserError(f"{repo} on the Hub has no revision {revision}") from None
    except errors.GatedRepoError:
        raise UserError(
            f"{repo} on the Hub is gated; accept its terms on its page, then hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{repo} is neither a folder here nor a repository on the Hub that can be {doing}; "
            "check its name, or log in with hf auth login"
        ) from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        raise UserError(f"{repo} on the Hub cannot be {doing}: {reason(code)}") from None
    except errors.LocalTokenNotFoundError:
        raise UserError(f"{repo} on the Hub cannot be {doing}: {reason(401)}") from None
    except (errors.HTTPError, OSError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        lost = f"the Hub cannot be reached ({said[0][:200]})"
        if doing == "read":
            raise UserError(f"{repo} is no folder here, and {lost} to look for it there") from None
        raise UserError(f"{repo} cannot be {doing}: {lost}") from None


def reason(code: int) -> str:
    """What a status of HTTP means here."""
    if code == 401:
        return "it does not know you; log in with hf auth login, or set HF_TOKEN"
    if code == 403:
        return "your token has no permission to; it needs the write role for this repository"
    return f"it answered with status {code}; try again later"
