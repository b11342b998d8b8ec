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

import pytest
import torch
import yaml

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.plan import make_plan
from accel_gpt.errors import UserError
from accel_gpt.launch import compile as compilation
from accel_gpt.launch import devices, precision
from tests.conftest import QUIET, launch
from tests.test_train import around_updates, records

Arguments = Callable[..., list[str]]
AUTO = ("--train.mixed_precision", "auto", "--train.compile", "auto", "--sample.every", "0")


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Simulate a CPU with these flags."""

    def give(*flags: str) -> None:
        for module in (devices, compilation):
            monkeypatch.setattr(module, "cpu_flags", lambda: frozenset(flags))

    return give


def saved(tmp_path: Path) -> tuple[str | None, bool]:
    """Return precision and compilation from the run's config.yaml."""
    train = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]
    return train["mixed_precision"], train["compile"]


@pytest.mark.parametrize(
    ("flag", "precision", "reason", "options"),
    [
        ("avx2", "no", ".* is not known to be faster in bf16", ()),
        ("amx_bf16", "bf16", ".* has instructions for it", ()),
        ("avx512_bf16", "bf16", ".* has instructions for it", ("--train.reproducible", "true")),
        ("avx2", "bf16", "set by accelerate launch", ()),
    ],
)
def test_the_cpu_decides_and_the_reason_is_printed(
    flag: str, precision: str, reason: str, options: tuple[str, ...], cpu: Callable[..., None],
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cpu(flag)
    by_launcher = "launch" in reason
    if by_launcher:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert launch(small_run(*AUTO, *options, "--train.max_steps", "3")) == 0
    assert saved(tmp_path) == (precision, False)
    shown = capsys.readouterr().err
    printed = {"no": "fp32", "bf16": "bf16"}[precision]
    assert re.search(rf"auto +precision {printed}: {reason}", shown)
    why = "compiling saves little on cpu without matrix units"
    why = "the run takes about 0 s" if flag == "amx_bf16" else why
    why = "train.reproducible is set" if options else why
    assert re.search(f"auto +not compiled: {why}", shown)
    assert f"precision {printed}, " in shown  # the precision that Accelerate uses


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


def test_a_run_that_moves_to_a_faster_device_keeps_what_it_does(
    cpu: Callable[..., None], small_run: Arguments, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cpu("avx2")
    assert launch(small_run(*AUTO, "--train.max_steps", "3")) == 0
    plain = ("--train.max_steps", "4", "--checkpoint.allow_change", "train.max_steps")
    cpu("amx_bf16")
    monkeypatch.setattr(compilation, "gains_from_compiling", lambda *_: (True, "saves 45%"))
    capsys.readouterr()
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
    ("capability", "budget", "expected"),
    [((7, 0), "null", True), ((6, 1), "null", False), ((9, 0), "2m", False), ((9, 0), "4m", True)],
)
def test_a_gpu_compiles_if_triton_supports_it_and_the_budget_is_long(
    capability: tuple[int, int],
    budget: str,
    expected: bool,
    small_run: Arguments,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(small_run(*AUTO, "--train.budget", budget), "test")
    state = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(compilation, "PartialState", lambda: state)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compilation.gains_from_compiling(config, make_plan(config, 1))[0] == expected


@pytest.mark.parametrize("compiler", ["works", "fails"])
def test_a_long_run_is_compiled_where_a_compiler_works(
    compiler: str,
    cpu: Callable[..., None],
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu("amx_bf16")
    monkeypatch.setattr(compilation, "cpu_seconds", lambda *_: 181.0)
    error = None if compiler == "works" else "no C++ compiler"
    monkeypatch.setattr(compilation, "compiler_error", lambda device: error)
    compiled: list[bool] = []
    monkeypatch.setattr("accel_gpt.model.gpt.GPT.compile", lambda _, **__: compiled.append(True))
    assert launch(small_run(*AUTO, "--optim.name", "adamw", "--train.max_steps", "4")) == 0
    assert saved(tmp_path)[1] == bool(compiled) == (error is None)
    shown = capsys.readouterr().err
    reason = (
        "compiling pays after 180 s"
        if error is None
        else "torch.compile does not work here (no C++ comp"
    )
    assert shown.count(reason) == 1


@pytest.mark.parametrize("requested", ["true", "graphs"])
def test_a_model_is_compiled_with_the_options_of_cuda_graphs(
    requested: str, small_run: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "compiler_error", lambda device: None)
    monkeypatch.setattr(compilation, "check_graphs", lambda plan: None)
    given: list[dict[str, bool] | None] = []
    monkeypatch.setattr("accel_gpt.model.gpt.GPT.compile", lambda _, options: given.append(options))
    options = (*QUIET, "--train.max_steps", "3", "--train.compile", requested)
    assert launch(small_run(*options)) == 0
    assert given == [dict(compilation.GRAPH_OPTIONS) if requested == "graphs" else None]


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
    plan = SimpleNamespace(world_size=world_size, accumulation_steps=accumulation_steps)
    with contextlib.nullcontext() if fits else pytest.raises(UserError, match="needs one GPU"):
        compilation.check_graphs(plan)  # type: ignore[arg-type]


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


def test_float32_products_on_a_cpu_are_exact_by_default(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    around_updates(monkeypatch, lambda _: found.append(torch.get_float32_matmul_precision()))
    for option in ("high", "auto"):
        words = ("--train.matmul_precision", option, "--train.max_steps", "3", *QUIET)
        assert launch(small_run(*words, "--out_dir", str(tmp_path / option))) == 0
    assert found == 3 * ["high"] + 3 * ["highest"]
