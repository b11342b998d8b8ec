"""The loss of our training beside that of nanoGPT's model, from the same weights and batches.

    python benchmarks/parity.py NANOGPT_FOLDER TEXT [--steps 200] [--json FILE]
        [--section.key value ...]

NANOGPT_FOLDER is a checkout of karpathy/nanoGPT, TEXT any text. Ours is the loop of `accel-gpt
train` with configs/shakespeare_char_cpu.yaml in IEEE float32, with the biases of the `gpt2` preset
and of nanoGPT's model. Beside it nanoGPT's model and optimizer, unmodified, take the same batches
with the same learning rates and the same clipping. Prints the largest difference of their losses;
exits with 1 where it is above 1e-4.
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import ROOT, facts, headline, save
from torch import Tensor, nn

from accel_gpt import train
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import load_config
from accel_gpt.config.plan import make_plan
from accel_gpt.console import run_main
from accel_gpt.model.gpt import GPT
from accel_gpt.training.accelerator import start_accelerator
from accel_gpt.training.setup import ensure_data
from accel_gpt.training.terminal import Display

LIMIT = 1e-4
NAMES = {  # nanoGPT's, ours
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


class Remembering:
    """A loader that keeps the last batch it gave."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.batch: tuple[Tensor, Tensor]

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.batch = next(self.loader)
        return self.batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def main(argv: list[str]) -> int:
    """Train both, step by step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    asked, options = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        losses = compare(asked, configured(asked, options, Path(folder)))
    apart = [abs(ours - theirs) for ours, theirs in losses]
    largest = max(apart)
    known = facts()
    print(headline(known))
    for step in sorted({0, *range(49, asked.steps, 50), asked.steps - 1}):
        ours, theirs = losses[step]
        print(f"step {step + 1:4}: accel_gpt {ours:.6f}, nanoGPT {theirs:.6f}")
    place = apart.index(largest) + 1
    print(f"largest difference in {asked.steps} steps: {largest:.2e}, at step {place}")
    save(asked.json, {"facts": known, "losses": losses, "largest": largest})
    return int(largest > LIMIT)


def configured(asked: argparse.Namespace, options: list[str], out: Path) -> Config:
    """The config of our run."""
    words = [ROOT / "configs/shakespeare_char_cpu.yaml", "--out_dir", out / "run"]
    words += ["--data.train", out / "data", "--data.prepare.path", asked.text.resolve()]
    words += ["--model.bias", "true", "--train.matmul_precision", "highest"]
    words += ["--train.max_steps", asked.steps, "--schedule.warmup_steps", asked.steps // 2]
    words += options
    return load_config([str(word) for word in words], "benchmarks/parity.py")


def compare(asked: argparse.Namespace, config: Config) -> list[tuple[float, float]]:
    """Our loss and nanoGPT's at every step."""
    plan = make_plan(config, 1)
    ensure_data(config.data)
    Path(config.out_dir).mkdir()
    config, accelerator = start_accelerator(config, plan)
    with Display(False, config, plan) as display:
        run = train.start(config, plan, accelerator, display)
    peer = model_of(asked.nanogpt, config, run.gpt)
    optim = config.optim
    betas = (optim.beta1, optim.beta2)
    optimizer = peer.configure_optimizers(optim.weight_decay, optim.lr, betas, "cpu")
    loader = Remembering(run.loader)
    run.loader = loader  # type: ignore[assignment]
    found = []
    for _ in range(asked.steps):
        train.update(run)
        ours = run.guard.flush(print)["train/loss"]
        for group in optimizer.param_groups:
            group["lr"] = run.optimizer.param_groups[0]["lr"]
        _, loss = peer(*(ids.contiguous() for ids in loader.batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append((ours, loss.item()))
    run.loader.close()
    return found


def model_of(nanogpt: Path, config: Config, gpt: GPT) -> Any:
    """nanoGPT's model with the weights of `gpt`."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", nanogpt / "model.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks itself up
    spec.loader.exec_module(module)
    shape = config.model
    asked = module.GPTConfig(
        shape.block_size,
        gpt.vocab_size,
        shape.n_layer,
        shape.n_head,
        shape.n_embd,
        dropout=0.0,
        bias=shape.bias,
    )
    peer: nn.Module = module.GPT(asked)
    weights = gpt.state_dict()
    with torch.no_grad():
        for name, weight in peer.state_dict().items():
            weight.copy_(weights[ours(name)][: len(weight)])  # without the rows that pad
    return peer.train()


def ours(name: str) -> str:
    """Our name of a weight of nanoGPT's."""
    for theirs, mine in NAMES.items():
        name = name.replace(theirs, mine)
    return name


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
