"""Prepare a data folder behind a URL."""

import errno
import hashlib
import io
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from accel_gpt.config.data import DataConfig, PrepareConfig
from accel_gpt.data.sources import open_data
from accel_gpt.errors import UserError
from accel_gpt.files import cache_folder
from accel_gpt.prepare.prepare import prepare
from accel_gpt.prepare.upload import prepare_at
from tests.conftest import launch, text_of
from tests.faults.launches import until
from tests.helpers.hub_server import HubServer, point_at
from tests.helpers.s3 import S3Server, require_s3
from tests.test_train import records

Arguments = Callable[..., list[str]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareConfig:
    """Settings that make three shards, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text(text_of(2_000))
    return PrepareConfig(source=str(text), tokenizer="bytes", shard_tokens=6_000)


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of each file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_url_gets_the_same_files(asked: PrepareConfig, tmp_path: Path) -> None:
    prepare(asked, tmp_path / "local")
    url = f"file://{tmp_path}/bucket/data"
    assert prepare_at(asked, url)
    assert contents(tmp_path / "bucket" / "data") == contents(tmp_path / "local")
    assert not list((cache_folder() / "prepared").glob("*/"))
    assert not prepare_at(asked, url)
    with pytest.raises(UserError, match=r"has no dataset\.json but data, so it is not a data fold"):
        prepare_at(asked, f"file://{tmp_path}/bucket")
    other = PrepareConfig(source=asked.source, tokenizer="chars")
    with pytest.raises(UserError, match=f"data folder {url} was prepared with other settings"):
        prepare_at(other, url)


def test_an_upload_that_broke_off_is_made_again(
    asked: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the index is there, nobody reads the folder."""
    put_file = LocalFileSystem.put_file
    seen: list[str] = []

    def fail(system: LocalFileSystem, source: str, target: str, **options: Any) -> None:
        seen.append(Path(target).name)
        if len(seen) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        put_file(system, source, target, **options)

    url = f"file://{tmp_path}/bucket/data"
    monkeypatch.setattr(LocalFileSystem, "put_file", fail)
    with pytest.raises(UserError, match=rf"{url} cannot be written: .*No space left on device"):
        prepare_at(asked, url)
    assert "dataset.json" not in seen
    with pytest.raises(UserError, match=r"dataset\.json"):
        open_data(url, "train", DataConfig())
    assert prepare_at(asked, url)
    assert seen[-1] == "dataset.json"
    open_data(url, "train", DataConfig())


def test_a_url_that_cannot_be_written_is_told_before_the_text_is_read(
    asked: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_s3()
    with S3Server() as s3:
        s3.point_at(monkeypatch)
        with pytest.raises(UserError, match=r"s3://misspelled/data cannot be written: .* exist"):
            prepare_at(asked, "s3://misspelled/data")
        assert not list((cache_folder() / "prepared").iterdir())
        assert list(s3.contents.buckets) == ["bucket"]
        missing = replace(asked, source=f"{asked.source}.old")
        with pytest.raises(UserError, match="there is no such file"):
            prepare_at(missing, "s3://bucket/data")
        assert s3.names() == []
        assert prepare_at(asked, "s3://bucket/data")
        assert "data/UPLOADING" not in s3.names()


def test_of_two_processes_one_uploads(
    asked: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins while the first one uploads."""
    put_file = LocalFileSystem.put_file
    url = f"file://{tmp_path}/bucket/data"
    results: list[bool] = []
    second = threading.Thread(target=lambda: results.append(prepare_at(asked, url)))
    seen: list[str] = []
    monkeypatch.setattr(sys, "stderr", io.StringIO())

    def start_second(system: LocalFileSystem, source: str, target: str, **options: Any) -> None:
        if not seen:
            second.start()
            until(lambda: "waiting for it" in sys.stderr.getvalue() or len(seen) > 4)
        seen.append(Path(target).name)
        put_file(system, source, target, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", start_second)
    assert prepare_at(asked, url)
    second.join()
    assert results == [False]
    assert len(seen) == len(set(seen))
    assert sorted(seen) == sorted(path.name for path in (tmp_path / "bucket" / "data").iterdir())


def test_a_run_prepares_the_folder_at_its_url_once(
    asked: PrepareConfig, small_run: Arguments, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/bucket/data"
    words = ["--data.train", url, "--data.prepare.source", str(asked.source)]
    words += ["--data.prepare.tokenizer", "bytes", "--train.max_steps", "2"]
    assert launch(small_run(*words)) == 0
    said = capfd.readouterr()
    assert f"data     {url} does not exist: preparing it from {asked.source}" in said.err
    assert f"uploaded it to {url}" in said.out
    Path(str(asked.source)).unlink()  # another machine does not have it
    assert launch(small_run(*words, "--out_dir", str(tmp_path / "second"))) == 0
    assert "uploaded" not in capfd.readouterr().out
    assert records(tmp_path / "second") == records(tmp_path / "run")


def test_a_repository_of_the_hub_gets_one_commit(
    asked: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(asked, tmp_path / "local")
    with HubServer() as hub:
        point_at(monkeypatch, hub, tmp_path / "home")
        assert prepare_at(asked, "hf://datasets/tester/notes/bytes")
        names = [path.name for path in (tmp_path / "local").iterdir()]
        assert sorted(hub.files("tester/notes")) == sorted(f"bytes/{n}" for n in names)
        assert not prepare_at(asked, "hf://datasets/tester/notes/bytes")
