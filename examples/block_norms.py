"""Log the norm of each block's weights, and of its average gradient.

    accel-gpt train quickstart --code examples/block_norms.py
    accel-gpt report runs/quickstart

metrics.jsonl gets train/weight_norm/N and train/average_gradient_norm/N for block N. A step drops
its gradient before it is logged, so this is the norm of the moving average that the optimizer
keeps: the first moment of AdamW, or the momentum of Muon.
"""

import torch


def _norm(tensors):
    norm = torch.nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded by FSDP


def _average_gradient(state):
    return state["exp_avg"] if "exp_avg" in state else state["momentum_buffer"]


def metrics(run):
    found = {}
    for number, block in enumerate(run.gpt.blocks):
        weights = list(block.parameters())
        averages = [_average_gradient(run.optimizer.state[p]) for p in weights]
        found[f"train/weight_norm/{number}"] = _norm(weights)
        found[f"train/average_gradient_norm/{number}"] = _norm(averages)
    return found
