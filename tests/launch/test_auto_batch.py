"""`train.micro_batch_size: auto`: find the largest that fits all processes, without a hang."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda._utils import _get_device_index

from accel_gpt.commands.resolve import load_code, load_config, with_code
from accel_gpt.config.plan import make_plan
from accel_gpt.errors import UserError
from accel_gpt.launch import auto_batch as sizing
from accel_gpt.model.gpt import GPT
from tests.helpers.memory import most_alive

Arguments = Callable[..., list[str]]
AUTO = ("--train.micro_batch_size", "auto")


@given(st.sets(st.integers(1, 5000), min_size=1), st.integers(0, 6000))
def test_bisection_finds_the_largest_that_fits(found: set[int], limit: int) -> None:
    sizes = sorted(found)
    fitting = [size for size in sizes if size <= limit]
    if fitting:
        assert sizing.largest_fitting(sizes, lambda size: size <= limit) == fitting[-1]
    else:
        with pytest.raises(UserError, match="not even 1 sequence fits"):
            sizing.largest_fitting(sizes, lambda size: size <= limit)


def test_a_size_must_fit_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank runs out of memory at three sequences."""
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return True

    monkeypatch.setattr(sizing, "all_gather", lambda fitting: [fitting, tried[-1] < 3])
    assert sizing.largest_fitting([1, 2, 4, 8], fits) == 2


def test_the_answer_divides_the_step_and_is_kept(small_run: Arguments) -> None:
    config = load_config(small_run(*AUTO, "--train.tokens_per_step", "384"), "test")
    plan = make_plan(config, 1)
    assert (plan.micro_batch_size, plan.accumulation_steps) == (1, 12)
    accelerator = Accelerator(cpu=True)
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= 5

    assert sizing.choose_micro_batch_size(config, accelerator, None, fits) == 4
    assert set(tried) <= {1, 2, 3, 4, 6, 12}

    def again(earlier: int, limit: int) -> int:
        return sizing.choose_micro_batch_size(config, accelerator, earlier, lambda n: n <= limit)

    assert again(2, limit=5) == 2
    assert again(2, limit=1) == 1  # it no longer fits
    assert again(5, limit=5) == 4  # it no longer divides the step


def test_on_a_cpu_the_tokens_decide(small_run: Arguments) -> None:
    config = load_config(small_run(*AUTO), "test")
    accelerator: Any = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    fits = sizing.make_fits(config, 257, accelerator)
    largest = sizing.CPU_TOKENS // config.model.block_size
    assert [fits(1), fits(largest), fits(largest + 1)] == [True, True, False]


@pytest.mark.parametrize(
    "options",
    [
        ("--optim.name", "muon", "--data.document_mask", "--train.mixed_precision", "bf16"),
        ("--train.reproducible", "--train.activation_checkpointing", "blocks"),
    ],
)
def test_a_trial_runs_with_each_option(small_run: Arguments, options: tuple[str, ...]) -> None:
    config = load_config(small_run(*options), "test")
    accelerator = Accelerator(cpu=True, mixed_precision=config.train.mixed_precision)
    sizing.try_step(config, 257, accelerator)
    assert accelerator.gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("compiled", "copies"),
    [
        ("false", 4),  # weights, two moments, sums of gradients
        ("auto", 5),  # and the gradients of a micro-step
        ("true", 5),
    ],
)
def test_a_trial_holds_what_a_step_holds(small_run: Arguments, compiled: str, copies: int) -> None:
    """A step with few tokens, so that hardly any activations are held."""
    shape = ("--model.n_embd", "256", "--model.block_size", "4", "--train.tokens_per_step", "4")
    options = (*shape, "--train.micro_batch_size", "1", "--train.compile", compiled)
    config = load_config(small_run(*options), "test")
    accelerator = Accelerator(cpu=True)
    peak = most_alive(lambda: sizing.try_step(config, 257, accelerator))
    parameters = sum(weight.numel() for weight in GPT(config.model, 257).parameters())
    assert copies <= peak / (4 * parameters) < copies + 0.5


def test_a_trial_has_the_moments_of_the_optimizer_from_its_first_backward_pass(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has none in its first step, and would run out of memory in its second."""
    made, kept = sizing.build_optimizer, list[torch.optim.Optimizer]()

    def keep(*args: Any) -> Any:
        kept.append(made(*args))
        return kept[-1]

    class Watched(GPT):
        def forward(self, *args: Any, **options: Any) -> torch.Tensor:
            assert len(kept[0].state) == len(list(self.parameters()))
            return super().forward(*args, **options)

    monkeypatch.setattr(sizing, "build_optimizer", keep)
    monkeypatch.setattr("accel_gpt.model.make.GPT", Watched)
    sizing.try_step(load_config(small_run(), "test"), 257, Accelerator(cpu=True))


def test_a_trial_in_fp8_computes_in_fp8(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    float8 = pytest.importorskip("torchao.float8")
    made: list[GPT] = []

    def make(*arguments: Any) -> GPT:
        made.append(GPT(config.model, 257))
        return made[-1]

    monkeypatch.setattr(sizing, "make_model", make)
    config = load_config(small_run("--model.n_embd", "32", "--optim.name", "muon"), "test")
    emulated = AORecipeKwargs(config=float8.Float8LinearConfig(emulate=True))
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[emulated])
    sizing.try_step(config, 257, accelerator)
    assert type(made[0].blocks[0].mlp.up).__name__ == "Float8Linear"


def test_a_trial_makes_the_model_of_code_on_the_cpu(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And moves it, as a run does: a buffer that comes from NumPy is on the CPU."""
    moved: list[torch.device] = []

    class Watched(GPT):
        def to(self, device: torch.device) -> NoReturn:  # type: ignore[override]
            assert self.wte.weight.device.type == "cpu"
            moved.append(device)
            raise InterruptedError

    code = tmp_path / "code.py"
    code.write_text("def model(config, vocab_size):\n    return made(config.model, vocab_size)\n")
    own = load_code(str(code))
    monkeypatch.setitem(own.model.function.__globals__, "made", Watched)  # type: ignore[union-attr]
    cuda: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(InterruptedError):
        sizing.try_step(with_code(load_config(small_run(), "test"), own), 257, cuda)
    assert moved == [cuda.device]


AS_IN_A_RUN = """
import torch

def loss(model, tokens, targets):
    logits = model(tokens)
    assert logits.dtype == torch.float32, logits.dtype
    assert not torch.is_autocast_enabled("cpu")
    return logits.square().mean()
"""


def test_a_trial_calls_the_loss_of_code_as_a_run_does(small_run: Arguments, tmp_path: Path) -> None:
    """With logits in float32 and no autocast, as after `Accelerator.prepare`."""
    code = tmp_path / "code.py"
    code.write_text(AS_IN_A_RUN)
    config = with_code(load_config(small_run(), "test"), load_code(str(code)))
    sizing.try_step(config, 257, Accelerator(cpu=True, mixed_precision="bf16"))


def test_running_out_of_memory_is_an_answer(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other errors are raised. With one GPU and no launcher the device has no index."""
    alone: Any = SimpleNamespace(num_processes=1, device=torch.device("cuda"))
    shares: list[float] = []

    def fraction(share: float, device: Any = None) -> None:
        shares.append(share)
        assert device is None or _get_device_index(device) >= 0  # as PyTorch's own function does

    def trial(*_: Any) -> None:
        if error:
            raise error

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fraction)
    monkeypatch.setattr(torch.cuda, "empty_cache", int)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(sizing, "try_step", trial)
    config, error = load_config(small_run(), "test"), None
    assert sizing.fits_cuda(config, 257, alone)
    error = torch.OutOfMemoryError("full")
    assert not sizing.fits_cuda(config, 257, alone)
    error = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        sizing.fits_cuda(config, 257, alone)
    assert shares == [sizing.CUDA_SHARE, 1.0] * 3  # restored
