"""Tasks of lm-evaluation-harness: `eval.tasks` while training, `accel-gpt evaluate RUN --tasks`.

lm-evaluation-harness evaluates an exported folder through its own interface to transformers,
`HFLM`. Reads the data of the tasks from the Hub or its cache, or local files that a task names.
"""

import difflib
import importlib.util
import io
import itertools
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError, require
from accel_gpt.evals.samples import prompt_ids
from accel_gpt.evals.validation import Beat, no_beat
from accel_gpt.model.gpt import GPT
from accel_gpt.model.sharding import is_sharded
from accel_gpt.training.ranks import all_gather, all_ranks
from accel_gpt.training.tensor_files import weights_of

Results = dict[str, Any]  # what lm_eval.evaluate returns
SEEDS = (0, 1234)  # of Python, and of numpy and torch: the defaults of lm_eval
RESAMPLES = 1000  # of a bootstrapped standard error: accurate to about 2%


@dataclass(frozen=True)
class Tasks:
    """Tasks with their data, as lm_eval loads them."""

    loaded: dict[str, Any]  # what lm_eval.evaluate takes
    limit: int | None  # first questions of each; None: all

    def score(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        accelerator: Accelerator,
        batch_size: int,
        beat: Beat = no_beat,
    ) -> dict[str, float]:
        """Evaluate the exported model in `folder`: `eval/TASK_METRIC` on all ranks; a collective.

        `beat` is called before each batch, with 0 for their number, which is not known; on all
        ranks as often, though their numbers of batches differ.
        """
        from lm_eval.evaluator import evaluate

        os.environ["DISABLE_MULTIPROC"] = "1"  # lm_eval would fork a process per core
        count, stderr = itertools.count(), sys.stderr

        def on_batch(*_: object) -> None:
            any_rank_computes(True)
            with redirect_stderr(stderr):
                beat(next(count), 0)

        def beat_as_often() -> None:
            while any_rank_computes(False):
                with redirect_stderr(stderr):
                    beat(next(count), 0)

        with seeded(accelerator.device), quiet():
            model = open_model(folder, tokenizer, accelerator, batch_size)
            model.model.register_forward_pre_hook(on_batch)
            model.accelerator = Joining(accelerator, before_barrier=beat_as_often)
            for task in self.loaded["tasks"].values():
                task.set_fewshot_seed(seed=SEEDS[1])
            settings = {"limit": self.limit, "bootstrap_iters": RESAMPLES, "log_samples": False}
            try:  # None on all ranks but the first
                results: Results | None = evaluate(lm=model, task_dict=self.loaded, **settings)
            except Exception as error:
                if "[UNK]" not in str(error):
                    raise
                raise UserError(
                    "a task has a character that the tokenizer of the model lacks"
                ) from None
        metrics: dict[str, float] = all_gather(metrics_of(results) if results else {})[0]
        return metrics

    def score_weights(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        accelerator: Accelerator,
        batch_size: int,
        beat: Beat = no_beat,
    ) -> dict[str, float]:
        """As `score`, for the weights of a model, which may be sharded."""
        from accel_gpt.hub.export import write_files

        weights = {}
        for name, tensor in weights_of(model).items():
            whole = tensor.full_tensor() if is_sharded(tensor) else tensor
            if accelerator.is_local_main_process:
                weights[name] = whole.cpu()
        with tempfile.TemporaryDirectory() as folder:
            with all_ranks():
                if accelerator.is_local_main_process:
                    copy = GPT.allocate(model.config, model.vocab_size)
                    copy.load_state_dict(weights, strict=False)  # tied weights are there once
                    write_files(copy, tokenizer, Path(folder), torch.float32)
            folders = all_gather(folder)
            own = folders[accelerator.process_index - accelerator.local_process_index]
            found = self.score(Path(own), tokenizer, accelerator, batch_size, beat)
            accelerator.wait_for_everyone()
        return found


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Seed all generators, as tasks shuffle answers; afterwards they are as before."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        random.seed(SEEDS[0])
        np.random.seed(SEEDS[1])
        torch.manual_seed(SEEDS[1])
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


class Joining:
    """An `Accelerator` for lm_eval that calls `before_barrier` before it waits for all ranks."""

    def __init__(self, accelerator: Accelerator, before_barrier: Callable[[], None]) -> None:
        self.accelerator = accelerator
        self.before_barrier = before_barrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def wait_for_everyone(self) -> None:
        """Wait for all ranks, of which others may have batches left."""
        self.before_barrier()
        self.accelerator.wait_for_everyone()


def any_rank_computes(this_one: bool) -> bool:
    """Whether any rank is about to compute a batch; a collective."""
    return any(all_gather(this_one))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and warnings of transformers, datasets and lm_eval."""
    for name in ("lm_eval", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    to = io.StringIO()
    with redirect_stdout(to), redirect_stderr(to), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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


def open_tasks(
    names: Sequence[str], path: str | None = None, limit: int | None = None, processes: int = 1
) -> Tasks:
    """Load the tasks, groups and tags of these names, of lm_eval and of the folder `path`.

    Raises `UserError` unless lm_eval is installed and knows all `names`, and for tasks whose data
    cannot be loaded, that run code, or have no question for one of the processes.
    """
    require(
        importlib.util.find_spec("lm_eval") is not None,
        "tasks need lm-evaluation-harness, which is not installed; "
        "pip install 'accel-gpt[lm-eval]'",
    )
    from lm_eval.tasks import TaskManager

    manager = None
    if path is not None:
        require(
            Path(path).is_dir(),
            f"{path} is no folder; give one that holds the YAML files of tasks",
        )
        manager = TaskManager(include_path=path, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_subtasks):  # its own are thousands
        manager = TaskManager(include_path=path)
    known = [match for name in names for match in matching_tasks(name, manager)]
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in known:
        try:
            with quiet():
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
    check_shares(loaded["tasks"], limit, processes)
    return Tasks(loaded, limit)


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
