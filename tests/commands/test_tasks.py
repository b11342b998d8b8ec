"""Tasks of lm-evaluation-harness on the exported model: metrics and errors."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from accel_gpt import cli
from accel_gpt.commands import tasks as module
from accel_gpt.commands.tasks import metrics_of, open_tasks, score_tasks
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.errors import UserError
from accel_gpt.evals.hellaswag import ending_losses, read_questions
from accel_gpt.model.gpt import GPT
from accel_gpt.prepare.bpe import train_bpe
from accel_gpt.transformers_io.export import export_tokenizer
from accel_gpt.transformers_io.hf_config import write_hf_config
from accel_gpt.transformers_io.hf_weights import export_tensors
from accel_gpt.transformers_io.load import load_pretrained
from tests.conftest import launch, run_here, text_of, tiny
from tests.helpers.harness_tasks import write_tasks
from tests.test_train import records

BLOCK_SIZE = 40  # shorter than some questions

# importing lm_eval sets environment variables
pytestmark = pytest.mark.usefixtures("settings_kept")
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs the extra lm-eval"
)
# of lm_eval and of transformers
ignore_warnings = pytest.mark.filterwarnings("ignore")


def export(folder: Path, tokenizer: Tokenizer) -> Path:
    """Write a folder for transformers; its random weights are large, so that answers differ."""
    torch.manual_seed(0)
    model = GPT(tiny(block_size=BLOCK_SIZE), tokenizer.vocab_size).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.ndim > 1 else 1)
    folder.mkdir()
    shape = write_hf_config(model.config, model.vocab_size, tokenizer.eot_id, "float32")
    (folder / "config.json").write_text(json.dumps(shape))
    save_file(export_tensors(model, "gpt2", torch.float32), folder / "model.safetensors")
    export_tokenizer(tokenizer, folder, BLOCK_SIZE)
    return folder


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks; the cache of `datasets` is in `tmp_path`."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_tasks(folder)
    return folder


@needs_lm_eval
@ignore_warnings
@pytest.mark.slow
def test_hellaswag_agrees_with_the_harness(tasks: Path, tmp_path: Path) -> None:
    """Ours needs no other package; the harness uses the exported model."""
    tokenizer, name = train_bpe([text_of(2000)], 300), "local_hellaswag"
    exported = export(tmp_path / "exported", tokenizer)
    found = score_tasks(
        folder=exported,
        tasks=open_tasks([name], str(tasks)),
        limit=None,
        batch_size=4,
        device="cpu",
        precision="no",
    )

    questions = read_questions(
        str(tasks / f"{name}.jsonl"), tokenizer, BLOCK_SIZE, tokenizer.vocab_size
    )
    assert max(len(tokens) for q in questions for tokens, _ in q.sequences) == BLOCK_SIZE + 1
    model, _ = load_pretrained(str(exported))
    losses = ending_losses(model, questions, Accelerator(cpu=True), 4).reshape(-1, 4)
    labels = np.array([question.label for question in questions])
    lengths = np.array([question.lengths for question in questions])
    acc = (losses.argmin(-1) == labels).mean()
    assert 0 < acc < 1
    assert found[f"eval/{name}_acc"] == pytest.approx(acc)
    acc_norm = ((losses / lengths).argmin(-1) == labels).mean()
    assert found[f"eval/{name}_acc_norm"] == pytest.approx(acc_norm)


@needs_lm_eval
@ignore_warnings
@pytest.mark.slow
def test_the_command_prints_the_metrics_of_tasks(
    small_run: Callable[..., list[str]],
    tasks: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch(small_run("--train.max_steps", "4", "--sample.every", "0")) == 0
    run = tmp_path / "run"
    command = ["evaluate", str(run), "--tasks_path", str(tasks), "--json", "--tasks"]
    before = records(run)
    capfd.readouterr()
    assert run_here(cli.dispatch, [*command, "[local_piqa, local_lambada, local_answers]"]) == 0
    printed = json.loads(capfd.readouterr().out)  # nothing else on standard output
    own = {key: value for key, value in before[-1].items() if key.startswith("eval/")}
    assert own.items() < printed["metrics"].items()
    new = printed["metrics"].keys() - own.keys()
    names = {"piqa_acc", "piqa_acc_norm", "lambada_acc", "lambada_perplexity"}
    names |= {"answers_exact_match"}
    assert new == {f"eval/local_{name}{end}" for name in names for end in ("", "_stderr")}
    assert run_here(cli.dispatch, [*command, "local_piqa", "--tasks_limit", "3"]) == 0
    accuracy = json.loads(capfd.readouterr().out)["metrics"]["eval/local_piqa_acc"]
    assert accuracy * 3 == pytest.approx(round(accuracy * 3))
    assert records(run) == before
    assert run_here(cli.dispatch, [*command, "local_piqa,local_lambada"]) == 2
    assert "repeat --tasks for several tasks" in capfd.readouterr().err
    assert run_here(cli.dispatch, [*command, "local_piga"]) == 2
    assert "error: unknown task 'local_piga'; did you mean local_piqa?" in capfd.readouterr().err


# --------------------------------------------------------------------------- mistakes


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"; run pip install -e '\.\[lm-eval\]' in the clone"):
        open_tasks(["piqa"], None)


class Task:
    """The parts of a task that are checked before it is evaluated."""

    def __init__(self, **marks: bool) -> None:
        self.__dict__.update(marks)


def test_tasks_that_would_run_code_or_are_not_text_are_refused() -> None:
    module.check_harmless("fine", Task())
    with pytest.raises(UserError, match="task humaneval runs code that the model writes"):
        module.check_harmless("humaneval", Task(UNSAFE_CODE=True))
    with pytest.raises(UserError, match="has images or audio"):
        module.check_harmless("mmmu", Task(MULTIMODAL=True))


def test_names_of_metrics() -> None:
    values: dict[str, Any] = {"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "x", "n": 3}
    more = {"exact_match,strict-match": np.float32(0.25), "exact_match,flexible": 1}
    assert metrics_of({"results": {"a": values, "b": more}}) == {
        "eval/a_acc": 0.5,
        "eval/b_exact_match_strict-match": 0.25,
        "eval/b_exact_match_flexible": 1.0,
    }
