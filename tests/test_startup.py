"""What is not imported before it is needed: each of these packages costs 0.1 to 1 s."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Arguments = Callable[..., list[str]]

HEAVY = (
    *("transformers", "tokenizers", "datasets", "huggingface_hub", "lm_eval", "matplotlib"),
    *("tensorboard", "tiktoken", "pandas", "pyarrow", "sympy"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"),
    "numpy.ma",
)


def imported_by(code: str, *arguments: str) -> list[str]:
    """Which of `HEAVY` are there after `code` ran in a process of its own."""
    told = f"import sys\n{code}\nprint(*[name for name in {HEAVY} if name in sys.modules])"
    words = [sys.executable, "-c", told, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_importing_the_trainer_brings_nothing_heavy() -> None:
    assert imported_by("import accel_gpt.train") == []


def test_a_model_that_is_loaded_brings_no_compiler() -> None:
    code = "from accel_gpt.model.gpt import GPT, ModelConfig\nGPT.allocate(ModelConfig(), 9)"
    assert "torch._dynamo" not in imported_by(code)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_without_trackers_brings_nothing_heavy(
    name: str, small_run: Arguments, tmp_path: Path
) -> None:
    """Steps, evaluations, samples and checkpoints."""
    code = "from accel_gpt import train\nassert train.main(sys.argv[1:]) == 0"
    quiet = ("--log.trackers", "[]", "--train.max_steps", "3", "--eval.every", "2")
    assert imported_by(code, *small_run(*quiet, "--optim.name", name)) == []
