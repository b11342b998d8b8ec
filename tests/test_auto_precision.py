"""`auto`: what is chosen on which device, that it is told, and that a resumed run keeps it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import PartialState
from safetensors.torch import load_file

from accel_gpt import train
from accel_gpt.config.experiment import Config
from accel_gpt.cost import devices
from accel_gpt.training import accelerator as environment
from accel_gpt.training import auto
from tests.conftest import launch

Arguments = Callable[..., list[str]]
AUTO = ("--train.mixed_precision", "auto", "--train.compile", "auto", "--sample.every", "0")


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the CPU one that has these flags."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)

    def give(*flags: str) -> None:
        monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset(flags))

    return give


def saved(tmp_path: Path) -> tuple[str, bool]:
    """Precision and compilation as the run's config.yaml has them."""
    train = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]
    return train["mixed_precision"], train["compile"]


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        (("avx2",), None, None),
        (("avx512_bf16", "amx_bf16"), None, "amx_bf16"),
        (("avx512_bf16", "amx_bf16"), "AVX512_CORE_BF16", "avx512_bf16"),
        (("avx512_bf16", "amx_bf16"), "avx512_core", None),
        (("amx_bf16",), "DEFAULT", "amx_bf16"),
        (("asimd", "bf16"), None, "bf16"),
    ],
)
def test_instructions_are_those_that_onednn_may_use(
    flags: tuple[str, ...],
    limit: str | None,
    expected: str | None,
    cpu: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu(*flags)
    if limit:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert devices.bf16_instructions() == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("avx2",), ("no", "this CPU has no bf16 instructions")),
        (("amx_bf16",), ("bf16", r"this CPU has matrix units for it \(amx_bf16\)")),
        (("avx512_bf16",), ("no", "the run is too short to try avx512_bf16")),
    ],
)
def test_the_cpu_decides_and_the_reason_is_printed(
    flags: tuple[str, ...],
    expected: tuple[str, str],
    cpu: Callable[..., None],
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cpu(*flags)
    assert launch(small_run(*AUTO, "--train.max_steps", "4", "--schedule.warmup_steps", "0")) == 0
    assert saved(tmp_path) == (expected[0], False)
    shown = capsys.readouterr().err
    assert re.search(rf"auto +precision (fp32|bf16): {expected[1]}", shown)
    assert re.search("auto +not compiled: .* the run is estimated at 0 s", shown)
    computed = {"no": "fp32", "bf16": "bf16"}[expected[0]]
    assert f"precision {computed}, " in shown  # what Accelerate computes in
    assert "WARNING" not in shown


@pytest.mark.parametrize("faster", ["no", "bf16"])
def test_where_the_flags_do_not_tell_a_step_is_timed(
    faster: str,
    cpu: Callable[..., None],
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu("avx512_bf16")
    monkeypatch.setattr(auto, "SHORT", 0.0)
    timed = auto.step_seconds

    def seconds(*given: object) -> float:
        assert timed(*given) > 0  # type: ignore[arg-type]
        return 1.0 if given[-1] == faster else 2.0

    monkeypatch.setattr(auto, "step_seconds", seconds)
    assert launch(small_run(*AUTO[:2], *AUTO[4:], "--train.max_steps", "4")) == 0
    assert saved(tmp_path) == (faster, False)


def test_a_resumed_run_keeps_the_choice_and_its_bits(
    cpu: Callable[..., None], small_run: Arguments, tmp_path: Path
) -> None:
    whole, parts, moved = (tmp_path / name for name in ("whole", "parts", "moved"))
    same = (*AUTO, "--schedule.decay_steps", "10", "--checkpoint.allow_change", "train.max_steps")
    cpu("amx_bf16")
    assert launch(small_run(*same, "--out_dir", str(whole))) == 0
    assert launch(small_run(*same, "--out_dir", str(parts), "--train.max_steps", "8")) == 0
    cpu("avx2")
    assert launch(small_run(*same, "--out_dir", str(parts))) == 0
    start = ("--checkpoint.resume", str(whole / "checkpoints" / "step_00000008"))
    assert launch(small_run(*same, "--out_dir", str(moved), *start)) == 0
    weights = []
    for folder in (whole, parts, moved):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["train"]["mixed_precision"] == "bf16"
        weights.append(load_file(folder / "checkpoints" / "step_00000012" / "model.safetensors"))
    for name, expected in weights[0].items():
        assert all(torch.equal(other[name], expected) for other in weights[1:])


def test_what_the_launcher_asks_for_goes_before_the_table(
    cpu: Callable[..., None],
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu("avx2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert launch(small_run(*AUTO, "--train.max_steps", "4")) == 0
    assert saved(tmp_path)[0] == "bf16"
    shown = capsys.readouterr().err
    assert "precision bf16: set by accelerate launch" in shown
    assert shown.count("WARNING: mixed_precision is bf16, for which this CPU has no") == 1


@pytest.mark.parametrize("compiler", ["works", "fails"])
def test_a_long_run_is_compiled_where_a_compiler_works(
    compiler: str,
    small_run: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "run_seconds", lambda *_: 1000.0)
    error = None if compiler == "works" else "no C++ compiler"
    monkeypatch.setattr(auto, "compiler_error", lambda device: error)
    compiled: list[bool] = []
    monkeypatch.setattr("accel_gpt.model.gpt.GPT.compile", lambda _: compiled.append(True))
    assert launch(small_run(*AUTO, "--optim.name", "adamw", "--train.max_steps", "4")) == 0
    assert saved(tmp_path)[1] == bool(compiled) == (error is None)
    shown = capsys.readouterr().err
    reason = "it saves about" if error is None else "torch.compile does not work here (no C++ comp"
    assert shown.count(reason) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile uses torch.jit
@pytest.mark.parametrize("asked", ["true", "auto"])
def test_a_broken_compiler_is_one_sentence(
    asked: str, small_run: Arguments, tmp_path: Path
) -> None:
    script = "from accel_gpt.training import auto as a; a.run_seconds = lambda *_: 1e6; "
    script += (
        "import sys; from accel_gpt.train import main; from accel_gpt.console import run_main; "
    )
    words = small_run("--train.compile", asked, "--train.max_steps", "4")
    environment = {
        **os.environ,
        "CXX": "/bin/false",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "c"),
    }
    command = [sys.executable, "-c", script + "sys.exit(run_main(main, sys.argv[1:]))", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (2 if asked == "true" else 0)
    assert done.stderr.count("torch.compile does not work here (InvalidCxxCompiler") == 1
    assert "Traceback" not in done.stderr


def test_float32_products_on_a_cpu_are_exact_by_default(
    small_run: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    update = train.update

    def looked(run: train.Run) -> None:
        found.append(torch.get_float32_matmul_precision())
        update(run)

    monkeypatch.setattr(train, "update", looked)
    for asked in ("high", "auto"):
        words = ("--train.matmul_precision", asked, "--train.max_steps", "4")
        assert launch(small_run(*words, "--out_dir", str(tmp_path / asked))) == 0
    assert found == 4 * ["high"] + 4 * ["highest"]


@pytest.mark.usefixtures("settings_kept")
def test_use_cpu_of_the_accelerate_config_holds_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def state(cpu: bool, **_: object) -> PartialState:
        asked.append(cpu)
        return PartialState(cpu=True)

    monkeypatch.setattr(environment, "PartialState", state)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    for use_cpu in ("false", "true"):
        monkeypatch.setenv("ACCELERATE_USE_CPU", use_cpu)
        environment.start_processes(Config())
    assert asked == [False, True]


def test_a_reproducible_run_never_chooses_by_the_clock(
    cpu: Callable[..., None],
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu("avx512_bf16")
    monkeypatch.setattr(auto, "SHORT", 0.0)
    monkeypatch.setattr(auto, "step_seconds", None)
    words = (*AUTO, "--train.reproducible", "true", "--train.max_steps", "4")
    assert launch(small_run(*words)) == 0
    assert saved(tmp_path) == ("no", False)
