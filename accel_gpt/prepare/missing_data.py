"""Prepare the data folder of a run if it is missing, at the start of the run.

A child process prepares it, which needs no torch and frees its memory at the end.
"""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from accel_gpt.children import launch_child
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import own_text_folder
from accel_gpt.console import write_err
from accel_gpt.data.index import INDEX, check_folder
from accel_gpt.data.sources import all_train_paths
from accel_gpt.errors import require
from accel_gpt.files import is_url
from accel_gpt.launch.ranks import (
    all_gather,
    all_ranks,
    end_group,
    shared_with_ranks,
    wait_for_file,
)
from accel_gpt.launch.stopping import exiting_on_signals
from accel_gpt.launcher import PREEMPTED, is_main, local_rank, rank
from accel_gpt.prepare.sources import KEY, select
from accel_gpt.prepare.upload import CHILD_SETTINGS, has_index, prepare_at


def ensure_data(config: Config) -> None:
    """Prepare the data folder of a run if it is missing; a collective.

    Rank 0 prepares it. On nodes that do not share the folder, one rank prepares it as well. The
    other ranks wait. If the command fails, all ranks exit with its code.
    Raises `UserError` if an existing folder was prepared with other settings, or if the text is
    missing.
    """
    out = str(config.data.folder)
    with all_ranks():
        missing = is_missing(config)
    missing_on_ranks = all_gather(missing)
    if not any(missing_on_ranks):
        return
    prepares = missing and local_rank() == 0
    if is_url(out):
        prepares = missing and is_main()
    elif missing_on_ranks[0]:  # rank 0 prepares for all ranks that share its folder
        shared = shared_with_ranks(Path(out).parent)
        prepares = prepares and (is_main() or not shared[rank()])
    settings: dict[str, object] | None = None
    with all_ranks():
        if prepares:
            prepare_config = config.data.prepare
            if not is_url(str(prepare_config.source)):
                is_own = config.data.train == own_text_folder(config.out_dir)
                select(prepare_config, key="data.text" if is_own else KEY)  # raises without a text
            write_err(f"data     {out} does not exist: preparing it from {prepare_config.source}")
            settings = {"out": out, **asdict(prepare_config)}
    run_prepare(settings)
    if missing and not is_url(out):
        wait_for_file(Path(out, INDEX))


def is_missing(config: Config) -> bool:
    """Return whether the data folder must be prepared.

    Raises `UserError` if an existing folder does not match the config.
    """
    data = config.data
    if data.own_shards is not None and data.prepare.source is None:
        return False
    prepared = data.folder if data.prepare.source is not None else None
    for source in all_train_paths(config):
        if source.path != prepared and not is_url(source.path):
            check_folder(Path(source.path))
    if data.prepare.source is None:
        return False
    require(
        bool(data.folder),
        f"data.prepare makes one folder, but data.train is {data.train or 'empty'}; set data.train "
        "to a folder, or prepare each folder of a mixture with accel-gpt prepare",
    )
    if not has_index(str(data.folder)):
        return True
    if local_rank() == 0:
        # the folder is complete, so this only compares the settings
        prepare_at(data.prepare, str(data.folder), keep_changed=True)
    return False


def run_prepare(settings: dict[str, object] | None) -> None:
    """Prepare with `settings` in a child until all ranks are done; a collective.

    If `settings` is None, this rank only waits. If a child fails, all ranks exit with its code.
    """
    with exiting_on_signals(PREEMPTED):
        process = None
        if settings:
            environment = {CHILD_SETTINGS: json.dumps(settings)}
            if "TORCHELASTIC_ERROR_FILE" in os.environ:
                environment["TORCHELASTIC_ERROR_FILE"] = os.environ["TORCHELASTIC_ERROR_FILE"]
            process = launch_child(
                [],
                module="accel_gpt.prepare.upload",
                environment=environment,
                own_group=True,  # only this process receives Ctrl-C
            )
        code = None if process else 0
        codes: list[int | None] = [None]
        try:  # a signal or the loss of a rank kills the child
            while None in codes and not any(codes):
                if process:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = process.wait(timeout=1)
                codes = all_gather(code)
        finally:
            if process:
                process.kill()
                process.wait()
    failed = [code for code in codes if code]
    if failed:
        end_group()
        sys.exit(failed[0])
