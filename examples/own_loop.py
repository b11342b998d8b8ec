"""A training loop of your own, made of the pieces of accel-gpt train: docs/how-to/own-loop.md.

python examples/own_loop.py quickstart [--section.key value ...]
accelerate launch examples/own_loop.py quickstart
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from accel_gpt.commands.resolve import load_config
from accel_gpt.commands.train import find_initial_weights
from accel_gpt.config.plan import make_plan
from accel_gpt.console import run_main
from accel_gpt.data.corpus import open_corpus
from accel_gpt.evals.evaluation import evaluate, open_evaluations
from accel_gpt.launcher import world_size
from accel_gpt.optim.groups import configure, fraction_at, set_rates
from accel_gpt.prepare.missing_data import ensure_data
from accel_gpt.training.accelerator import build_model, start_accelerator
from accel_gpt.training.auto_batch import resolve_micro_batch_size
from accel_gpt.training.compilation import resolve_compile
from accel_gpt.training.divergence import StepGuard
from accel_gpt.training.gradients import make_gradients, micro_batches
from accel_gpt.training.losses import make_loss
from accel_gpt.training.metrics import MetricsLog
from accel_gpt.training.process import make_host_group
from accel_gpt.training.resume import choose_checkpoint, restore
from accel_gpt.training.saving import CheckpointWriter
from accel_gpt.training.setup import new_state


def main(argv: Sequence[str]) -> int:
    # config, processes, data
    config = load_config(argv, "own_loop.py")
    initialize = find_initial_weights(config)
    plan = make_plan(config, world_size())
    config, accelerator = start_accelerator(config, plan)
    config, plan = resolve_micro_batch_size(config, plan, accelerator)
    config = resolve_compile(config, plan)
    ensure_data(config)
    corpus = open_corpus(config)
    evaluations = open_evaluations(config, corpus)
    # model, optimizer, checkpoints
    gpt, model, optimizer = build_model(config, accelerator, corpus.vocab_size)
    compute_loss = make_loss(config.own, plan.accumulation_steps)
    gradients = make_gradients(config, accelerator, model)
    guard = StepGuard(config.train, accelerator.device)
    folder = Path(config.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(
        accelerator=accelerator,
        config=config.checkpoint,
        out_dir=folder,
        group=make_host_group(config.train, plan.world_size),
        tokenizer=corpus.tokenizer,
        log=accelerator.print,
    )
    # start or resume
    state = new_state(config, corpus, plan.world_size)
    checkpoint = choose_checkpoint(config, state, accelerator.print)
    torch.manual_seed(config.seed)
    if checkpoint:
        state = restore(accelerator, checkpoint, state, gpt, optimizer, accelerator.print)
    else:
        initialize(gpt)
    configure(optimizer, config.optim)  # the options of this launch, not those of the checkpoint
    guard.load_state_dict(vars(state))
    corpus.load_state_dict(vars(state))
    loader = corpus.loader(plan, accelerator.process_index, accelerator.device, state.sequences)
    if accelerator.is_main_process:
        metrics = MetricsLog(folder, state.step, state.tokens, plan.max_steps)

    model.train()
    while state.step < plan.last_step:
        # learning rate
        set_rates(optimizer, config.optim, fraction_at(state.step, config, plan), state.step)
        # forward and backward: the gradient is the mean over micro-steps and processes
        firsts = plan.micro_step_starts(accelerator.process_index, state.sequences)
        batches = micro_batches(loader, accelerator, plan, corpus.document_end)
        for first, (tokens, targets, documents, weight) in zip(firsts, batches, strict=True):
            with gradients.micro_step(first):
                loss = compute_loss(model, tokens, targets, documents)
                gradients.backward(loss * weight)
        loss = gradients.finish()
        norm = gradients.norm()
        # update, unless the loss or the gradient is not finite
        optimizer.optimizer.clip(norm, config.optim.grad_clip)
        optimizer.optimizer.skip = guard.check(state.step + 1, state.sequences, loss, norm)
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.sequences += plan.sequences_per_step
        state.tokens += plan.tokens_per_step
        # evaluate, log, save
        last = state.step == plan.last_step
        evaluating = last or bool(config.eval.every and state.step % config.eval.every == 0)
        saving = last or state.save_is_due(config.checkpoint, plan.tokens_per_step)
        if evaluating or saving or state.step % config.log.every == 0:
            record = {"step": state.step, "tokens": state.tokens} | guard.flush(accelerator.print)
            if evaluating:
                record |= evaluate(evaluations, gpt, accelerator, last_step=last)
                state.note_evaluation(record["eval/val_loss"])
                accelerator.print(f"step {state.step}: val loss {state.val_loss:.4f}")
            accelerator.print(f"step {state.step}: loss {record['train/loss']:.4f}")
            if accelerator.is_main_process:
                metrics.write(record)
        if saving:
            state.set_fields(guard.state_dict() | corpus.state_dict())
            save = writer.save_last if last else writer.save  # the last one must succeed
            save(state, gpt, optimizer)
    loader.close()
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
