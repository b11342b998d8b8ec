"""The Hub's client: each failure is one sentence; names of repositories."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_gpt.errors import UserError
from accel_gpt.hub import (
    download_repo,
    hub_errors,
    parse_repo,
)
from tests.helpers.hub_server import HubServer, no_waiting, point_at

REPO = "tester/model"
FILES = {"config.json": b"{}\n", "sub/model.safetensors": bytes(range(256)) * 8}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        point_at(monkeypatch, server, tmp_path / "home")
        no_waiting(monkeypatch)
        yield server


def upload(files: dict[str, bytes]) -> None:
    from huggingface_hub import CommitOperationAdd, HfApi

    with hub_errors(REPO, "written"):
        operations = [CommitOperationAdd(name, data) for name, data in files.items()]
        HfApi().create_repo(REPO, exist_ok=True)
        HfApi().create_commit(REPO, operations, commit_message="up")


def test_what_is_uploaded_is_downloaded_again_from_the_cache(hub: HubServer) -> None:
    upload(FILES)
    upload(FILES)  # no new commit, and nothing is sent twice
    assert (hub.commits(REPO), len(hub.lfs_uploads)) == (["up", "initial commit"], 1)
    folder = download_repo(f"hf://{REPO}@main", "*")
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES == hub.files(REPO)
    hub.stop()
    assert download_repo(REPO, "*") == folder


def test_each_failure_of_the_client_is_one_sentence(hub: HubServer) -> None:
    upload(FILES)
    with pytest.raises(UserError, match=r"status 404: Invalid rev id: v9"):
        download_repo(f"{REPO}@v9", "*")
    with pytest.raises(UserError, match="neither a local folder nor a repository on the Hub that"):
        download_repo("tester/none", "*")
    other = {"sub/model.safetensors": b"other" * 300}
    for status, sentence in ((401, "status 401: Forbidden"), (403, "you must use a write token")):
        hub.refuse(status)
        with pytest.raises(UserError, match=sentence):
            upload(other)
    hub.refuse(0)
    hub.drop_next_upload(100, times=6)
    with pytest.raises(UserError, match="cannot be written: the Hub cannot be reached"):
        upload(other)
    for where, tries in (("/objects/batch", 6), ("/verify", 6), ("/commit/", 1)):
        hub.fail_next(503, tries, containing=where)
        with pytest.raises(UserError, match=r"cannot be written: the Hub answered with .* 503"):
            upload(other)
    hub.stop()
    with pytest.raises(UserError, match="cannot be read: the Hub cannot be reached"):
        download_repo("tester/other", "*")


def test_failures_of_this_machine_are_not_blamed_on_the_hub() -> None:
    for error, sentence in (
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "No space left on device: /x"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), "No such file: /x"),
    ):
        expected = pytest.raises(UserError, match=f"a/b cannot be written: {sentence}")
        with expected, hub_errors("a/b", "written"):
            raise error


def test_names_of_repositories() -> None:
    assert parse_repo("hf://user/name@step-3") == ("user/name", "step-3")
    assert parse_repo("gpt2@v1") == ("openai-community/gpt2", "v1")
    for name in ("a--b", "user/name.git", "a/b/c", "x" * 97, "mod\u00e8le", "../x"):
        with pytest.raises(UserError, match="is neither a folder nor a repository on the Hub"):
            parse_repo(name)
