"""Judge what a run has learned: against counting, against the impossible, and by its curve.

The bounds were chosen on one half of the runs of benchmarks/doctor.py; benchmarks/RESULTS.md shows
the other half.
"""

import math

import numpy as np

from accel_gpt.config.depth import (
    BATCH_EXPONENT,
    REFERENCE_BATCH,
    REFERENCE_STEPS,
)
from accel_gpt.config.plan import plural
from accel_gpt.health.bands import compare_with_band
from accel_gpt.health.case import Case, Line
from accel_gpt.model.sizes import parameter_counts
from accel_gpt.report.curves import Floats

ORDER = (0.75, 0.05)  # share of the way from the unigram to the bigram model, below: look, wrong
IMPOSSIBLE = (0.5, 0.35)  # loss over the loss of the 5-gram model, below: look, wrong
LEAKED = (0.2, 0.5)  # share of validation windows in train, beyond the share of repeated windows
RISEN = (0.01, 0.05)  # rise of the val loss above its lowest value
GAP = (0.25, 1.0)  # growth of (val - train) / train since the first evaluation
DROPOUT_COST = 0.1  # (train loss with dropout - without) / without
UNTIED = 0.85  # share of parameters in embedding and head that are not tied
SHRUNK = 0.98  # loss after the warm-up over the loss of step 1
EXPONENT = (
    0.05,
    0.5,
)  # of the power of the step by which the loss falls: less or more is looked at
FITTED_LOSSES = 8  # fewer tell no exponent; assumption
CURVE_RISEN = (0.02, 0.2)  # rise of the train loss above its lowest mean
SIGMA = 4.0  # standard errors that a rise of the train loss exceeds
JUMP = 1.3  # factor on the size of updates at a resume, at the same rate
NO_WARMUP = 0.9  # share of the peak rate in step 1
NO_DECAY = 0.5  # share of the peak rate in the last step
UPDATES = (0.1, 0.5)  # update over weights at the peak rate, in the part with the largest
SLOW_UPDATES = 3e-4  # the same of the part with the largest: too small
STILL = 1e-7  # the same of the weight with the smallest: it does not change
CLIPPED = 0.95  # share of logged steps whose gradient is clipped, after the warm-up
SKIPPED = (0.001, 0.02)  # share of updates
SPIKES = (0.005, 0.02)  # share of steps
SMALL_BATCH = 1 / 128  # of the best batch for the length of the run
UPDATES_OF = "train/update_ratio/"
LEAST = f"{UPDATES_OF}least"
BLOCKS = 10  # means of the train loss along a run
LEAST_LOSSES = 5  # logged losses in a mean


def counting(case: Case) -> Line:
    """Does it know more than counting?"""
    line = Line("counting", "Does it know more than counting?")
    loss = case.last("eval/val_loss")
    if loss is None:
        line.compared = "no evaluation yet"
        return line
    text = case.text
    bits = case.last("eval/val_bits_per_byte")
    error = case.last("eval/val_bits_per_byte_se")
    line.figure = f"{loss:.3f} nats per token"
    if bits is not None:
        line.figure = f"{bits:.3f}{'' if error is None else f' ± {error:.3f}'} bits per byte"
    if text is None:
        line.compared = case.why_no_text
        return line
    if case.uses("targets"):
        line.compared = "the loss counts only the targets that targets() of --code keeps"
        return line
    unit = math.log(2) * text.bytes_per_token if bits and text.bytes_per_token else 1
    known = {name: value / unit for name, value in text.losses.items()}
    if unit != 1:
        known |= text.compressed
    line.compared = ", ".join(f"{name} {value:.2f}" for name, value in known.items())
    line.find("fine")
    unigram = text.losses["unigram"]
    share = (unigram - loss) / (unigram - text.losses["bigram"])
    if share < ORDER[1]:
        line.find("wrong", "it has learned no order of tokens: check optim.lr, loss() and targets")
    elif share < ORDER[0]:
        line.find("look", "it knows less than the bigram model: train longer, or check optim.lr")
    return line


def leak(case: Case) -> Line:
    """Is it too good to be true?"""
    line = Line("leak", "Is it too good to be true?")
    text = case.text
    if text is None:
        line.compared = case.why_no_text
        return line
    line.figure = (
        f"{text.val_in_train:.1%} of validation windows of {text.window} tokens stand in train"
    )
    line.compared = f"{text.repeated:.1%} of train windows stand there more than once"
    line.find("fine")
    line.judge(
        text.val_in_train - text.repeated,
        *LEAKED,
        "validation text stands in the train text: take it out, and train anew",
    )
    loss = case.last("eval/val_loss")
    if loss is not None and not case.uses("targets"):
        ratio = loss / text.losses["5-gram"]
        line.figure = f"loss {ratio:.2f} of the 5-gram model's; {line.figure}"
        line.judge(
            -ratio,
            -IMPOSSIBLE[0],
            -IMPOSSIBLE[1],
            "a model that sees later tokens has such a loss: check attention and targets",
        )
    return line


def fit(case: Case) -> Line:
    """Is it over- or underfitted?"""
    line = Line("fit", "Is it over- or underfitted?")
    steps, val = case.after_start("eval/val_loss")
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
        line.compared = ", ".join(facts) or "no evaluation yet"
        return line
    error = case.last("eval/val_loss_se")
    line.figure = (
        f"val {val[-1]:.3f}{'' if error is None else f' ± {error:.3f}'}, train {train:.3f}"
    )
    best = int(val.argmin())
    facts.insert(0, f"lowest val {val[best]:.3f} at step {steps[best]:,.0f}")
    line.compared = "; ".join(facts)
    line.find("fine")
    rise = val[-1] / val[best] - 1
    line.judge(
        rise,
        *RISEN,
        f"val loss rises since step {steps[best]:,.0f}: use the best checkpoint, more text or "
        "fewer epochs",
    )
    _, trained = case.after_start("eval/train_loss")
    if len(trained) == len(val) and rise <= RISEN[0]:
        gaps = (val - trained) / trained
        growth = float(gaps[-1] - gaps[0])
        line.judge(growth, *GAP, "the train text is learned by heart: use more text or dropout")
    _, losses = case.after_start("train/loss")
    if case.config.model.dropout > 0 and len(losses):
        cost = float(losses[-LEAST_LOSSES:].mean()) / train - 1
        line.judge(cost, DROPOUT_COST, math.inf, f"dropout costs {cost:.0%} of the loss: lower it")
    if not case.config.model.tie_embeddings and not case.uses("model"):
        counts = parameter_counts(case.config.model, int(case.recorded("model", "vocab_size")))
        share = 1 - sum_of_blocks(counts) / counts["total"]
        line.judge(
            share,
            UNTIED,
            math.inf,
            f"{share:.0%} of the parameters are embedding and head: set model.tie_embeddings",
        )
    return line


def sum_of_blocks(counts: dict[str, int]) -> int:
    """Return the parameters outside of embedding and head."""
    names = [name for name in counts if name not in ("total", "total_unpadded")]
    outside = [name for name in names if not name.startswith(("embedding", "token", "head"))]
    return sum(counts[name] for name in outside)


# --------------------------------------------------------------------------- the curve


def curve(case: Case) -> Line:
    """Is the curve as it should be?"""
    line = Line("curve", "Is the curve as it should be?")
    steps, losses = case.metrics.curve("train/loss")
    if len(losses) < 2:
        line.compared = "fewer than two logged losses"
        return line
    warm = int(np.searchsorted(steps, case.recorded("plan", "warmup_steps"), side="right")) - 1
    end = float(losses[-min(LEAST_LOSSES, len(losses) - 1) :].mean())
    line.figure = (
        f"train loss {losses[0]:.2f} at step {steps[0]:,.0f}, {losses[max(warm, 0)]:.2f} after the "
        f"warm-up, {end:.3f} at step {steps[-1]:,.0f}"
    )
    line.find("fine")
    judge_schedule(case, line)
    exponent = fall_exponent(steps, losses, 2 * case.recorded("plan", "warmup_steps"))
    if exponent is not None:
        line.figure += f", as step^{-exponent:.2f}"
        line.judge(exponent, EXPONENT[1], math.inf, "no text is learned this fast: check targets")
    rise, step = risen(steps, losses)
    if end > SHRUNK * losses[0]:
        line.find("wrong", "the loss does not fall: lower optim.lr, check loss() and targets")
    elif rise > CURVE_RISEN[0]:
        todo = "lower optim.lr"
        _, evaluated = case.after_start("eval/train_loss")
        if len(evaluated) and evaluated[-1] < (1 + CURVE_RISEN[0]) * evaluated.min():
            todo = "its evaluation does not, so the two losses differ: check loss() of --code"
        line.judge(rise, *CURVE_RISEN, f"it has risen by {rise:.0%} since step {step:,.0f}: {todo}")
    elif exponent is not None and case.config.model.init_from == "scratch":
        line.judge(-exponent, -EXPONENT[0], math.inf, "it falls too slowly: check optim.lr")
    for step in case.run.resumes():
        factor = jump_at(case, step)
        if not 1 / JUMP < factor < JUMP:
            line.find(
                "look",
                f"after the resume at step {step:,}, updates are {factor:.2f} times as large: the "
                "state of the optimizer was lost",
            )
    compare_with_band(case, line)
    return line


def judge_schedule(case: Case, line: Line) -> None:
    """Judge how the rate begins and ends, and whether the run came to its end."""
    steps, shares = case.rate
    if len(shares):
        line.compared = (
            f"the rate begins at {shares[0]:.0%} and is {shares[-1]:.0%} of its peak at the end"
        )
        if steps[0] == 1:
            todo = "the rate begins at its peak: set schedule.warmup_steps"
            line.judge(shares[0], NO_WARMUP, math.inf, todo)
        if case.ended:
            line.judge(shares[-1], NO_DECAY, math.inf, "the rate does not decay: schedule.name")
    if case.run.state == "stopped":
        line.find(
            "look",
            f"it stopped at step {case.run.last_step:,} of {case.run.end:,}: launch it again",
        )


def fall_exponent(steps: Floats, losses: Floats, first: float) -> float | None:
    """Fit losses after step `first` by a power of the step; None if there are too few."""
    fitted = (steps > first) & (losses > 0)
    if np.count_nonzero(fitted) < FITTED_LOSSES:
        return None
    slope, _ = np.polyfit(np.log(steps[fitted]), np.log(losses[fitted]), 1)
    return -float(slope)


def risen(steps: Floats, losses: Floats) -> tuple[float, float]:
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
    if rise < SIGMA * noise * math.sqrt(2 / size):
        rise = 0.0
    return rise / float(means[lowest]), float(steps[len(losses) - (count - 1 - lowest) * size - 1])


def jump_at(case: Case, step: int) -> float:
    """Return the factor by which updates grow at a resume, at the same rate; 1 if unknown."""
    factors = []
    for key in case.metrics.keys(UPDATES_OF):
        steps, sizes = case.metrics.curve(key)
        rates = np.interp(steps, *case.metrics.curve("train/lr"))
        sizes = np.divide(sizes, rates, out=np.zeros_like(sizes), where=rates > 0)
        before = sizes[steps <= step][-LEAST_LOSSES:]
        after = sizes[steps > step][:1]
        if key != LEAST and len(before) == LEAST_LOSSES and len(after) and before.min() > 0:
            factors.append(float(after[0] / np.median(before)))
    return float(np.median(factors)) if factors else 1.0


# --------------------------------------------------------------------------- the rates


def rates(case: Case) -> Line:
    """Are the rates right?"""
    line = Line("rates", "Are the rates right?")
    line.find("fine")
    facts = []
    ratios = {}
    for key in case.metrics.keys(UPDATES_OF):
        values = case.at_high_rate(key)
        if len(values) and key != LEAST:
            ratios[key.removeprefix(UPDATES_OF)] = float(np.median(values))
    if ratios:
        largest = max(ratios, key=lambda part: ratios[part])
        smallest = min(ratios, key=lambda part: ratios[part])
        others = f"{ratios[smallest]:.2%} ({smallest}) to " if largest != smallest else ""
        facts.append(
            f"a step changes {others}{ratios[largest]:.2%} ({largest}) of the weights at the peak "
            "rate"
        )
        line.judge(ratios[largest], *UPDATES, "steps this large forget: lower the rate")
        line.judge(
            -ratios[largest],
            -SLOW_UPDATES,
            math.inf,
            "steps this small learn little: raise optim.lr",
        )
    least = case.at_high_rate(LEAST)
    if len(least) and np.median(least) < STILL:
        line.find("wrong", "a weight never changes: check optimizer() and requires_grad")
    norms = case.at_high_rate("train/grad_norm")
    if len(norms):
        facts.append(f"gradient norm {np.median(norms):.2g}")
    limit = case.config.optim.grad_clip
    if limit and len(norms):
        clipped = float((norms > limit).mean())
        facts.append(f"clipped in {clipped:.0%} of steps")
        line.judge(clipped, CLIPPED, math.inf, "nearly every gradient is clipped: lower optim.lr")
    done = max(case.run.last_step, 1)
    skipped = case.last("train/skipped") or 0.0
    spikes = case.last("train/spikes") or 0.0
    facts.append(f"{plural(int(skipped), 'skipped update')}, {plural(int(spikes), 'loss spike')}")
    if case.run.last_launch("mixed_precision") != "fp16":  # its scaler skips some
        line.judge(skipped / done, *SKIPPED, "updates are skipped: see the log for the steps")
    line.judge(spikes / done, *SPIKES, "the loss spikes: lower optim.lr")
    line.figure = "; ".join(facts)
    compare_batch(case, line)
    vectors = case.recorded("optimizer", "decayed_vectors")
    if vectors > 0:
        line.find("look", f"weight decay reaches {vectors:.0f} norms and biases: leave them out")
    fixed = case.recorded("optimizer", "never_updated")
    if fixed > 0:
        line.find("look", f"{fixed:.0f} weights are in no group of the optimizer: they are fixed")
    dtypes = case.run.last_launch("model", "dtypes")
    if isinstance(dtypes, list) and dtypes != ["float32"]:
        names = " and ".join(map(str, dtypes))
        line.find("look", f"the weights are {names}: small updates are rounded away; use float32")
    return line


def compare_batch(case: Case, line: Line) -> None:
    """Compare the batch with the best one for the length of the run, as `model.depth` does."""
    batch = case.recorded("plan", "world_size") * case.recorded("plan", "micro_batch_size")
    batch *= case.recorded("plan", "block_size") * case.recorded("plan", "accumulation_steps")
    tokens = batch * case.recorded("plan", "max_steps")
    if not tokens > 0:
        return
    best = REFERENCE_BATCH * (tokens / (REFERENCE_BATCH * REFERENCE_STEPS)) ** BATCH_EXPONENT
    line.compared = f"{batch:,.0f} tokens a step, {batch / best:.1%} of the best for its length"
    line.judge(
        -batch / best,
        -SMALL_BATCH,
        math.inf,
        f"about {best:,.0f} tokens a step are best for {tokens:,.0f}: raise train.tokens_per_step",
    )
