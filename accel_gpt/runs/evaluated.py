"""Evaluate other weights than the trained ones: those that `evaluated()` of --code returns.

They may be an average of the weights over the steps. Validation, samples and the best checkpoint
use them. Each checkpoint stores them beside the trained weights, and every command opens them.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from accel_gpt.errors import UserError, did_you_mean, require
from accel_gpt.launch.context import Context
from accel_gpt.model.language_model import LanguageModel
from accel_gpt.model.sharding import is_sharded, local_shard
from accel_gpt.optim.own import OwnOptimizer
from accel_gpt.own_code import unexpected
from accel_gpt.runs.state import TrainState
from accel_gpt.runs.tensor_files import weights_of


class EvaluatedWeights:
    """The weights of a run that are evaluated."""

    def __init__(
        self, context: Context, gpt: LanguageModel, optimizer: AcceleratedOptimizer
    ) -> None:
        self.context = context
        self.gpt = gpt
        optimizer_of_torch = optimizer.optimizer
        if isinstance(optimizer_of_torch, OwnOptimizer):
            optimizer_of_torch = optimizer_of_torch.inner
        self.optimizer = optimizer_of_torch

    @torch.no_grad()
    def tensors(self, state: TrainState) -> dict[str, Tensor] | None:
        """Return all evaluated weights by name; None: the trained ones, also before the first step.

        Weights that `evaluated()` leaves out are the trained ones. Under FSDP, each rank returns
        its shards. Raises `UserError` unless the function returns weights of the model.
        """
        function = self.context.config.own.evaluated
        if function is None or not state.step:
            return None
        trained = weights_of(self.gpt)
        returned = function(
            model=self.gpt,
            optimizer=self.optimizer,
            step=state.step,
            config=self.context.config,
            plan=self.context.plan,
        )
        if not isinstance(returned, Mapping):
            raise unexpected(function.place, returned, "{name: tensor}")
        aliases = self.gpt.state_dict().keys() - trained.keys()  # further names of tied weights
        weights = dict(trained)
        for name, tensor in returned.items():
            if name in aliases:
                continue
            if name not in trained:
                near = did_you_mean(
                    str(name), trained, "give the names of model.named_parameters()"
                )
                raise UserError(f"{function.place} returned {name}, which is no weight; {near}")
            weight = trained[name]
            fits = (
                isinstance(tensor, Tensor)
                and tensor.shape == weight.shape
                and is_sharded(tensor) == is_sharded(weight)
            )
            if not fits:
                kind = type(weight).__name__
                expected = f"a {kind} of shape {tuple(weight.shape)}"
                raise unexpected(f"{function.place}: {name}", tensor, expected)
            weights[name] = tensor.detach().to(weight.dtype, copy=True)  # it may be a weight itself
        return weights

    def check(self, state: TrainState) -> None:
        """Raise `UserError` if `evaluated()` fails, or changes the weights that it is given."""
        function = self.context.config.own.evaluated
        if function is None:
            return
        before = self.copy_of_model()
        self.tensors(state)
        for name, weight in weights_of(self.gpt).items():
            require(
                torch.equal(local_shard(weight), local_shard(before[name])),
                f"{function.place} changes {name} of the model; return new tensors",
            )

    @contextlib.contextmanager
    def used(self, state: TrainState) -> Iterator[None]:
        """Let the model have the evaluated weights inside the block, and the trained ones after."""
        evaluated = self.tensors(state)
        if evaluated is None:
            yield
            return
        trained = self.copy_of_model()
        try:
            self.copy_into_model(evaluated)
            yield
        finally:
            self.copy_into_model(trained)

    def copy_of_model(self) -> dict[str, Tensor]:
        """Return a copy of the weights that the model has."""
        return {name: weight.clone() for name, weight in weights_of(self.gpt).items()}

    @torch.no_grad()
    def copy_into_model(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` into the tensors of the model, which DDP, FSDP and the optimizer hold."""
        for name, weight in weights_of(self.gpt).items():
            weight.copy_(weights[name])
