"""Judge what a run rests on: its text, its machine, its checkpoints, and what it says of itself.

The bounds were chosen on one half of the runs of benchmarks/doctor.py; benchmarks/RESULTS.md shows
the other half.
"""

import math
from collections.abc import Iterator

import numpy as np

from accel_gpt.config.compare import option_of
from accel_gpt.console import format_clock
from accel_gpt.cost.forecast import assumed_mfu
from accel_gpt.errors import AccelGPTError, first_line
from accel_gpt.files import strict_json
from accel_gpt.health.case import Case, Line
from accel_gpt.runs.checkpoint import verify_checkpoint

COPIED = (0.1, 0.5)  # share of tokens in exact copies of an earlier document
REPEATED = (0.5, 0.9)  # share of train windows that stand in the train text more than once
MOST_FREQUENT = (0.3, 0.45)  # share of one token
UNREADABLE = (0.002, 0.05)  # share of characters
READ_BACK = (0.95, 0.8)  # share of tokens, below
MANY_TOKENS = 200_000  # text of this size has more than one document; assumption
WAITS = (0.1, math.inf)  # share of a step that waits for data
EVALUATION = (0.5, math.inf)  # share of the time
SAMPLES = (0.25, math.inf)
SAVES = (0.25, math.inf)
LEAST_SHARE = 0.005  # that is told
SLOWEST_RANK = (1.5, math.inf)  # times the median rank
LOW_MFU = 0.5  # of the MFU that `accel-gpt plan` assumes
LARGE_MODEL = 100_000_000  # parameters; smaller models do not fill a GPU
LOST_SECONDS = 3600.0  # of work that a kill costs; assumption
LOST_SHARE = 0.3  # of the work so far
LOST_STEPS = 20  # fewer are no loss; assumption


def data(case: Case) -> Line:
    """Is the data sound?"""
    line = Line("data", "Is the data sound?")
    text = case.text
    if text is None:
        line.compared = case.why_no_text
        return line
    facts = []
    if text.documents is not None:
        facts.append(f"{text.documents:,} documents of {text.median_document:,} tokens (median)")
    facts.append(f"{text.copied_share:.0%} of the tokens in copies of earlier documents")
    facts.append(f"{text.repeated:.0%} of {text.window}-token windows more than once")
    facts.append(f"most frequent token {text.most_frequent!r} {text.most_frequent_share:.1%}")
    if text.unreadable:
        facts.append(f"{text.unreadable:.2%} of characters unreadable")
    line.figure = "; ".join(facts)
    line.compared = f"counted over {text.counted_tokens:,} of {text.train_tokens:,} train tokens"
    line.find("fine")
    line.judge(
        text.copied_share,
        *COPIED,
        "remove the copies, and train anew",
    )
    if text.copied_share <= COPIED[0]:
        line.judge(text.repeated, *REPEATED, "most of the text is there more than once")
    line.judge(
        text.most_frequent_share,
        *MOST_FREQUENT,
        f"token {text.most_frequent!r} is too frequent: look for padding, or ids of another type",
    )
    line.judge(
        text.unreadable, *UNREADABLE, "characters were lost: read the text with its own encoding"
    )
    line.judge(
        -text.read_back,
        -READ_BACK[0],
        -READ_BACK[1],
        f"the tokenizer gives back {text.read_back:.0%} of the tokens: it is not theirs",
    )
    if text.documents == 0 and text.counted_tokens > MANY_TOKENS:
        line.find("look", "no end-of-text token: documents run together, and samples do not end")
    return line


def machine(case: Case) -> Line:
    """Is the machine used?"""
    line = Line("machine", "Is the machine used?")
    _, rates = case.metrics.curve("perf/tokens_per_second")
    _, step_ms = case.metrics.curve("perf/step_ms")
    if not len(rates) or not len(step_ms):
        line.compared = "no speed was logged"
        return line
    line.find("fine")
    facts = [f"{np.median(rates):,.0f} tokens/s (median)"]
    _, mfus = case.metrics.curve("perf/mfu")
    if len(mfus):
        mfu = float(np.median(mfus))
        assumed = assumed_mfu(case.config)
        facts.append(f"MFU {mfu:.0%}")
        line.compared = f"plan assumes an MFU of {assumed:.0%}"
        if case.recorded("model", "parameters") > LARGE_MODEL:
            line.judge(-mfu, -LOW_MFU * assumed, math.inf, "try a larger train.micro_batch_size")
    else:
        line.compared = "no peak rate is known of this device"
    _, waits = case.metrics.curve("perf/data_wait_ms")
    if len(waits):
        share = float(np.mean(waits) / np.mean(step_ms))
        if share >= LEAST_SHARE:
            facts.append(f"{share:.0%} of a step waits for data")
        line.judge(share, *WAITS, "reading is too slow: copy the data to a local disk")
    facts += pauses(case, line)
    _, slowest = case.metrics.curve("perf/slowest_rank")
    if len(slowest):
        times = float(np.median(slowest))
        facts.append(f"the slowest rank takes {times:.2f} times as long as the median")
        line.judge(times, *SLOWEST_RANK, "all ranks wait for one: look at its machine")
    line.figure = "; ".join(facts)
    return line


def pauses(case: Case, line: Line) -> Iterator[str]:
    """Judge and describe the share of the time that is not training."""
    seconds = float(np.nanmax(case.metrics.seconds, initial=0))
    if seconds <= 0:
        return
    for key, noun, bounds, todo in (
        ("perf/evaluation_s", "evaluation", EVALUATION, "raise eval.every or lower eval.tokens"),
        ("perf/samples_s", "samples", SAMPLES, "raise sample.every"),
        ("perf/save_s", "saves", SAVES, "raise checkpoint.every"),
    ):
        share = case.total(key) / seconds
        if share >= LEAST_SHARE:
            yield f"{noun} {share:.0%} of the time"
        line.judge(share, *bounds, todo)


def kill(case: Case) -> Line:
    """Would a kill hurt?"""
    line = Line("kill", "Would a kill hurt?")
    run = case.run
    copies = run.config.get("checkpoint.copy_to")
    line.compared = f"copied to {copies}" if copies else "not copied (checkpoint.copy_to)"
    last = run.last_step
    damaged = 0
    for step, folder in reversed(run.checkpoints.items()):
        try:
            verify_checkpoint(folder)
        except AccelGPTError as error:
            damaged += 1
            line.find("wrong", first_line(error))
            continue
        lost = max(run.step - step, 0)
        seconds = case.seconds_after(step)
        line.figure = (
            f"checkpoint of step {step:,} is intact; {lost:,} steps since, "
            f"{format_clock(seconds)} of work"
        )
        line.find("fine")
        if lost > LOST_STEPS and (seconds > LOST_SECONDS or lost > LOST_SHARE * last):
            line.find("look", "a kill costs these steps: lower checkpoint.every")
        return line
    line.figure = f"{'all are damaged' if damaged else 'no checkpoint'} after {last:,} steps"
    if last > LOST_STEPS and not damaged:
        every = case.config.checkpoint.every
        line.find("wrong", f"a kill costs the whole run: checkpoint.every is {every:,}")
    return line


def identity(case: Case) -> Line:
    """Does it say what it is?"""
    line = Line("identity", "Does it say what it is?")
    if not case.run.launches:
        line.compared = "run.json is missing"
        line.find("look", "nothing tells which code made this run")
        return line
    commit = case.run.last_launch("commit")
    version = case.run.last_launch("versions", "accel-gpt")
    torch = case.run.last_launch("versions", "torch")
    launches = len(case.run.launches)
    line.figure = f"accel-gpt {version}, commit {commit or 'not recorded'}, torch {torch}"
    line.compared = f"{launches} launch{'' if launches == 1 else 'es'}"
    line.find("fine")
    if isinstance(commit, str) and commit.endswith("-dirty"):
        line.find("look", "its code was changed after the commit: commit before you train")
    for name, keys in (
        ("the commit", ("commit",)),
        ("the versions", ("versions",)),
        ("the file of --code", ("code", "sha256")),
    ):
        values = case.launches(*keys)
        if any(value != values[0] for value in values):
            line.find("look", f"{name} changed at a resume")
    for change in changed_keys(case):
        line.find("look", change)
    return line


def changed_keys(case: Case) -> Iterator[str]:
    """Describe the changes of the config at a resume that change what is trained."""
    for step, changed in zip(case.launches("step"), case.launches("changed"), strict=True):
        if not isinstance(changed, dict):
            continue
        for key, values in changed.items():
            if option_of(key).resume in ("ask", "refuse"):
                before, now = map(strict_json, values)
                yield f"{key} changed from {before} to {now} at step {step}"
