"""The test Hub under the real client: what goes up comes down, and how the client takes faults.

The faults here are what code that pushes has to live with; they say which exception comes out.
"""

import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_repo import is_lfs
from tests.hub_server import HubServer, environment, no_waiting, point_at

pytestmark = pytest.mark.slow  # a tool of other tests


REPO = "tester/model"
BACKOFF = [1, 2, 4, 8, 8]  # seconds between the six tries of http_backoff
WEIGHTS = random.Random(0).randbytes(3_000_000)
FILES = {
    "README.md": b"---\nlicense: mit\n---\nA model.\n",
    "config.json": b"{}\n",
    "sub/notes.txt": "naïve\n".encode(),
    "sub/model.safetensors": WEIGHTS,
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as made:
        point_at(monkeypatch, made, tmp_path / "home")
        yield made


@pytest.fixture
def pauses(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client wanted to wait, and did not."""
    return no_waiting(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """FILES on disk."""
    for name, data in FILES.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "folder"


def push(folder: Path, **options: object) -> str:
    """Creates the repo and uploads the folder; the commit id."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(REPO, exist_ok=True)
    return api.upload_folder(repo_id=REPO, folder_path=folder, commit_message="Up", **options).oid


def contents(folder: str | Path) -> dict[str, bytes]:
    found = (path for path in Path(folder).rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    return {name: data for name, data in files.items() if name != ".gitattributes"}


def asked(hub: HubServer, text: str) -> int:
    """How often the client asked for a path with this text."""
    return sum(text in path for _, path in hub.requests)


# --------------------------------------------------------------------------- up


def test_folder_arrives_as_it_is(hub: HubServer, folder: Path) -> None:
    from huggingface_hub import HfApi

    commit = push(folder)
    assert hub.files(REPO) == FILES
    assert hub.commits(REPO) == ["Up", "initial commit"]
    assert hub.refs(REPO) == {"main": commit}
    assert [size for _, size in hub.lfs_uploads] == [len(WEIGHTS)]
    assert HfApi().model_info(REPO).sha == commit
    assert HfApi().whoami()["name"] == hub.user


def test_same_folder_again_sends_no_object_and_makes_no_commit(
    hub: HubServer, folder: Path
) -> None:
    first = push(folder)
    hub.requests.clear()
    assert push(folder) == first
    assert hub.commits(REPO) == ["Up", "initial commit"]
    assert len(hub.lfs_uploads) == 1
    assert not asked(hub, "/commit/")


def test_changed_file_alone_is_sent(hub: HubServer, folder: Path) -> None:
    first = push(folder)
    (folder / "config.json").write_text("{1}")
    second = push(folder)
    assert hub.files(REPO) == {**FILES, "config.json": b"{1}"}
    assert hub.files(REPO, first) == FILES
    assert len(hub.lfs_uploads) == 1
    (folder / "sub/model.safetensors").write_bytes(WEIGHTS[::-1])
    third = push(folder)
    assert len(hub.lfs_uploads) == 2
    assert len({first, second, third}) == 3


def test_renamed_object_is_not_sent_again(hub: HubServer, folder: Path) -> None:
    push(folder)
    (folder / "sub/model.safetensors").rename(folder / "model.safetensors")
    push(folder, delete_patterns="sub/*.safetensors")
    assert sorted(hub.files(REPO)) == sorted(contents(folder))
    assert len(hub.lfs_uploads) == 1


def test_files_and_folders_can_be_deleted(hub: HubServer, folder: Path) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    push(folder)
    HfApi().delete_folder("sub", REPO)
    assert sorted(hub.files(REPO)) == ["README.md", "config.json"]
    HfApi().delete_file("config.json", REPO)
    assert sorted(hub.files(REPO)) == ["README.md"]
    with pytest.raises(EntryNotFoundError, match="A file with this name doesn't exist"):
        HfApi().delete_file("config.json", REPO)


def test_private_repo_is_seen_by_its_owner_alone(hub: HubServer) -> None:
    from huggingface_hub import HfApi, create_repo
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    create_repo(REPO, private=True)
    create_repo("tester/open")
    assert hub.private == {REPO: True, "tester/open": False}
    assert create_repo(REPO, exist_ok=True).repo_id == REPO
    with pytest.raises(HfHubHTTPError, match=r"(?s)409 Conflict.*You already created"):
        create_repo(REPO)
    assert HfApi().model_info(REPO).private
    with pytest.raises(RepositoryNotFoundError, match="401 Client Error"):
        HfApi(token=False).model_info(REPO)
    assert not HfApi(token=False).model_info("tester/open").private


def test_lfs_is_for_binary_and_for_large_files() -> None:
    assert not is_lfs("README.md", "é".encode() * 300, 600)
    assert not is_lfs("cut.txt", ("a" + "é" * 300).encode()[:512], 601)
    assert is_lfs("data.txt", b"a", 1_000_001)
    assert is_lfs("notes", b"a\0b", 3)
    assert is_lfs("notes", b"\xff\xfe", 2)
    for name in ("model.safetensors", "a.bin", "loss.png", "x/events.out.tfevents.1.host"):
        assert is_lfs(name, b"text", 4)


def test_card_is_checked(hub: HubServer, folder: Path) -> None:
    (folder / "README.md").write_text("---\ntags: [\n---\n")
    with pytest.raises(ValueError, match=r"Invalid metadata in README\.md"):
        push(folder)
    (folder / "README.md").write_text("# A model\n")
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        push(folder)


def test_commit_on_an_old_parent_is_refused(hub: HubServer, folder: Path) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    first = push(folder)
    (folder / "config.json").write_text("{2}")
    second = push(folder, parent_commit=first)
    (folder / "config.json").write_text("{3}")
    with pytest.raises(HfHubHTTPError, match=r"(?s)412 .*A commit has happened since"):
        push(folder, parent_commit=first)
    assert hub.refs(REPO) == {"main": second}


# --------------------------------------------------------------------------- names


def test_tags_and_branches_are_made_moved_and_listed(hub: HubServer, folder: Path) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    api, first = HfApi(), push(folder)
    api.create_tag(REPO, tag="best")
    api.create_branch(REPO, branch="run/a")
    (folder / "config.json").write_text("{2}")
    second = push(folder, revision="run/a")
    assert hub.tags(REPO) == {"best": first}
    assert hub.branches(REPO) == {"main": first, "run/a": second}
    with pytest.raises(HfHubHTTPError, match=r"(?s)409 .*already exists: best"):
        api.create_tag(REPO, tag="best", revision="run/a")
    api.delete_tag(REPO, tag="best")
    api.create_tag(REPO, tag="best", revision="run/a")
    api.create_branch(REPO, branch="main", exist_ok=True)
    api.create_branch(REPO, branch="old", revision=first)
    refs = api.list_repo_refs(REPO)
    assert {ref.name: ref.target_commit for ref in refs.tags} == hub.tags(REPO) == {"best": second}
    assert {ref.name: ref.target_commit for ref in refs.branches} == hub.branches(REPO)
    assert hub.branches(REPO) == {"main": first, "run/a": second, "old": first}
    api.delete_branch(REPO, branch="run/a")
    with pytest.raises(RevisionNotFoundError):
        api.delete_branch(REPO, branch="run/a")
    titles = [commit.title for commit in api.list_repo_commits(REPO, revision="best")]
    assert titles == hub.commits(REPO, "best") == ["Up", "Up", "initial commit"]


# --------------------------------------------------------------------------- down


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_snapshots_of_a_branch_a_tag_and_a_commit(
    hub: HubServer, tmp_path: Path, kind: str
) -> None:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    name = REPO if kind == "model" else f"datasets/{REPO}"
    hub.add(name, FILES)
    HfApi().create_tag(REPO, tag="v1", repo_type=kind)
    first = hub.refs(name)["main"]
    hub.add(name, {"config.json": b"new"})
    hub.add(name, {"more/a.bin": b"x"}, revision="side")
    for revision in ("main", "v1", first, "side"):
        there = snapshot_download(REPO, revision=revision, repo_type=kind)
        assert contents(there) == hub.files(name, revision)
        assert Path(there).is_relative_to(tmp_path / "home" / "hub")
    assert hub.files(name, "v1") == FILES
    assert sorted(hub.files(name, "side")) == sorted([*FILES, "more/a.bin"])
    hub.requests.clear()
    one = hf_hub_download(REPO, "sub/model.safetensors", revision="v1", repo_type=kind)
    assert Path(one).read_bytes() == WEIGHTS
    assert [method for method, _ in hub.requests] == ["HEAD"]  # the cache has the rest


def test_part_of_a_file_can_be_read(hub: HubServer) -> None:
    from huggingface_hub import HfFileSystem

    hub.add(REPO, {"model.bin": WEIGHTS})
    with HfFileSystem().open(f"{REPO}/model.bin", block_size=1000) as file:
        file.seek(70_000)
        assert file.read(500) == WEIGHTS[70_000:70_500]
        file.seek(-5, os.SEEK_END)
        assert file.read() == WEIGHTS[-5:]


def test_folders_are_listed(hub: HubServer) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    hub.add(REPO, {**FILES, "sub/deep/x.txt": b""})
    api = HfApi()

    def names(path: str | None = None, **options: bool) -> list[str]:
        return [entry.path for entry in api.list_repo_tree(REPO, path, **options)]

    assert names() == [".gitattributes", "README.md", "config.json", "sub"]
    assert names("sub") == ["sub/deep", "sub/model.safetensors", "sub/notes.txt"]
    assert names("sub", recursive=True) == ["sub/deep", "sub/deep/x.txt", *names("sub")[1:]]
    found, missing = "sub/model.safetensors", "none.txt"
    (weights, sub) = api.get_paths_info(REPO, [found, missing, "sub"])
    assert isinstance(weights, RepoFile)
    assert weights.lfs is not None
    assert weights.lfs.size == len(WEIGHTS)
    assert sub.path == "sub"


def test_what_is_missing_has_its_own_error(hub: HubServer, folder: Path) -> None:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    with pytest.raises(RepositoryNotFoundError, match="404 Client Error"):
        snapshot_download("tester/none")
    hub.add(REPO, FILES)
    with pytest.raises(RevisionNotFoundError, match="Invalid rev id: none"):
        snapshot_download(REPO, revision="none")
    with pytest.raises(RevisionNotFoundError, match="Invalid rev id: none"):
        push(folder, revision="none")
    with pytest.raises(EntryNotFoundError, match="Entry Not Found"):
        hf_hub_download(REPO, "none.json")


def test_another_process_finds_the_hub_and_the_token(hub: HubServer, tmp_path: Path) -> None:
    code = (
        "from huggingface_hub import create_repo, hf_hub_download, upload_file\n"
        "repo = create_repo('tester/child', private=True).repo_id\n"
        "upload_file(path_or_fileobj=b'\\0', path_in_repo='a.bin', repo_id=repo)\n"
        "print(hf_hub_download(repo, 'a.bin'))\n"
    )
    variables = {**os.environ, **environment(hub, tmp_path / "other")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path / "other" / "hub"))
    assert hub.files("tester/child") == {"a.bin": b"\0"}
    assert hub.lfs_uploads[0][1] == 1


# --------------------------------------------------------------------------- faults


def test_broken_upload_is_tried_again_from_its_start(
    hub: HubServer, folder: Path, pauses: list[float]
) -> None:
    hub.drop_next_upload(100_000, times=2)
    push(folder)
    assert hub.files(REPO) == FILES
    assert pauses == BACKOFF[:2]
    assert [size for _, size in hub.lfs_uploads] == [len(WEIGHTS)]
    assert asked(hub, "/storage/") == 3


def test_upload_that_breaks_six_times_is_a_runtime_error(
    hub: HubServer, folder: Path, pauses: list[float]
) -> None:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    hub.drop_next_upload(100_000, times=6)
    with pytest.raises(RuntimeError, match=r"Error while uploading 'sub/model\.safeten") as caught:
        push(folder)
    cause = caught.value.__cause__
    assert isinstance(cause, HTTPError)
    assert not isinstance(cause, HfHubHTTPError | OSError)
    assert pauses == BACKOFF
    assert hub.commits(REPO) == ["initial commit"]
    assert not hub.lfs_uploads


@pytest.mark.parametrize("where", ["/preupload/", "/objects/batch", "/storage/", "/verify"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_hub_is_asked_six_times(
    hub: HubServer, folder: Path, pauses: list[float], where: str, status: int
) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    hub.fail_next(status, 6, containing=where)
    kind = RuntimeError if where in ("/storage/", "/verify") else HfHubHTTPError
    with pytest.raises(kind) as caught:
        push(folder)
    error = caught.value.__cause__ if kind is RuntimeError else caught.value
    assert isinstance(error, HfHubHTTPError)
    assert error.response.status_code == status
    assert pauses == BACKOFF
    push(folder)
    assert hub.files(REPO) == FILES
    assert len(hub.lfs_uploads) == 1  # what had arrived before the failure counts


@pytest.mark.parametrize("where", ["/repos/create", "/commit/", "/tag/", "/branch/"])
def test_what_changes_the_repo_is_asked_once(
    hub: HubServer, folder: Path, pauses: list[float], where: str
) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    hub.fail_next(503, 1, containing=where)
    with pytest.raises(HfHubHTTPError, match="503 Service Unavailable"):  # noqa: PT012
        push(folder)
        HfApi().create_tag(REPO, tag="a")
        HfApi().create_branch(REPO, branch="b")
    assert asked(hub, where) == 1
    assert not pauses


def test_hub_may_say_how_long_to_wait(hub: HubServer, folder: Path, pauses: list[float]) -> None:
    hub.fail_next(429, 1, "/preupload/", Retry_After="70")
    hub.fail_next(429, 1, "/preupload/", RateLimit='"api";r=0;t=200')
    push(folder)
    assert pauses == [71, 201]


def test_commit_whose_answer_was_lost_is_not_made_twice(
    hub: HubServer, folder: Path, pauses: list[float]
) -> None:
    from huggingface_hub.errors import HTTPError

    hub.fail_next(0, 1, containing="/commit/")
    with pytest.raises(HTTPError, match="disconnected"):
        push(folder)
    assert hub.files(REPO) == FILES
    assert push(folder) == hub.refs(REPO)["main"]
    assert hub.commits(REPO) == ["Up", "initial commit"]
    assert not pauses


def test_read_token_is_told_as_403(hub: HubServer, folder: Path, pauses: list[float]) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    push(folder)
    (folder / "config.json").write_text("{2}")
    hub.refuse(403)
    with pytest.raises(HfHubHTTPError, match=r"403 Forbidden: .*use a write token") as caught:
        push(folder)  # create_repo(exist_ok=True) passes over it: the repo is there
    assert caught.value.response.status_code == 403
    assert not isinstance(caught.value, RepositoryNotFoundError)
    with pytest.raises(HfHubHTTPError, match="403 Forbidden"):
        HfApi().create_repo("tester/new", exist_ok=True)
    assert HfApi().whoami()["auth"]["accessToken"]["role"] == "read"
    hub.refuse(0)
    push(folder)
    assert not pauses


def test_wrong_token_is_told_as_401(hub: HubServer, folder: Path, pauses: list[float]) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    push(folder)
    wrong, right = HfApi(token="hf_wrong"), HfApi()
    for api, refused in ((wrong, 0), (right, 401)):
        hub.refuse(refused)
        with pytest.raises(HfHubHTTPError, match=r"(?s)401 .*Invalid credentials in") as caught:
            api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id=REPO)
        assert not isinstance(caught.value, RepositoryNotFoundError)
        assert caught.value.server_message == "Invalid credentials in Authorization header"
        with pytest.raises(HfHubHTTPError, match="Invalid user token"):
            api.whoami()
    assert sorted(hub.files(REPO)) == sorted(FILES)
    assert not pauses


def test_no_token_is_told_as_a_missing_repo(hub: HubServer, folder: Path) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    push(folder)
    nobody = HfApi(token=False)
    with pytest.raises(RepositoryNotFoundError, match="401 Client Error"):
        nobody.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id=REPO)
    with pytest.raises(HfHubHTTPError, match="Invalid username or password"):
        nobody.create_repo("tester/new")


def test_hub_that_is_gone(hub: HubServer, folder: Path, pauses: list[float]) -> None:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    push(folder)
    there = snapshot_download(REPO)
    hub.stop()
    with pytest.raises(HTTPError, match="Connection refused") as caught:
        push(folder)
    assert type(caught.value).__name__ == "ConnectError"
    assert not isinstance(caught.value, HfHubHTTPError | OSError)
    assert not pauses  # create_repo is asked once
    with pytest.raises(HTTPError, match="refused"):
        HfApi().upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id=REPO)
    assert pauses == BACKOFF
    assert snapshot_download(REPO) == there  # from the cache
    with pytest.raises(LocalEntryNotFoundError, match="refused"):
        snapshot_download(REPO, cache_dir=folder)


def test_slow_line(hub: HubServer) -> None:
    from huggingface_hub import get_session

    hub.add(REPO, {})
    hub.upload_delay = 0.2
    oid = hashlib.sha256(b"body").hexdigest()
    get_session()  # takes its own time to make
    started = time.monotonic()
    assert get_session().put(f"{hub.url}/storage/{REPO}/{oid}", content=b"body").is_success
    assert 0.2 < time.monotonic() - started < 2
    assert hub.lfs_uploads == [(oid, 4)]
    assert get_session().put(f"{hub.url}/storage/{REPO}/{oid}", content=b"bode").is_client_error


def test_large_file_is_linked(hub: HubServer) -> None:
    from huggingface_hub import get_session

    hub.add(REPO, {"a.bin": b"abc", "a.txt": b"abc"})
    text, large = (
        get_session().head(f"{hub.url}/{REPO}/resolve/main/a.{kind}").headers
        for kind in ("txt", "bin")
    )
    assert large["X-Linked-Size"] == large["Content-Length"] == text["Content-Length"] == "3"
    assert large["X-Linked-Etag"] == f'"{hashlib.sha256(b"abc").hexdigest()}"'
    assert "X-Linked-Size" not in text
    assert text["X-Repo-Commit"] == hub.refs(REPO)["main"]
