"""Train a GPT: the whole story, top to bottom.

    accelerate launch --config_file accelerate_config.yaml accel_gpt/train.py CONFIG \\
        [--section.key value ...]

Reads the config, the token shards (made first if they are missing) and, when the run has one, its
newest checkpoint; writes the run's folder: config, metrics, samples, checkpoints.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config
from accel_gpt.config.plan import Plan, make_plan
from accel_gpt.config.shipped import copy_shipped
from accel_gpt.console import run_main
from accel_gpt.data.corpus import Corpus
from accel_gpt.data.loader import Loader
from accel_gpt.errors import DataError
from accel_gpt.evals.evaluation import Evaluation, open_evaluation
from accel_gpt.evals.samples import check_prompts, sample, samples_due
from accel_gpt.files import fault_point
from accel_gpt.hub.background_push import Uploads, start_uploads
from accel_gpt.hub.load import download_checkpoint, load_initial_model
from accel_gpt.hub.pretrained import inherit
from accel_gpt.launcher import is_main, world_size
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import configure, fraction_at, set_rates
from accel_gpt.training.accelerator import ensure_data
from accel_gpt.training.anomalies import Ledger, TooManySkippedError, check_weights
from accel_gpt.training.auto_batch import sized
from accel_gpt.training.batches import batch_figures, micro_batches, pass_over
from accel_gpt.training.gradients import Gradients, make_gradients
from accel_gpt.training.guards import locked
from accel_gpt.training.metrics import Record
from accel_gpt.training.precision import resolve_compile, start_accelerator
from accel_gpt.training.ranks import peers, require_same
from accel_gpt.training.reporter import Reporter, shown
from accel_gpt.training.resume import choose_checkpoint, choose_rollback, restore
from accel_gpt.training.saving import CheckpointWriter
from accel_gpt.training.setup import freeze, new_state, open_corpus, prepared
from accel_gpt.training.state import TrainState
from accel_gpt.training.stopping import PREEMPTED, StopSignal, die_with_launcher, listen_for_stop
from accel_gpt.training.terminal import Display, last_words
from accel_gpt.training.watchdog import Watchdog


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
    gradients: Gradients
    state: TrainState
    reporter: Reporter
    writer: CheckpointWriter
    uploads: Uploads | None  # of the main process, where hub.push asks for them
    evaluation: Evaluation
    loader: Loader = field(init=False)
    ledger: Ledger = field(init=False)


def main(argv: Sequence[str]) -> int:
    """Train as `argv` says; returns the exit code."""
    return launch(load_config(argv, "train.py", inherit), argv[0])


def launch(config: Config, source: str) -> int:
    """Train as `config`, which `source` names, says, alone in its folder; returns the exit code."""
    die_with_launcher()
    started, plan = time.monotonic(), make_plan(config, world_size())
    with locked(Path(config.out_dir)) if is_main() else contextlib.nullcontext():
        if is_main():
            copy_shipped(source, Path(config.out_dir))
        ensure_data(config.data)
        with peers(plan.world_size):
            if config.eval.only:
                from accel_gpt.commands.evaluate_model import evaluate_only

                return evaluate_only(config)
            return train(download_checkpoint(config), plan, started)


def train(config: Config, plan: Plan, started: float) -> int:
    """Run from wherever the run stands to its end, or to a signal; returns the exit code."""
    config, accelerator = start_accelerator(config, plan)
    stop = listen_for_stop(config, accelerator, started)
    config, plan = sized(config, plan, accelerator)
    config = resolve_compile(config, plan)
    with shown(config, plan, accelerator) as display:
        run = start(config, plan, accelerator, display)
        writing, profiling = contextlib.closing(run.writer), run.reporter.profile
        with Watchdog(config.train.step_timeout) as watchdog, writing, profiling:
            run.reporter.beat, stopping = watchdog.beat, False
            while run.state.step < plan.max_steps and not stopping:
                stopping = step(run, stop)
                run.reporter.completed(run.state.step)
            run.loader.close()
            run.writer.wait()
        stop.saved = stopping
        run.reporter.write(accelerator.end_training)
        if run.uploads:  # what a signal keeps from the Hub, the next launch uploads
            stopping |= run.uploads.finish(lambda: stopping or stop.received is not None)
    stop.ignore()
    display.say(last_words(config, run.state, stop.received if stopping else None))
    return PREEMPTED if stopping else 0


def start(config: Config, plan: Plan, accelerator: Accelerator, display: Display) -> Run:
    """Build everything, and take up the checkpoint that the run has."""
    corpus = open_corpus(config)
    evaluation = open_evaluation(config, corpus)
    require_same(corpus.identity(), DataError)
    state, say = new_state(config, corpus, accelerator.num_processes), display.say
    check_prompts(config.sample, corpus.tokenizer, config.model.block_size, say)
    path = choose_checkpoint(config, state, say)
    torch.manual_seed(config.seed)
    new = path or config.model.init_from == "scratch"
    gpt = GPT(config.model, corpus.vocab_size) if new else load_initial_model(config, corpus, say)
    model, optimizer = prepared(config, accelerator, gpt)
    gradients = make_gradients(config, accelerator, model)
    if path:
        state = restore(accelerator, path, state, gpt, optimizer, say)
        say(f"resuming {config.out_dir} from step {state.step:,} ({path})")
    reporter = Reporter(config, plan, accelerator, gpt, display)
    uploads = start_uploads(config, plan.max_steps, say) if is_main() else None
    note = uploads.note if uploads else lambda _: None
    writer = CheckpointWriter(accelerator, config, corpus.tokenizer, say, reporter.sync, note)
    parts = (config, plan, accelerator, corpus, gpt, model, optimizer, gradients, state)
    run = Run(*parts, reporter, writer, uploads, evaluation)
    take_place(run)
    reporter.launch(run.corpus, state)
    model.train()  # evaluation and sampling give it back as they found it
    freeze()
    return run


def take_place(run: Run) -> None:
    """Data, ledger and settings where `run.state` stands."""
    run.corpus.load_state_dict(vars(run.state))
    rank, device = run.accelerator.process_index, run.accelerator.device
    run.loader = run.corpus.loader(run.plan, rank, device, run.state.sequences)
    run.loader.keep_sequences = run.config.log.batch_hash
    run.ledger = Ledger(run.config.train, device, run.state)
    configure(run.optimizer, run.config.optim)  # a checkpoint brings the settings of the past


def step(run: Run, stop: StopSignal) -> bool:
    """One step and what is due after it; whether the run shall stop there."""
    fault_point("step")
    try:
        update(run)
        stopping, retrying = stop.agreed(run.writer.retry_is_due(), run.writer.seconds)
        stopping &= run.state.step < run.plan.max_steps
        after_step(run, stopping, retrying)
        return stopping
    except TooManySkippedError:
        go_back(run)
        return False


def update(run: Run) -> None:
    """One optimizer update, or none where loss or gradient are not finite; nothing waits for it."""
    accelerator, plan, state = run.accelerator, run.plan, run.state
    pass_over(run.loader, plan, state)
    set_rates(run.optimizer, run.config, plan, state.step)
    batches = micro_batches(run.loader, accelerator, plan, run.corpus.document_end)
    firsts = plan.firsts(accelerator.process_index, state.sequences)
    for first, (tokens, targets, documents, weight) in zip(firsts, batches, strict=True):
        with run.gradients.micro_step(first):
            run.gradients.backward(run.model(tokens, targets, documents=documents) * weight)
    loss = run.gradients.finish()  # over all processes, as the gradient is
    grad_norm = run.gradients.clip(run.config.optim.grad_clip)
    run.optimizer.optimizer.skip = run.ledger.judge(state, loss, grad_norm)
    with run.reporter.layers(state.step + 1, grad_norm, tokens, documents):
        run.optimizer.step()
    run.optimizer.zero_grad()
    state.step += 1
    state.sequences += plan.sequences_per_step
    state.tokens += plan.tokens_per_step


def after_step(run: Run, stopping: bool, retrying: bool) -> None:
    """What is due at the completed step: figures, evaluation, a checkpoint, samples.

    Nothing waits for the device unless something is due.
    """
    config, state, reporter = run.config, run.state, run.reporter
    last = state.step == run.plan.max_steps
    logging = last or state.step % config.log.every == 0
    evaluating = last or bool(config.eval.every and state.step % config.eval.every == 0)
    saving = last or stopping or retrying
    saving |= state.save_is_due(config.checkpoint, run.plan.tokens_per_step)
    sampling = samples_due(config.sample, state.step, last)
    record: Record = {}
    if logging or evaluating or saving:
        figures = run.ledger.read(state, reporter.say) | run.corpus.epoch_metrics(state.sequences)
        if logging:
            fraction = fraction_at(state.step - 1, config, run.plan)
            record = figures | {"train/lr": config.optim.lr * fraction}
            record |= reporter.pace(state.step) | batch_figures(run.loader, run.accelerator)
    with reporter.watch.pause() if evaluating or saving or sampling else contextlib.nullcontext():
        if evaluating:
            record |= run.evaluation.figures(run.gpt, run.accelerator, reporter.beat)
            state.val_loss = record["eval/val_loss"]
            saving |= state.note_best() and config.checkpoint.keep_best
            if last and config.eval.whole_at_end:
                record |= run.evaluation.whole_val(run.gpt, run.accelerator, reporter.beat)
        if record:
            reporter.publish(state, record)
        if saving:
            save(run, last or stopping)
            reporter.beat()
        if sampling:
            gpt, tokenizer = run.gpt, run.corpus.tokenizer
            text = sample(run.accelerator, gpt, tokenizer, config.sample, config.seed, state.step)
            reporter.samples(state.step, text)


def save(run: Run, last: bool) -> None:
    """Save a checkpoint of the completed step; the last one of a launch must get to the disk."""
    state = run.state
    check_weights(run.gpt, run.accelerator, state.step)
    state.seconds = run.reporter.watch.elapsed()
    state.load_state_dict(run.corpus.state_dict(run.loader))
    save_now = run.writer.save_last if last else run.writer.save
    save_now(state, run.gpt, run.optimizer)


def go_back(run: Run) -> None:
    """Return to the last checkpoint, once, and leave out the batches that led away from it."""
    run.writer.wait()
    path, excluded = choose_rollback(run.config, run.plan, run.state, run.reporter.say)
    run.loader.close()
    parts = (run.gpt, run.optimizer, run.reporter.say)
    run.state = restore(run.accelerator, path, run.state, *parts)
    run.state.excluded = excluded
    take_place(run)
    run.reporter.go_back(run.state)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
