"""`accel-gpt plan CONFIG --code FILE` for a file with a `model()`, which is built without storage.

The memory of its activations is not known, so it does not say whether a run fits.
"""

from accel_gpt.commands.options import PlanCommand
from accel_gpt.commands.plan import print_forecast
from accel_gpt.cost.forecast import vocabulary_size
from accel_gpt.errors import require
from accel_gpt.model.make import make_model


def run(options: PlanCommand) -> int:
    """Print what a config with a model of your own needs."""
    config = options.loaded
    require(
        config.train.micro_batch_size != "auto",
        "train.micro_batch_size is auto; with a model() of --code, expected a number",
    )
    model = make_model(config, vocabulary_size(config)[0], "meta")
    return print_forecast(options, {"total": model.parameter_count()}, model.flops_per_token())
