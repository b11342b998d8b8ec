"""Whole commands as the READMEs give them, ours over nanoGPT's: seconds and the loss at the end.

    python benchmarks/whole_commands.py NANOGPT_FOLDER TEXT [--rounds 3] [--json FILE]
        [--allow_busy] [--section.key value ...]

NANOGPT_FOLDER is a checkout of karpathy/nanoGPT, driven unmodified (in a copy) by the CPU command
of its README; TEXT is tinyshakespeare. Ours are `accelerate launch` of the configs in GOALS as they
ship (and the options, if any are given), with folders of their own and another seed each round;
nanoGPT's seed is fixed. They run in turn on prepared data. The seconds are those of the whole
process: imports, evaluation, samples and checkpoints included. The losses are those of the whole
val split in sequences of the model's context: ours as it evaluates itself at the end, nanoGPT's of
the checkpoint that it leaves. Where others kept the machine busy it warns and does not write FILE.
"""

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from common import (
    ROOT,
    Metrics,
    OtherLoad,
    add_report_options,
    call,
    facts,
    headline,
    interleave,
    last_json,
    median,
    save,
    table,
    timed,
)
from systems import CHARS, gather

from accel_gpt.config.parse import load_config
from accel_gpt.training.setup import ensure_data

PEER = "nanoGPT"
README = (  # nanoGPT's, line 85
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
    "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    "--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
GOALS = {"shakespeare_char_cpu": 0.8, "fast_shakespeare_cpu": 1 / 6}  # of nanoGPT's seconds
TARGET = 1.91  # nanoGPT's val loss, mean of five seeds: benchmarks/RESULTS.md
LOSS = """
import json, numpy, torch
from model import GPT, GPTConfig
saved = torch.load("out-shakespeare-char/ckpt.pt", weights_only=False)
gpt = GPT(GPTConfig(**saved["model_args"])).eval()
gpt.load_state_dict(saved["model"])
data = torch.from_numpy(numpy.fromfile("data/shakespeare_char/val.bin", numpy.uint16).astype(int))
total, T = 0.0, gpt.config.block_size
with torch.no_grad():
    for x, y in zip(data[:-1].split(T), data[1:].split(T)):
        total += gpt(x[None], y[None])[1].item() * len(x)
print(json.dumps({"val_loss": total / (len(data) - 1)}))
"""


def main() -> None:
    """Run all in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    add_report_options(parser)
    args, options = parser.parse_known_args()
    machine, load = facts(), OtherLoad(args)
    print(headline(machine))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        peer = gather(args.nanogpt, args.text, work, [CHARS])
        subjects: dict[str, Callable[[], Metrics]] = {PEER: partial(nanogpt, peer)}
        for name in GOALS:
            words = [ROOT / f"configs/{name}.yaml", "--data.train", work / "data"]
            words += ["--data.prepare.path", args.text.resolve(), *options]
            ensure_data(load_config([str(word) for word in words], __file__).data)
            subjects[name] = partial(ours, work / "run", words, itertools.count())
        found = interleave(subjects, args.rounds, load)
    print("\n" + format_rounds(found))
    save(args.json, {"facts": machine, "rounds": found}, load)


def nanogpt(peer: Path) -> Metrics:
    """Its README's command."""
    seconds = timed(lambda: call([sys.executable, *README.split()], peer))
    return {"seconds": seconds, **last_json(call([sys.executable, "-c", LOSS], peer))}


def ours(out: Path, words: Sequence[str | Path], seeds: "itertools.count[int]") -> Metrics:
    """`accelerate launch` of a config."""
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", ROOT / "accelerate_config.yaml", ROOT / "accel_gpt/train.py"]
    command = [*launch, *words, "--out_dir", out, "--seed", str(next(seeds))]
    seconds = timed(lambda: call(command))
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    shutil.rmtree(out)
    return {"seconds": seconds, "val_loss": last["eval/whole_val_loss"]}


def format_rounds(found: dict[str, list[Metrics]]) -> str:
    """Medians of the seconds and their ratios to nanoGPT's, with the losses."""
    rows = []
    for name, rounds in found.items():
        losses = [metrics["val_loss"] for metrics in rounds]
        ratio = median(rounds, "seconds") / median(found[PEER], "seconds")
        goal = GOALS.get(name, 1.0)
        reached = f"{sum(loss <= TARGET for loss in losses)} of {len(losses)}"
        verdict = ("reached" if ratio <= goal else "missed") if name in GOALS else ""
        rows.append([name, f"{median(rounds, 'seconds'):.1f}", f"{ratio:.3f}", f"{goal:.3f}"])
        rows[-1] += [verdict, f"{statistics.mean(losses):.4f}", reached]
    head = ["whole command", "seconds", f"of {PEER}'s", "goal", "", "val loss", f"at {TARGET}"]
    return table(head, rows)


if __name__ == "__main__":
    main()
