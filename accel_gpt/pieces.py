"""The pieces of `accel-gpt train`, for a training loop of your own.

docs/how-to/own-loop.md describes each, and `examples/own_loop.py` uses them all. Their names stay,
with the arguments, methods and attributes that the example uses. All other names may change.
"""

from accel_gpt.commands.resolve import load_config
from accel_gpt.commands.train import find_initial_weights
from accel_gpt.console import run_main
from accel_gpt.data.corpus import open_corpus
from accel_gpt.evals.evaluation import evaluate, open_evaluations
from accel_gpt.launch.accelerator import build_model
from accel_gpt.launch.process import make_host_group
from accel_gpt.launch.resolve import resolve
from accel_gpt.launch.setup import new_state
from accel_gpt.optim.groups import configure, fraction_at, set_rates
from accel_gpt.prepare.missing_data import ensure_data
from accel_gpt.runs.resume import choose_checkpoint, restore
from accel_gpt.runs.saving import CheckpointWriter
from accel_gpt.training.gradients import make_gradients, micro_batches
from accel_gpt.training.guard import StepGuard
from accel_gpt.training.losses import make_loss
from accel_gpt.training.metrics import MetricsLog

__all__ = (
    "CheckpointWriter",
    "MetricsLog",
    "StepGuard",
    "build_model",
    "choose_checkpoint",
    "configure",
    "ensure_data",
    "evaluate",
    "find_initial_weights",
    "fraction_at",
    "load_config",
    "make_gradients",
    "make_host_group",
    "make_loss",
    "micro_batches",
    "new_state",
    "open_corpus",
    "open_evaluations",
    "resolve",
    "restore",
    "run_main",
    "set_rates",
)
