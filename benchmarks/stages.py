"""Compare stages with runs that have none, at equal tokens, over paired seeds.

    python benchmarks/stages.py [--out runs/stages] [--seeds 1,2,3,4,5] [--steps 300]

Text: `code` is the source of Python's standard library, `docs` the documentation of the installed
packages, as in hours.py. They share one tokenizer. Two sweeps (`accel-gpt sweep`):

better text, judged by the val loss on docs
    mixed      7 % docs from the first step to the last
    more       3 % docs, and in the last tenth 43 %: as many tokens of docs as `mixed`
    last       code alone, and in the last tenth 70 % docs: as many tokens of docs as `mixed`
    code       code alone

growing length, on code, judged by the val loss in sequences of 512 tokens
    long       512 tokens from the first step on
    growing    128 tokens, from half of the run on 256, in the last fifth 512
    grown late 128 tokens, in the last tenth 512

All runs have 3 layers of 96 channels and 4,096 tokens in a step; the rate falls in the last 70 %.
The same command goes on after an interruption.
"""

import argparse
import json
from pathlib import Path

from common import OURS, print_table, run_command, save_report, start_report
from hours import write_text

CONFIG = """\
data: {{train: {train}, val: {{docs: {out}/docs, code: {out}/code}}}}
model: {{preset: fast, n_layer: 3, n_head: 2, n_embd: 96, block_size: {block_size},
  rope_theta: 500, logit_softcap: null}}
train: {{tokens_per_step: 4096, micro_batch_size: {sequences}, max_steps: {steps}}}
optim: {{name: muon, lr: 1e-2, embedding_lr: 0.1, muon_momentum: 0.9, beta1: 0.8, weight_decay: 0,
  grad_clip: 0}}
schedule: {{name: wsd, warmup_steps: 10, decay_share: 0.7}}
eval: {{every: 0, tokens: 131072}}
sample: {{every: 0}}
checkpoint: {{every: 0}}
log: {{every: 20, trackers: []}}
stages: [{stages}]
"""
BETTER = "[{{path: {out}/docs, weight: {docs}}}, {{path: {out}/code, weight: {code}}}]"
SWEEPS = {
    "docs": ("mixed", "more", "last", "code"),
    "code": ("long", "growing", "grown_late"),
}


def main() -> None:
    """Make the text, sweep, and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/stages"))
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    report = start_report()
    prepare(args.out)
    write_configs(args.out, args.steps)
    for val, names in SWEEPS.items():
        folder = args.out / f"sweep_{val}"
        configs = [args.out / f"{name}.yaml" for name in names]
        options = ["--seed", args.seeds, "--metric", f"eval/val_loss/{val}", "--out_dir", folder]
        print(run_command(["python", *OURS, "sweep", *configs, *options]), flush=True)
        found = json.loads((folder / "sweep.json").read_text())
        report[val] = found
        rows = [
            [
                Path(one["name"]).stem,
                f"{sum(one['losses'].values()) / len(one['losses']):.4f}",
                str(len(one["losses"])),
                f"{one['time'] or 1:.2f}",
            ]
            for one in found["settings"]
        ]
        print_table(["run", f"val loss on {val}", "seeds", "time"], rows)
    save_report(args.out / "stages.json", report)


def prepare(out: Path) -> None:
    """Make the shards of both texts, with the tokenizer of the code."""
    if not (out / "text").exists():
        write_text(out / "text")
    if not (out / "code").exists():
        bpe = ["--tokenizer", "bpe", "--vocab_size", "4096"]
        run_command(["python", *OURS, "prepare", "stdlib", "--out", out / "code", *bpe])
    if not (out / "docs").exists():
        same = ["--tokenizer", out / "code" / "tokenizer.json"]
        run_command(["python", *OURS, "prepare", out / "text", "--out", out / "docs", *same])


def write_configs(out: Path, steps: int) -> None:
    """Write the config of each run."""

    def write(name: str, train: str = "", block_size: int = 128, stages: str = "") -> None:
        text = CONFIG.format(
            train=train or f"{out}/code",
            out=out,
            block_size=block_size,
            sequences=4096 // block_size,
            steps=steps,
            stages=stages,
        )
        (out / f"{name}.yaml").write_text(text, encoding="utf-8")

    def better(docs: float) -> str:
        return BETTER.format(out=out, docs=docs, code=round(1 - docs, 2))

    def lengths(*edges: tuple[float, int]) -> str:
        return ", ".join(
            f"{{from: {first}, model.block_size: {length}, "
            f"train.micro_batch_size: {4096 // length}}}"
            for first, length in edges
        )

    write("code")
    write("mixed", better(0.07))
    write("more", better(0.03), stages=f"{{from: 0.9, data.train: {better(0.43)}}}")
    write("last", stages=f"{{from: 0.9, data.train: {better(0.7)}}}")
    write("long", block_size=512)
    write("growing", block_size=512, stages=lengths((0, 128), (0.5, 256), (0.8, 512)))
    write("grown_late", block_size=512, stages=lengths((0, 128), (0.9, 512)))


if __name__ == "__main__":
    main()
