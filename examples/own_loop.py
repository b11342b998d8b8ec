"""A training loop of your own: python examples/own_loop.py CONFIG (docs/how-to/own-loop.md)."""

import sys
from pathlib import Path

import torch

from accel_gpt import pieces


def main(argv):
    config = pieces.load_config(argv, "own_loop.py")
    initialize = pieces.find_initial_weights(config)
    context = pieces.resolve(config)
    config, plan, accelerator = context.config, context.plan, context.accelerator
    pieces.ensure_data(config)
    corpus = pieces.open_corpus(config)
    evaluations = pieces.open_evaluations(config, corpus)
    gpt, model, optimizer = pieces.build_model(config, accelerator, corpus.vocab_size)
    compute_loss = pieces.make_loss(context)
    gradients = pieces.make_gradients(config, accelerator, model)
    guard = pieces.StepGuard(accelerator.device)
    folder, group = Path(config.out_dir), pieces.make_host_group(config.train, plan.world_size)
    folder.mkdir(parents=True, exist_ok=True)
    writer = pieces.CheckpointWriter(
        accelerator, config.checkpoint, folder, group, corpus.tokenizer, accelerator.print
    )
    state = pieces.new_state(context, corpus)
    checkpoint = pieces.choose_checkpoint(config, state, accelerator.print)
    torch.manual_seed(config.seed)
    if checkpoint:
        state = pieces.restore(accelerator, checkpoint, state, gpt, optimizer, accelerator.print)
    else:
        state.initial_weights = initialize(gpt)
    pieces.configure(optimizer, config.optim)  # the options of this launch, not of the checkpoint
    guard.load_state_dict(vars(state))
    corpus.load_state_dict(vars(state))
    loader = corpus.loader(plan, accelerator.process_index, accelerator.device, state.sequences)
    if accelerator.is_main_process:
        metrics = pieces.MetricsLog(folder, state.step, state.tokens)
    while state.step < plan.last_step:
        rate = pieces.fraction_at(state.step, config, plan)  # a share of the peak
        pieces.set_rates(optimizer, config.optim, rate, state.step)
        batch = plan.at(state.step)  # of the present stage
        accelerator.gradient_accumulation_steps = batch.accumulation_steps
        accelerator.step = 0  # counts micro-steps
        firsts = batch.micro_step_starts(accelerator.process_index, state.sequences)
        batches = pieces.micro_batches(loader, accelerator, batch, corpus.target_mask)
        for first, (*inputs, weight) in zip(firsts, batches, strict=True):
            with gradients.micro_step(first):
                gradients.backward(compute_loss(model, *inputs, state.step) * weight)
        loss, norm = gradients.finish(), gradients.norm()  # means over micro-steps and processes
        optimizer.optimizer.clip(norm, config.optim.grad_clip)
        optimizer.optimizer.skip = guard.check(state.step + 1, state.sequences, loss, norm)
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        state.sequences += batch.whole_sequences_per_step
        state.tokens += batch.tokens_per_step
        last = state.step == plan.last_step
        evaluating = last or bool(config.eval.every and state.step % config.eval.every == 0)
        saving = last or state.save_is_due(config.checkpoint, batch.tokens_per_step)
        if evaluating or saving or state.step % config.log.every == 0:
            record = {"step": state.step, "tokens": state.tokens} | guard.flush(accelerator.print)
            if evaluating:
                record |= pieces.evaluate(evaluations, gpt, accelerator)
                state.note_evaluation(record, config.eval.yardstick)
            accelerator.print({key: round(value, 4) for key, value in record.items()})
            if accelerator.is_main_process:
                metrics.write(record, plan.max_steps)
        if saving:
            state.set_fields(guard.state_dict() | corpus.state_dict())
            (writer.save_last if last else writer.save)(state, gpt, optimizer)
    loader.close()
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(pieces.run_main(main, sys.argv[1:]))
