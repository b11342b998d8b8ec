"""How a run starts: its ranks, the lock of its folder, its data, its initial state."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from accel_gpt.config.data import DataConfig, TextStream
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_flat
from accel_gpt.config.shipped import copy_shipped
from accel_gpt.data.corpus import Corpus, open_shards
from accel_gpt.data.shards import INDEX
from accel_gpt.data.sources import is_url
from accel_gpt.errors import require
from accel_gpt.launcher import (
    PREEMPTED,
    is_main,
    local_rank,
    main_address,
    network_advice,
    rank,
    world_size,
)
from accel_gpt.training.accelerator import requested_precision, start_processes
from accel_gpt.training.machine import code_versions
from accel_gpt.training.ranks import (
    all_gather,
    all_ranks,
    appears,
    end_group,
    require_all,
    sees_main,
)
from accel_gpt.training.run_folder import locked
from accel_gpt.training.state import TrainState
from accel_gpt.training.stopping import INIT, Watchdog


@contextlib.contextmanager
def prepare_run(config: Config, source: str) -> Iterator[None]:
    """Join the ranks, hold the lock of the run's folder and prepare the data if it is missing.

    `source`: where `config` was read from. Raises on all ranks what one raises, and `UserError`
    where the folder is not shared.
    """
    folder, advice = Path(config.out_dir), network_advice()
    meeting = "has not met the others" + (f" at {main_address()}" if world_size() > 1 else "")
    with contextlib.ExitStack() as held:
        with Watchdog(config.train.init_timeout, INIT, meeting, advice):
            start_processes(config)
            with all_ranks():
                if is_main():
                    held.enter_context(locked(folder))
                    copy_shipped(source, folder)
            require_shared(folder)
        ensure_data(config.data)
        yield


def require_shared(folder: Path) -> None:
    """Raise `UserError` on all ranks unless all see the same `folder`; a collective."""
    apart = [rank for rank, seen in enumerate(sees_main(folder)) if not seen]
    names = all_gather(os.uname().nodename)
    first = apart[0] if apart else 0
    require_all(
        not apart,
        f"out_dir {folder} is not shared: rank {first} on {names[first]} does not find there what "
        f"rank 0 on {names[0]} has written; set out_dir to a folder on a disk that all nodes share",
    )


def ensure_data(data: DataConfig) -> None:
    """Prepare the data folder if it is missing, on rank 0 and on one rank of each machine that does
    not share the folder, while the others wait; a collective.

    `accel-gpt prepare` does it in a process of its own, which needs no torch and gives its memory
    back. Exits on all ranks with its code if it fails; raises `UserError` if the folder that is
    there was prepared in another way.
    """
    text, folder = data.prepare.path or data.prepare.dataset, Path(str(data.folder))
    missing, first = False, local_rank() == 0
    with all_ranks():
        if data.prepare.source is None:
            require(
                not (text and data.folder) or folder.exists(),
                f"data.train {data.folder} does not exist, and data.prepare.source does not say "
                f"what {text} is; set it to text, jsonl, parquet, arrow or dataset",
            )
        else:
            require(
                bool(data.folder) and not is_url(str(data.folder)),
                f"data.prepare makes one folder, but data.train is {data.train or 'empty'}; name "
                "the folder, or prepare those of a mixture one by one with accel-gpt prepare",
            )
            missing = not (folder / INDEX).exists()
            if first and not missing:
                from accel_gpt.prepare.prepare import prepare

                prepare(data.prepare, folder)  # only compares
    if not any(every := all_gather(missing)):
        return
    shared = sees_main(folder.parent) if every[0] else every
    own = missing and first and (is_main() or not (every[0] and shared[rank()]))
    run_prepare({"out": str(folder), **asdict(data.prepare)} if own else None)
    if missing:
        appears(folder / INDEX)


def run_prepare(settings: dict[str, object] | None) -> None:
    """Run `accel-gpt prepare` with `settings` (None: on other ranks alone) until all ranks are
    done; a collective. Exits on all with the code of one that fails.
    """
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    wakeup = signal.set_wakeup_fd(-1)  # `StopSignal` would end this process and leave that one
    before = [signal.signal(n, lambda *_: sys.exit(PREEMPTED)) for n in numbers]
    process = start_prepare(settings) if settings else None
    try:  # a signal, or a rank that is lost, kills the process
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            codes = all_gather(exit_code(process))
    finally:
        if process:
            process.kill()
            process.wait()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    if any(codes):
        end_group()
        sys.exit(next(code for code in codes if code))


def start_prepare(settings: dict[str, object]) -> subprocess.Popen[bytes]:
    """Start `accel-gpt prepare` with `settings`."""
    # through a pipe: everybody on the machine can see a command line, and a URL may hold a password
    reading, writing = os.pipe()
    os.write(writing, json.dumps(settings, ensure_ascii=False).encode("utf-8", "surrogateescape"))
    os.close(writing)
    command = [sys.executable, "-m", "accel_gpt.cli", "prepare", f"/dev/fd/{reading}"]
    try:
        return subprocess.Popen(command, pass_fds=(reading,))
    finally:
        os.close(reading)


def exit_code(process: subprocess.Popen[bytes] | None) -> int | None:
    """The exit code of `process`, 0 without one; None where it still works after a second."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(1) if process else 0
    return None


def open_corpus(config: Config) -> Corpus:
    """Open what `data.train` names: prepared shards, or text that is tokenized while training."""
    if isinstance(config.data.train, TextStream):
        from accel_gpt.text.streaming import open_text

        return open_text(config)
    return open_shards(config)


def new_state(config: Config, corpus: Corpus, world_size: int) -> TrainState:
    """The state of a run before its first step."""
    flat = to_flat(config)
    if config.train.reproducible:  # else a resume may change it
        flat["train.mixed_precision"] = requested_precision(config)
    return TrainState(
        world_size=world_size,
        tokenizer_fingerprint=corpus.tokenizer.fingerprint,
        config=flat,
        versions=code_versions(),
        **corpus.state_dict(),
    )
