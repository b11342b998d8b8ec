"""`accel-gpt train CONFIG --smoke`: try training, saving and resuming in four steps."""

import tempfile
from dataclasses import replace
from pathlib import Path

from accel_gpt.commands.options import SmokeCommand
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import to_yaml
from accel_gpt.config.plan import shorten
from accel_gpt.console import install_exit_handlers, write_out
from accel_gpt.files import write_file
from accel_gpt.launcher import run_child

STEPS = 4
SAMPLE_TOKENS = 16  # of a sample
QUESTIONS = 8  # of HellaSwag


def run(options: SmokeCommand) -> int:
    """Train four steps in a temporary folder: evaluate, sample, save, stop halfway and resume.

    Missing data is prepared and kept. Returns the exit code of the run.
    """
    install_exit_handlers()
    with tempfile.TemporaryDirectory(prefix="accel_gpt_smoke_") as folder:
        config = smoke_config(options.loaded, out_dir=str(Path(folder, "run")))
        path = Path(folder, "config.yaml")
        write_file(path, [to_yaml(config).encode()])
        for stop_at in (str(STEPS // 2), "null"):
            code = run_child(["train", str(path), "--train.stop_at", stop_at]).returncode
            if code:
                return code
    write_out(
        f"{STEPS} steps, evaluation, samples, checkpoints and resuming work: {options.config}\n"
    )
    return 0


def smoke_config(config: Config, out_dir: str) -> Config:
    """Return `config` with four steps, and everything due after every second step."""
    every = STEPS // 2
    config = shorten(config, STEPS)
    return replace(
        config,
        out_dir=out_dir,
        sample=replace(config.sample, every=every, max_new_tokens=SAMPLE_TOKENS),
        eval=replace(
            config.eval,
            every=every,
            tokens=config.train.micro_batch_sequences * config.model.block_size,
            hellaswag_limit=QUESTIONS,
        ),
        checkpoint=replace(config.checkpoint, every=every, copy_to=None),
    )
