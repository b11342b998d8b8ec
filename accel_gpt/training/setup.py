"""What a run is built from: its data, its initial state."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from accel_gpt.config.data import DataConfig, TextStream
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat
from accel_gpt.data.corpus import Corpus, open_shards
from accel_gpt.data.sources import is_url
from accel_gpt.errors import require
from accel_gpt.launcher import local_rank
from accel_gpt.training.machine import code_versions
from accel_gpt.training.state import TrainState


def ensure_data(data: DataConfig) -> None:
    """Prepare the data folder if it is missing: one rank of each machine, while the others wait.

    `accel-gpt prepare` does it in a process of its own, which needs no torch and gives its memory
    back. Exits with its code if it fails; raises `UserError` if the folder that is there was
    prepared in another way.
    """
    text = data.prepare.path or data.prepare.dataset
    if data.prepare.source is None:
        require(
            not (text and data.folder) or Path(str(data.folder)).exists(),
            f"data.train {data.folder} does not exist, and data.prepare.source does not say what "
            f"{text} is; set it to text, jsonl, parquet, arrow or dataset",
        )
        return
    require(
        bool(data.folder) and not is_url(str(data.folder)),
        f"data.prepare makes one folder, but data.train is {data.train or 'empty'}; name the "
        "folder, or prepare those of a mixture one by one with accel-gpt prepare",
    )
    folder = Path(str(data.folder))
    if local_rank() != 0:
        while not (folder / "dataset.json").exists():
            time.sleep(0.2)
    elif (folder / "dataset.json").exists():
        from accel_gpt.prepare.prepare import prepare

        prepare(data.prepare, folder)  # only compares
    else:
        run_prepare({"out": str(folder), **asdict(data.prepare)})


def run_prepare(settings: dict[str, object]) -> None:
    """Run `accel-gpt prepare` with `settings`; exits with its code if it fails."""
    # through a pipe: everybody on the machine can see a command line, and a URL may hold a password
    reading, writing = os.pipe()
    os.write(writing, json.dumps(settings, ensure_ascii=False).encode("utf-8", "surrogateescape"))
    os.close(writing)
    command = [sys.executable, "-m", "accel_gpt.cli", "prepare", f"/dev/fd/{reading}"]
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(n, lambda number, _: sys.exit(128 + number)) for n in numbers]
    try:  # a signal kills the process
        code = subprocess.run(command, check=False, pass_fds=(reading,)).returncode
    finally:
        os.close(reading)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    if code:
        sys.exit(code)


def open_corpus(config: Config) -> Corpus:
    """Open what `data.train` names: prepared shards, or text that is tokenized while training."""
    if isinstance(config.data.train, TextStream):
        from accel_gpt.text.streaming import open_text

        return open_text(config)
    return open_shards(config)


def new_state(config: Config, corpus: Corpus, world_size: int) -> TrainState:
    """The state of a run before its first step."""
    return TrainState(
        world_size=world_size,
        tokenizer_fingerprint=corpus.tokenizer.fingerprint,
        config=to_flat(config),
        versions=code_versions(),
        **corpus.state_dict(),
    )
