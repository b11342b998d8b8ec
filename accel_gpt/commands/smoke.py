"""`accel-gpt train CONFIG --smoke`: four steps of a config through all that a run does."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accel_gpt.commands.verify_resume import shortened
from accel_gpt.config.parse import load_config, to_yaml
from accel_gpt.console import exit_on_sigterm, write_out
from accel_gpt.files import write_file
from accel_gpt.launcher import run_child

STEPS = 4
SAMPLE_TOKENS, QUESTIONS = 16, 8  # of a sample; of HellaSwag


def smoke(argv: Sequence[str]) -> int:
    """Train four steps in a temporary folder: evaluate, sample, save, stop after the second and
    resume. Data that is missing is prepared, and stays. Returns the exit code of the run.
    """
    from accel_gpt.hub.pretrained import inherit

    exit_on_sigterm()
    config = shortened(load_config(argv, "accel-gpt train", inherit), STEPS)
    batch = config.train.sequences * config.model.block_size
    sample = replace(config.sample, every=2, max_new_tokens=SAMPLE_TOKENS)
    evaluation = replace(config.eval, every=2, tokens=batch, hellaswag_limit=QUESTIONS)
    with tempfile.TemporaryDirectory(prefix="accel_gpt_smoke_") as folder:
        checkpoint = replace(config.checkpoint, every=2, copy_to=None)
        config = replace(
            config, out_dir=str(Path(folder, "run")), sample=sample, eval=evaluation,
            checkpoint=checkpoint,
        )  # fmt: skip
        path = Path(folder, "config.yaml")
        write_file(path, [to_yaml(config).encode()])
        for stop_at in ("2", "null"):
            code = run_child(["train", str(path), "--train.stop_at", stop_at]).returncode
            if code:
                return code
    write_out(f"{STEPS} steps, evaluation, samples, checkpoints and resuming work: {argv[0]}\n")
    return 0
