"""End a run once its validation loss has risen twice in a row.

    accel-gpt train quickstart --code examples/early_stop.py --eval.every 100

The last step is saved, the exit code is 0, and run.json records why the run ended. The best
checkpoint is the one before the rises (Prechelt 1998, "Early Stopping - But When?").
"""

import math
from pathlib import Path

import accel_gpt


def after_evaluation(run, record):
    if not run.accelerator.is_main_process:
        return
    metrics = accel_gpt.Run(Path(run.config.out_dir)).metrics  # of all launches, without `record`
    losses = [*metrics.get("eval/val_loss", ()), record["eval/val_loss"]]
    last = [loss for loss in losses if not math.isnan(loss)][-3:]
    if len(last) == 3 and last[0] < last[1] < last[2]:
        run.finish("the validation loss has risen twice in a row")
