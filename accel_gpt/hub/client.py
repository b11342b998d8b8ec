"""The Hugging Face Hub, and what goes wrong with it in one sentence each.

The token is the client's own affair (`hf auth login`, or HF_TOKEN): it is never seen here.
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from accel_gpt.errors import UserError, require

SCHEME = "hf://"
OPENAI = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
BUSY = (408, 429, 500, 502, 503, 504)  # statuses that pass
HERE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)  # no fault of the Hub


class Unreachable(UserError):
    """The connection broke or the Hub is busy: it may work later."""


def check_repo(repo: str) -> None:
    """Raise `UserError` for what cannot be a repository of one's own."""
    require(
        is_repository(repo) and "/" in repo,
        f"{repo!r} is no name of a repository; expected user/name",
    )


def is_repository(name: str) -> bool:
    """Whether the Hub would take a name, `name` or `user/name`, for a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.isascii()  # clients before that of constraints.txt take any letters


def hub_name(place: str) -> str:
    """`place` with the owner of GPT-2's weights, which are known without one."""
    return f"openai-community/{place}" if place.partition("@")[0] in OPENAI else place


def parse_place(place: str) -> tuple[str, str | None]:
    """`hf://user/name@revision`, also without scheme or revision -> (user/name, revision).

    Raises `UserError` for what cannot be a repository's name.
    """
    repo, _, revision = place.removeprefix(SCHEME).partition("@")
    require(
        is_repository(repo),
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
    except (errors.HTTPError, OSError, RuntimeError) as error:  # type: ignore[attr-defined]
        cause: BaseException = error
        # what kept it from looking beyond its cache, or from sending a large file
        if isinstance(error, errors.LocalEntryNotFoundError | RuntimeError) and error.__cause__:
            cause = error.__cause__
        raise explained(cause, repo, doing, revision) from None


def explained(error: BaseException, repo: str, doing: str, revision: str | None) -> UserError:
    """One sentence for an error of the client."""
    from huggingface_hub import errors

    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{repo} on the Hub has no revision {revision}")
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{repo} on the Hub is gated; accept its terms on its page, then hf auth login"
        )
    if isinstance(error, errors.RepositoryNotFoundError) and doing == "read":
        return UserError(
            f"{repo} is neither a folder here nor a repository on the Hub that can be read; check "
            "its name, or log in with hf auth login"
        )
    if isinstance(error, errors.LocalTokenNotFoundError):
        return UserError(f"{repo} on the Hub cannot be {doing}: {reason(401)}")
    if isinstance(error, errors.HfHubHTTPError):
        code = error.response.status_code
        kind = Unreachable if code in BUSY else UserError
        return kind(f"{repo} on the Hub cannot be {doing}: {reason(code)}")
    if isinstance(error, OSError) and error.errno in HERE:
        return UserError(f"{repo} cannot be {doing}: {error.strerror}: {error.filename}")
    if isinstance(error, FileNotFoundError):
        return UserError(f"{repo} cannot be {doing}: {error.filename} has gone meanwhile")
    said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if doing == "read":
        return Unreachable(
            f"{repo} is no folder here, and the Hub cannot be reached for it: {said}"
        )
    return Unreachable(f"{repo} cannot be {doing}: the Hub cannot be reached: {said}")


def reason(code: int) -> str:
    """What a status of HTTP means here."""
    if code == 401:
        return "it does not know you; log in with hf auth login, or set HF_TOKEN"
    if code == 403:
        return "your token has no permission to; it needs the write role for this repository"
    if code == 404:
        return "there is no such repository, or it is not yours; check its name and your login"
    return f"it answered with status {code}; try again later"
