"""Run loss, model and optimizers on CUDA tensors without storage, on a machine without CUDA.

    python -m tests.helpers.fake_cuda LIBRARY

LIBRARY registers a device guard for CUDA that does nothing, so that a build of PyTorch without CUDA
can make views of such tensors. An operation that mixes devices or shapes raises an error. Prints a
JSON object: the chunk of the loss for each form, and what each preset made.
"""

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.model import loss
from accel_gpt.model.gpt import GPT
from accel_gpt.optim.groups import make_optimizer, set_lr

VOCAB, ROWS, C = 50257, 50304, 768
H100_BYTES = 85e9
SHAPE = {"n_layer": 12, "n_head": 12, "n_embd": C, "block_size": 1024}


def main() -> None:
    """Print what was computed, as JSON."""
    torch.ops.load_library(sys.argv[1])
    with contextlib.ExitStack() as stack:
        for name, value in {
            "torch.cuda.is_available": True,
            "torch.cuda.is_bf16_supported": True,
            "torch.cuda.current_device": 0,
            "torch.cuda.get_device_properties": SimpleNamespace(total_memory=H100_BYTES),
            "torch.cuda._lazy_init": None,
            "accel_gpt.model.loss.adds_in_float32": True,
        }.items():
            stack.enter_context(mock.patch(name, lambda *_, _value=value, **__: _value))
        stack.enter_context(mock.patch.object(loss, "_compile", lambda function: function))
        stack.enter_context(FakeTensorMode())
        chunks = {}
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.half), ("fp32", torch.float)):
            for compiled in (False, True):
                for cap in (0.0, 15.0):
                    form = f"{name}{', compiled' * compiled}{', capped' * bool(cap)}"
                    chunks[form] = run_loss(dtype, cap, compiled)
        presets = {preset: run_model(preset) for preset in PRESETS}
    sys.stdout.write(json.dumps({"chunks": chunks, "presets": presets}) + "\n")


def run_loss(dtype: torch.dtype, cap: float, compiled: bool) -> int:
    """Compute loss and gradients of 40,000 tokens; return the tokens of a chunk."""
    x = torch.empty(40_000, C, dtype=dtype, device="cuda")
    weight = torch.empty(ROWS, C, device="cuda")
    targets = torch.empty(40_000, dtype=torch.long, device="cuda")
    operation = loss._loss_and_gradients._init_fn
    total, dx, dw = operation(x, weight, targets, VOCAB, cap, compiled)
    losses = loss._token_losses._init_fn(x, weight, targets, VOCAB, cap, compiled)
    for result in (total, dx, dw, losses):
        assert result.is_cuda
    assert (total.dtype, dx.dtype, dw.dtype) == (torch.float32, dtype, torch.float32)
    return loss._chunk_size(weight.to(dtype), cap, compiled)


def run_model(preset: str) -> dict[str, Any]:
    """Run a forward pass of GPT-2's size under autocast, and an update of each optimizer."""
    with torch.device("cuda"):
        model = GPT(ModelConfig(**{**SHAPE, **PRESETS[preset]}), VOCAB, init=False)
        model.tie_weights()
        model.build_rotary()
    model.bf16_residual = True
    streams: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *given: streams.append(given[-1]))
    tokens = torch.empty(8, 1024, dtype=torch.long, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        value = model.train()(tokens, tokens)
    for name in ("adamw", "muon"):
        optimizer = make_optimizer(model, OptimConfig(name))  # type: ignore[arg-type]  # a Literal
        set_lr(optimizer, 1.0)
        for p in model.parameters():
            p.grad = torch.empty_like(p)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.clip(norm, 1.0)
        optimizer.skip = (~torch.isfinite(norm)).float()
        optimizer.step()
        for state in optimizer.state.values():
            assert all(tensor.is_cuda for tensor in state.values())
    return {
        "loss": str(value.dtype),
        "stream": sorted({str(x.dtype) for x in streams}),
        "device": sorted({x.device.type for x in (value, *streams)}),
    }


if __name__ == "__main__":
    main()
