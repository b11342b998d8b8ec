"""`auto`: the choice for each device is printed, and a resumed run keeps it."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.plan import Plan
from accel_gpt.errors import UserError
from accel_gpt.launch import compile as compilation
from accel_gpt.launch import devices, precision, resolve
from accel_gpt.launch.accelerator import set_up_model
from accel_gpt.launch.process import join_ranks
from accel_gpt.model.gpt import GPT
from tests.conftest import QUIET, launch, tiny
from tests.test_train import records

Arguments = Callable[..., list[str]]
AUTO = ("--train.mixed_precision", "auto", "--train.compile", "auto", "--sample.every", "0")


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Simulate a CPU with these flags."""

    def give(*flags: str) -> None:
        monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset(flags))

    return give


def saved(tmp_path: Path) -> tuple[str | None, bool]:
    """Return precision and compilation from the run's config.yaml."""
    train = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]
    return train["mixed_precision"], train["compile"]


def test_what_is_chosen_is_printed_and_recorded(
    cpu: Callable[..., None], small_run: Arguments, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also by a later launch, on a device that would choose otherwise: it keeps what was done."""
    cpu("avx2")
    assert launch(small_run(*AUTO, "--train.max_steps", "3")) == 0
    shown = capsys.readouterr().err
    assert re.search("auto +precision fp32: .* is not known to be faster in bf16", shown)
    assert "auto     not compiled: compiling saves little on cpu" in shown
    assert "precision fp32, " in shown  # the precision that Accelerate uses
    assert saved(tmp_path) == ("no", False)
    plain = ("--train.max_steps", "4", "--checkpoint.allow_change", "train.max_steps")
    cpu("amx_bf16")
    monkeypatch.setattr(resolve, "choose_compile", lambda *_: (True, "saves 45%"))
    assert launch(small_run(*AUTO, *plain)) == 0
    shown = capsys.readouterr().err
    file = tmp_path / "run" / "config.yaml"
    assert f"auto     precision fp32: as in {file}\n" in shown
    assert f"auto     not compiled: as in {file}\n" in shown
    assert saved(tmp_path) == ("no", False)
    launches = json.loads((tmp_path / "run" / "run.json").read_text())["launches"]
    for launched in launches:
        asked = launched["asked"]
        assert (asked["train.mixed_precision"], asked["train.compile"]) == ("auto", "auto")


@pytest.mark.parametrize(
    ("flag", "launcher", "expected"),
    [
        ("avx2", "no", "no"),
        ("amx_bf16", "no", "bf16"),
        ("avx512_bf16", "no", "bf16"),
        ("avx2", "bf16", "bf16"),
    ],
)
def test_a_cpu_decides_unless_the_launcher_does(
    flag: str, launcher: str, expected: str, cpu: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cpu(flag)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    assert precision.choose_precision(reproducible=True)[0] == expected


@pytest.mark.parametrize(
    ("gpu", "capability", "environment", "reproducible", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), {}, False, "bf16"),  # torchrun sets no precision
        ("NVIDIA A100-SXM4-80GB", (8, 0), {"ACCELERATE_MIXED_PRECISION": "no"}, False, "bf16"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), {"ACCELERATE_MIXED_PRECISION": "fp16"}, False, "fp16"),
        ("NVIDIA GeForce GTX 1660", (7, 5), {}, False, "no"),
        ("Tesla T4", (7, 5), {}, False, "fp16"),
        ("Tesla T4", (7, 5), {"ACCELERATE_USE_FSDP": "true"}, False, "no"),
        ("Tesla T4", (7, 5), {}, True, "no"),
    ],
)
def test_a_gpu_decides_unless_the_launcher_does(
    gpu: str, capability: tuple[int, int], environment: dict[str, str], reproducible: bool,
    expected: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    state = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(precision, "PartialState", lambda: state)
    monkeypatch.setattr(precision, "device_name", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert precision.choose_precision(reproducible)[0] == expected


@pytest.mark.parametrize(
    ("capability", "budget", "expected"),
    [((7, 0), None, True), ((6, 1), None, False), ((9, 0), "2m", False), ((9, 0), "4m", True)],
)
def test_a_gpu_compiles_if_triton_supports_it_and_the_budget_is_long(
    capability: tuple[int, int],
    budget: str | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(compilation, "PartialState", lambda: state)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = Config(train=TrainConfig(max_steps=None if budget else 10, budget=budget))
    assert compilation.choose_compile(config)[0] == expected


@pytest.mark.parametrize("error", [None, "no C++ compiler"])
def test_a_run_is_compiled_where_a_compiler_works(
    error: str | None, small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(resolve, "choose_compile", lambda *_: (True, "saves 45%"))
    monkeypatch.setattr(compilation, "compiler_error", lambda device: error)
    compiled: list[bool] = []
    monkeypatch.setattr("accel_gpt.model.gpt.GPT.compile", lambda _, **__: compiled.append(True))
    assert launch(small_run(*AUTO, *QUIET, "--train.max_steps", "3")) == 0
    assert saved(tmp_path)[1] == bool(compiled) == (error is None)
    reason = f"torch.compile does not work here ({error})" if error else "saves 45%"
    assert capsys.readouterr().err.count(reason) == 1


@pytest.mark.parametrize("requested", ["graphs", True, False])
def test_a_model_is_compiled_with_the_options_of_cuda_graphs(
    requested: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, bool] | None] = []
    monkeypatch.setattr("accel_gpt.model.gpt.GPT.compile", lambda _, options: given.append(options))
    set_up_model(GPT(tiny(), 100), TrainConfig(compile=requested))
    options = dict(compilation.GRAPH_OPTIONS) if requested == "graphs" else None
    assert given == [options] * bool(requested)


@pytest.mark.parametrize(
    ("device", "world_size", "accumulation_steps", "fits"),
    [
        ("cuda", 1, 1, True),
        ("cpu", 1, 1, False),
        ("cuda", 2, 1, False),
        ("cuda", 1, 4, False),
    ],
)
def test_cuda_graphs_need_one_gpu_and_one_micro_step(
    device: str,
    world_size: int,
    accumulation_steps: int,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(device=torch.device(device))
    monkeypatch.setattr(compilation, "PartialState", lambda: state)
    monkeypatch.setattr(compilation, "compiler_error_on_any_machine", lambda: None)
    plan = Plan(world_size, 1, 8, accumulation_steps, 9, 0, 9)
    compilation.check_compile(TrainConfig(compile=True), plan)
    with contextlib.nullcontext() if fits else pytest.raises(UserError, match="needs one GPU"):
        compilation.check_compile(TrainConfig(compile="graphs"), plan)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, to get its memory
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile uses torch.jit
def test_cuda_graphs_change_no_loss(small_run: Arguments, tmp_path: Path) -> None:
    losses = []
    for compiled in ("true", "graphs"):
        options = (*QUIET, "--train.compile", compiled, "--out_dir", str(tmp_path / compiled))
        assert launch(small_run(*options)) == 0
        losses.append([line["train/loss"] for line in records(tmp_path / compiled)])
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile uses torch.jit
def test_a_broken_compiler_is_one_sentence(small_run: Arguments, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from accel_gpt.commands.train import main; from accel_gpt.console import run_main\n"
        "sys.exit(run_main(main, sys.argv[1:]))"
    )
    words = small_run("--train.compile", "true", "--train.max_steps", "4")
    words += ["--train.mixed_precision", "bf16"]
    broken = {**os.environ, "CXX": "/bin/false", compilation.CACHE: str(tmp_path / "c")}
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, env=broken, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("torch.compile does not work here (InvalidCxxCompiler") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("settings_kept")
def test_float32_products_on_a_cpu_are_exact_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    join_ranks(TrainConfig(matmul_precision="high"))
    assert torch.get_float32_matmul_precision() == "high"
    join_ranks(TrainConfig())
    assert torch.get_float32_matmul_precision() == "highest"
