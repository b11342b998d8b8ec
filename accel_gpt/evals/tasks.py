"""Tasks of lm-evaluation-harness on an exported model: `accel-gpt evaluate RUN --tasks ...`.

lm-evaluation-harness evaluates the folder through its own interface to transformers, `HFLM`. Reads
the data of the tasks from the Hub or its cache, or local files that a task's YAML names.
"""

import contextlib
import difflib
import importlib.util
import logging
import os
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError, require
from accel_gpt.evals.samples import prompt_ids
from accel_gpt.training.ranks import all_gather

Results = dict[str, Any]  # what lm_eval.evaluate returns
SEEDS = (0, 1234)  # of Python, and of numpy and torch: the defaults of lm_eval
RESAMPLES = 1000  # of a bootstrapped standard error: accurate to about 2%


def run_tasks(
    folder: Path,
    tokenizer: Tokenizer,
    accelerator: Accelerator,
    tasks: Sequence[str],
    manager: Any,
    limit: int | None,
    batch_size: int,
) -> dict[str, float]:
    """Evaluate the exported model in `folder` on `tasks`; a collective. Seeds all generators.

    Returns `eval/TASK_METRIC` on all ranks. `manager`: the result of `open_tasks`. `limit`: only
    so many questions of each task. Raises `UserError` for a task whose data cannot be loaded.
    """
    from lm_eval.evaluator import evaluate

    os.environ["DISABLE_MULTIPROC"] = "1"  # lm_eval would fork a process per core
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    random.seed(SEEDS[0])  # as tasks shuffle answers
    np.random.seed(SEEDS[1])
    torch.manual_seed(SEEDS[1])
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and lm_eval
        loaded = load_tasks(tasks, manager, accelerator)
        check_shares(loaded["tasks"], limit, accelerator.num_processes)
        model = open_model(folder, tokenizer, accelerator, batch_size)
        settings = {"limit": limit, "bootstrap_iters": RESAMPLES, "log_samples": False}
        try:  # None on all ranks but the first
            results: Results | None = evaluate(lm=model, task_dict=loaded, **settings)
        except Exception as error:
            if "[UNK]" not in str(error):
                raise
            raise UserError(
                "a task has a character that the tokenizer of the model lacks"
            ) from None
    metrics: dict[str, float] = all_gather(metrics_of(results) if results else {})[0]
    return metrics


def open_model(
    folder: Path, tokenizer: Tokenizer, accelerator: Accelerator, batch_size: int
) -> Any:
    """Load a folder with transformers as lm_eval's `HFLM`; each rank takes a share of questions.

    `HFLM` sets ranks up by itself for CUDA alone, so they are set here, for any device. It needs
    an end-of-text token, and one that starts a text: a tokenizer without gets an unused one.
    """
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported, prefix = AutoTokenizer.from_pretrained(folder), None
    if exported.eos_token is None:
        exported.add_special_tokens({"eos_token": "<|endoftext|>"})
        if exported.bos_token is None:
            (prefix,) = prompt_ids("", tokenizer, tokenizer.vocab_size)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    model = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(folder).to(accelerator.device),
        tokenizer=exported,
        prefix_token_id=prefix,
        batch_size=batch_size,
        mixed_precision_dtype=dtypes.get(accelerator.mixed_precision),
    )
    model.accelerator = accelerator
    model._rank, model._world_size = accelerator.process_index, accelerator.num_processes
    return model


def metrics_of(results: Results) -> dict[str, float]:
    """`eval/TASK_METRIC` of every number in lm_eval's results.

    Where a task has several filters of its answers, the filter is part of the name.
    """
    found = {}
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, filters = key.partition(",")
            if comma and isinstance(value, Real):
                name = metric if filters == "none" else f"{metric}_{filters}"
                found[f"eval/{task}_{name}"] = float(value)
    return found


# --------------------------------------------------------------------------- tasks


def open_tasks(names: Sequence[str], include_path: str | None) -> Any:
    """Return lm_eval's index of its tasks and those of a folder, which takes seconds to read.

    Raises `UserError` unless lm_eval is installed and knows all `names`.
    """
    require(
        importlib.util.find_spec("lm_eval") is not None,
        "tasks need lm-evaluation-harness, which is not installed; "
        "pip install 'accel-gpt[lm-eval]'",
    )
    from lm_eval.tasks import TaskManager

    manager = None
    if include_path is not None:
        require(
            Path(include_path).is_dir(),
            f"{include_path} is no folder; give one that holds the YAML files of tasks",
        )
        manager = TaskManager(include_path=include_path, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_subtasks):  # its own are thousands
        manager = TaskManager(include_path=include_path)
    for name in names:
        matching_tasks(name, manager)
    return manager


def load_tasks(names: Sequence[str], manager: Any, accelerator: Accelerator) -> dict[str, Any]:
    """Load the tasks, groups and tags of these names with their data; the first rank goes first."""
    known = [match for name in names for match in matching_tasks(name, manager)]
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


def matching_tasks(name: str, manager: Any) -> list[str]:
    """Names of the tasks that match a name, a pattern as mmlu_*, or the path of a YAML file."""
    found: list[str] = manager.match_tasks([name])
    if not found and Path(name).is_file():
        return [name]
    if not found:
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f"the nearest are {', '.join(near)}" if near else "`lm_eval ls tasks` lists them"
        raise UserError(f"unknown task {name!r}; {hint}")
    return found


def check_harmless(name: str, task: Any) -> None:
    """Raise `UserError` for a task that runs code the model writes, or that is not text."""
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
    """Raise `UserError` if a process would get no question, which lm_eval does not handle."""
    for name, task in tasks.items():
        count = min(len(task.eval_docs), limit or sys.maxsize)
        require(
            count >= processes,
            f"task {name} has {count} questions (limit {limit}) for {processes} processes; start "
            "fewer, or raise the limit",
        )
