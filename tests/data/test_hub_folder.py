"""Shards in a repository of the Hub are read at one commit."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_gpt.cli import dispatch
from accel_gpt.commands import train as command
from accel_gpt.config.data import DataConfig, PrepareConfig
from accel_gpt.data import downloads
from accel_gpt.data.shards import Split
from accel_gpt.data.sources import open_data
from accel_gpt.prepare.prepare import prepare
from accel_gpt.runs.checkpoint import read_state
from tests.conftest import QUIET, run_here, text_of
from tests.helpers.hub_server import HubServer, no_waiting, point_at

REPO = "tester/shards"
URL = f"hf://datasets/{REPO}"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A data folder of several shards."""
    text = tmp_path / "text.txt"
    text.write_text(text_of(4000))
    source = PrepareConfig(source=str(text), tokenizer="bytes", shard_tokens=2000)
    prepare(source, tmp_path / "shards")
    return tmp_path / "shards"


@pytest.fixture
def hub(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub that has the shards."""
    monkeypatch.setattr(downloads, "PAUSE_SECONDS", 0.01)
    with HubServer() as server:
        point_at(monkeypatch, server, tmp_path / "home")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        no_waiting(monkeypatch)
        add(server, shards)
        yield server


def add(hub: HubServer, folder: Path, inside: str = "") -> None:
    """Commit the files of a folder."""
    files = [path for path in folder.iterdir() if path.is_file()]
    hub.add(REPO, {f"{inside}{path.name}": path.read_bytes() for path in files})


def opened(url: str = URL, **options: Any) -> Split:
    """Open the train split."""
    return open_data(url, "train", DataConfig(**options))[0]


def read(split: Split) -> np.ndarray[Any, Any]:
    """Read all tokens."""
    return np.concatenate([split.read(i, 0, one.tokens) for i, one in enumerate(split.shards)])


def fetched(hub: HubServer) -> Counter[str]:
    """Count the downloads of each shard."""
    paths = [path for method, path in hub.requests if method == "GET" and "/resolve/" in path]
    return Counter(Path(path).name for path in paths if path.endswith(".npy"))


@pytest.mark.parametrize("inside", ["", "gpt2/"])
def test_shards_are_read_at_one_commit(hub: HubServer, shards: Path, inside: str) -> None:
    add(hub, shards, inside)
    local = opened(str(shards))
    split = opened(f"{URL}@main/{inside}")
    assert (read(split) == read(local)).all()
    assert split.fingerprint == local.fingerprint
    assert fetched(hub) == dict.fromkeys([shard.name for shard in local.shards], 1)


def test_a_resumed_run_reads_the_commit_that_it_began_with(
    hub: HubServer,
    shards: Path,
    small_run: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = ("--train.max_steps", "4", "--eval.tokens", "64", "--checkpoint.every", "2")
    own = small_run("--data.train", URL, *QUIET, *short)
    prepares = ["--data.prepare.source", "user/text"]
    assert run_here(command.main, [*own, *prepares]) == 2
    assert f"data folder {URL} was prepared with other settings" in capsys.readouterr().err
    assert run_here(command.main, [*own, "--train.stop_at", "2"]) == 0
    caches = tmp_path / "cache" / "accel_gpt" / "shards"
    assert len(list(caches.iterdir())) == 1
    index = json.loads((shards / "dataset.json").read_text())
    index["splits"]["train"].reverse()
    hub.add(REPO, {"dataset.json": json.dumps(index).encode()})
    assert run_here(command.main, own) == 0
    assert not list(caches.iterdir())
    states = [read_state(path) for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    commits = [state.data_commits[URL] for state in states]
    assert len(set(commits)) == 1
    assert commits[0] != hub.repos[REPO].find("main")
    without_val = {**index, "splits": {"train": index["splits"]["train"]}}
    hub.add(REPO, {"dataset.json": json.dumps(without_val).encode()})
    assert run_here(dispatch, ["evaluate", str(tmp_path / "run")]) == 0
    hub.add(REPO, {"dataset.json": json.dumps(index).encode()})
    assert run_here(command.main, [*own, "--out_dir", str(tmp_path / "new")]) == 0
    (path,) = list((tmp_path / "new" / "checkpoints").glob("*4"))
    assert read_state(path).data_commits[URL] == hub.repos[REPO].find("main")
