"""Train a GPT: set up a run, make its steps, save and evaluate.

    accelerate launch --config_file accelerate_config.yaml accel_gpt/train.py CONFIG \\
        [--section.key value ...]

Reads the token shards and the newest checkpoint of the run. Writes config, metrics, samples and
checkpoints to the run's folder. What comes before and after, commands/train.py does.

`train` holds the loop. `update` makes one optimizer step, and `after_step` does everything that is
due after it.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accel_gpt.console import exit_while_importing, run_process

if __name__ == "__main__":
    exit_while_importing()  # the libraries below take seconds

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from accel_gpt.config.experiment import Config
from accel_gpt.config.plan import Finish, Plan
from accel_gpt.config.stages import stage_configs
from accel_gpt.data.altered import DataFiles
from accel_gpt.data.corpus import Corpus, open_corpus
from accel_gpt.data.loader import Loader
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.evals.evaluation import Evaluation, evaluate, open_evaluations, open_losses
from accel_gpt.evals.own_check import check_own_code
from accel_gpt.evals.samples import prompt_ids, sample, samples_due
from accel_gpt.evals.validation import describe_targets
from accel_gpt.files import fault_point
from accel_gpt.launch.accelerator import build_model
from accel_gpt.launch.compile import forget_compiled
from accel_gpt.launch.context import Context, Initialize
from accel_gpt.launch.process import make_host_group
from accel_gpt.launch.ranks import RankError, all_gather, all_ranks, on_main, require_same
from accel_gpt.launch.setup import Launch, check_data, new_state
from accel_gpt.launch.stopping import (
    StopRequested,
    StopSignal,
    Watchdog,
)
from accel_gpt.model.language_model import LanguageModel, draw_weights
from accel_gpt.optim.groups import configure, fraction_at, logged_peak, set_rates
from accel_gpt.own_code import place_in_own_code
from accel_gpt.runs.evaluated import EvaluatedWeights
from accel_gpt.runs.resume import choose_checkpoint, restore
from accel_gpt.runs.saving import CheckpointWriter, describe_newest
from accel_gpt.runs.state import TrainState
from accel_gpt.training.dashboard import open_dashboard
from accel_gpt.training.display import Display
from accel_gpt.training.gradients import Batch, Gradients, make_gradients, micro_batches
from accel_gpt.training.guard import StepGuard, check_weights
from accel_gpt.training.length import look_at_length, set_length
from accel_gpt.training.losses import ComputeLoss, OwnLoss, make_loss
from accel_gpt.training.metrics import RankClock, Record, checked_record
from accel_gpt.training.profiling import profile
from accel_gpt.training.reporter import Reporter, summarize_run
from accel_gpt.training.updates import UpdateSizes

LOOK_SECONDS = 0.02  # between two looks at data that has not come
TELL_SECONDS = 10.0  # without data, until the run says what it waits for; assumption


@dataclass
class Training:
    """Hold all objects of a run during training."""

    context: Context
    corpus: Corpus
    data_files: DataFiles
    gpt: LanguageModel  # for evaluation, samples and checkpoints
    model: torch.nn.Module  # the same model, wrapped by Accelerate for training
    optimizer: AcceleratedOptimizer
    gradients: Gradients
    state: TrainState
    reporter: Reporter
    writer: CheckpointWriter
    evaluated: EvaluatedWeights
    evaluations: list[Evaluation]
    loader: Loader
    guard: StepGuard
    updates: UpdateSizes
    ranks: RankClock
    compute_loss: ComputeLoss
    batch: Batch | None = None  # the last micro-batch of this rank
    finish_why: str = ""  # set on this rank by a function of --code

    @property
    def config(self) -> Config:
        """Return the resolved config."""
        return self.context.config

    @property
    def plan(self) -> Plan:
        """Return the batch and the length of the run."""
        return self.context.plan

    @property
    def accelerator(self) -> Accelerator:
        """Return the `Accelerator` of the run."""
        return self.context.accelerator

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the data, as `Evaluated.tokenizer`."""
        return self.corpus.tokenizer

    def finish(self, why: str) -> None:
        """End the run at this step, for good; for `metrics` and `after_evaluation` of --code.

        The step is evaluated and saved, and the exit code is 0. `why` is recorded in run.json. One
        rank is enough.
        """
        self.finish_why = str(why) or "no reason was given"

    def clock(self) -> dict[str, Any]:
        """Return what the functions of --code may take beside the run."""
        return {"step": self.state.step, "config": self.config, "plan": self.plan}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the steps in the block; close the loader and the writer at its end."""
        with (
            Watchdog(self.config.train.step_timeout) as watchdog,
            contextlib.closing(self.writer),
            contextlib.ExitStack() as at_end,
        ):
            at_end.callback(lambda: self.loader.close())  # another one, if the length has changed
            self.reporter.watchdog = watchdog
            yield


# --------------------------------------------------------------------------- start


def train(
    context: Context,
    launch: Launch,
    initialize: Initialize = draw_weights,
    on_start: Callable[[], None] | None = None,
    on_checkpoint: Callable[[Path], None] | None = None,
    before_save: Callable[[], None] | None = None,
) -> bool:
    """Train from the newest checkpoint to the last step; return whether a signal stopped the run.

    `context`: what is done; see `resolve`. `launch`: the ranks and the lock of the run's folder;
    see `open_launch`. `initialize` sets the weights of a run that has no checkpoint. `on_start` is
    called on rank 0 when config, data and checkpoint are accepted, before the run writes its first
    record. `on_checkpoint` is called there with the folder of each new checkpoint, before older
    ones are pruned. `before_save` is called there before each save and at the end; it raises
    `BusyError` if the run goes on elsewhere.
    """
    stop = launch.stop
    timeout = context.config.train.step_timeout
    with launch.display as display, open_dashboard(context):
        stop.announce = display.log
        with Watchdog(timeout, "has not opened data, model and checkpoint"):
            run = set_up(context, display, initialize, on_start, on_checkpoint, before_save)
        with run.watched(), profile(context) as profile_step:
            stop.saves = run.state.step > 0
            stop.starting = False
            run.writer.is_stopping = partial(is_stopping, run, stop)
            stopping = finish_resumed_step(run, stop)
            while run.state.step < run.plan.last_step and not stopping:
                stopping = make_step(run, stop)
                run.reporter.heartbeat()
                profile_step()
            run.writer.wait()
            with all_ranks():  # the last evaluation came after the last save
                run.writer.check_folder()
                run.data_files.check_now()
        stop.saved = stopping
        run.reporter.finish()
        if run.state.step == run.plan.end:
            run.corpus.remove_cache()
    received = stop.received if stopping else None
    display.log(summarize_run(run.config, run.plan, run.state, received))
    return stopping


def is_stopping(run: Training, stop: StopSignal) -> bool:
    """Return whether this rank has received a signal; the watchdog learns that the run waits."""
    run.reporter.heartbeat()
    return stop.received is not None


def set_up(
    context: Context,
    display: Display,
    initialize: Initialize = draw_weights,
    on_start: Callable[[], None] | None = None,
    on_checkpoint: Callable[[Path], None] | None = None,
    before_save: Callable[[], None] | None = None,
) -> Training:
    """Build the model, optimizer, data and reporter; resume if the run has a checkpoint.

    `initialize` and the functions after it: see `train`.
    """
    config = context.config
    accelerator = context.accelerator
    log = context.log
    with all_ranks():
        corpus = open_corpus(config)
        evaluations = open_evaluations(config, corpus)
    require_same(corpus.identity(), DataError)
    state = new_state(context, corpus)
    if config.sample.every:
        for prompt in config.sample.prompts:
            prompt_ids(prompt, corpus.tokenizer, corpus.vocab_size)  # raises
    checkpoint = choose_checkpoint(config, state, log)
    data_files = check_data(context, corpus, resuming=checkpoint is not None)
    gpt, model, optimizer = build_model(config, accelerator, corpus.vocab_size)
    if config.own.file:
        on_main(lambda: check_own_code(config, context.plan, gpt, corpus, accelerator))
    gradients = make_gradients(config, accelerator, model)
    torch.manual_seed(config.seed)
    if checkpoint:
        state = restore(accelerator, checkpoint, state, gpt, optimizer, log)
        log(f"resuming {config.out_dir} from step {state.step:,} ({checkpoint})")
    else:
        state.initial_weights = initialize(gpt)
        if state.initial_weights:
            state.pending_record = {}  # trained weights are evaluated before step 1
    gpt.check_tied()

    def check_owner() -> None:
        context.check_folder()
        if before_save:
            before_save()

    on_main(lambda: on_start and on_start())
    reporter = Reporter(context, gpt, optimizer, display)
    writer = CheckpointWriter(
        accelerator=accelerator,
        config=config.checkpoint,
        out_dir=Path(config.out_dir),
        group=make_host_group(config.train, accelerator.num_processes),
        tokenizer=corpus.tokenizer,
        log=log,
        before_publish=reporter.sync,
        on_checkpoint=on_checkpoint,
        check_folder=check_owner,
    )
    corpus.load_state_dict(vars(state))
    guard = StepGuard(accelerator.device)
    guard.load_state_dict(vars(state))
    configure(optimizer, config.optim)  # overrides the options from a checkpoint
    run = Training(
        context=context,
        corpus=corpus,
        data_files=data_files,
        gpt=gpt,
        model=model,
        optimizer=optimizer,
        gradients=gradients,
        state=state,
        reporter=reporter,
        writer=writer,
        evaluated=EvaluatedWeights(context, gpt, optimizer),
        evaluations=evaluations,
        loader=open_loader(context, corpus, state),
        guard=guard,
        updates=UpdateSizes(gpt, optimizer, accelerator),
        ranks=RankClock(accelerator),
        compute_loss=make_loss(context),
    )
    enter_stage(run)
    with all_ranks():
        reporter.start(run.corpus, state)
    if config.own.targets is not None:
        log(describe_targets(corpus, config.model.block_size))
    model.train()  # evaluation and sampling restore this mode
    return run


def open_loader(context: Context, corpus: Corpus, state: TrainState) -> Loader:
    """Return the micro-batches of this rank from `state` on."""
    return corpus.loader(
        plan=context.plan,
        rank=context.accelerator.process_index,
        device=context.accelerator.device,
        position=state.sequences,
    )


def enter_stage(run: Training) -> None:
    """Set the number of micro-steps of the stage that makes the next step."""
    plan = run.plan.at(run.state.step)
    run.accelerator.gradient_accumulation_steps = plan.accumulation_steps
    run.accelerator.step = 0  # Accelerate counts micro-steps, and a step begins with a whole number
    if run.plan.begins_stage(run.state.step):
        run.guard.forget_losses()
        forget_compiled()  # so that a launch that resumes here compiles the same


# --------------------------------------------------------------------------- the step


def make_step(run: Training, stop: StopSignal) -> bool:
    """Make one step and everything that is due after it; return whether the run must stop."""
    fault_point("step")
    if run.corpus.cache is not None and wait_for_data(run, stop):
        return True
    if look_at_length(run.context, run.state, run.reporter, run.corpus) and run.plan.stages:
        run.loader.close()  # it has read ahead, maybe beyond the end of a stage
        run.loader = open_loader(run.context, run.corpus, run.state)
    if run.plan.begins_stage(run.state.step):
        enter_stage(run)
    stop.saves = True
    update(run)
    return after_step(run, stop)


def wait_for_data(run: Training, stop: StopSignal) -> bool:
    """Wait until all ranks have the batches of a step; return whether the run must stop first.

    A collective, for remote data. So no rank waits for the network inside a step, where it could
    neither stop nor save. If a shard does not come within `train.step_timeout`, all ranks raise
    `DataError`. In both cases the completed step is saved.
    """
    began = time.monotonic()
    waited = 0.0
    told = False
    nothing_to_save = run.state.step == 0
    while True:
        with saving_on_error(run, nothing_to_save), all_ranks(stop.group):
            ready = run.loader.fetch(run.plan.at(run.state.step).accumulation_steps)
        stopping, waiting = stop.agree_to_stop(not ready)
        if stopping and not nothing_to_save:
            save(run, must_succeed=True)
        if stopping or not waiting:
            run.loader.waited += waited
            return stopping
        waited = time.monotonic() - began
        if not told and time.monotonic() - began > TELL_SECONDS and run.corpus.waits_for:
            run.reporter.log(f"WARNING: waiting for {run.corpus.waits_for}")
            told = True
        run.reporter.heartbeat()  # the loader limits this wait, not the watchdog
        time.sleep(LOOK_SECONDS)


def update(run: Training) -> None:
    """Make one optimizer step; nothing waits for the device, except on MPS.

    The optimizer skips the update if the loss or gradient is not finite, or if there is no target.
    """
    accelerator = run.accelerator
    state = run.state
    plan = run.plan.at(state.step)
    config = run.config
    logging = is_logged(run, state.step + 1)
    if logging:
        run.ranks.begin_step()
    fraction = fraction_at(state.step, config, plan)
    set_rates(run.optimizer, config.optim, fraction, state.step)
    batches = micro_batches(run.loader, accelerator, plan, run.corpus.target_mask)
    firsts = plan.micro_step_starts(accelerator.process_index, state.sequences)
    # Gradient accumulation. The gradient is all-reduced in the last micro-step, with FSDP in every
    # micro-step, and with train.reproducible in `finish`.
    for first, batch in zip(firsts, batches, strict=True):
        run.batch = batch
        tokens, targets, documents, weight = batch
        with run.gradients.micro_step(first):
            loss = run.compute_loss(run.model, tokens, targets, documents, state.step)
            run.ranks.end_forward()
            run.gradients.backward(loss * weight)
    loss = run.gradients.finish()  # all-reduced mean, like the gradient
    grad_norm = run.gradients.norm()
    run.optimizer.optimizer.clip(grad_norm, run.config.optim.grad_clip)
    run.optimizer.optimizer.skip = run.guard.check(state.step + 1, state.sequences, loss, grad_norm)
    if logging:
        run.updates.begin()
    run.optimizer.step()
    run.updates.end()
    run.optimizer.zero_grad()
    state.step += 1
    state.sequences += plan.whole_sequences_per_step
    state.tokens += plan.tokens_per_step


def is_logged(run: Training, step: int) -> bool:
    """Return whether the metrics of a completed step are logged."""
    plan = run.plan
    return (
        step in (1, plan.last_step) or step % run.config.log.every == 0 or plan.begins_stage(step)
    )


def after_step(run: Training, stop: StopSignal) -> bool:
    """Log, save, evaluate and sample if due after a step; wait for the device only then.

    A save that is due comes before the evaluation, so that a failed evaluation loses no step.
    Returns whether the run must stop. Then the next launch makes the evaluation and the samples.
    """
    config = run.config
    state = run.state
    reporter = run.reporter
    stopping, must_save = stop.agree_to_stop(run.writer.retry_is_due())
    last = state.step == run.plan.last_step
    stopping = stopping and not last  # the last step is saved anyway; a signal ends its evaluation
    logging = is_logged(run, state.step)
    evaluating = last or bool(config.eval.every and state.step % config.eval.every == 0)
    plan = run.plan.at(state.step - 1)
    save_is_due = state.save_is_due(config.checkpoint, plan.tokens_per_step)
    saving = last or stopping or must_save or save_is_due
    sampling = samples_due(config.sample, state.step, last)
    record: Record = {}
    if logging or evaluating or saving or sampling:
        metrics = run.guard.flush(reporter.log) | run.corpus.epoch_metrics(state.sequences)
        if run.guard.too_many_skipped:  # before the step is saved
            run.writer.wait()
            newest = describe_newest(run.writer.out_dir)
            raise run.guard.error(plan.whole_sequences_per_step, newest)
        if logging:
            record |= metrics
            peak = logged_peak(run.optimizer, config.optim)
            if run.plan.stages:
                record["data/stage"] = run.plan.stage_of(state.step - 1) + 1
            record["train/lr"] = peak * fraction_at(state.step - 1, config, run.plan)
            record |= reporter.step_metrics(state.step, run.loader.take_wait())
            record |= run.updates.metrics() | run.ranks.metrics()
            if evaluating:
                state.pending_record = dict(record)  # if own metrics fail, the evaluation stays due
            if state.step == 1:
                run.evaluated.check(state)
            with saving_on_error(run):
                record |= own_metrics(run, record)
            if config.own.metrics is not None and is_finished(run):
                last = evaluating = saving = True
                stopping = False
                sampling = samples_due(config.sample, state.step, last)
    pausing = evaluating or saving or sampling
    with reporter.stopwatch.pause() if pausing else contextlib.nullcontext():
        if evaluating:
            # the checkpoint of this step stores the record, so that a resumed run can publish it
            state.pending_record = dict(record)
        elif record:
            reporter.publish(state, record)
        if saving:
            save(run, must_succeed=last or stopping)
            reporter.heartbeat()
        if not stopping:
            stopping = evaluate_and_sample(run, stop, sampling=sampling, saved=saving)
    return stopping


def own_metrics(run: Training, others: Record) -> Record:
    """Return the parts of the loss and the metrics that the file of --code adds to `others`."""
    own = run.config.own
    record: Record = {}
    if isinstance(run.compute_loss, OwnLoss):
        record |= run.compute_loss.metrics(run.accelerator)
    if own.metrics is not None:
        with torch.no_grad():
            found = own.metrics(
                run=run, record={**others, **record}, batch=run.batch, **run.clock()
            )
        record |= checked_record(found, own.place("metrics"), {**others, **record})
    return record


def is_finished(run: Training) -> bool:
    """Return whether a function of --code has finished the run at this step; a collective.

    Records it in run.json, and makes this step the last one. Before the first step there is nothing
    to save, so the run goes on, and also if the disk takes no record.
    """
    whys = [why for why in all_gather(run.finish_why) if why]
    run.finish_why = ""
    if not whys or not run.state.step:
        return False
    own = run.config.own
    finish = Finish(step=run.state.step, why=whys[0], file=own.name, sha256=own.sha256)
    plan = replace(run.plan, finish=finish)
    return set_length(run.context, run.state, run.reporter, run.corpus, run.config, plan)


@contextlib.contextmanager
def saving_on_error(run: Training, saved: bool = False) -> Iterator[None]:
    """Save the completed step if data or a function of --code fail, unless it is `saved`.

    Of several ranks, only an error that all ranks raise together saves the step.
    """
    try:
        yield
    except StopRequested:
        raise
    except Exception as error:
        on_all_ranks = isinstance(error, DataError | RankError)
        expected = isinstance(error, UserError) or place_in_own_code(error) is not None
        alone = run.accelerator.num_processes == 1
        if not saved and (on_all_ranks or (expected and alone)):
            with contextlib.suppress(AccelGPTError):  # the first error says more
                save(run, must_succeed=True)
        raise


def finish_resumed_step(run: Training, stop: StopSignal) -> bool:
    """Evaluate and sample the step that a run resumes from, if the previous launch did not.

    A new run evaluates the trained weights that it begins with. Returns whether the run must stop.
    """
    state = run.state
    if run.config.checkpoint.keep_best and state.best_step == state.step:
        run.writer.name_best(state)  # a kill may have prevented this
    last = state.step == run.plan.last_step
    sampling = state.step > 0 and samples_due(run.config.sample, state.step, last)
    if sampling:
        sampling = on_main(lambda: not run.reporter.samples_path(state.step).exists())
    with run.reporter.stopwatch.pause():
        stopping = evaluate_and_sample(run, stop, sampling=sampling, saved=True)
    forget_compiled()  # else the shapes of the evaluation would change the graph of the steps
    return stopping


# --------------------------------------------------------------------------- after a step


def evaluate_and_sample(run: Training, stop: StopSignal, sampling: bool, saved: bool) -> bool:
    """Make the evaluation if the completed step awaits one, and samples if `sampling`.

    A signal on any rank ends both at once on all ranks. The step is then saved unless it is already
    `saved`. Returns whether a signal came.
    """
    state = run.state
    writer = run.writer
    finish = run.plan.finish
    is_best = False
    try:
        with saving_on_error(run, saved):
            if state.pending_record is not None:
                is_best = evaluate_step(run, stop) and run.config.checkpoint.keep_best
                if is_best and saved:
                    writer.name_best(state)
            ends = run.plan.finish is not finish  # the evaluation has finished the run
            if sampling or (ends and samples_due(run.config.sample, state.step, last=True)):
                write_samples(run, stop.check)
    except StopRequested:
        writer.wait()
        if not saved or writer.problem:
            save(run, must_succeed=True)
        return True
    if (is_best or ends) and not saved:
        save(run, must_succeed=ends)
    return False


def evaluate_step(run: Training, stop: StopSignal) -> bool:
    """Evaluate the completed step and publish its record; return whether it is the best so far."""
    state = run.state

    def on_progress(done: int, total: int) -> None:
        fault_point("evaluation")
        run.reporter.heartbeat()
        run.reporter.display.show_evaluation(done, total)
        stop.check()

    record: Record = {}
    # a checkpoint's JSON stores null for a number that is not finite
    for key, value in (state.pending_record or {}).items():
        record[key] = math.nan if value is None else value
    with run.reporter.stopwatch.spend("evaluation"), run.evaluated.used(state):
        record |= evaluate(
            evaluations=evaluations_of_stage(run),
            model=run.gpt,
            accelerator=run.accelerator,
            on_progress=on_progress,
        )
        # if the run is killed before the record is published, all of this is made again
        if run.config.own.after_evaluation is not None:
            run.config.own.after_evaluation(run=run, record=record, **run.clock())
            is_finished(run)
    is_best = state.note_evaluation(record, run.config.eval.yardstick, since=stage_began(run))
    run.reporter.publish(state, record)
    return is_best


def evaluations_of_stage(run: Training) -> list[Evaluation]:
    """Return the evaluations, with the sequences of the stage that made the completed step."""
    if not run.plan.stages:
        return run.evaluations
    number = run.plan.stage_of(run.state.step - 1)
    return [open_losses(stage_configs(run.config)[number], run.corpus), *run.evaluations[1:]]


def stage_began(run: Training) -> int:
    """Return the steps that were complete when the stage of the completed step began."""
    plan = run.plan
    return plan.stages[plan.stage_of(run.state.step - 1)].first_step if plan.stages else 0


def write_samples(run: Training, check: Callable[[], None]) -> None:
    """Generate text from each prompt with the model of the completed step, and write it.

    Calls `check` on all ranks after each token.
    """

    def on_token() -> None:
        fault_point("sample")
        run.reporter.heartbeat()
        check()

    with run.reporter.stopwatch.spend("samples"), run.evaluated.used(run.state):
        text = sample(
            accelerator=run.accelerator,
            model=run.gpt,
            tokenizer=run.corpus.tokenizer,
            config=run.config.sample,
            seed=run.config.seed,
            step=run.state.step,
            on_token=on_token,
        )
    run.reporter.write_samples(run.state.step, text)


def save(run: Training, must_succeed: bool) -> None:
    """Save a checkpoint of the completed step, unless a data file was altered: a `DataError`.

    `must_succeed`: wait until it is on disk, and raise an error if it cannot be written.
    """
    state = run.state
    with run.reporter.stopwatch.spend("save"):
        with all_ranks():
            run.data_files.check_now()
        check_weights(run.gpt, run.accelerator, state.step)
        state.seconds = run.reporter.stopwatch.elapsed()
        state.set_fields(run.guard.state_dict() | run.corpus.state_dict())
        write = run.writer.save_last if must_succeed else run.writer.save
        write(state, run.gpt, run.optimizer, run.evaluated.tensors(state))


if __name__ == "__main__":
    from accel_gpt.commands.train import main

    run_process(main)
