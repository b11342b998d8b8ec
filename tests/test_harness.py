"""Our answers to the tasks of lm_eval against those of its own interface to transformers."""

import json
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from accel_gpt import cli
from accel_gpt.data.tokenizer import CharsTokenizer, Tokenizer, load_tokenizer, train_bpe
from accel_gpt.errors import UserError
from accel_gpt.evals import tasks as harness
from accel_gpt.evals.tasks import evaluate_tasks, figures, run_tasks
from accel_gpt.hub.export import save_tokenizer
from accel_gpt.hub.hf_config import write_shape
from accel_gpt.hub.hf_weights import export_tensors
from accel_gpt.hub.load import load_pretrained
from accel_gpt.launcher import environment_without_launcher
from accel_gpt.model.gpt import GPT
from tests.conftest import launch, run_here, text_of, tiny
from tests.harness_tasks import COUNT, write_tasks
from tests.test_train import records

GREEDY = "{until: ['king', 'of the'], max_gen_toks: 12}"
TASKS = ["hellaswag", "piqa", "arc", "lambada", "wikitext", "answers"]
NAMES = [f"local_{name}" for name in TASKS]
BLOCK_SIZE = 40  # shorter than some questions

# importing lm_eval sets variables of the environment
pytestmark = pytest.mark.usefixtures("settings_kept")
needs_lm_eval = pytest.mark.skipif(
    harness.importlib.util.find_spec("lm_eval") is None, reason="needs the extra lm-eval"
)


def bpe_tokenizer() -> Tokenizer:
    return train_bpe([text_of(2000)], 300)


def export(folder: Path, preset: str, tokenizer: Tokenizer) -> None:
    """A folder for transformers; the weights are drawn, and large: the model has opinions."""
    torch.manual_seed(0)
    model = GPT(tiny(preset, block_size=BLOCK_SIZE), tokenizer.vocab_size).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.ndim > 1 else 1)
    folder.mkdir()
    shape = write_shape(model.config, model.vocab_size, tokenizer.eot_id, "float32")
    (folder / "config.json").write_text(json.dumps(shape))
    save_file(export_tensors(model, preset, torch.float32), folder / "model.safetensors")
    save_tokenizer(tokenizer, folder, BLOCK_SIZE)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tasks; what `datasets` caches goes to `tmp_path`, and nothing is forked."""
    import datasets

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # lm_eval's pool: processes without our threads
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_tasks(folder, GREEDY)
    return folder


def ask_transformers(exported: Path, tasks: Path, names: list[str]) -> dict[str, Any]:
    """`lm_eval --model hf` on an exported folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        found: dict[str, Any] = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(exported)},
            tasks=names,
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            batch_size=5,
            device="cpu",
            bootstrap_iters=1000,
            log_samples=True,
        )
    return found


def ask(exported: Path, tasks: Path, names: list[str], **more: Any) -> dict[str, Any]:
    model, tokenizer = load_pretrained(str(exported))
    found = evaluate_tasks(
        model,
        tokenizer,
        Accelerator(cpu=True),
        names,
        batch_size=3,
        include_path=str(tasks),
        log_samples=True,
        **more,
    )
    assert found is not None
    return found


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any], names: list[str]) -> None:
    """Question by question: the same requests, answers to 1e-4 nats, the same verdicts."""
    for name in names:
        pairs = zip(ours["samples"][name], theirs["samples"][name], strict=True)
        for mine, other in pairs:
            assert mine["arguments"] == other["arguments"]
            assert flat(mine["resps"]) == pytest.approx(flat(other["resps"]), abs=1e-4)
            assert mine["metrics"] == other["metrics"]
            for metric in mine["metrics"]:
                assert mine[metric] == pytest.approx(other[metric], abs=1e-4)
        expected = {key: value for key, value in theirs["results"][name].items() if "," in key}
        assert expected
        for key, value in expected.items():
            close = value if isinstance(value, str) else pytest.approx(value, rel=1e-5)
            assert ours["results"][name][key] == close


def flat(answers: Any) -> Any:
    """Answers of any nesting in one list; a single text as it is."""
    if not isinstance(answers, list | tuple):
        return [answers]
    return [one for answer in answers for one in flat(answer)]


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_every_question_is_answered_as_by_lm_eval_on_the_exported_model(
    preset: str, tasks: Path, tmp_path: Path
) -> None:
    exported = tmp_path / "exported"
    export(exported, preset, bpe_tokenizer())
    ours, theirs = ask(exported, tasks, NAMES), ask_transformers(exported, tasks, NAMES)
    assert_alike(ours, theirs, NAMES)
    found = {name: ours["samples"][name] for name in NAMES}
    assert {len(samples) for samples in found.values()} == {COUNT}
    assert {sample["acc"] for sample in found["local_hellaswag"]} == {0.0, 1.0}
    greedy = [sample["resps"][0][0][1] for sample in found["local_lambada"]]
    texts = [sample["resps"][0][0] for sample in found["local_answers"]]
    assert len(set(texts)) > 1
    assert not any("king" in text for text in texts)
    assert isinstance(greedy[0], bool)


@needs_lm_eval
@pytest.mark.slow
def test_a_beginning_of_text_token_of_a_foreign_tokenizer_is_heeded(
    tasks: Path, tmp_path: Path
) -> None:
    """Llama's tokenizers put <s> before each text, and transformers does it after the export."""
    exported, given = tmp_path / "exported", tmp_path / "given"
    content = json.loads(bpe_tokenizer().file_text)
    ids = [token["id"] for token in content["added_tokens"]]
    begin = max(ids) + 1
    content["added_tokens"].append({**content["added_tokens"][0], "id": begin, "content": "<s>"})
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [begin], "tokens": ["<s>"]}},
    }
    given.mkdir()
    (given / "tokenizer.json").write_text(json.dumps(content))
    (given / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer = load_tokenizer(given)
    assert tokenizer.kind == "hf"
    export(exported, "llama", tokenizer)
    ours, theirs = ask(exported, tasks, NAMES), ask_transformers(exported, tasks, NAMES)
    assert_alike(ours, theirs, NAMES)


PROCESS = """
import json, sys, datasets
datasets.config.HF_DATASETS_CACHE = sys.argv[3]
from accelerate import Accelerator
from accel_gpt.evals.tasks import run_tasks
from accel_gpt.hub.load import load_pretrained
accelerator = Accelerator(cpu=True)
found = run_tasks(*load_pretrained(sys.argv[1]), accelerator, sys.argv[4:], 9, 4, sys.argv[2])
with open(f"{sys.argv[1]}/found_{accelerator.process_index}", "w") as out:
    json.dump(found, out)
"""


@needs_lm_eval
@pytest.mark.slow
def test_two_processes_find_what_one_finds(tasks: Path, tmp_path: Path) -> None:
    exported, script = tmp_path / "exported", tmp_path / "ask.py"
    export(exported, "gpt2", bpe_tokenizer())
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
    one = figures(ask(exported, tasks, NAMES, limit=9))
    assert first == second
    assert {"eval/local_hellaswag_acc_norm", "eval/local_answers_exact_match"} < one.keys()
    assert first.keys() == one.keys()
    # the order of questions differs, and with it what a bootstrap draws
    stable = [key for key in one if "perplexity_stderr" not in key]
    stable = [key for key in stable if "bits_per_byte_stderr" not in key]
    assert [first[key] for key in stable] == pytest.approx([one[key] for key in stable], rel=1e-6)


# --------------------------------------------------------------------------- one process


def a_model(block_size: int = BLOCK_SIZE) -> tuple[GPT, Tokenizer]:
    tokenizer = bpe_tokenizer()
    torch.manual_seed(0)
    return GPT(tiny(block_size=block_size), tokenizer.vocab_size), tokenizer


def a_harness(block_size: int = BLOCK_SIZE) -> Any:
    from accel_gpt.evals.harness_model import HarnessModel

    return HarnessModel(*a_model(block_size), Accelerator(cpu=True), 4)


@needs_lm_eval
def test_figures_of_a_task_leave_no_trace(tasks: Path) -> None:
    model, tokenizer = a_model()
    assert model.training
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    found = run_tasks(model, tokenizer, Accelerator(cpu=True), ["local_piqa"], 5, 4, str(tasks))
    assert set(found) == {
        *("eval/local_piqa_acc", "eval/local_piqa_acc_stderr"),
        *("eval/local_piqa_acc_norm", "eval/local_piqa_acc_norm_stderr"),
    }
    assert found["eval/local_piqa_acc"] in [i / 5 for i in range(6)]
    assert model.training
    assert all(weight.grad is None for weight in model.parameters())
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


@needs_lm_eval
def test_log_likelihoods_are_those_of_the_model_alone() -> None:
    """Against one forward for each token: truncated contexts, shared inputs, rolled answers."""
    asked = a_harness(block_size=16)
    model = asked.model.eval()
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(300, (60,), generator=draw).tolist()

    def alone(context: list[int], answer: list[int], keep: int) -> float:
        whole, total = context + answer, 0.0
        for end in range(len(context), len(whole)):
            before = torch.tensor([whole[max(0, keep) : end]])
            total += float(model(before)[0, -1].log_softmax(-1)[whole[end]])
        return total

    short = ("", ""), ids[:5], ids[5:9]
    same = ("", ""), ids[:5], [*ids[5:8], 7]
    long = ("", ""), ids[:30], ids[30:40]
    with torch.no_grad():
        answers = asked._loglikelihood_tokens([short, same, long], disable_tqdm=True)
        expected = [alone(*short[1:], 0), alone(*same[1:], 0), alone(*long[1:], 40 - 17)]
        assert [nats for nats, _ in answers] == pytest.approx(expected, abs=1e-4)
        # an answer longer than the context: each token once, 16 from the token before, then rolled
        ((rolled, _),) = asked._loglikelihood_tokens([(("", ""), ids[:3], ids[3:43])], True)
        first = alone([ids[2]], ids[3:19], 0)
        second = alone(ids[18:19], ids[19:35], 0)
        third = alone(ids[26:35], ids[35:43], 0)
        assert rolled == pytest.approx(first + second + third, abs=1e-4)
    with pytest.raises(UserError, match="makes no token of the answer 'b'"):
        asked._loglikelihood_tokens([(("a", "b"), [1], [])], disable_tqdm=True)


class Request:
    """What lm_eval hands to a model."""

    def __init__(self, *args: Any) -> None:
        self.args = args


@needs_lm_eval
def test_texts_end_where_a_task_says() -> None:
    asked = a_harness(block_size=64)
    asked.model.eval()
    with torch.no_grad():
        plain = {"until": [], "max_gen_toks": 20}
        texts = ["the king", "a", "the king of the land went"]
        whole = asked.generate_until([Request(text, plain) for text in texts])
        alone = [asked.generate_until([Request(text, plain)])[0] for text in texts]
        assert whole == alone
        stop = whole[1][8:11]
        assert stop
        cut = asked.generate_until([Request("a", {**plain, "until": [stop]})])
        assert cut == [whole[1][: whole[1].index(stop)]]
        (drawn,) = asked.generate_until([Request("a", {**plain, "temperature": 1.0})])
        assert drawn != whole[1]
        with pytest.raises(UserError, match=r"a context of 64 \(model.block_size\) has no room"):
            asked.generate_until([Request("a", {"max_gen_toks": 64})])
        with pytest.raises(UserError, match="generation with num_beams, which is not offered"):
            asked.generate_until([Request("a", {**plain, "num_beams": 4})])


@needs_lm_eval
@pytest.mark.slow
def test_the_command_keeps_the_figures_of_tasks_with_the_run(
    small_run: Callable[..., list[str]],
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch(small_run("--train.max_steps", "4", "--sample.every", "0")) == 0
    run = tmp_path / "run"
    command = ["evaluate", str(run), "--include_path", str(tasks), "--json", "--tasks"]
    before = records(run)[-1]
    capsys.readouterr()
    assert run_here(cli.dispatch, [*command, "local_piqa,local_lambada"]) == 0
    told = json.loads(capsys.readouterr().out)  # nothing else on standard output
    after = records(run)[-1]
    assert before.items() < after.items()
    new = after.keys() - before.keys()
    names = {"piqa_acc", "piqa_acc_norm", "lambada_acc", "lambada_perplexity"}
    assert new == {f"eval/local_{name}{end}" for name in names for end in ("", "_stderr")}
    assert {key: told["figures"][key] for key in new} == {key: after[key] for key in new}
    assert run_here(cli.dispatch, [*command, "local_piqa", "--limit", "3"]) == 0
    assert records(run)[-1] == after  # a quick look is not kept
    capsys.readouterr()
    assert run_here(cli.dispatch, [*command, "local_piga"]) == 2
    told = capsys.readouterr().err
    assert "error: unknown task 'local_piga'; the nearest are local_piqa" in told


# --------------------------------------------------------------------------- mistakes


@needs_lm_eval
def test_what_is_no_task_is_told(tasks: Path, tmp_path: Path) -> None:
    def ask_for(name: str, folder: Path, tokenizer: Tokenizer) -> None:
        model = GPT(tiny(), tokenizer.vocab_size)
        run_tasks(model, tokenizer, Accelerator(cpu=True), [name], None, 4, str(folder))

    (tasks / "away.yaml").write_text(
        "task: away\ndataset_path: json\ndataset_kwargs: {data_files: {test: none.jsonl}}\n"
        "test_split: test\noutput_type: loglikelihood\ndoc_to_text: a\ndoc_to_target: b\n"
    )
    with pytest.raises(UserError, match="task away could not be loaded"):
        ask_for("away", tasks, bpe_tokenizer())
    with pytest.raises(UserError, match="is no folder; give one that holds the YAML files"):
        ask_for("local_piqa", tmp_path / "none", bpe_tokenizer())
    with pytest.raises(UserError, match=r"character '.' is not among the 3 of the chars"):
        ask_for("local_piqa", tasks, CharsTokenizer("abc"))


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'accel-gpt\[lm-eval\]'"):
        run_tasks(*a_model(), Accelerator(cpu=True), ["piqa"], None, 4)


class Task:
    """The parts of a task that are looked at before it is asked."""

    def __init__(self, count: int = 3, **marks: bool) -> None:
        self.eval_docs = range(count)
        self.__dict__.update(marks)


def test_tasks_that_would_run_code_or_leave_a_process_idle() -> None:
    harness.check_harmless("fine", Task())
    with pytest.raises(UserError, match="task humaneval runs the code that the model writes"):
        harness.check_harmless("humaneval", Task(UNSAFE_CODE=True))
    with pytest.raises(UserError, match="asks about pictures or sound"):
        harness.check_harmless("mmmu", Task(MULTIMODAL=True))
    harness.check_shares({"few": Task(3)}, None, 3)
    with pytest.raises(UserError, match=r"task few has 3 questions .* for 4 processes"):
        harness.check_shares({"few": Task(3)}, None, 4)
    with pytest.raises(UserError, match=r"task few has 2 questions \(limit 2\)"):
        harness.check_shares({"few": Task(3)}, 2, 3)


def test_names_of_figures() -> None:
    values = {"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": "x", "sample_len": 3}
    more = {"exact_match,strict-match": np.float32(0.25), "exact_match,flexible": 1}
    assert figures({"results": {"a": values, "b": more}}) == {
        "eval/a_acc": 0.5,
        "eval/b_exact_match_strict-match": 0.25,
        "eval/b_exact_match_flexible": 1.0,
    }
