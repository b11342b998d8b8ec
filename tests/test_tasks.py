"""Tasks of lm-evaluation-harness on the exported model: metrics, ranks, refusals, no trace."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from accel_gpt import cli
from accel_gpt.data.tokenizer import CharsTokenizer, Tokenizer, load_tokenizer
from accel_gpt.errors import UserError
from accel_gpt.evals import tasks as module
from accel_gpt.evals.hellaswag import ending_losses, read_questions
from accel_gpt.evals.tasks import metrics_of, open_model, open_tasks
from accel_gpt.hub.export import export_tokenizer
from accel_gpt.hub.hf_config import write_hf_config
from accel_gpt.hub.hf_weights import export_tensors
from accel_gpt.hub.load import load_pretrained
from accel_gpt.launcher import environment_without_launcher
from accel_gpt.model.gpt import GPT
from accel_gpt.prepare.bpe import train_bpe
from tests.conftest import launch, run_here, text_of, tiny
from tests.harness_tasks import write_tasks
from tests.test_train import records

NAMES = ["local_hellaswag", "local_lambada", "local_answers"]
BLOCK_SIZE = 40  # shorter than some questions

# importing lm_eval sets variables of the environment
pytestmark = pytest.mark.usefixtures("settings_kept")
needs_lm_eval = pytest.mark.skipif(
    module.importlib.util.find_spec("lm_eval") is None, reason="needs the extra lm-eval"
)


def export(folder: Path, tokenizer: Tokenizer) -> Path:
    """A folder for transformers; the weights are drawn, and large: the model has opinions."""
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
    """A folder of tasks; what `datasets` caches goes to `tmp_path`."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_tasks(folder)
    return folder


def evaluate(exported: Path, tasks: Path, names: list[str], limit: int | None) -> dict[str, float]:
    opened = open_tasks(names, str(tasks), limit)
    return opened.score(exported, load_tokenizer(exported), Accelerator(cpu=True), 4)


PROCESS = """
import json, sys, datasets
from pathlib import Path
datasets.config.HF_DATASETS_CACHE = sys.argv[3]
from accelerate import Accelerator
from accel_gpt.data.tokenizer import load_tokenizer
from accel_gpt.evals.tasks import open_tasks
accelerator, names = Accelerator(cpu=True), sys.argv[4:]
folder, tasks = Path(sys.argv[1]), open_tasks(names, sys.argv[2], 9, 2)
found = tasks.score(folder, load_tokenizer(folder), accelerator, 4)
(folder / f"found_{accelerator.process_index}").write_text(json.dumps(found))
"""


@needs_lm_eval
@pytest.mark.slow
def test_two_processes_find_what_one_finds(tasks: Path, tmp_path: Path) -> None:
    tokenizer = train_bpe([text_of(2000)], 300)
    exported, script = export(tmp_path / "exported", tokenizer), tmp_path / "ask.py"
    script.write_text(PROCESS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(script), str(exported), str(tasks)]
    done = subprocess.run(
        [*command, str(tmp_path / "cache"), *NAMES],  # 9 questions: 5 and 4
        env=environment_without_launcher(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((exported / f"found_{rank}").read_text()) for rank in (0, 1))
    one = evaluate(exported, tasks, NAMES, 9)
    assert first == second
    assert {"eval/local_hellaswag_acc_norm", "eval/local_answers_exact_match"} < one.keys()
    assert first.keys() == one.keys()
    # the order of questions differs, and with it what a bootstrap draws
    stable = [key for key in one if "perplexity_stderr" not in key]
    assert [first[key] for key in stable] == pytest.approx([one[key] for key in stable], rel=1e-4)


@needs_lm_eval
@pytest.mark.slow
def test_hellaswag_agrees_with_the_harness_question_by_question(
    tasks: Path, tmp_path: Path
) -> None:
    """Ours needs no other package; the harness computes with the exported model."""
    from lm_eval.evaluator import evaluate

    tokenizer, one, name = train_bpe([text_of(2000)], 300), Accelerator(cpu=True), "local_hellaswag"
    exported = export(tmp_path / "exported", tokenizer)
    loaded = open_tasks([name], str(tasks)).loaded
    harness = open_model(exported, tokenizer, one, 4)
    answered = evaluate(lm=harness, task_dict=loaded, bootstrap_iters=0)["samples"][name]
    answered.sort(key=lambda answer: answer["doc_id"])
    theirs = [[likely for likely, _ in answer["filtered_resps"]] for answer in answered]

    questions = read_questions(str(tasks / f"{name}.jsonl"), tokenizer, BLOCK_SIZE)
    assert max(len(tokens) for q in questions for tokens, _ in q.sequences) == BLOCK_SIZE + 1
    model, _ = load_pretrained(str(exported))
    ours = -ending_losses(model, questions, one, 4).reshape(-1, 4)
    assert ours == pytest.approx(np.array(theirs), rel=1e-4)
    right = [answer["acc"] for answer in answered]
    assert (ours.argmax(-1) == [q.label for q in questions]).tolist() == right
    assert 0 < sum(right) < len(right)


@needs_lm_eval
@pytest.mark.slow
def test_tasks_while_training_are_those_of_the_command_and_change_nothing_else(
    small_run: Callable[..., list[str]],
    tasks: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = small_run("--train.max_steps", "8", "--eval.every", "2", "--sample.every", "0")
    assert launch([*options, "--out_dir", str(tmp_path / "without")]) == 0
    asked = ["--eval.tasks", "local_piqa,local_answers", "--eval.tasks_path", str(tasks)]
    capfd.readouterr()
    assert launch([*options, *asked, "--eval.tasks_every", "4", "--train.stop_at", "6"]) == 0
    assert launch([*options, *asked, "--eval.tasks_every", "4"]) == 0
    assert "Running" not in capfd.readouterr().err  # progress bars of lm_eval
    found, without = records(tmp_path / "run"), records(tmp_path / "without")
    assert [r["step"] for r in found if "eval/local_piqa_acc" in r] == [4, 6, 8]
    for record, other in zip(found, without, strict=True):
        assert {k: v for k, v in record.items() if "local" not in k} == other
    last = {key: value for key, value in found[-1].items() if "local" in key}
    assert "eval/local_answers_exact_match" in last
    assert run_here(cli.dispatch, ["evaluate", str(tmp_path / "run"), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)["metrics"]
    assert {key: printed[key] for key in last} == pytest.approx(last)
    wrong = [*options, *asked, "--out_dir", str(tmp_path / "wrong")]
    assert launch([*wrong, "--eval.tasks_every", "3"]) == 2
    assert launch([*wrong, "--eval.tasks", "local_piga"]) == 2
    assert launch([*wrong, "--model.preset", "fast", "--model.bias", "true"]) == 2
    shown = capfd.readouterr().err
    assert "eval.tasks_every is 3 and eval.every 2" in shown
    assert "unknown task 'local_piga'" in shown
    assert "no class of transformers computes this shape" in shown


@needs_lm_eval
@pytest.mark.slow
def test_the_command_keeps_the_metrics_of_tasks_with_the_run(
    small_run: Callable[..., list[str]],
    tasks: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch(small_run("--train.max_steps", "4", "--sample.every", "0")) == 0
    run = tmp_path / "run"
    command = ["evaluate", str(run), "--include_path", str(tasks), "--json", "--tasks"]
    before = records(run)[-1]
    capfd.readouterr()
    assert run_here(cli.dispatch, [*command, "local_piqa,local_lambada"]) == 0
    printed = json.loads(capfd.readouterr().out)  # nothing else on standard output
    after = records(run)[-1]
    assert before.items() < after.items()
    new = after.keys() - before.keys()
    names = {"piqa_acc", "piqa_acc_norm", "lambada_acc", "lambada_perplexity"}
    assert new == {f"eval/local_{name}{end}" for name in names for end in ("", "_stderr")}
    assert {key: printed["metrics"][key] for key in new} == {key: after[key] for key in new}
    assert run_here(cli.dispatch, [*command, "local_piqa", "--limit", "3"]) == 0
    assert records(run)[-1] == after  # a quick look is not kept
    capfd.readouterr()
    assert run_here(cli.dispatch, [*command, "local_piga"]) == 2
    printed = capfd.readouterr().err
    assert "error: unknown task 'local_piga'; the nearest are local_piqa" in printed


# --------------------------------------------------------------------------- mistakes


@needs_lm_eval
@pytest.mark.slow
def test_what_cannot_be_evaluated_is_refused(tasks: Path, tmp_path: Path) -> None:
    (tasks / "away.yaml").write_text(
        "task: away\ndataset_path: json\ndataset_kwargs: {data_files: {test: none.jsonl}}\n"
        "test_split: test\noutput_type: loglikelihood\ndoc_to_text: a\ndoc_to_target: b\n"
    )
    letters = "".join(sorted({*"abcdefghijklmnopqrstuvwxyz ?:QAuestionw\n"}))
    exported = export(tmp_path / "letters", CharsTokenizer(letters))  # without an end-of-text token
    found = evaluate(exported, tasks, ["local_piqa"], 2)
    names = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    assert set(found) == {f"eval/local_piqa_{name}" for name in names}
    assert found["eval/local_piqa_acc"] in (0, 0.5, 1)
    assert evaluate(exported, tasks, ["local_answers"], 2)
    exported = export(tmp_path / "exported", CharsTokenizer("abc"))
    with pytest.raises(UserError, match="task away could not be loaded"):
        open_tasks(["away"], str(tasks))
    with pytest.raises(UserError, match="is no folder; give one that holds the YAML files"):
        open_tasks(["local_piqa"], str(tmp_path / "none"))
    with pytest.raises(UserError, match="a character that the tokenizer of the model lacks"):
        evaluate(exported, tasks, ["local_piqa"], None)


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'accel-gpt\[lm-eval\]'"):
        open_tasks(["piqa"], None)


class Task:
    """The parts of a task that are checked before it is evaluated."""

    def __init__(self, count: int = 3, **marks: bool) -> None:
        self.eval_docs = range(count)
        self.__dict__.update(marks)


def test_tasks_that_would_run_code_or_leave_a_process_idle() -> None:
    module.check_harmless("fine", Task())
    with pytest.raises(UserError, match="task humaneval runs the code that the model writes"):
        module.check_harmless("humaneval", Task(UNSAFE_CODE=True))
    with pytest.raises(UserError, match="asks about pictures or sound"):
        module.check_harmless("mmmu", Task(MULTIMODAL=True))
    module.check_shares({"few": Task(3)}, None, 3)
    with pytest.raises(UserError, match=r"task few has 2 questions \(limit 2\) for 3 processes"):
        module.check_shares({"few": Task(3)}, 2, 3)


def test_names_of_metrics() -> None:
    values: dict[str, Any] = {"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "x", "n": 3}
    more = {"exact_match,strict-match": np.float32(0.25), "exact_match,flexible": 1}
    assert metrics_of({"results": {"a": values, "b": more}}) == {
        "eval/a_acc": 0.5,
        "eval/b_exact_match_strict-match": 0.25,
        "eval/b_exact_match_flexible": 1.0,
    }
