"""Judge what a run has learned: against counting, against the impossible, and by its curve.

Bounds without a source were chosen on half A of benchmarks/doctor.py. benchmarks/RESULTS.md has
both halves.
"""

import math
from statistics import median

import numpy as np

from accel_gpt.config.depth import BATCH_EXPONENT, REFERENCE_BATCH, REFERENCE_STEPS
from accel_gpt.config.plan import plural
from accel_gpt.config.stages import stage_configs, total_tokens
from accel_gpt.health.bands import compare_with_band
from accel_gpt.health.case import Above, Below, Case, Line, Unknown
from accel_gpt.model.sizes import parameter_counts
from accel_gpt.report.curves import Floats

# share of the way from the unigram to the bigram model
BIGRAM_SHARE = Below(look=0.75, wrong=0.05)
LEAST_ORDER = 0.05  # nats between these two models: less tells nothing; assumption
# Loss over the loss of the 5-gram model. Text that repeats itself within a sequence reaches 0.23
# (lines of six equal words of 8 random letters). A 7B model reaches about 0.44 (assumption).
IMPOSSIBLE = Below(look=0.4, wrong=0.1)
# share of validation windows in train, beyond the share of repeated train windows
LEAKED = Above(look=0.2, wrong=0.5)
VAL_RISEN = Above(look=0.01, wrong=0.05)  # last val loss above the lowest one
GAP = Above(look=0.25, wrong=1.0)  # growth of (val - train) / train since the first evaluation
DROPOUT_COST = Above(look=0.1)  # (train loss with dropout - without) / without
UNTIED = Above(look=0.85)  # share of the parameters in embedding and head
SHRUNK = 0.98  # train loss at the end over the one of step 1; above, it has not fallen
FAST = Above(look=0.5)  # exponent of the power of the step by which the train loss falls
TRAIN_RISEN = Above(look=0.02, wrong=0.2)  # train loss at the end above its lowest mean
SIGMA = 4.0  # standard errors that a difference must exceed
JUMP = 1.3  # factor on the size of updates at a resume, at the same rate
NO_WARMUP = Above(look=0.9)  # rate in the first step, as a share of the peak
NO_DECAY = Above(look=0.5)  # rate in the last step, as a share of the peak
LARGE_UPDATES = Above(look=0.1, wrong=0.5)  # of the weights at the peak rate, in the largest part
SMALL_UPDATES = Below(look=3e-4)
STILL = 1e-7  # the same of a weight that does not change
CLIPPED = Above(look=0.95)  # share of logged steps whose gradient is clipped
CLIPPED_STEPS = 20  # logged steps that tell it; assumption
SKIPPED = Above(look=0.001, wrong=0.02)  # share of updates
SPIKES = Above(look=0.005, wrong=0.02)  # share of steps
BATCH = Below(look=1 / 128)  # tokens of a step over the best number
FITTED_LOSSES = 8  # logged losses that tell an exponent; assumption
BLOCKS = 10  # means of the train loss along a run
LEAST_LOSSES = 5  # logged losses in a mean
UPDATES_OF = "train/update_ratio/"
LEAST = f"{UPDATES_OF}least"


def counting(case: Case, line: Line) -> None:
    """Compare the val loss with models that count the train tokens."""
    loss = case.last("eval/val_loss")
    if loss is None:
        raise Unknown("no evaluation yet")
    bits = case.last("eval/val_bits_per_byte")
    error = case.last("eval/val_bits_per_byte_se")
    line.figure = f"{loss:.3f} nats per token"
    if bits is not None:
        line.figure = f"{bits:.3f}{'' if error is None else f' ± {error:.3f}'} bits per byte"
    text = case.text
    if case.uses("targets"):
        raise Unknown("the loss counts only the targets that targets() of --code keeps")
    unit = math.log(2) * text.bytes_per_token if bits and text.bytes_per_token else 1
    others = {name: value / unit for name, value in text.losses.items()}
    line.compared = ", ".join(f"{name} {value:.2f}" for name, value in others.items())
    unigram = text.losses["unigram"]
    order = unigram - text.losses["bigram"]
    if case.is_early:
        raise Unknown(f"{line.compared}; it has just begun")
    if order > LEAST_ORDER:
        share = (unigram - loss) / order
        todo = "it knows less than the bigram model: train longer, or check optim.lr"
        if share < BIGRAM_SHARE.wrong:
            todo = "it has learned no order of tokens: check optim.lr, loss() and targets"
        line.judge(share, BIGRAM_SHARE, todo)


def leak(case: Case, line: Line) -> None:
    """Look for validation text in the train text, and for a loss that no model reaches."""
    text = case.text
    line.figure = (
        f"{text.val_in_train:.1%} of the validation windows of {text.window} tokens stand in "
        f"{text.read}"
    )
    line.compared = f"{text.repeated:.1%} of the train windows stand there more than once"
    if text.has_windows:
        todo = "validation text stands in the train text: take it out, and train anew"
        line.judge(text.leaked(SIGMA), LEAKED, todo)
    loss = case.last("eval/val_loss")
    if loss is not None and not case.uses("targets") and case.from_scratch:
        ratio = loss / text.losses["5-gram"]
        line.figure = f"loss {ratio:.2f} of the 5-gram model's; {line.figure}"
        line.judge(
            ratio,
            IMPOSSIBLE,
            "a model that sees later tokens has such a loss, or one whose text repeats itself "
            "within a sequence: check attention and targets",
        )


def fit(case: Case, line: Line) -> None:
    """Compare val and train loss, and the text with the size of the model."""
    steps, val = case.in_last_stage("eval/val_loss")
    train = case.last("eval/train_loss")
    parameters = case.recorded("model", "parameters")
    tokens = float(case.metrics.tokens[-1]) if len(case.metrics.tokens) else math.nan
    facts = []
    epochs = case.last("data/epochs")
    if epochs is not None:
        facts.append(f"{epochs:.2f} epochs")
    if tokens > 0 and parameters > 0:
        facts.append(f"{tokens / parameters:.2g} tokens per parameter")
    if not len(val) or train is None:
        raise Unknown("; ".join(facts) or "no evaluation yet")
    error = case.last("eval/val_loss_se")
    spread = "" if error is None else f" ± {error:.3f}"
    line.figure = f"val {val[-1]:.3f}{spread}, train {train:.3f}"
    best = int(val.argmin())
    of_stage = " of the stage" if case.run.stages else ""
    facts.insert(0, f"lowest val{of_stage} {val[best]:.3f} at step {steps[best]:,.0f}")
    line.compared = "; ".join(facts)
    risen = val[-1] / val[best] - 1
    line.judge(
        risen,
        VAL_RISEN,
        f"val loss rises since step {steps[best]:,.0f}: use the best checkpoint, more text or "
        "fewer epochs",
    )
    _, trained = case.after_start("eval/train_loss")
    _, val = case.after_start("eval/val_loss")
    if len(trained) == len(val) and risen <= VAL_RISEN.look:
        gaps = (val - trained) / trained
        todo = "the train text is learned by heart: use more text or dropout"
        line.judge(float(gaps[-1] - gaps[0]), GAP, todo)
    _, losses = case.after_start("train/loss")
    stages = stage_configs(case.config)
    present = stages[: int(case.run.stage_of(case.run.last_step)) + 1][-1]
    same_data = present.data == stages[0].data  # eval/train_loss is of the first stage's data
    if case.config.model.dropout > 0 and len(losses) and train > 0 and same_data:
        cost = float(losses[-LEAST_LOSSES:].mean()) / train - 1
        line.judge(cost, DROPOUT_COST, f"dropout costs {cost:.0%} of the loss: lower it")
    judge_embeddings(case, line)


def judge_embeddings(case: Case, line: Line) -> None:
    """Judge the share of embedding and head in the parameters, if they are not tied."""
    vocab_size = case.recorded("model", "vocab_size")
    model = case.config.model
    if model.tie_embeddings or case.uses("model") or not vocab_size > 0:
        return
    counts = parameter_counts(model, int(vocab_size))
    share = (counts["embedding"] + counts["head"]) / counts["total"]
    todo = f"{share:.0%} of the parameters are embedding and head: set model.tie_embeddings"
    line.judge(share, UNTIED, todo)


# --------------------------------------------------------------------------- the curve


def curve(case: Case, line: Line) -> None:
    """Judge the shape of the train loss, and the schedule behind it."""
    steps, losses = case.metrics.curve("train/loss")
    if len(losses) < 2:
        raise Unknown("fewer than two logged losses")
    warm = min(int(np.searchsorted(steps, case.warmup_steps)), len(steps) - 1)
    end = float(losses[-min(LEAST_LOSSES, len(losses) - 1) :].mean())
    line.figure = (
        f"train loss {losses[0]:.2f} at step {steps[0]:,.0f}, {losses[warm]:.2f} after the "
        f"warm-up, {end:.3f} at step {steps[-1]:,.0f}"
    )
    judge_schedule(case, line)
    judge_fall(case, line, end)
    for step in case.run.resumes():
        factor = jump_at(case, step)
        if not 1 / JUMP < factor < JUMP:
            line.find(
                "look",
                f"after the resume at step {step:,}, updates are {factor:.2f} times as large: the "
                "state of the optimizer was lost",
            )
    compare_with_band(case, line)


def judge_schedule(case: Case, line: Line) -> None:
    """Judge how the rate begins and ends, and whether the run came to its end."""
    steps, shares = case.rate
    if len(shares):
        line.compared = (
            f"the rate begins at {shares[0]:.0%} of its peak and is now at {shares[-1]:.0%}"
        )
        if steps[0] == 1 and not case.is_early:
            line.judge(
                shares[0], NO_WARMUP, "the rate begins at its peak: set schedule.warmup_steps"
            )
        if case.run.state == "finished":
            line.judge(shares[-1], NO_DECAY, "the rate does not decay: set schedule.name")
    if case.run.state == "stopped":
        line.find(
            "look",
            f"it stopped at step {case.run.last_step:,} of {case.run.end:,}: launch it again",
        )


def judge_fall(case: Case, line: Line, end: float) -> None:
    """Judge how far and how fast the train loss falls to `end`."""
    steps, losses = case.metrics.curve("train/loss")
    first = case.run.stage_of(steps) == 0  # a later stage may change the loss at once
    exponent = fall_exponent(steps[first], losses[first], 2 * case.warmup_steps)
    if exponent is not None:
        line.figure += f", as step^{-exponent:.2f}"
        line.judge(exponent, FAST, "no text is learned this fast: check targets")
    rise, step = rise_of(*case.in_last_stage("train/loss"))
    if rise > TRAIN_RISEN.look:
        todo = "lower optim.lr"
        _, evaluated = case.in_last_stage("eval/train_loss")
        if len(evaluated) and evaluated[-1] < (1 + TRAIN_RISEN.look) * evaluated.min():
            todo = "its evaluation does not, so the two losses differ: check loss() of --code"
        line.judge(rise, TRAIN_RISEN, f"it has risen by {rise:.0%} since step {step:,.0f}: {todo}")
    if not case.from_scratch or case.is_early:
        return
    if end > SHRUNK * losses[0]:
        line.find("wrong", "the loss does not fall: lower optim.lr, check loss() and targets")


def fall_exponent(steps: Floats, losses: Floats, first: float) -> float | None:
    """Fit losses after step `first` by a power of the step; None if there are too few."""
    fitted = (steps > max(first, 0)) & (losses > 0)
    if np.count_nonzero(fitted) < FITTED_LOSSES:
        return None
    slope, _ = np.polyfit(np.log(steps[fitted]), np.log(losses[fitted]), 1)
    return -float(slope)


def rise_of(steps: Floats, losses: Floats) -> tuple[float, float]:
    """Return by which share the train loss ends above its lowest mean, and where that mean ends.

    The share is 0 if it is less than `SIGMA` standard errors, or if there are too few losses.
    """
    size = max(LEAST_LOSSES, len(losses) // BLOCKS)
    count = len(losses) // size
    if count < 2:
        return 0.0, 0.0
    means = losses[len(losses) - count * size :].reshape(count, size).mean(axis=1)
    lowest = int(means.argmin())
    rise = float(means[-1] - means[lowest])
    noise = float(np.std(np.diff(losses[-3 * size :]))) / math.sqrt(2)  # without the trend
    if rise < SIGMA * noise * math.sqrt(2 / size) or means[lowest] <= 0:
        rise = 0.0
    place = len(losses) - (count - 1 - lowest) * size - 1
    return (rise / float(means[lowest]) if rise else 0.0), float(steps[place])


def jump_at(case: Case, step: int) -> float:
    """Return the factor by which updates grow at a resume, at the same rate; 1 if unknown."""
    factors = []
    schedule = case.metrics.curve("train/lr")
    if not len(schedule[0]):
        return 1.0
    for key in case.metrics.keys(UPDATES_OF):
        steps, sizes = case.metrics.curve(key)
        rates = np.interp(steps, *schedule)
        sizes = np.divide(sizes, rates, out=np.zeros_like(sizes), where=rates > 0)
        stages = case.run.stage_of(steps)
        before = sizes[(steps <= step) & (stages == case.run.stage_of(step + 1))][-LEAST_LOSSES:]
        after = sizes[steps > step][:1]
        if key != LEAST and len(before) == LEAST_LOSSES and len(after) and before.min() > 0:
            # of two references the kinder: updates shrink by themselves in the first steps
            grown = (float(after[0] / median(before)), float(after[0] / before[-1]))
            factors.append(min(grown, key=lambda factor: abs(factor - 1)))
    return float(median(factors)) if factors else 1.0


# --------------------------------------------------------------------------- the rates


def rates(case: Case, line: Line) -> None:
    """Judge the size of updates and gradients, and what the optimizer updates."""
    norms = case.at_high_rate("train/grad_norm")
    if not len(norms):
        raise Unknown("no step was logged")
    facts = judge_updates(case, line)
    facts.append(f"gradient norm {median(norms):.2g}")
    limit = case.config.optim.grad_clip
    if limit:
        clipped = float((norms > limit).mean())
        facts.append(f"clipped in {clipped:.0%} of steps")
        if len(norms) >= CLIPPED_STEPS:
            line.judge(clipped, CLIPPED, f"optim.grad_clip {limit:g} clips nearly every gradient")
    steps = max(case.run.last_step, 1)
    skipped = case.last("train/skipped") or 0.0
    spikes = case.last("train/spikes") or 0.0
    facts.append(f"{plural(int(skipped), 'skipped update')}, {plural(int(spikes), 'loss spike')}")
    if case.run.last_launch("mixed_precision") != "fp16":  # its scaler skips some
        line.judge(skipped / steps, SKIPPED, "updates are skipped: the log names the steps")
    line.judge(spikes / steps, SPIKES, "the loss spikes: lower optim.lr")
    line.figure = "; ".join(facts)
    judge_batch(case, line)
    judge_optimizer(case, line)


def judge_updates(case: Case, line: Line) -> list[str]:
    """Judge the size of updates at the peak rate; return it in words."""
    ratios = {}
    for key in case.metrics.keys(UPDATES_OF):
        values = case.at_high_rate(key)
        if len(values) and key != LEAST:
            ratios[key.removeprefix(UPDATES_OF)] = float(median(values))
    least = case.at_high_rate(LEAST)
    if len(least) and median(least) < STILL:
        line.find("wrong", "a weight never changes: check optimizer() and requires_grad")
    if not ratios:
        return []
    largest = max(ratios, key=lambda part: ratios[part])
    smallest = min(ratios, key=lambda part: ratios[part])
    line.judge(ratios[largest], LARGE_UPDATES, "steps this large forget: lower the rate")
    if not case.is_early:
        line.judge(ratios[largest], SMALL_UPDATES, "steps this small learn little: raise optim.lr")
    others = f"{ratios[smallest]:.2%} ({smallest}) to " if largest != smallest else ""
    return [
        f"a step changes {others}{ratios[largest]:.2%} ({largest}) of the weights at the peak rate"
    ]


def judge_batch(case: Case, line: Line) -> None:
    """Compare the batch with the best one for the length of the run, as `model.depth` does."""
    sizes = ("world_size", "micro_batch_size", "block_size", "accumulation_steps")
    batch = math.prod(case.recorded("plan", size) for size in sizes)
    steps = case.run.max_steps or 0
    if case.run.stages and steps:
        batch = total_tokens(case.config, steps) / steps  # the mean over all stages
    tokens = batch * steps
    if not tokens > 0:
        return
    best = REFERENCE_BATCH * (tokens / (REFERENCE_BATCH * REFERENCE_STEPS)) ** BATCH_EXPONENT
    line.compared = f"{batch:,.0f} tokens a step, {batch / best:.1%} of the best for its length"
    line.judge(
        batch / best,
        BATCH,
        f"about {best:,.0f} tokens a step are best for {tokens:,.0f}: raise train.tokens_per_step",
    )


def judge_optimizer(case: Case, line: Line) -> None:
    """Judge which weights the optimizer updates and decays, and their type."""
    decayed = case.recorded("optimizer", "decayed_vectors")
    if decayed > 0:
        vectors = case.recorded("optimizer", "vectors")
        line.find("look", f"weight decay reaches {decayed:.0f} of {vectors:.0f} norms and biases")
    fixed = case.recorded("optimizer", "never_updated")
    if fixed > 0:
        weights = case.recorded("optimizer", "weights")
        line.find("look", f"the optimizer does not update {fixed:.0f} of {weights:.0f} weights")
    dtypes = case.run.last_launch("model", "dtypes")
    if isinstance(dtypes, list) and dtypes != ["float32"]:
        names = " and ".join(map(str, dtypes))
        line.find("look", f"the weights are {names}: small updates are rounded away; use float32")
