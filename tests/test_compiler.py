"""fp8 is refused by name where it would not be; compiled code is kept where only we write."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.errors import UserError
from accel_gpt.model.gpt import GPT
from accel_gpt.training import accelerator, auto
from tests.conftest import launch

Arguments = Callable[..., list[str]]
FP8 = Config(train=TrainConfig(mixed_precision="fp8"))


def card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], torchao: bool) -> None:
    """A machine with such a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(accelerator, "find_spec", lambda name: object() if torchao else None)


def test_fp8_on_a_cpu_is_refused(
    small_run: Arguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(small_run("--train.mixed_precision", "fp8")) == 2
    error = capsys.readouterr().err
    assert "needs a GPU of compute capability 8.9 or more, of which there is none" in error
    assert "set train.mixed_precision to bf16" in error
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")  # of accelerate launch
    assert launch(small_run()) == 2
    assert launch(small_run("--train.mixed_precision", "no", "--train.max_steps", "3")) == 0


@pytest.mark.parametrize(
    ("capability", "torchao", "named", "unnamed"),
    [
        ((8, 0), True, "A100 has 8.0", "torchao"),
        ((8, 0), False, "A100 has 8.0 and the package torchao", "none"),
        ((9, 0), False, "needs the package torchao", "capability"),
    ],
)
def test_what_fp8_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    torchao: bool,
    named: str,
    unnamed: str,
) -> None:
    card(monkeypatch, capability, torchao)
    with pytest.raises(UserError) as error:
        accelerator.check_fp8(FP8)
    assert named in str(error.value)
    assert unnamed not in str(error.value)


def test_fp8_is_taken_where_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, (8, 9), True)
    accelerator.check_fp8(FP8)


def test_compiled_code_is_kept_where_nobody_else_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(auto.CACHE, "given")
    auto.use_compile_cache()
    assert os.environ[auto.CACHE] == "given"
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv(auto.CACHE)
    auto.use_compile_cache()
    folder = tmp_path / "accel_gpt" / "compiled"
    assert os.environ[auto.CACHE] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv(auto.CACHE)
    folder.chmod(0o770)
    with pytest.raises(UserError, match="can be written by others; chmod 700 it"):
        auto.use_compile_cache()
    assert auto.CACHE not in os.environ


def test_a_compiled_run_has_its_cache_before_it_compiles(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(auto.CACHE, "")  # put back what was there afterwards
    monkeypatch.delenv(auto.CACHE)
    places: list[str] = []
    monkeypatch.setattr(GPT, "compile", lambda model: places.append(os.environ[auto.CACHE]))
    monkeypatch.setattr("accel_gpt.training.auto.compiler_error", lambda device: None)
    quiet = ("--eval.every", "0", "--sample.every", "0", "--train.max_steps", "3")
    assert launch(small_run(*quiet)) == 0
    assert not (tmp_path / "cache").exists()
    again = ("--out_dir", str(tmp_path / "compiled"), "--train.compile")
    assert launch(small_run(*quiet, *again)) == 0
    assert places == [str(tmp_path / "cache" / "accel_gpt" / "compiled")]
