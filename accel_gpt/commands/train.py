"""Train a config: `accel-gpt train CONFIG`, or `accelerate launch accel_gpt/train.py CONFIG`.

Finds the weights that the run starts from, prepares the data if they are missing, fetches a copy of
a lost checkpoint, trains, and uploads the checkpoints.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from accelerate import PartialState

from accel_gpt.commands.clock import rehearse
from accel_gpt.commands.options import TrainCommand
from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import read_yaml
from accel_gpt.config.values import is_config_of_run
from accel_gpt.console import print_line, write_err
from accel_gpt.errors import first_line, require
from accel_gpt.health.doctor import examine, verdict
from accel_gpt.launch.context import Initialize
from accel_gpt.launch.process import keep_freed_memory
from accel_gpt.launch.ranks import all_ranks, on_main
from accel_gpt.launch.resolve import resolve
from accel_gpt.launch.setup import Launch, open_launch
from accel_gpt.launch.stopping import exiting_on_signals
from accel_gpt.launcher import PREEMPTED, is_main, use_slurm_variables
from accel_gpt.model.language_model import draw_weights
from accel_gpt.prepare.missing_data import ensure_data
from accel_gpt.publish.uploader import Uploader
from accel_gpt.report.runs import open_runs
from accel_gpt.train import train
from accel_gpt.transformers_io.load import load_initial_weights
from accel_gpt.transformers_io.pretrained import check_initial_tokenizer


def main(argv: Sequence[str]) -> int:
    """Train with the config and options in `argv`, for `train.py`; return the exit code."""
    use_slurm_variables()
    keep_freed_memory()
    return train_config(load_config(argv, "train.py"), argv[0])


def run(options: TrainCommand) -> int:
    """Train the config; return the exit code."""
    keep_freed_memory()
    return train_config(options.loaded, options.config)


def train_config(config: Config, source: str) -> int:
    """Prepare, train and upload; return the exit code.

    `source`: the path that `config` was read from.
    """
    initialize = find_initial_weights(config)
    with open_launch(config) as launch:
        on_main(lambda: note_source(config, source))
        ensure_data(config)
        uploader = make_uploader(config, launch)
        if uploader:
            launch.stop.before_exit = uploader.release
        try:
            on_main(uploader.open if uploader else lambda: None)
            context = resolve(
                asked=config,
                rehearse=rehearse,
                initialize=initialize,
                log=launch.display.log,
                check_folder=launch.check_folder,
            )
            stopped = train(
                context=context,
                launch=launch,
                initialize=initialize,
                on_start=uploader.start if uploader else None,
                on_checkpoint=uploader.on_checkpoint if uploader else None,
                before_save=uploader.check if uploader else None,
            )
            unfinished = finish_uploads(uploader, launch, stopped)
        finally:
            if uploader:
                uploader.close()
    if not stopped and not unfinished and is_main():
        tell_health(config.out_dir)
    return PREEMPTED if stopped or unfinished else 0


def tell_health(out_dir: str) -> None:
    """Print the verdict on a run that has reached its last step.

    The run is complete: neither an error nor a signal changes its exit code.
    """
    with exiting_on_signals(exit_code=0):
        try:
            (run,) = open_runs([out_dir])
            if run.state == "finished":  # not so with train.stop_at
                print_line(f"health   {verdict(examine(run))}; accel-gpt doctor {out_dir}")
        except Exception as error:
            print_line(f"health   not known: {first_line(error)}")


def make_uploader(config: Config, launch: Launch) -> Uploader | None:
    """Return what copies and pushes the checkpoints of a run, on rank 0; None if nothing does."""
    if not is_main() or (config.checkpoint.copy_to is None and config.hub.push == "never"):
        return None
    return Uploader(
        checkpoint=config.checkpoint,
        hub=config.hub,
        run=Path(config.out_dir),
        log=launch.display.log,
        on_lost=launch.stop.request,
    )


def note_source(config: Config, source: str) -> None:
    """Print a line if the config of a moved run is used.

    Raises `UserError` if a run's own config, which has its length, is launched with a budget.
    """
    path = Path(source)
    if not is_config_of_run(path) or Path(config.out_dir).resolve() != path.parent.resolve():
        return
    require(
        config.train.budget is None,
        f"{source} sets the length of its run already; leave out train.budget, or set another "
        "out_dir",
    )
    written = str(read_yaml(source).get("out_dir", config.out_dir))
    if Path(written).resolve() != path.parent.resolve():
        write_err(
            f"{source} sets out_dir to {written}; the run continues in {config.out_dir}, the "
            "folder of the file"
        )


def find_initial_weights(config: Config) -> Initialize:
    """Return the function that sets the weights of a new run.

    Raises `UserError` if the weights of `model.init_from` do not fit the tokenizer, before any text
    is prepared.
    """
    if config.model.init_from == "scratch":
        return draw_weights
    check_initial_tokenizer(config)
    return partial(load_initial_weights, config)


def finish_uploads(uploader: Uploader | None, launch: Launch, stopped: bool) -> bool:
    """Wait for the uploads and end the process group; return whether a signal left one undone.

    The next launch makes it. Raises `BusyError` if another launch owns the copies. If the run is
    `stopped`, all ranks wait for rank 0, since a launcher ends all processes as soon as one exits
    with code 75.
    """

    def interrupted() -> bool:
        return stopped or launch.stop.received is not None

    if not stopped:
        PartialState().destroy_process_group()
        return uploader.finish(interrupted) if uploader else False
    with all_ranks(launch.stop.group):
        unfinished = uploader.finish(interrupted) if uploader else False
    PartialState().destroy_process_group()
    return unfinished
