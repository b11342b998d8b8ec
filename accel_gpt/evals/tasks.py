"""Tasks of lm-evaluation-harness, asked of our model: `accel-gpt evaluate RUN --tasks ...`.

Reads the data of the tasks from the Hub or its cache, or local files that a task's YAML names.
"""

import contextlib
import difflib
import importlib.util
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError, require
from accel_gpt.model.gpt import GPT, evaluating

Results = dict[str, Any]  # what lm_eval.evaluate returns
SEEDS = (0, 1234)  # of Python, and of all else: lm_eval's own
RESAMPLES = 1000  # of a bootstrapped standard error: known to about 2%


def run_tasks(
    model: GPT,
    tokenizer: Tokenizer,
    accelerator: Accelerator,
    tasks: Sequence[str],
    limit: int | None,
    batch_size: int,
    include_path: str | None = None,
    manager: Any = None,
) -> dict[str, float]:
    """The figures of `tasks`, `eval/TASK_METRIC`, on all processes; a collective.

    `limit`: only so many questions of each task. `include_path`: a folder with YAML files of more
    tasks; the Python functions that they name are run. `manager`: what `open_tasks` gave, where it
    was called before. Raises `UserError` where lm_eval is not installed, for an unknown task, and
    for one whose data cannot be had.
    """
    results = evaluate_tasks(
        model, tokenizer, accelerator, tasks, limit, batch_size, include_path, manager
    )
    found = [figures(results) if results else {}]
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    return found[0]


def evaluate_tasks(
    model: GPT,
    tokenizer: Tokenizer,
    accelerator: Accelerator,
    tasks: Sequence[str],
    limit: int | None = None,
    batch_size: int = 16,
    include_path: str | None = None,
    manager: Any = None,
    log_samples: bool = False,
) -> Results | None:
    """What lm_eval tells about `tasks`, None on all processes but the first; a collective.

    `log_samples`: with each question and its answers.
    """
    manager = manager or open_tasks(tasks, include_path)
    from lm_eval.evaluator import evaluate

    from accel_gpt.evals.harness_model import HarnessModel

    asked = HarnessModel(model, tokenizer, accelerator, batch_size)
    with evaluating(model), seeded(), quiet_bootstrap():
        loaded = load_tasks(tasks, manager, accelerator)
        check_shares(loaded["tasks"], limit, accelerator.num_processes)
        found: Results | None = evaluate(
            lm=asked,
            task_dict=loaded,
            limit=limit,
            bootstrap_iters=RESAMPLES,
            log_samples=log_samples,
        )
    return found


def figures(results: Results) -> dict[str, float]:
    """`eval/TASK_METRIC` of every number in lm_eval's results.

    Where a task reads its answers in more than one way (filters), the way is part of the name.
    """
    found = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, way = key.partition(",")
            if comma and isinstance(value, Real):
                name = metric if way == "none" else f"{metric}_{way}"
                found[f"eval/{task}_{name}"] = float(value)
    return found


# --------------------------------------------------------------------------- tasks


def open_tasks(names: Sequence[str], include_path: str | None) -> Any:
    """lm_eval's index of its tasks and those of a folder, which takes seconds to read.

    Raises `UserError` unless it is installed and knows all `names`.
    """
    require(
        importlib.util.find_spec("lm_eval") is not None,
        "tasks are asked by lm-evaluation-harness, which is not installed; "
        "pip install 'accel-gpt[lm-eval]'",
    )
    manager = task_manager(names, include_path)
    for name in names:
        matches(name, manager)
    return manager


def load_tasks(names: Sequence[str], manager: Any, accelerator: Accelerator) -> dict[str, Any]:
    """The tasks, groups and tags of these names with their data; the first process loads first."""
    known = [match for name in names for match in matches(name, manager)]
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    with accelerator.main_process_first():
        for name in known:
            try:
                parts = manager.load(name)
            except Exception as error:  # of datasets, the Hub, the network, a task's own code
                why = str(error).strip().partition("\n")[0]
                raise UserError(
                    f"task {name} could not be loaded ({type(error).__name__}: {why}); its data "
                    "must be on the Hub and reachable, in its cache, or where its YAML file says"
                ) from error
            for kind, entries in loaded.items():
                entries.update(parts.get(kind, {}))
    for name, task in loaded["tasks"].items():
        check_harmless(name, task)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEEDS[1])
    return loaded


def task_manager(names: Sequence[str], include_path: str | None) -> Any:
    """lm_eval's index of tasks; its own thousands are read only where they are needed."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        require(
            Path(include_path).is_dir(),
            f"{include_path} is no folder; give one that holds the YAML files of tasks",
        )
        local = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(local.all_subtasks):
            return local
    return TaskManager(include_path=include_path)


def matches(name: str, manager: Any) -> list[str]:
    """The tasks that a name, a pattern as mmlu_* or the path of a YAML file stands for."""
    found: list[str] = manager.match_tasks([name])
    if not found and Path(name).is_file():
        return [name]
    if not found:
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f"the nearest are {', '.join(near)}" if near else "`lm_eval ls tasks` lists them"
        raise UserError(f"unknown task {name!r}; {hint}")
    return found


def check_harmless(name: str, task: Any) -> None:
    """Raise `UserError` for a task that runs what the model writes, or shows it pictures."""
    require(
        not getattr(task, "UNSAFE_CODE", False),
        f"task {name} runs the code that the model writes, which is not done here; export the "
        "model and ask lm_eval with --confirm_run_unsafe_code, in a place where it does no harm",
    )
    require(
        not getattr(task, "MULTIMODAL", False),
        f"task {name} asks about pictures or sound; the model reads text",
    )


def check_shares(tasks: Mapping[str, Any], limit: int | None, processes: int) -> None:
    """Raise `UserError` where a process would get no question: lm_eval has no answer to that."""
    if processes == 1:
        return
    for name, task in tasks.items():
        count = min(len(task.eval_docs), limit or sys.maxsize)
        require(
            count >= processes,
            f"task {name} has {count} questions (limit {limit}) for {processes} processes; start "
            "fewer, or raise the limit",
        )


# --------------------------------------------------------------------------- surroundings


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Seeds as lm_eval's, from which tasks shuffle answers; then all is as it was."""
    kept = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(SEEDS[0])
        np.random.seed(SEEDS[1])
        torch.default_generator.manual_seed(SEEDS[1])
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])


@contextlib.contextmanager
def quiet_bootstrap() -> Iterator[None]:
    """Keep lm_eval from forking a process per core, and its prints from our standard output."""
    name = "DISABLE_MULTIPROC"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
