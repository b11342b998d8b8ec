"""Untested combinations are rejected; compiled code goes to a private folder."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs, DistributedType

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.errors import UserError
from accel_gpt.launch import accelerator as accelerator_module
from accel_gpt.launch import compile as compilation
from accel_gpt.launch import process, unsupported
from accel_gpt.launch.accelerator import build_model, set_up_model
from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import Block, Matrix
from accel_gpt.optim.groups import make_optimizer
from tests.conftest import QUIET, launch, tiny

Arguments = Callable[..., list[str]]
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP version 1"),
        ({**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
        ({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "activation_checkpointing"),
        ({"PARALLELISM_CONFIG_TP_SIZE": "2"}, "tensor parallelism"),
        ({**FSDP2, "PARALLELISM_CONFIG_CP_SIZE": "2"}, "context parallelism"),
        ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "a parallelism_config without FSDP"),
        ({**FSDP2, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "3"}, "sharding over 3 of 1 processes"),
        ({"ACCELERATE_MIXED_PRECISION": "int3"}, "mixed_precision int3"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend INDUCTOR"),
        ({"ACCELERATE_FP8_BACKEND": "TE"}, "fp8 backend TE"),
    ],
)
def test_what_the_accelerate_config_asks_for_is_refused_by_name(
    environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {**FSDP2, "FSDP_OFFLOAD_PARAMS": "false", "ACCELERATE_DYNAMO_BACKEND": "NO"}
    with monkeypatch.context() as patch:
        for key, value in {**defaults, "PARALLELISM_CONFIG_TP_SIZE": "1"}.items():
            patch.setenv(key, value)
        unsupported.check_accelerate_config()
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=f"{name}.* in the accelerate config is not supported"):
        unsupported.check_accelerate_config()


@pytest.mark.parametrize(
    ("kind", "precision", "device", "exact", "message"),
    [
        ("MULTI_XPU", "no", "xpu", False, "started MULTI_XPU but it is not supported"),
        ("MULTI_CPU", "fp16", "cpu", False, "a CPU cannot train in fp16"),
        ("FSDP", "fp16", "cuda", False, "fp16 but under FSDP"),
        (
            "FSDP",
            "no",
            "cuda",
            True,
            "reproducible is true but FSDP sums",
        ),
        ("MULTI_CPU", "fp8", "cpu", True, "cannot sum the scaled gradients of fp8"),
    ],
)
def test_what_accelerate_started_is_refused_by_name(
    kind: str, precision: str, device: str, exact: bool, message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def check(kind: str, precision: str, device: str, exact: bool) -> None:
        started: Any = SimpleNamespace(
            distributed_type=DistributedType(kind), mixed_precision=precision,
            device=torch.device(device),
        )  # fmt: skip
        unsupported.check_engine(started, TrainConfig(reproducible=exact), dropout=0.0)

    started: Any = SimpleNamespace(
        distributed_type=DistributedType.NO, mixed_precision="no", device=torch.device("mps")
    )
    blocks = TrainConfig(activation_checkpointing="blocks")
    unsupported.check_engine(started, blocks, dropout=0.0)
    with pytest.raises(UserError, match="blocks but on mps PyTorch recomputes"):
        unsupported.check_engine(started, blocks, dropout=0.1)
    for fine in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        check(fine, "bf16", "cuda", exact=False)
    check("MULTI_CPU", "bf16", "cpu", exact=True)
    with pytest.raises(UserError, match=message):
        check(kind, precision, device, exact)
    for key, value in FSDP2.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="sets FSDP but Accelerate started NO on cpu"):
        check("NO", "no", "cpu", exact=False)  # without a launcher


@pytest.mark.usefixtures("settings_kept")
def test_use_cpu_of_the_accelerate_config_holds_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[bool] = []

    def state(cpu: bool, **_: object) -> PartialState:
        started.append(cpu)
        return PartialState(cpu=True)

    monkeypatch.setattr(process, "PartialState", state)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    for use_cpu in ("false", "true"):
        monkeypatch.setenv("ACCELERATE_USE_CPU", use_cpu)
        process.join_ranks(TrainConfig())
    assert started == [False, True]


@pytest.mark.usefixtures("settings_kept")
def test_a_process_that_sees_one_gpu_of_several_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate gives DDP the local rank as the index of the GPU."""
    device = torch.device("cuda", 0)
    state = SimpleNamespace(num_processes=2, local_process_index=1, device=device)
    monkeypatch.setattr(process, "PartialState", lambda **_: state)
    monkeypatch.setattr(process, "world_size", lambda: 2)
    process.join_ranks(TrainConfig())
    assert state.local_process_index == 0


@pytest.mark.parametrize(
    ("precision", "checkpointing", "passes", "dtype"),
    [("bf16", "none", 1, torch.bfloat16), ("no", "blocks", 2, torch.float32)],
)
def test_the_type_of_the_residual_stream_is_that_of_the_precision_and_blocks_are_recomputed(
    precision: str,
    checkpointing: Any,
    passes: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[torch.dtype] = []
    forward = Block.forward

    def watched(block: Block, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        seen.append(x.dtype)
        return forward(block, x, *rest, **named)

    monkeypatch.setattr(Block, "forward", watched)
    gpt = GPT(tiny(), 100)
    set_up_model(gpt, TrainConfig(activation_checkpointing=checkpointing))
    tokens = torch.zeros((1, 8), dtype=torch.long)
    with Accelerator(cpu=True, mixed_precision=precision).autocast():
        loss = gpt(tokens, tokens)
    loss.backward()
    assert seen == [dtype] * (2 * passes)  # of two blocks


def test_threads_are_those_of_the_user_but_not_those_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(5)))
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")  # of outer and nested regions
    assert process.cpu_threads(TrainConfig()) == 3
    assert process.cpu_threads(TrainConfig(reproducible=True)) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun sets it
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert process.cpu_threads(TrainConfig()) == 5


# --------------------------------------------------------------------------- fp8


def test_fp8_on_a_cpu_is_refused(
    small_run: Arguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch(small_run("--train.mixed_precision", "fp8")) == 2
    assert "there is no GPU of compute capability 8.9 or more" in capsys.readouterr().err
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")  # set by accelerate launch
    assert launch(small_run()) == 2


def test_fp8_without_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(unsupported, "is_torchao_available", lambda: False)
    with pytest.raises(UserError, match="torchao is not installed"):
        unsupported.check_fp8("fp8")


class Doubled(Matrix):
    """A linear layer that computes something else than a product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class DrawnAtOnes(Matrix):
    """A linear layer with a method that an initialization may call."""

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)


def double_here(layer: Matrix) -> None:
    """Replace `forward` of one layer."""
    layer.forward = lambda x: 2 * torch.nn.functional.linear(x, layer.weight)  # type: ignore[method-assign]


class OntoResidual(torch.nn.Linear):
    """A linear layer whose attributes are those of its class."""

    muon_rows = ()
    onto_residual = True


def build(precision: str, model: ModelConfig) -> tuple[Any, Any]:
    """Build a model on a CPU, with fp8 emulated, and the optimizer that its layers ask for."""
    recipe = []
    if precision == "fp8":
        float8 = pytest.importorskip("torchao.float8")
        recipe = [AORecipeKwargs(config=float8.Float8LinearConfig(emulate=True))]
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=recipe)
    config = Config(model=model, optim=OptimConfig("muon"))
    gpt, _, _ = build_model(config, accelerator, 256)
    torch.manual_seed(0)
    gpt.init_weights()
    return gpt, make_optimizer(gpt, replace(config.optim, residual_lr_factor=0.5))


@pytest.mark.parametrize("own_class", [False, True], ids=["ours", "own class"])
def test_a_layer_in_fp8_begins_and_trains_as_in_bf16(
    own_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*arguments: Any) -> GPT:
        gpt = GPT(model, 256)
        for block in gpt.blocks if own_class else ():
            old = block.mlp.down
            block.mlp.down = OntoResidual(old.in_features, old.out_features)
        return gpt

    monkeypatch.setattr(accelerator_module, "make_model", made)
    model = tiny("gpt2", n_embd=64)
    plain, plain_optimizer = build("bf16", model)
    gpt, optimizer = build("fp8", model)
    replaced = {type(block.mlp.down).__name__ for block in gpt.blocks}
    assert replaced == {"Float8Linear"}
    for (name, expected), weight in zip(plain.named_parameters(), gpt.parameters(), strict=True):
        assert torch.equal(weight, expected), name
    names = {id(weight): name for name, weight in gpt.named_parameters()}
    names |= {id(weight): name for name, weight in plain.named_parameters()}
    groups, plain_groups = (
        [[names[id(weight)] for weight in group["params"]] for group in one.param_groups]
        for one in (optimizer, plain_optimizer)
    )
    assert groups == plain_groups


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "__class__", Doubled),
        lambda layer: setattr(layer, "__class__", DrawnAtOnes),
        double_here,
        lambda layer: layer.register_forward_hook(lambda _, given, out: 2 * out),
        lambda layer: layer.register_forward_pre_hook(lambda _, given: 2 * given[0]),
        lambda layer: layer.register_parameter("gain", torch.nn.Parameter(torch.ones(1))),
    ],
    ids=["class", "method", "forward", "hook", "pre-hook", "weights"],
)
def test_a_layer_that_computes_more_than_a_product_is_not_replaced_in_fp8(
    change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*arguments: Any) -> GPT:
        gpt = GPT(tiny("gpt2", n_embd=64), 256)
        change(gpt.blocks[1].mlp.up)
        return gpt

    monkeypatch.setattr(accelerator_module, "make_model", changed)
    gpt, _ = build("fp8", tiny("gpt2", n_embd=64))
    kinds = {name: type(layer).__name__ for name, layer in gpt.named_modules()}
    assert kinds["blocks.1.mlp.up"] != "Float8Linear"
    assert kinds["blocks.1.mlp.down"] == kinds["blocks.0.mlp.up"] == "Float8Linear"
    assert kinds["blocks.0.attn.qkv"] == "Matrix"  # Accelerate leaves out the first and the last
    assert kinds["head"] == "Head"


# --------------------------------------------------------------------------- compiled code


def test_a_compiled_run_keeps_its_code_where_nobody_else_writes(
    small_run: Arguments, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "cache" / "accel_gpt" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(compilation.CACHE, "given")
    compilation.use_compile_cache()
    assert os.environ[compilation.CACHE] == "given"
    assert not cache.exists()
    monkeypatch.delenv(compilation.CACHE)
    folders: list[str] = []
    monkeypatch.setattr(
        GPT, "compile", lambda model, **_: folders.append(os.environ[compilation.CACHE])
    )
    monkeypatch.setattr(compilation, "compiler_error", lambda device: None)
    assert launch(small_run(*QUIET, "--train.max_steps", "3", "--train.compile")) == 0
    assert folders == [str(cache)]
    assert cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv(compilation.CACHE, raising=False)
    cache.chmod(0o770)
    with pytest.raises(UserError, match=r"other users can write to .* chmod 700"):
        compilation.use_compile_cache()
    assert compilation.CACHE not in os.environ


@pytest.mark.gpu
@pytest.mark.usefixtures("settings_kept")
def test_reproducible_attention_on_cuda_is_flash_and_not_cudnn(small_run: Arguments) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs compute capability 8.0")
    process.join_ranks(load_config(small_run("--train.reproducible"), "test").train)
    q = torch.empty(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    given = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)  # causal
    assert torch.backends.cuda.can_use_flash_attention(given)
    assert not torch.backends.cuda.can_use_cudnn_attention(given)
