"""Check that our training computes the losses of nanoGPT's model from the same weights and batches.

    python benchmarks/parity.py NANOGPT TEXT [--steps 200] [--json FILE] [--section.key value ...]

NANOGPT is a checkout of karpathy/nanoGPT, TEXT any text. Ours is the loop of `accel-gpt train` with
configs/shakespeare_char_cpu.yaml in IEEE float32, with the biases that nanoGPT's model has. Beside
it nanoGPT's model and optimizer, unmodified, take the same batches with the same learning rates and
the same clipping. Prints losses of both and their largest difference; the exit code is 1 if it is
above 1e-4.

The tests compare our model with transformers' GPT-2 and Llama, and our Muon with torch's.
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import ROOT, flags, make_parser, save_report, start_report
from torch import nn

from accel_gpt import train
from accel_gpt.commands.clock import set_up_unseen
from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.console import run_main
from accel_gpt.launch.resolve import resolve
from accel_gpt.model.gpt import GPT
from accel_gpt.prepare.missing_data import ensure_data

LIMIT = 1e-4
NAMES = {  # nanoGPT's names of weights, and ours
    "transformer.": "",
    "h.": "blocks.",
    "ln_1": "norm_1",
    "ln_2": "norm_2",
    "ln_f": "norm_f",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.proj",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
    "lm_head": "head",
}


def main(argv: list[str]) -> int:
    """Train both, step by step, and print their losses; return the exit code."""
    parser = make_parser(__doc__, peer=True)
    parser.add_argument("--steps", type=int, default=200)
    args, options = parser.parse_known_args(argv)
    report = start_report()
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(args, options, Path(folder))
        losses = train_both(args.nanogpt, config, args.steps)
    for step in sorted({0, *range(49, args.steps, 50), args.steps - 1}):
        ours, theirs = losses[step]
        print(f"step {step + 1:4}: accel_gpt {ours:.6f}, nanoGPT {theirs:.6f}")
    differences = [abs(ours - theirs) for ours, theirs in losses]
    largest = max(differences)
    at_step = differences.index(largest) + 1
    print(f"largest difference in {args.steps} steps: {largest:.2e}, at step {at_step}")
    save_report(args.json, {**report, "losses": losses, "largest": largest})
    return int(largest > LIMIT)


def make_config(args: argparse.Namespace, more: list[str], folder: Path) -> Config:
    """Load the config of our run, with the options `more` over it."""
    options: dict[str, object] = {
        "out_dir": folder / "run",
        "data.train": folder / "data",
        "data.prepare.source": args.text.resolve(),
        "data.prepare.tokenizer": "chars",  # another data.train drops the file's data.prepare
        "model.bias": True,
        "train.mixed_precision": "no",
        "train.compile": False,
        "train.matmul_precision": "highest",
        "train.max_steps": args.steps,
        "schedule.warmup_steps": args.steps // 2,
    }
    config = ROOT / "configs/shakespeare_char_cpu.yaml"
    return load_config([str(config), *flags(options), *more], "benchmarks/parity.py")


def train_both(nanogpt: Path, config: Config, steps: int) -> list[tuple[float, float]]:
    """Return our loss and nanoGPT's at every step."""
    ensure_data(config)
    Path(config.out_dir).mkdir()
    context = resolve(config)
    config, plan, accelerator = context.config, context.plan, context.accelerator
    run = set_up_unseen(config, plan, accelerator)
    batches = run.corpus.loader(plan, 0, accelerator.device, 0)  # those of run.loader once more
    peer = make_peer(nanogpt, config, run.gpt)
    optim = config.optim
    betas = (optim.beta1, optim.beta2)
    optimizer = peer.configure_optimizers(optim.weight_decay, optim.lr, betas, "cpu")
    losses = []
    for _ in range(steps):
        train.update(run)
        ours = run.guard.flush(print)["train/loss"]
        for group in optimizer.param_groups:
            group["lr"] = run.optimizer.param_groups[0]["lr"]
        tokens, targets = next(batches)
        _, loss = peer(tokens.contiguous(), targets.contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append((ours, loss.item()))
    run.loader.close()
    batches.close()
    return losses


def make_peer(nanogpt: Path, config: Config, gpt: GPT) -> Any:
    """Build nanoGPT's model with the weights of `gpt`."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", nanogpt / "model.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    shape = module.GPTConfig(
        block_size=config.model.block_size,
        vocab_size=gpt.vocab_size,
        n_layer=config.model.n_layer,
        n_head=config.model.n_head,
        n_embd=config.model.n_embd,
        dropout=0.0,
        bias=config.model.bias,
    )
    peer: nn.Module = module.GPT(shape)
    weights = gpt.state_dict()
    with torch.no_grad():
        for name, weight in peer.state_dict().items():
            weight.copy_(weights[our_name(name)][: len(weight)])  # without the rows that pad
    return peer.train()


def our_name(name: str) -> str:
    """Return our name of one of nanoGPT's weights."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
