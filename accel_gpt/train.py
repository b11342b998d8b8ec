"""Train a GPT: the whole story, top to bottom.

    accelerate launch --config_file accelerate_config.yaml accel_gpt/train.py CONFIG.yaml \\
        [--section.key value ...]

Reads the config, the token shards (made first if they are missing) and, when the run has one, its
newest checkpoint; writes the run's folder: config, metrics, samples, checkpoints.
"""

import contextlib
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from accel_gpt.config import Config
from accel_gpt.data.loader import Loader
from accel_gpt.data.order import derive_seed
from accel_gpt.errors import run_main
from accel_gpt.evals.samples import check_prompts, is_sample_step, sample
from accel_gpt.evals.validation import evaluate_splits
from accel_gpt.hub.load import start_model
from accel_gpt.hub.push import fetch_resume
from accel_gpt.hub.sources import inherit
from accel_gpt.hub.uploads import Uploads, start_uploads
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import configure, make_optimizer, set_lr
from accel_gpt.optim.schedule import lr_fraction
from accel_gpt.parse import load_config
from accel_gpt.plan import Plan, make_plan
from accel_gpt.run.batches import micro_batches
from accel_gpt.run.checkpoint import TrainState, is_due, prune, restore, save_checkpoint
from accel_gpt.run.corpus import Corpus
from accel_gpt.run.environment import ensure_data, is_main, start_accelerator, world_size
from accel_gpt.run.guards import PREEMPTED, StopSignal, check_finite, count_skipped, locked
from accel_gpt.run.metrics import (
    Display,
    MetricsLog,
    Record,
    Stopwatch,
    last_words,
    start_trackers,
    write_samples,
)
from accel_gpt.run.resume import take_up
from accel_gpt.run.setup import Speed, record_run
from accel_gpt.run.text_corpus import open_corpus


@dataclass
class Run:
    """All that a training run holds."""

    config: Config
    plan: Plan
    accelerator: Accelerator
    corpus: Corpus
    gpt: GPT  # what is evaluated, sampled and saved
    model: nn.Module  # the same, as Accelerate wrapped it for training
    optimizer: AcceleratedOptimizer
    loader: Loader
    state: TrainState
    watch: Stopwatch
    speed: Speed
    display: Display
    metrics: MetricsLog | None  # of the main process
    uploads: Uploads | None  # of the main process, where hub.push asks for them


def main(argv: Sequence[str]) -> int:
    """Train as `argv` says; returns the exit code."""
    return launch(load_config(argv, "train.py", inherit))


def launch(config: Config) -> int:
    """Train as `config` says, alone in its folder; returns the exit code."""
    plan = make_plan(config, world_size())
    with locked(Path(config.out_dir)) if is_main() else contextlib.nullcontext():
        ensure_data(config.data)
        return train(fetch_resume(config), plan)


def train(config: Config, plan: Plan) -> int:
    """Run from wherever the run stands to its end, or to a signal; returns the exit code."""
    accelerator = start_accelerator(config, plan)
    stop, stopping, skipped = StopSignal(accelerator.num_processes), False, 0
    with Display(accelerator.is_main_process, plan.max_steps) as display:
        run = start(config, plan, accelerator, display)
        while run.state.step < plan.max_steps and not stopping:
            loss, grad_norm = update(run)
            if accelerator.optimizer_step_was_skipped:  # fp16: the scale was too large
                skipped = count_skipped(skipped, run.state.step)
                continue
            skipped = 0
            stopping = stop.agreed() and run.state.step < plan.max_steps
            after_step(run, loss, grad_norm, stopping)
        run.loader.close()
        accelerator.end_training()
        if run.uploads:  # what a signal keeps from the Hub, the next launch uploads
            stopping |= run.uploads.finish(lambda: stopping or stop.received is not None)
        signal_name = (stop.received or "signal to another process") if stopping else None
        display.say(last_words(config, run.state, signal_name))
    return PREEMPTED if stopping else 0


def start(config: Config, plan: Plan, accelerator: Accelerator, display: Display) -> Run:
    """Build everything, and take up the checkpoint that the run has."""
    corpus = open_corpus(config)
    check_prompts(config.sample, corpus.tokenizer)
    state = corpus.new_state(config, accelerator.num_processes)
    path = take_up(config, state, accelerator, display.say)
    torch.manual_seed(config.seed)
    gpt = start_model(config, corpus, path is not None, display.say)
    torch.manual_seed(derive_seed(config.seed, "dropout", accelerator.process_index))
    if config.train.compile:
        gpt.compile()  # in place: no wrapper, the names of the weights stay
    optimizer = make_optimizer(gpt, config.optim, fused=accelerator.mixed_precision != "fp16")
    model, optimizer = accelerator.prepare(gpt, optimizer)
    if path:
        state = restore(accelerator, path, state)
        corpus = corpus.continued(state)
        configure(optimizer, config.optim)
        display.say(f"resuming {config.out_dir} from step {state.step:,} ({path})")
    speed, metrics, uploads = Speed(gpt, plan, accelerator), None, None
    if accelerator.is_main_process:
        display.say(record_run(config, plan, accelerator, corpus, speed, state.step))
        metrics = MetricsLog(Path(config.out_dir), state.step, state.tokens, plan.max_steps)
        uploads = start_uploads(config, display.say)
    start_trackers(accelerator, config, state.step)
    model.train()  # evaluation and sampling give it back as they found it
    loader = corpus.loader(plan, accelerator.process_index, accelerator.device, state.sequences)
    settle = torch.cuda.synchronize if accelerator.device.type == "cuda" else int
    watch = Stopwatch(state.seconds, state.step, settle)
    gc.collect()
    gc.freeze()  # what lives until the end need not be searched for garbage
    return Run(
        *(config, plan, accelerator, corpus, gpt, model, optimizer),
        *(loader, state, watch, speed, display, metrics, uploads),
    )


def update(run: Run) -> tuple[Tensor, Tensor]:
    """One optimizer update; its loss (of this process) and gradient norm, still on the device."""
    accelerator, plan, state = run.accelerator, run.plan, run.state
    schedule, optim = run.config.schedule, run.config.optim
    set_lr(run.optimizer, lr_fraction(state.step, schedule.name, plan, schedule.min_lr / optim.lr))
    total = torch.zeros((), device=accelerator.device)
    batches = micro_batches(run.loader, accelerator, plan, run.corpus.document_end)
    for tokens, targets, documents, weight in batches:
        with accelerator.accumulate(run.model):
            loss = run.model(tokens, targets, documents=documents) * weight
            accelerator.backward(loss)
            total += loss.detach()
    # the last micro-step has reduced the gradients
    grad_norm = accelerator.clip_grad_norm_(run.model.parameters(), optim.grad_clip or float("inf"))
    run.optimizer.step()
    run.optimizer.zero_grad()
    state.sequences += plan.sequences_per_step
    if not accelerator.optimizer_step_was_skipped:
        state.step += 1
        state.tokens += plan.tokens_per_step
    return total / plan.accumulation_steps, grad_norm


def after_step(run: Run, loss: Tensor, grad_norm: Tensor, stopping: bool) -> None:
    """What is due at the completed step: figures, evaluation, a checkpoint, samples.

    Nothing waits for the device unless something is due.
    """
    config, state, watch = run.config, run.state, run.watch
    last = state.step == run.plan.max_steps
    logging = last or state.step % config.log.every == 0
    evaluating = last or bool(config.eval.every and state.step % config.eval.every == 0)
    saving = last or stopping or is_due(config.checkpoint, state, run.plan.tokens_per_step)
    sampling = bool(config.sample.every) and (
        last or is_sample_step(state.step, config.sample.every, config.sample.growth)
    )
    record: Record = {}
    if logging or evaluating or saving:
        figures = step_figures(run, loss, grad_norm)
        epochs = run.corpus.epoch_figures(state.sequences)
        record = figures | run.speed.figures(watch.lap(state.step)) | epochs if logging else {}
    with watch.pause() if evaluating or saving or sampling else contextlib.nullcontext():
        if evaluating:
            tokens = config.eval.tokens
            record |= evaluate_splits(run.gpt, run.corpus, run.accelerator, run.plan, tokens)
            state.val_loss = record["eval/val_loss"]
            saving = (state.note_best() and config.checkpoint.keep_best) or saving
        if record:
            publish(run, record)
        if saving:
            save(run)
        if sampling:
            publish_samples(run)


def step_figures(run: Run, loss: Tensor, grad_norm: Tensor) -> Record:
    """Figures of the completed step over all processes; the one place that waits for the device."""
    figures = {
        "train/loss": run.accelerator.reduce(loss, "mean").item(),
        "train/lr": run.optimizer.param_groups[0]["lr"],
        "train/grad_norm": grad_norm.item(),
    }
    check_finite(figures["train/loss"], figures["train/grad_norm"], run.state.step)
    return figures


def publish(run: Run, record: Record) -> None:
    """Give the figures of a step to the files, the trackers and the terminal."""
    state = run.state
    state.seconds = run.watch.elapsed()
    run.accelerator.log(record, step=state.step)
    if run.metrics:
        whole = {"step": state.step, "tokens": state.tokens, "time": state.seconds} | record
        run.metrics.write(whole)
        run.display.show(whole, run.watch.left(state.step, run.plan.max_steps))


def publish_samples(run: Run) -> None:
    """Write samples to `samples/` and the trackers, and show them at the end of the run."""
    state, config = run.state, run.config
    gpt, tokenizer = run.gpt, run.corpus.tokenizer
    text = sample(run.accelerator, gpt, tokenizer, config.sample, config.seed, state.step)
    write_samples(run.accelerator, Path(config.out_dir), state.step, text)
    if state.step == run.plan.max_steps:
        run.display.say(text)


def save(run: Run) -> None:
    """Save a checkpoint of the completed step, name the best, then remove what is not kept."""
    run.state.seconds = run.watch.elapsed()
    run.corpus.note_place(run.state, run.loader)
    out = Path(run.config.out_dir)
    if run.metrics:
        run.metrics.sync()
    path = save_checkpoint(run.accelerator, out, run.state, run.gpt, run.corpus.tokenizer)
    if run.uploads:
        run.uploads.note(path, last=run.state.step == run.plan.max_steps)
    if run.metrics:
        prune(out, run.config.checkpoint, run.state.best_step)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
