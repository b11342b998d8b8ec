"""Download from the Hugging Face Hub, and turn its errors into one sentence each.

`huggingface_hub` reads the access token (`hf auth login`, or HF_TOKEN); this package never does.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.data.tokenizer_json import FILE, HUB_FILES
from accel_gpt.errors import UserError, first_line, require

SCHEME = "hf://"
OPENAI = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
BUSY = (408, 429, 500, 502, 503, 504)  # HTTP status codes of a temporary failure
STATUS = MappingProxyType(
    {
        401: "the Hub rejected your login; log in with hf auth login, or set HF_TOKEN",
        403: "your token lacks the permission; create one with the write role for this repository",
        404: "there is no such repository, or it is not yours; check its name and your login",
    }
)


class UnreachableError(UserError):
    """The connection failed or the Hub is busy; a retry may succeed."""


def is_repo(name: str) -> bool:
    """Return whether the Hub accepts a repository name: `name` or `user/name`."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # no __all__

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.isascii()  # older versions of huggingface_hub accept any letter


def parse_repo(name: str) -> tuple[str, str | None]:
    """Split `hf://user/name@revision` into user/name and revision.

    The scheme and the revision are optional, and so is the user for GPT-2's models. Raises
    `UserError` for an invalid name.
    """
    repo, _, revision = name.removeprefix(SCHEME).partition("@")
    require(
        is_repo(repo),
        f"{name} is neither a folder nor a repository on the Hub; give a path, user/name or "
        "user/name@revision",
    )
    return f"openai-community/{repo}" if repo in OPENAI else repo, revision or None


def download_tokenizer(name: str) -> Path:
    """Download the tokenizer files of a repository; return their folder."""
    folder = download_repo(name, *HUB_FILES)
    require(
        (folder / FILE).is_file() or (folder / "vocab.json").is_file(),
        f"{name} has no {FILE} on the Hub, or the Hub cannot be reached and the cache has none; "
        "choose another repository, or check the network",
    )
    return folder


def cached_gpt2_folders() -> Iterator[Path]:
    """Yield folders of the Hub's local cache that may hold GPT-2's tokenizer, without a request."""
    from huggingface_hub import try_to_load_from_cache

    for repo in ("openai-community/gpt2", "gpt2"):
        for name in (FILE, "vocab.json"):
            if isinstance(found := try_to_load_from_cache(repo, name), str):
                yield Path(found).parent


def download_repo(name: str, *patterns: str) -> Path:
    """Download the files of a repository that match `patterns`; return their folder in the cache.

    Raises `UserError` if the repository does not exist or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    repo, revision = parse_repo(name)
    with hub_errors(repo, "read", revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set, so that `huggingface_hub` sends no request."""
    from huggingface_hub import constants

    return constants.is_offline_mode()


@contextmanager
def hub_errors(
    repo: str, action: str, revision: str | None = None, repo_type: str = "model"
) -> Iterator[None]:
    """Turn errors of `huggingface_hub` into a `UserError` of one sentence.

    `action`: "read" or "written".
    """
    from huggingface_hub import errors

    try:
        yield
    except (errors.HTTPError, OSError, RuntimeError) as error:  # type: ignore[attr-defined]  # of httpx
        cause: BaseException = error
        # these two wrap the error that says why the request or the upload failed
        if isinstance(error, errors.LocalEntryNotFoundError | RuntimeError) and error.__cause__:
            cause = error.__cause__
        raise user_error(cause, repo, action, revision, repo_type) from None


def user_error(
    error: BaseException, repo: str, action: str, revision: str | None, repo_type: str
) -> UserError:
    """Describe an error of `huggingface_hub` in one sentence."""
    from huggingface_hub import errors

    failed = f"{repo} cannot be {action}"
    if is_offline() and isinstance(
        error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError
    ):
        if action != "read":
            return UserError(f"{failed}: HF_HUB_OFFLINE is set; unset it")
        return UserError(f"{failed}: {not_cached(repo, repo_type)}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{repo} on the Hub has no revision {revision}; check its name")
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{repo} on the Hub is gated; accept its terms on its page, then run hf auth login"
        )
    if isinstance(error, errors.RepositoryNotFoundError) and action == "read":
        what = "neither a local folder nor a repository"
        if repo_type != "model":
            what = f"not a {repo_type} repository"
        return UserError(
            f"{repo} is {what} on the Hub that you can read; check its name, or log in with "
            "hf auth login"
        )
    if isinstance(error, errors.LocalTokenNotFoundError):
        return UserError(f"{failed}: {STATUS[401]}")
    if isinstance(error, errors.HfHubHTTPError):
        code = error.response.status_code
        kind = UnreachableError if code in BUSY else UserError
        reason = STATUS.get(code, f"the Hub answered with status {code}; try again later")
        return kind(f"{failed}: {reason}")
    if isinstance(error, OSError) and (error.filename or error.errno == errno.ENOSPC):
        return UserError(f"{failed}: {error.strerror}: {error.filename}")  # a local file
    if action == "read" and repo_type == "model":
        failed = f"{repo} is not a local folder and cannot be read from the Hub"
    return UnreachableError(f"{failed}: the Hub cannot be reached: {first_line(error)}")


def not_cached(repo: str, repo_type: str) -> str:
    """Return the reason and fix for files that are missing in the Hub's cache while offline."""
    option = "" if repo_type == "model" else f" --repo-type {repo_type}"
    return (
        "HF_HUB_OFFLINE is set, and the cache of the Hub lacks some of its files; unset "
        f"HF_HUB_OFFLINE, or first run `hf download {repo}{option}` on a node with network"
    )


def no_progress_bar() -> Any:
    """Return a class of progress bars for `huggingface_hub` that prints nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    class NoProgressBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            options["disable"] = True
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]  # tqdm has no types

    return NoProgressBar


def describe_dataset_error(
    dataset: str, config: str | None, split: str, error: BaseException
) -> str:
    """Describe why a data set could not be read and what to check."""
    advice = (
        "check its id, configuration and split, your login (hf auth login, or HF_TOKEN) and the "
        "network"
    )
    if is_offline():
        advice = "unset HF_HUB_OFFLINE, or prepare the data on a node with network"
    return (
        f"data set {dataset} (config {config}, split {split}) could not be read from the Hub "
        f"({type(error).__name__}: {error}); {advice}"
    )
