"""A preparation that is stopped anywhere and resumed writes the same bytes."""

import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.shards import open_split
from accel_gpt.data.tokenizer import load_tokenizer
from accel_gpt.errors import UserError
from accel_gpt.prepare import documents, encoding
from accel_gpt.prepare import prepare as build
from accel_gpt.prepare import shards as writer
from accel_gpt.prepare.prepare import prepare
from tests.helpers.hub_server import HubServer, environment

fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the journal every few documents, use small batches, split long documents."""
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(encoding, "PIECE_OVERHEAD", 10)
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 60)
    monkeypatch.setattr("accel_gpt.prepare.rows.BATCH_ROWS", 7)


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    """A file of 120 documents, every sixth one a repeat, in shards of 900 tokens."""
    datasets.disable_progress_bars()
    lines = []
    for i in range(120):
        number = i if i % 6 else i // 2
        text = f"Document {number} says é{'!' * (number % 7)} once\n" * (number % 5 + 1)
        lines.append(json.dumps({"text": text}) + "\n")
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return PrepareConfig(source=str(tmp_path / "a.jsonl"), tokenizer="bytes", shard_tokens=900)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "data" / "made"


def partial(out: Path) -> Path:
    return out.with_name("made.partial")


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def assert_undisturbed(config: PrepareConfig, out: Path) -> None:
    """Assert that `out` equals an undisturbed preparation, and that nothing else is left."""
    whole = out.parents[1] / "undisturbed"
    if not whole.exists():
        prepare(config, whole)
    assert content(out) == content(whole)
    assert {*os.listdir(out.parent)} - {"made.lock"} == {"made"}  # a killed process leaves its lock


def texts(out: Path, name: str) -> list[str]:
    split = open_split(out, name)
    ids = [int(t) for i, n in enumerate(split.lengths) for t in split.read(i, 0, int(n))]
    return load_tokenizer(out).decode(ids).split("<|endoftext|>")[:-1]


# --------------------------------------------------------------------------- faults


def at_each_write(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` at each point where the disk changes.

    The points are before a sync, a rename or a removal, and in the middle of writing tokens.
    """
    here = os.getpid()

    def before(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def called(*arguments: Any, **named: Any) -> Any:
            if os.getpid() == here:
                act()
            return real(*arguments, **named)

        patch.setattr(owner, name, called)

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "unlink")):
        before(owner, name)
    before(writer.ShardWriter, "add")


def prepare_and_die(config: PrepareConfig, out: Path, after: int, writes: Any = None) -> None:
    left = after

    def count() -> None:
        nonlocal left
        left -= 1
        if writes is not None:
            writes.value += 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.stderr = sys.stdout = io.StringIO()
    at_each_write(pytest.MonkeyPatch(), count)
    prepare(config, out)


def run_and_kill(config: PrepareConfig, out: Path, after: int) -> bool:
    """Prepare in a process that is killed at write number `after`; return whether it was."""
    process = fork.Process(target=prepare_and_die, args=(config, out, after))
    process.start()
    process.join(30)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def check_nothing_half(out: Path) -> None:
    """Assert that only complete folders open as data."""
    assert not out.exists()
    for name in ("train", "val"):
        if (partial(out) / "dataset.json").exists():
            split = open_split(partial(out), name)
            assert all(len(split.read(i, 0, int(n))) for i, n in enumerate(split.lengths))
        else:
            with pytest.raises(UserError):
                open_split(partial(out), name)


def test_killed_again_and_again_it_makes_the_same_bytes(config: PrepareConfig, out: Path) -> None:
    draw, kills = random.Random(3), 0
    while run_and_kill(config, out, draw.randint(30, 90)):
        kills += 1
        check_nothing_half(out)
        assert kills < 40, "it gets no further"
    assert kills >= 3
    assert_undisturbed(config, out)


def test_what_was_counted_before_a_kill_is_told_at_the_end(
    config: PrepareConfig, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(str(config.source))
    path.write_text('{"text": "<|endoftext|>"}\n' + path.read_text())
    assert run_and_kill(config, out, 60)
    prepare(config, out)
    told = capsys.readouterr().err
    assert re.search(r"resuming from [1-9]", told)
    assert "the text spells <|endoftext|> 1 time as letters" in told
    assert_undisturbed(config, out)


@pytest.mark.slow
def test_a_kill_at_any_write_does_no_harm(
    config: PrepareConfig, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(config, shard_tokens=3000)
    writes = fork.Value("i", 0)
    process = fork.Process(target=prepare_and_die, args=(config, tmp_path / "x", 0, writes))
    process.start()
    process.join(30)
    number, continued = int(writes.value), 0
    capsys.readouterr()
    for after in (1, 5, *range(9, number - 12, 15), *range(number, number - 13, -3)):
        assert run_and_kill(config, out, after)
        if after == number:  # all but the sync of the parent folder
            assert_undisturbed(config, out)
        else:
            check_nothing_half(out)
        prepare(config, out)
        assert_undisturbed(config, out)
        continued += "resuming from" in capsys.readouterr().err
        shutil.rmtree(out)
    assert continued > 5


def test_a_full_disk_is_reported_and_continued_from(
    config: PrepareConfig, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 41

    def full() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        at_each_write(patch, full)
        with pytest.raises(OSError, match="No space left"):
            prepare(config, out)
    check_nothing_half(out)
    prepare(config, out)
    assert_undisturbed(config, out)


# --------------------------------------------------------------------------- starting over


@pytest.fixture
def stopped(
    config: PrepareConfig,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> PrepareConfig:
    """The config of a preparation that Ctrl-C stopped in the middle; `out`.partial is there."""
    real = build.Preparation.save
    left = 4

    def save(work: build.Preparation, *position: Any) -> None:
        nonlocal left
        real(work, *position)
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build.Preparation, "save", save)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, out)
    assert f"{partial(out)} is kept" in capsys.readouterr().err
    return config


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "tokenizer.json").write_text("{"), "not valid JSON"),
    (lambda f: os.truncate(f / "progress.json", 0), "it holds no tokens"),
    (lambda f: os.truncate(f / "train_000000.npy", 500), "train_000000.npy is missing, or shorter"),
    (lambda f: os.truncate(f / "hashes.bin", 8), "hashes.bin is missing, or shorter"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_what_does_not_belong_together_starts_over(
    stopped: PrepareConfig,
    out: Path,
    damage: Callable[[Path], object],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(partial(out))
    prepare(stopped, out)
    said = capsys.readouterr().err
    assert reason in said
    assert "starting over" in said
    assert "resuming" not in said
    assert_undisturbed(stopped, out)


def test_what_cannot_be_resumed_now_is_refused_and_the_work_is_kept(
    stopped: PrepareConfig, out: Path
) -> None:
    before = content(partial(out))
    with pytest.raises(UserError, match=r"val_fraction: 0\.1, requested 0\.2\); remove it"):
        prepare(replace(stopped, val_fraction=0.2), out)
    with Path(str(stopped.source)).open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"begun with other .*sizes of the files\); remove it"):
        prepare(stopped, out)
    assert content(partial(out)) == before


def test_a_corrected_command_starts_over_if_the_failed_one_saved_no_tokens(
    config: PrepareConfig, out: Path
) -> None:
    with pytest.raises(UserError, match="no such column"):
        prepare(replace(config, text_field="body"), out)
    prepare(config, out)
    assert_undisturbed(config, out)


def test_a_folder_of_another_origin_is_not_removed(config: PrepareConfig, out: Path) -> None:
    partial(out).mkdir(parents=True)
    (partial(out) / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"made\.partial has no progress\.json; remove it"):
        prepare(config, out)
    assert (partial(out) / "thesis.txt").read_text() == "mine"


# --------------------------------------------------------------------------- the Hub


def rows_file(number: int) -> bytes:
    """A Parquet file of a data set, with 3 MB of text."""
    texts = [f"row {i} of file {number}\n" * 10 for i in range(15_000)]
    sink = io.BytesIO()
    table = pa.table({"text": texts, "n": range(15_000)})
    pq.write_table(table, sink, row_group_size=3000)
    return sink.getvalue()


@pytest.mark.slow
def test_a_preparation_from_the_hub_that_is_killed_twice_makes_the_same_bytes(
    tmp_path: Path,
) -> None:
    """It does not read earlier files again, and keeps no copy of the data set."""
    words = [sys.executable, "-m", "accel_gpt", "prepare", "tester/text"]
    words += ["--tokenizer", "bytes", "--shard_tokens", "300000", "--out"]
    files = {f"train-{n}-of-3.parquet": rows_file(n) for n in range(3)}
    with HubServer() as hub:
        hub.add("tester/text", files | {"validation-0-of-1.parquet": rows_file(9)})
        environ = os.environ | environment(hub, tmp_path / "home")

        def start(name: str, **more: str) -> "subprocess.Popen[str]":
            command = [*words, str(tmp_path / name)]
            return subprocess.Popen(
                command,
                env=environ | more,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )

        whole = start("whole")
        assert "prepared" in whole.communicate()[0]
        for shard in (5, 16):
            stopped = start("stopped")
            while not (tmp_path / "stopped.partial" / f"train_{shard:06d}.npy").exists():
                assert stopped.poll() is None
                time.sleep(0.001)
            stopped.kill()
            stopped.communicate()
        hub.requests.clear()
        assert "resuming from" in start("stopped").communicate()[1]
        asked = Counter(path.rpartition("/")[2] for _, path in hub.requests)
        assert asked["train-0-of-3.parquet"] < asked["train-2-of-3.parquet"]  # only for the columns
        offline = start("other", HF_HUB_OFFLINE="1")
        assert "OfflineModeIsEnabled" in offline.communicate()[1]
        assert offline.returncode == 2
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "stopped" / path.name).read_bytes()
    assert texts(tmp_path / "whole", "val") == [f"row {i} of file 9\n" * 10 for i in range(15_000)]
    cached = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in cached) < 20_000
