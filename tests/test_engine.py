"""Engines that no test covers are refused by name; an optimizer without the weights stops a run."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

from accel_gpt.config.experiment import Config
from accel_gpt.config.optim import OptimConfig
from accel_gpt.errors import UserError
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer
from accel_gpt.training import accelerator as engine
from tests.conftest import launch, tiny

Arguments = Callable[..., list[str]]
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "has DeepSpeed, which is not supported"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "has Megatron-LM"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP version 1, .*set fsdp_version: 2"),
        ({**FSDP2, "FSDP_VERSION": "1"}, "FSDP version 1"),
        ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
        (
            {**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"},
            "use train.activation_checkpointing blocks",
        ),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tensor parallelism over 2 processes"),
        ({**FSDP2, "PARALLELISM_CONFIG_CP_SIZE": "2"}, "context parallelism over 2"),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "a parallelism_config without FSDP"),
        ({**FSDP2, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "3"}, "over 3 processes, .* 1 were started"),
        ({"ACCELERATE_MIXED_PRECISION": "int3"}, "mixed_precision int3, .*; set one of no, bf16"),
        (
            {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
            "INDUCTOR, .* set train.compile",
        ),
    ],
)
def test_what_the_accelerate_config_asks_for_is_refused_by_name(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.check_accelerate_config()
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=message):
        engine.check_accelerate_config()


def test_what_accelerate_launch_sets_by_default_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {
        **FSDP2,
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "PARALLELISM_CONFIG_TP_SIZE": "1",
    }.items():
        monkeypatch.setenv(key, value)
    engine.check_accelerate_config()


def test_a_refusal_is_one_sentence_and_exit_code_2(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert launch(small_run()) == 2
    told = capsys.readouterr().err
    assert "DeepSpeed" in told
    assert "Traceback" not in told


def test_fsdp_without_gpus_is_refused(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accelerate would train with plain processes, in silence."""
    for key, value in FSDP2.items():
        monkeypatch.setenv(key, value)
    assert launch(small_run()) == 2
    assert "asks for FSDP but Accelerate started NO on cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "precision", "device", "message"),
    [
        ("MULTI_XPU", "no", "xpu", "started MULTI_XPU, which is not supported"),
        ("MULTI_CPU", "fp16", "cpu", "no fp16 training"),
        ("FSDP", "fp16", "cuda", "fp16 but the model is sharded by FSDP"),
    ],
)
def test_what_accelerate_started_is_refused_by_name(
    kind: str, precision: str, device: str, message: str
) -> None:
    def started(kind: str, precision: str, device: str) -> Any:
        given = {"distributed_type": DistributedType(kind), "mixed_precision": precision}
        return SimpleNamespace(**given, device=torch.device(device))

    for fine in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        engine.check_engine(started(fine, "bf16", "cuda"), Config())
    with pytest.raises(UserError, match=message):
        engine.check_engine(started(kind, precision, device), Config())


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model = GPT(tiny(), 64)
    optimizer = make_optimizer(model, OptimConfig())
    engine.check_parameters(model, optimizer)
    replaced = model.blocks[0].attn.qkv  # as torchao's all-gather in fp8 does
    replaced.weight = torch.nn.Parameter(replaced.weight.detach().clone())
    with pytest.raises(UserError, match=r"holds 27 of the model's 28 .*blocks\.0\.attn\.qkv\.w"):
        engine.check_parameters(model, optimizer)
    smaller = GPT(tiny(n_layer=1), 64)
    with pytest.raises(UserError, match="the optimizer holds 0 of"):
        engine.check_parameters(smaller, optimizer)


def test_fp8_without_all_gathers_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those replace the weights by new parameters, which the optimizer does not hold."""
    pytest.importorskip("torchao", reason="fp8 needs torchao")
    assert engine.fp8_recipe(Config()) == []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    (recipe,) = engine.fp8_recipe(Config())
    assert recipe.config.enable_fsdp_float8_all_gather is False
    assert recipe.config.pad_inner_dim
