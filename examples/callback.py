"""Look at a run after each evaluation, and stop it once the validation loss rises. For notebooks:

    import accel_gpt
    run = accel_gpt.run("quickstart", {"code": "examples/callback.py", "eval.every": 100})
    run.metrics["eval/val_loss"].dropna()

In a notebook, `%%writefile callback.py` as the first line of a cell writes the cell to that file.
The run stops as after Ctrl-C: it saves a checkpoint, and the same call resumes it. On the command
line:

    accel-gpt train quickstart --code examples/callback.py --eval.every 100
"""

import signal
from itertools import pairwise
from pathlib import Path

import torch

import accel_gpt
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.evals.samples import write_text

RISES = 2  # in a row, after which the run stops


def _has_risen(losses):
    """Return whether each of the last losses is above the one before it."""
    last = losses[-RISES - 1 :]
    return len(last) > RISES and all(before < after for before, after in pairwise(last))


def after_evaluation(run, record):
    sampling = SampleConfig(num=1, max_new_tokens=60, temperature=0.8)
    generator = torch.Generator(run.accelerator.device).manual_seed(run.state.step)
    # on all ranks, since FSDP gathers the weights from all of them
    (text,) = write_text(run.gpt, run.corpus.tokenizer, "", sampling, generator)
    if not run.accelerator.is_main_process:
        return
    print(f"step {run.state.step:,}: val loss {record['eval/val_loss']:.4f}\n{text}\n", flush=True)
    # the losses of all launches are in the folder of the run, this one included
    losses = accel_gpt.Run(Path(run.config.out_dir)).metrics["eval/val_loss"].dropna()
    if _has_risen(losses.tolist()):
        print(f"the validation loss has risen {RISES} times in a row: the run saves and stops")
        signal.raise_signal(signal.SIGINT)
