"""How a model is evaluated: without dropout and gradients, and as it was afterwards."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module, compiled: bool = True) -> Iterator[None]:
    """Switch `model` to evaluation mode, without gradients; restore its mode, also after an error.

    A compiled model runs uncompiled unless `compiled`, and always on a CPU: there compiling the
    evaluation takes 10 to 20 s and makes it no faster (benchmarks/RESULTS.md).
    """
    eager = not compiled or next(model.parameters()).device.type == "cpu"
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), uncompiled(model.modules()) if eager else contextlib.nullcontext():
            yield
    finally:
        model.train(training)


@contextlib.contextmanager
def uncompiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run `modules` that were compiled in place as they were before."""
    compiled = [(m, m._compiled_call_impl) for m in modules if m._compiled_call_impl is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
