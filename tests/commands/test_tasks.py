"""Tasks of lm-evaluation-harness on the exported model."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_gpt import cli
from accel_gpt.commands.tasks import metrics_of
from tests.conftest import launch, run_here
from tests.helpers.harness_tasks import write_tasks
from tests.test_train import records

# importing lm_eval sets environment variables
pytestmark = pytest.mark.usefixtures("settings_kept")
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs the extra lm-eval"
)
# of lm_eval and of transformers
ignore_warnings = pytest.mark.filterwarnings("ignore")


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
def test_the_command_prints_the_metrics_of_tasks(
    small_run: Callable[..., list[str]],
    tasks: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """HellaSwag is scored twice: by us, and by the harness on the exported model."""
    options = ["--train.max_steps", "4", "--sample.every", "0", "--train.micro_batch_size", "2"]
    assert launch(small_run(*options, "--model.block_size", "128")) == 0
    run = tmp_path / "run"
    command = ["evaluate", str(run), "--json", "--tasks"]
    before = records(run)
    capfd.readouterr()
    files = [f"{tasks}/local_{name}.yaml" for name in ("piqa", "lambada", "answers", "hellaswag")]
    ours = ["--hellaswag", str(tasks / "local_hellaswag.jsonl")]
    assert run_here(cli.dispatch, [*command, json.dumps(files), *ours]) == 0
    printed = json.loads(capfd.readouterr().out)  # nothing else on standard output
    metrics = printed["metrics"]
    for name in ("acc", "acc_norm"):
        expected = metrics.pop(f"eval/hellaswag_{name}")
        assert metrics.pop(f"eval/local_hellaswag_{name}") == pytest.approx(expected)
        error = metrics.pop(f"eval/hellaswag_{name}_se")
        assert metrics.pop(f"eval/local_hellaswag_{name}_stderr") == pytest.approx(error)
    own = {key: value for key, value in before[-1].items() if key.startswith("eval/")}
    assert own.items() < printed["metrics"].items()
    new = printed["metrics"].keys() - own.keys()
    others = {"piqa_acc", "piqa_acc_norm", "lambada_acc", "lambada_perplexity"}
    others |= {"answers_exact_match"}
    assert new == {f"eval/local_{name}{end}" for name in others for end in ("", "_stderr")}
    assert run_here(cli.dispatch, [*command, files[0], "--limit", "3"]) == 0
    accuracy = json.loads(capfd.readouterr().out)["metrics"]["eval/local_piqa_acc"]
    assert accuracy * 3 == pytest.approx(round(accuracy * 3))
    assert records(run) == before
    assert run_here(cli.dispatch, [*command, "helaswag"]) == 2
    assert "error: unknown task 'helaswag'; did you mean hellaswag" in capfd.readouterr().err


def test_names_of_metrics() -> None:
    values: dict[str, Any] = {"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "x", "n": 3}
    more = {"exact_match,strict-match": np.float32(0.25), "exact_match,flexible": 1}
    assert metrics_of({"results": {"a": values, "b": more}}) == {
        "eval/a_acc": 0.5,
        "eval/b_exact_match_strict-match": 0.25,
        "eval/b_exact_match_flexible": 1.0,
    }
