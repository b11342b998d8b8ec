"""Judge what a run rests on: its text, its machine, its checkpoints, and what it says of itself.

Bounds without a source were chosen on half A of benchmarks/doctor.py.
"""

from collections.abc import Iterator
from statistics import median

import numpy as np

from accel_gpt.config.compare import option_of
from accel_gpt.config.plan import LENGTH_KEYS, plural
from accel_gpt.console import format_clock
from accel_gpt.cost.forecast import assumed_mfu
from accel_gpt.errors import AccelGPTError, first_line
from accel_gpt.files import strict_json
from accel_gpt.health.case import Above, Below, Case, Line, Unknown
from accel_gpt.report.curves import Floats
from accel_gpt.runs.checkpoint import verify_checkpoint

COPIED = Above(look=0.1, wrong=0.5)  # share of tokens in exact copies of an earlier document
REPEATED = Above(look=0.5, wrong=0.9)  # share of train windows that stand there more than once
MOST_FREQUENT = Above(look=0.4, wrong=0.6)  # share of one token; the spaces of code take 0.29
FEW_TOKENS = 64  # a smaller vocabulary in use may have such a token; assumption
UNREADABLE = Above(look=0.002, wrong=0.05)  # share of characters
READ_BACK = Below(look=0.95, wrong=0.8)  # share of tokens
MANY_TOKENS = 200_000  # text of this size has more than one document; assumption
WAITS = Above(look=0.1)  # share of the steps that wait for data
EVALUATION = Above(look=0.5)  # share of the time
SAMPLES = Above(look=0.25)
SAVES = Above(look=0.25)
LEAST_SHARE = 0.005  # smaller shares are not printed
LEAST_SECONDS = 5.0  # of a run whose time is judged; assumption
SLOWEST_RANK = Above(look=1.5)  # times the median rank
LOW_MFU = Below(look=0.5)  # of the MFU that `accel-gpt plan` assumes
LARGE_MODEL = 100_000_000  # parameters; smaller models do not fill a GPU
LOST_SECONDS = 3600.0  # of work that a kill costs; assumption
LOST_SHARE = 0.3  # of the work so far, if it takes `LEAST_LOST_SECONDS`
LEAST_LOST_SECONDS = 600.0  # assumption
LOST_STEPS = 20  # fewer are no loss; assumption


def data(case: Case, line: Line) -> None:
    """Judge the tokens that the run trains on."""
    text = case.text
    facts = []
    if text.documents:
        count = plural(text.documents, "document")
        facts.append(f"{count} of {text.median_document:,} tokens (median)")
    facts.append(f"{text.copied_share:.0%} of the tokens in copies of earlier documents")
    facts.append(f"{text.repeated:.0%} of {text.window}-token windows more than once")
    facts.append(f"most frequent token {text.most_frequent!r} {text.most_frequent_share:.1%}")
    if text.unreadable:
        facts.append(f"{text.unreadable:.2%} of characters unreadable")
    line.figure = "; ".join(facts)
    line.compared = f"counted over {text.counted_tokens:,} of {text.train_tokens:,} train tokens"
    line.judge(text.copied_share, COPIED, "remove the copies, and train anew")
    if text.copied_share <= COPIED.look and text.has_windows:
        line.judge(text.repeated, REPEATED, "most of the text is there more than once")
    if text.used_tokens >= FEW_TOKENS:
        line.judge(
            text.most_frequent_share,
            MOST_FREQUENT,
            f"token {text.most_frequent!r} is too frequent: look for padding, or ids of another "
            "type",
        )
    line.judge(text.unreadable, UNREADABLE, "characters were lost: read the text in its encoding")
    line.judge(
        text.read_back,
        READ_BACK,
        f"only {text.read_back:.0%} of the tokens come back if their text is encoded: another "
        "tokenizer made them",
    )
    if text.documents == 0 and text.counted_tokens > MANY_TOKENS:
        line.find("look", "no end-of-text token: documents run together, and samples do not end")


def machine(case: Case, line: Line) -> None:
    """Judge what the time goes into."""
    steps, step_ms = case.metrics.curve("perf/step_ms")
    _, speeds = case.metrics.curve("perf/tokens_per_second")
    if not len(speeds) or not len(step_ms):
        raise Unknown("no speed was logged")
    facts = [f"{median(speeds):,.0f} tokens/s (median)"]
    _, mfus = case.metrics.curve("perf/mfu")
    line.compared = "no peak rate is known of this device"
    share_of_plan = 0.0
    if len(mfus):
        mfu = float(median(mfus))
        assumed = assumed_mfu(case.config)
        share_of_plan = mfu / assumed
        facts.append(f"MFU {mfu:.0%}")
        line.compared = f"plan assumes an MFU of {assumed:.0%}"
        if case.recorded("model", "parameters") > LARGE_MODEL:
            line.judge(share_of_plan, LOW_MFU, "try a larger train.micro_batch_size")
    waits = share_of_waits(case, steps, step_ms)
    if waits >= LEAST_SHARE:
        facts.append(f"{waits:.0%} of the steps wait for data")
        if share_of_plan < 1:  # a GPU that is busy hides the wait
            line.judge(waits, WAITS, "reading is too slow: copy the data to a local disk")
    facts += pauses(case, line)
    _, slowest = case.metrics.curve("perf/slowest_rank")
    if len(slowest):
        times = float(median(slowest))
        facts.append(f"the slowest rank takes {times:.2f} times as long as the median")
        line.judge(times, SLOWEST_RANK, "all ranks wait for one: look at its machine")
    line.figure = "; ".join(facts)


def share_of_waits(case: Case, steps: Floats, step_ms: Floats) -> float:
    """Return the share of the time of steps in which the host waits for data.

    The first record of a launch is left out: its steps compile.
    """
    _, wait_ms = case.metrics.curve("perf/data_wait_ms")
    covered = np.diff(steps, prepend=0)  # steps of each record
    counted = np.ones(len(steps), bool)
    for launched in (0, *case.run.resumes()):
        counted[np.flatnonzero(steps > launched)[:1]] = False
    if len(wait_ms) != len(step_ms) or not counted.any():
        return 0.0
    whole = float((covered * step_ms)[counted].sum())
    return float((covered * wait_ms)[counted].sum()) / whole if whole > 0 else 0.0


def pauses(case: Case, line: Line) -> Iterator[str]:
    """Judge and describe the share of the time that is not training."""
    seconds = float(np.nanmax(case.metrics.seconds, initial=0))
    if seconds < LEAST_SECONDS:
        return
    for key, noun, bounds, todo in (
        ("perf/evaluation_s", "evaluation", EVALUATION, "raise eval.every or lower eval.tokens"),
        ("perf/samples_s", "samples", SAMPLES, "raise sample.every"),
        ("perf/save_s", "saves", SAVES, "raise checkpoint.every"),
    ):
        share = float(case.metrics.curve(key)[1].sum()) / seconds
        if share >= LEAST_SHARE:
            yield f"{noun} {share:.0%} of the time"
        line.judge(share, bounds, todo)


def kill(case: Case, line: Line) -> None:
    """Verify the newest checkpoint, and judge how much work it would leave to repeat."""
    run = case.run
    copies = run.config.get("checkpoint.copy_to")
    line.compared = f"copied to {copies}" if copies else "not copied (checkpoint.copy_to)"
    newest = 0
    for step, folder in reversed(run.checkpoints.items()):
        try:
            verify_checkpoint(folder)
        except AccelGPTError as error:
            if folder.is_dir():  # else it was pruned meanwhile
                line.find("wrong", first_line(error))
            continue
        newest = step
        break
    lost = max(run.last_step - newest, 0)
    seconds = case.seconds_after(newest)
    name = f"checkpoint of step {newest:,} is intact" if newest else "no intact checkpoint"
    line.figure = f"{name}; {lost:,} steps since, {format_clock(seconds)} of work"
    long = seconds > LOST_SECONDS or (
        lost > LOST_SHARE * run.last_step and seconds > LEAST_LOST_SECONDS
    )
    every = case.config.checkpoint.every
    if not newest and run.state == "finished":
        line.find("look", "no checkpoint is left")
    elif not newest and lost > LOST_STEPS and run.state == "stopped":
        line.find("wrong", f"its work is lost: checkpoint.every is {every:,}")
    elif lost > LOST_STEPS and long:
        line.find("look", f"a kill costs this work: checkpoint.every is {every:,}")


def identity(case: Case, line: Line) -> None:
    """Judge whether the record of the run tells what made it."""
    if not case.run.launches:
        line.compared = "run.json is missing"
        line.find("look", "nothing tells which code made this run")
        return
    commit = case.run.last_launch("commit")
    version = case.run.last_launch("versions", "accel-gpt")
    torch = case.run.last_launch("versions", "torch")
    launches = len(case.run.launches)
    line.figure = f"accel-gpt {version}, commit {commit or 'not recorded'}, torch {torch}"
    line.compared = plural(launches, "launch", "launches")
    if isinstance(commit, str) and commit.endswith("-dirty"):
        line.find("look", "its code was changed after the commit: commit before you train")
    for name, keys in (
        ("the commit", ("commit",)),
        ("the versions", ("versions",)),
        ("the file of --code", ("code", "sha256")),
    ):
        values = case.run.each_launch(*keys)
        if any(value != values[0] for value in values):
            line.find("look", f"{name} changed at a resume")
    for change in changed_keys(case):
        line.find("look", change)


def changed_keys(case: Case) -> Iterator[str]:
    """Describe the changes of the config at a resume that change what is trained."""
    for launch in case.run.launches:
        changed = launch.get("changed")
        for key, values in changed.items() if isinstance(changed, dict) else ():
            is_length = key in (*LENGTH_KEYS, "train.budget")  # a longer run is no other run
            if option_of(key).resume in ("ask", "refuse") and not is_length:
                before, now = map(strict_json, values)
                yield f"{key} changed from {before} to {now} at step {launch.get('step')}"
