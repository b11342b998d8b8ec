"""Read and write repositories on the Hugging Face Hub, with one sentence for each failure.

`huggingface_hub` reads the access token (`hf auth login`, or HF_TOKEN); this package never does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from accel_gpt.errors import UserError, one_line, require

if TYPE_CHECKING:
    from huggingface_hub import HfUri

SCHEME = "hf://"
OPENAI = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


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
        f"{name} is neither a folder nor a repository on the Hub; expected a path, user/name or "
        "user/name@revision",
    )
    return f"openai-community/{repo}" if repo in OPENAI else repo, revision or None


def parse_url(url: str) -> "HfUri":
    """Parse the URL of a folder in a repository: `hf://datasets/user/name@revision/folder`.

    Raises `UserError` for another text.
    """
    from huggingface_hub import parse_hf_uri
    from huggingface_hub.errors import HfUriError

    try:
        return parse_hf_uri(url.rstrip("/"))
    except HfUriError as error:
        raise UserError(f"{url} is not a URL on the Hub: {error}") from None


def newest_commit(url: str) -> str:
    """Return the newest commit of the repository in `url`, or of the revision that it names.

    Raises `UserError` if the repository or the revision does not exist or cannot be read.
    """
    from huggingface_hub import HfApi

    place = parse_url(url)
    with hub_errors(url, "read"):
        found = HfApi().repo_info(place.id, repo_type=place.type, revision=place.revision)
    return str(found.sha)


def download_repo(name: str, *patterns: str) -> Path:
    """Download the files of a repository that match `patterns`; return their folder in the cache.

    If the Hub cannot be reached, the cache gives its newest commit of the revision. Raises
    `UserError` if the repository does not exist or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    repo, revision = parse_repo(name)
    # every repository has .gitattributes: there is a warning if no file matches
    allowed = [".gitattributes", *patterns]
    with hub_errors(repo, "read"):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=allowed))


@contextmanager
def hub_errors(repo: str, action: str) -> Iterator[None]:
    """Turn errors of `huggingface_hub` into a `UserError` of one sentence.

    `action`: "read" or "written".
    """
    from huggingface_hub import errors

    failed = f"{repo} cannot be {action}"
    lasting = (
        errors.OfflineModeIsEnabled,
        errors.LocalTokenNotFoundError,
        errors.EntryNotFoundError,
    )
    try:
        yield
    except (errors.HTTPError, OSError, RuntimeError) as raised:  # type: ignore[attr-defined]  # of httpx
        error: BaseException = raised
        # these two wrap the error that says why the request or the upload failed
        if isinstance(raised, errors.LocalEntryNotFoundError | RuntimeError):
            error = raised.__cause__ or raised
        if action == "read" and isinstance(error, errors.RepositoryNotFoundError):
            raise UserError(
                f"{repo} is neither a local folder nor a repository on the Hub that you can read"
            ) from None
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
            said = one_line(error.server_message or str(error))
            raise UserError(f"{failed}: the Hub answered with status {status}: {said}") from None
        if isinstance(error, OSError) and error.strerror and error.filename:  # a local file
            raise UserError(f"{failed}: {error.strerror}: {error.filename}") from None
        if isinstance(error, lasting):
            raise UserError(f"{failed}: {one_line(error)}") from None
        raise UserError(f"{failed}: the Hub cannot be reached: {one_line(error)}") from None
