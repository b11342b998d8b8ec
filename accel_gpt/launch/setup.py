"""Set up a run: join the ranks, lock the folder, check the data, make the first state.

Writes the lock file into the folder of the run.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from accelerate import PartialState

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import make_plan
from accel_gpt.config.values import to_flat
from accel_gpt.data.altered import DataFiles
from accel_gpt.data.corpus import Corpus
from accel_gpt.launch.context import Context
from accel_gpt.launch.machine import commit, package_versions, rank_identity
from accel_gpt.launch.precision import requested_precision
from accel_gpt.launch.process import join_ranks, make_host_group
from accel_gpt.launch.ranks import (
    all_gather,
    all_ranks,
    explain_lost_rank,
    require_all,
    require_same,
    shared_with_ranks,
)
from accel_gpt.launch.stopping import (
    StopSignal,
    Watchdog,
)
from accel_gpt.launch.unsupported import check_trackers
from accel_gpt.launcher import die_with_launcher, is_main, local_rank, world_size
from accel_gpt.runs.folder import FolderLock, locked
from accel_gpt.runs.state import TrainState, record_code
from accel_gpt.training.display import Display


@dataclass
class Launch:
    """Hold what a process of a run keeps from its start to its end."""

    stop: StopSignal
    check_folder: Callable[[], None]
    """Raise `BusyError` on rank 0 if the run has lost its folder."""
    display: Display


@contextlib.contextmanager
def open_launch(config: Config) -> Iterator[Launch]:
    """Receive signals, join the ranks and hold the lock of the run's folder.

    If one rank raises an error, all ranks do. Raises `UserError` for a mistake in the config that
    is found without the ranks, and if the ranks do not share the folder.
    """
    die_with_launcher()
    make_plan(config, world_size())  # raises
    check_trackers(config.log.trackers)
    lock: FolderLock | None = None  # on rank 0
    folder = Path(config.out_dir)
    with (
        contextlib.closing(StopSignal(starting=True)) as stop,
        explain_lost_rank(world_size()),
        contextlib.ExitStack() as held,
    ):
        with meeting_watchdog(config):
            join_same_ranks(config)
            stop.group = make_host_group(config.train, world_size())
            with all_ranks():
                if is_main():
                    lock = held.enter_context(locked(folder))
            require_shared(folder)
        yield Launch(stop, lock.check if lock else lambda: None, Display(is_main()))


def join_same_ranks(config: Config) -> PartialState:
    """Join the ranks; raise `UserError` if they differ in config, code or versions."""
    state = join_ranks(config.train)
    if state.num_processes > 1:
        require_same(rank_identity(to_flat(config), config.own.sha256))
    return state


def meeting_watchdog(config: Config) -> Watchdog:
    """Return the watchdog of the block in which the ranks meet."""
    problem = "has not met the others"
    if world_size() > 1:
        problem += f" at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return Watchdog(config.train.step_timeout, problem)


def require_shared(folder: Path) -> None:
    """Raise an error on all ranks unless all share `folder`; a collective."""
    separate = [rank for rank, seen in enumerate(shared_with_ranks(folder)) if not seen]
    names = all_gather(os.uname().nodename)
    first = separate[0] if separate else 0
    require_all(
        not separate,
        f"out_dir {folder} is not shared: rank {first} on {names[first]} does not find a file that "
        f"rank 0 on {names[0]} wrote; set out_dir to a folder on a disk that all nodes share",
    )


def check_data(context: Context, corpus: Corpus, resuming: bool) -> DataFiles:
    """Raise `DataError` on all ranks if rank 0 finds that a data file was altered; a collective.

    Returns the files to look at while the run trains: one rank of each node looks at them.
    """
    splits = corpus.splits() if local_rank() == 0 else []
    with all_ranks():
        files = DataFiles(splits, context.log)
        if is_main():
            files.check_since_last_launch(
                run=Path(context.config.out_dir),
                resuming=resuming,
                accept_changes="data.train" in context.config.checkpoint.allow_change,
            )
    return files


def new_state(context: Context, corpus: Corpus) -> TrainState:
    """Return the state of a run before its first step."""
    config = context.config
    flat = to_flat(config)
    if config.train.reproducible:  # otherwise the precision may change at a resume
        flat["train.mixed_precision"] = requested_precision(config.train)
    versions = dict(package_versions())
    revision = commit()
    if revision:
        versions["commit"] = revision
    return TrainState(
        world_size=context.plan.world_size,
        tokenizer_fingerprint=corpus.tokenizer.fingerprint,
        config=flat,
        budget=context.plan.budget,
        versions=versions,
        code=record_code(config.own),
        **corpus.state_dict(),
    )
