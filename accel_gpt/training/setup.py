"""How a run starts: its ranks, the lock of its folder, its data, its initial state."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import is_config_of_run, own_text_folder, read_yaml, to_flat
from accel_gpt.config.shipped import copy_shipped
from accel_gpt.console import write_err
from accel_gpt.data.corpus import Corpus
from accel_gpt.data.shards import INDEX
from accel_gpt.data.sources import is_url
from accel_gpt.data.verify import DataVerifier
from accel_gpt.errors import UserError, require
from accel_gpt.launcher import (
    PREEMPTED,
    is_main,
    launch_child,
    local_rank,
    main_address,
    rank,
    world_size,
)
from accel_gpt.training.accelerator import (
    requested_precision,
    start_processes,
    warn_without_gpu,
)
from accel_gpt.training.machine import code_versions
from accel_gpt.training.ranks import (
    all_gather,
    all_ranks,
    appears,
    end_group,
    require_all,
    sees_main,
)
from accel_gpt.training.run_folder import FolderLock, locked
from accel_gpt.training.state import TrainState
from accel_gpt.training.stopping import INIT, Watchdog


@contextlib.contextmanager
def prepare_run(config: Config, source: str) -> Iterator[Callable[[], None]]:
    """Join the ranks, hold the lock of the run's folder and prepare the data if it is missing.

    Yields a check that raises `BusyError` on rank 0 if the folder is no longer the locked one.
    `source`: where `config` was read from. Raises on all ranks what one raises, and `UserError`
    where the folder is not shared.
    """
    lock: FolderLock | None = None  # on rank 0
    folder = Path(config.out_dir)
    meeting = "has not met the others" + (f" at {main_address()}" if world_size() > 1 else "")
    with contextlib.ExitStack() as held:
        with Watchdog(config.train.init_timeout, INIT, meeting):
            start_processes(config)
            warn_without_gpu()
            with all_ranks():
                if is_main():
                    lock = held.enter_context(locked(folder))
                    tell_moved(config, source)
                    copy_shipped(source, folder)
            require_shared(folder)
        ensure_data(config)
        yield lock.check if lock else no_check


def no_check() -> None:
    """Stand for `FolderLock.check` on other ranks than 0, which hold no lock."""


def tell_moved(config: Config, source: str) -> None:
    """Print a line if `source` is the config of a run whose folder was moved or copied since."""
    path = Path(source)
    if not is_config_of_run(path) or Path(config.out_dir).resolve() != path.parent.resolve():
        return
    written = str(read_yaml(source).get("out_dir", config.out_dir))
    if Path(written).resolve() != path.parent.resolve():
        write_err(
            f"{source} names out_dir {written}; the run continues in {config.out_dir}, where the "
            "file lies"
        )


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


def ensure_data(config: Config, stdout: TextIO | None = None) -> None:
    """Prepare the data folder if it is missing, on rank 0 and on one rank of each machine that does
    not share the folder, while the others wait; a collective.

    `accel-gpt prepare` does it in a process of its own, which needs no torch and gives its memory
    back. What it prints goes to `stdout`. Exits on all ranks with its code if it fails; raises
    `UserError` if the folder that is there was prepared in another way, or the text is missing.
    """
    data = config.data
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
    with all_ranks():
        if own:
            check_text(config)
    run_prepare({"out": str(folder), **asdict(data.prepare)} if own else None, stdout)
    if missing:
        appears(folder / INDEX)


def check_text(config: Config) -> None:
    """Raise `UserError`, with the key that the user set, if there is no text to prepare."""
    prepare = config.data.prepare
    kinds = ("auto", "text", "jsonl", "parquet", "arrow")
    if prepare.source not in kinds or prepare.path in (None, "-") or is_url(str(prepare.path)):
        return
    from accel_gpt.text.selection import select_files

    try:
        select_files(str(prepare.path), prepare.source)
    except UserError as error:
        if config.data.train != own_text_folder(config.out_dir):
            raise
        raise UserError(str(error).replace("data.prepare.path", "data.text")) from None


def run_prepare(settings: dict[str, object] | None, stdout: TextIO | None = None) -> None:
    """Run `accel-gpt prepare` with `settings` (None: on other ranks alone) until all ranks are
    done; a collective. Exits on all with the code of one that fails.
    """
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    wakeup = signal.set_wakeup_fd(-1)  # `StopSignal` would end this process and leave that one
    before = [signal.signal(n, lambda *_: sys.exit(PREEMPTED)) for n in numbers]
    process = start_prepare(settings, stdout) if settings else None
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


def start_prepare(
    settings: dict[str, object], stdout: TextIO | None = None
) -> subprocess.Popen[str]:
    """Start `accel-gpt prepare` with `settings`; its output goes to `stdout`.

    The settings go through a pipe, which marks them as those of a config: errors name its keys.
    """
    return launch_child(
        ["prepare"],
        environment={k: v for k, v in os.environ.items() if k == "TORCHELASTIC_ERROR_FILE"},
        secret=json.dumps(settings, ensure_ascii=False),
        stdin=None,  # it may be the text
        stdout=stdout,
    )


def exit_code(process: subprocess.Popen[str] | None) -> int | None:
    """The exit code of `process`, 0 without one; None where it still works after a second."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(1) if process else 0
    return None


def verify_data(config: Config, corpus: Corpus, log: Callable[[str], None]) -> DataVerifier:
    """Start to verify the data files of a run in the background, on one rank of each machine."""
    return DataVerifier(
        splits=corpus.splits() if local_rank() == 0 else [],
        vocab_size=corpus.vocab_size,
        folder=Path(config.out_dir),
        accept_changes="data.train" in config.checkpoint.allow_change,
        log=log,
    )


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
