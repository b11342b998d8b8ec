"""What the training loop costs over a bare PyTorch loop with the same model and batch.

    python benchmarks/loop.py CONFIG.yaml [--section.key value ...]

Both loops run in this process, a step of one and a step of the other in turn. A round is as many
steps of each as there are between two log lines, so that it holds one line; prints the medians over
the rounds and their ratio. The bare loop: forward, backward, clip, AdamW on one batch that stays in
memory, in float32. Ours: the same plus data, accumulate, schedule and metrics. Evaluation, samples
and checkpoints are off. Then what finite checks, signals and the watchdog take of a step.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from accel_gpt import train
from accel_gpt.config.parse import load_config
from accel_gpt.config.plan import make_plan
from accel_gpt.console import run_main
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.training.accelerator import start_accelerator
from accel_gpt.training.setup import ensure_data
from accel_gpt.training.stopping import StopSignal, Watchdog
from accel_gpt.training.terminal import Display

ROUNDS = 20
GUARDS = 2000


def main(argv: list[str]) -> int:
    """Time both loops in turn."""
    with tempfile.TemporaryDirectory() as out:
        quiet = ["--eval.every", "0", "--sample.every", "0", "--checkpoint.every", "0"]
        config = load_config([*argv, "--out_dir", out, *quiet], "benchmarks/loop.py")
        plan = make_plan(config, 1)
        config, accelerator = start_accelerator(config, plan)
        ensure_data(config.data)
        Path(out).mkdir(exist_ok=True)
        with Display(False, config, plan) as display:
            run = train.start(config, plan, accelerator, display)
        bare = GPT(config.model, run.corpus.vocab_size).to(accelerator.device)
        optimizer = make_optimizer(bare, config.optim)
        batch = next(run.loader)
        stop = StopSignal()
        times: dict[str, list[float]] = {"bare": [], "ours": []}
        for _ in range(ROUNDS):
            spent = {"bare": 0.0, "ours": 0.0}
            for _ in range(config.log.every):
                spent["bare"] += timed(lambda: bare_step(bare, optimizer, batch, config, plan))
                spent["ours"] += timed(lambda: our_step(run, stop))
            for name, seconds in spent.items():
                times[name].append(seconds / config.log.every)
        run.loader.close()
        watchdog = Watchdog(None)
        guards = [timed(lambda: guard_step(run, stop, watchdog)) for _ in range(GUARDS)]
    median = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    print(f"bare loop  {median['bare']:8.3f} ms a step")
    print(f"accel_gpt  {median['ours']:8.3f} ms a step")
    print(f"overhead   {100 * (median['ours'] / median['bare'] - 1):+.2f} %")
    spent = statistics.median(guards) * 1e3
    print(f"guards     {spent:8.3f} ms a step, {100 * spent / median['ours']:.2f} % of it")
    return 0


def timed(step: object) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    step()  # type: ignore[operator]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def bare_step(bare, optimizer, batch, config, plan) -> None:  # type: ignore[no-untyped-def]
    """The least that a training step can be."""
    for _ in range(plan.accumulation_steps):
        loss = bare(*batch) / plan.accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(bare.parameters(), config.optim.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def our_step(run: train.Run, stop: StopSignal) -> None:
    """A step of ours, with its metrics."""
    train.update(run)
    train.after_step(run, stop)


def guard_step(run: train.Run, stop: StopSignal, watchdog: Watchdog) -> None:
    """What a step does lest the run be lost or spoilt."""
    ones = torch.ones((), device=run.accelerator.device)
    run.guard.check(run.state.step, run.state.sequences, ones, ones)
    stop.agreed(run.writer.retry_is_due(), run.writer.seconds)
    watchdog.beat()


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
