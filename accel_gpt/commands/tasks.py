"""Evaluate an exported model on tasks of lm-evaluation-harness: `accel-gpt evaluate RUN --tasks`.

The harness loads the model with `HFLM`, its interface to transformers. Reads the data of the tasks
from the Hub, from the Hub's cache, or from files that a task names.
"""

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.errors import UserError, did_you_mean, install_extra, require

RESAMPLES = 1000  # makes bootstrapped standard errors accurate to about 2 %
AUTOCAST = MappingProxyType({"bf16": "bfloat16", "fp16": "float16"})


def open_tasks(names: Sequence[str]) -> list[Any]:
    """Load tasks, groups and tags of lm-evaluation-harness by name, or from YAML files.

    Raises `UserError` if lm-eval is not installed, if a name is unknown, or if the data of a task
    cannot be loaded.
    """
    require(
        importlib.util.find_spec("lm_eval") is not None,
        f"tasks need lm-evaluation-harness but it is not installed; {install_extra('lm-eval')}",
    )
    manager = task_manager()
    known = [match for name in names for match in matching_tasks(name, manager)]
    try:
        loaded = manager.load(known)
    except Exception as error:  # from datasets, the Hub, the network or a task's own code
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"the tasks {', '.join(known)} could not be loaded ({type(error).__name__}: {reason})"
        ) from error
    inside = {name for children in loaded["group_map"].values() for name in children}
    named = loaded["groups"] | loaded["tasks"]
    return [task for name, task in named.items() if name not in inside]


@cache
def task_manager() -> Any:
    """Return the harness's index of its tasks; it takes seconds to read."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def matching_tasks(name: str, manager: Any) -> list[str]:
    """Return the tasks that match a name, a pattern such as mmlu_*, or the path of a YAML file."""
    found: list[str] = manager.match_tasks([name])
    if not found and Path(name).is_file():
        return [name]
    if not found:
        hint = did_you_mean(name, manager.all_tasks, "`lm_eval ls tasks` lists all tasks")
        raise UserError(f"unknown task {name!r}; {hint}")
    return found


def score_tasks(
    folder: Path,
    tasks: Sequence[Any],
    limit: int | None,
    batch_size: int,
    device: str,
    precision: str,
) -> dict[str, float]:
    """Evaluate the exported model in `folder`; return metrics named `eval/TASK_METRIC`.

    `tasks`: see `open_tasks`. `limit`: evaluate only the first questions of each task;
    None: all. `precision`: a value of `Accelerator.mixed_precision`. The harness rejects a task
    that runs code of the model, or that is not text.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    os.environ["DISABLE_MULTIPROC"] = "1"  # keeps lm_eval from forking a process per core
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each truncated question
    with contextlib.redirect_stdout(sys.stderr):  # lm_eval prints its progress
        model = HFLM(
            pretrained=str(folder),
            batch_size=batch_size,
            device=device,
            mixed_precision_dtype=AUTOCAST.get(precision),
        )
        results = simple_evaluate(
            model=model,
            tasks=list(tasks),
            task_manager=task_manager(),
            limit=limit,
            bootstrap_iters=RESAMPLES,
            log_samples=False,
        )
    return metrics_of(results)


def metrics_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Return every number in the results of lm_eval as `eval/TASK_METRIC`.

    If a metric has a filter, the name is `eval/TASK_METRIC_FILTER`.
    """
    found = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, filters = key.partition(",")
            if comma and isinstance(value, Real):
                name = metric if filters == "none" else f"{metric}_{filters}"
                found[f"eval/{task}_{name}"] = float(value)
    return found
