"""`accel-gpt evaluate` and `eval.only`: a run measured after training, its figures kept with it."""

import csv
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer

from accel_gpt.cli import dispatch
from accel_gpt.commands.evaluate_model import as_json, as_table
from accel_gpt.config.data import PrepareConfig
from accel_gpt.data.shards import open_split
from accel_gpt.evals.validation import eval_sequences
from accel_gpt.hub.export import export
from accel_gpt.hub.load import load_pretrained
from accel_gpt.prepare.prepare import prepare
from accel_gpt.training.metrics import COLUMNS, MetricsLog, merge_record
from accel_gpt.training.run_folder import locked
from tests.conftest import launch, run_here, text_of
from tests.test_hellaswag import short
from tests.test_launch import ACCELERATE, PLAIN
from tests.test_train import records

Arguments = Callable[..., list[str]]
FOUR = ("--train.max_steps", "4", "--sample.every", "0")


def call(*words: str) -> int:
    return run_here(dispatch, ["evaluate", *words])


@pytest.fixture(scope="module")
def made(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with checkpoints of the second and the last, evaluated at its end."""
    folder = tmp_path_factory.mktemp("made")
    config = folder / "four.yaml"
    config.write_text(
        f"""
out_dir: {folder / "run"}
data: {{train: {prepared / "corpus"}}}
model: {{n_layer: 2, n_head: 2, n_embd: 32, block_size: 32, dropout: 0.1}}
train: {{tokens_per_step: 256, micro_batch_size: 4, max_steps: 4, cpu_threads: 1}}
eval: {{every: 4, tokens: 512}}
sample: {{every: 0}}
checkpoint: {{every: 2, keep_best: false}}
log: {{every: 1, trackers: []}}
"""
    )
    assert launch([str(config)]) == 0
    return folder / "run"


@pytest.fixture
def trained(made: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_the_command_gives_the_figures_of_the_run_and_adds_to_them(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = records(trained)
    assert call(str(trained), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    evals = {key: value for key, value in before[-1].items() if key.startswith("eval/")}
    assert told["figures"] == evals
    assert told["step"] == 4
    assert records(trained) == before

    questions = str(short(tmp_path / "h.jsonl"))
    assert call(str(trained), "--checkpoint", "2", "--hellaswag", questions) == 0
    shown = capsys.readouterr().out
    assert "step 2" in shown
    assert "hellaswag_acc_norm" in shown
    assert f"kept in {trained / 'metrics.jsonl'}" in shown
    after = records(trained)
    assert [line["step"] for line in after] == [1, 2, 3, 4]
    assert after[1]["train/loss"] == before[1]["train/loss"]
    assert {"eval/val_loss", "eval/hellaswag_acc"} <= after[1].keys()
    assert [after[i] for i in (0, 2, 3)] == [before[i] for i in (0, 2, 3)]
    rows = list(csv.DictReader((trained / "metrics.csv").read_text().splitlines()))
    assert float(rows[1]["eval/val_loss"]) == after[1]["eval/val_loss"]
    assert float(rows[1]["eval/hellaswag_acc"]) == after[1]["eval/hellaswag_acc"]

    # measured in another way: told, not kept
    assert call(str(trained), "--tokens", "null", "--hellaswag", questions, "--limit", "2") == 0
    assert "not kept: --tokens, --limit or --hellaswag differ" in capsys.readouterr().out
    assert records(trained) == after

    with locked(trained):
        assert call(str(trained), "--checkpoint", "4", "--hellaswag", questions) == 0
    assert "not kept: out_dir" in capsys.readouterr().out
    assert records(trained) == after


def test_a_run_is_measured_in_the_precision_of_its_launch(
    small_run: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Which `accelerate launch --mixed_precision` gave, and its config does not tell."""
    run = tmp_path / "run"
    with monkeypatch.context() as launcher:
        launcher.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert launch(small_run(*FOUR)) == 0
    before = records(run)
    capsys.readouterr()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert call(str(run), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["precision"] == "bf16"
    assert found["figures"]["eval/val_loss"] == before[-1]["eval/val_loss"]
    assert launch(small_run(*FOUR, "--eval.only")) == 0
    assert "step 4, in bf16" in capsys.readouterr().out
    AcceleratorState._reset_state(reset_partial_state=True)
    assert launch(small_run(*FOUR, "--eval.only", "--train.mixed_precision", "no")) == 0
    assert "not kept: computed in float32, those of the run in bf16" in capsys.readouterr().out
    text = (run / "run.json").read_text()
    (run / "run.json").write_text(text.replace('"bf16"', '"fp16"'))  # launched on a GPU
    assert call(str(run)) == 0
    assert "not kept: computed in float32, those of the run in fp16" in capsys.readouterr().out
    assert records(run) == before


def test_other_data_is_told_by_its_name(
    trained: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(corpus, tmp_path / "copy")
    assert call(str(trained), "--data", str(tmp_path / "copy"), "--json") == 0
    found = json.loads(capsys.readouterr().out)["figures"]
    own = records(trained)[-1]
    assert found == {
        "eval/val_loss/copy": own["eval/val_loss"],
        "eval/val_loss_se/copy": own["eval/val_loss_se"],
        "eval/val_bits_per_byte/copy": own["eval/val_bits_per_byte"],
    }
    text = tmp_path / "text.txt"
    asked = PrepareConfig(source="text", path=str(text), tokenizer="chars", workers=1)
    prepare(asked, tmp_path / "chars")
    capsys.readouterr()
    assert call(str(trained), "--data", str(tmp_path / "chars")) == 3
    error = capsys.readouterr().err
    assert "the data has another tokenizer (chars" in error


def test_mistakes_of_the_command(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained / "checkpoints" / "step_00000004"
    lone = shutil.copytree(checkpoint, tmp_path / "lone")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"ctx": "a", "label": 0}\n')
    for words, code, message in (
        ([str(lone)], 2, "is no run, so its val data is not known; give --data"),
        ([str(trained), "--tokens", "some"], 2, "--tokens is some; expected a whole number"),
        ([str(trained), "--limit", "0"], 2, "evaluate.limit is 0"),
        ([str(trained), "--checkpoint", "3"], 2, "has no checkpoint '3'; choose last, best or"),
        ([str(trained), "--hellaswag", str(bad)], 3, "line 1 has endings None"),
        ([str(trained), "--data", str(tmp_path / "none")], 2, "none"),
    ):
        assert call(*words) == code
        assert message in capsys.readouterr().err


def test_bits_per_byte_are_those_of_the_text(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: the bits of all targets over the UTF-8 bytes of the text, less the first token."""
    text = " ".join(f"{word} naïve ДОМ 東京 {i % 7}" for i, word in enumerate(text_of(600).split()))
    (tmp_path / "text.txt").write_text(text)
    asked = {"path": str(tmp_path / "text.txt"), "tokenizer": "bpe"}
    prepare(PrepareConfig(source="text", vocab_size=300, workers=1, **asked), tmp_path / "bpe")
    words = ["--data.train", str(tmp_path / "bpe"), "--eval.tokens", "null"]
    assert launch(small_run(*FOUR, *words)) == 0

    split = open_split(tmp_path / "bpe", "val")
    (ids,) = [split.read(i, 0, int(n)).astype("int64") for i, n in enumerate(split.lengths)]
    tokenizer = Tokenizer.from_file(str(tmp_path / "bpe" / "tokenizer.json"))
    held = tokenizer.decode(ids.tolist())
    assert text.endswith(held)
    assert len(held) < 0.8 * len(held.encode())
    model, _ = load_pretrained(str(tmp_path / "run"))
    model.eval()
    bits = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 32):
            row = torch.from_numpy(ids[start : start + 33])
            logits = model(row[None, :-1])[0].double()
            bits += F.cross_entropy(logits, row[1:], reduction="sum").item() / math.log(2)
    expected = bits / len(held[len(tokenizer.decode(ids[:1].tolist())) :].encode())
    assert records(tmp_path / "run")[-1]["eval/val_bits_per_byte"] == pytest.approx(expected, 1e-4)
    capsys.readouterr()
    assert call(str(tmp_path / "run"), "--json") == 0
    found = json.loads(capsys.readouterr().out)["figures"]
    assert found["eval/val_bits_per_byte"] == pytest.approx(expected, 1e-4)


# --------------------------------------------------------------------------- eval.only


def test_eval_only_measures_and_leaves_the_run_alone(
    trained: Path, small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = records(trained)
    files = {p: p.read_bytes() for p in (trained / "checkpoints").rglob("*") if p.is_file()}
    state = [(trained / name).read_bytes() for name in ("config.yaml", "run.json")]
    questions = str(short(tmp_path / "h.jsonl"))
    asked = ["--train.max_steps", "4", "--eval.only"]
    assert launch(small_run(*asked, "--eval.hellaswag", questions)) == 0
    assert "hellaswag_acc" in capsys.readouterr().out
    after = records(trained)
    assert after[:3] == before[:3]
    assert before[3].items() <= after[3].items()
    assert "eval/hellaswag_acc" in after[3]
    found = {p: p.read_bytes() for p in (trained / "checkpoints").rglob("*") if p.is_file()}
    assert found == files
    assert [(trained / name).read_bytes() for name in ("config.yaml", "run.json")] == state

    elsewhere = ["--out_dir", str(tmp_path / "new")]
    assert launch(small_run(*elsewhere, "--eval.only")) == 2
    assert "model.init_from is scratch, so there is nothing" in capsys.readouterr().err
    assert launch(small_run(*elsewhere, "--eval.only", "--model.init_from", str(trained))) == 0
    (told,) = records(tmp_path / "new")
    assert told["step"] == 0
    assert told["eval/val_loss"] == before[3]["eval/val_loss"]
    assert not (tmp_path / "new" / "checkpoints").exists()


# --------------------------------------------------------------------------- records and tables


def test_a_step_without_a_record_gets_one_in_its_place(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, 0, 10)
    for step in (2, 4):
        log.write({"step": step, "tokens": step * 100, "time": 1.0, "train/loss": 2.0})
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("²,a digit that is no number\n")
    merge_record(tmp_path, {"step": 3, "tokens": 300, "time": 9.0, "eval/val_loss": math.inf})
    merge_record(tmp_path, {"step": 4, "tokens": 0, "time": 0, "eval/val_loss": 1.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 3, 4]
    assert lines[1] == {"step": 3, "tokens": 300, "time": 9.0, "eval/val_loss": None}
    assert lines[2] == {
        **{"step": 4, "tokens": 400, "time": 1.0, "train/loss": 2.0},
        "eval/val_loss": 1.5,
    }
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["step"], row["tokens"], row["eval/val_loss"]) for row in rows] == [
        ("2", "200", ""),
        ("3", "300", "inf"),
        ("4", "400", "1.5"),
    ]
    assert rows[2]["progress"] == "40.0"
    MetricsLog(tmp_path, 4, 400, 10).write({"step": 5, "tokens": 500, "time": 2.0})
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4


def test_table_and_json() -> None:
    figures = {
        "eval/val_loss": 3.0,
        "eval/val_loss_se": 0.01,
        "eval/val_perplexity": 20.1,
        "eval/val_bits_per_byte": 1.1,
        "eval/val_bits_per_byte_se": math.nan,
        "eval/val_loss/code": 2.0,
        "eval/hellaswag_acc": 0.5,
        "eval/hellaswag_acc_se": 0.1,
    }
    shown = as_table("runs/x", 1200, figures, "kept", "no").splitlines()
    assert shown[0] == "runs/x, step 1,200, in float32"
    assert shown[3].split() == ["val", "3.0000", "±0.0100", "20.09", "1.1000"]
    assert shown[4].split() == ["val/code", "2.0000", "7.39"]
    assert shown[6].split() == ["hellaswag_acc", "0.5000", "±0.1000"]
    assert (
        json.loads(as_json("gpt2", None, figures, "x", "bf16"))["figures"][
            "eval/val_bits_per_byte_se"
        ]
        is None
    )


# --------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_real_processes_give_the_same_bits(
    processes: int, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import subprocess

    words = ["evaluate", str(trained), "--json", "--tokens", "null"]
    words += ["--hellaswag", str(short(tmp_path / "h.jsonl"))]
    assert run_here(dispatch, words) == 0
    alone = json.loads(capsys.readouterr().out)
    launcher = [*ACCELERATE, "--multi_gpu", "--num_processes", str(processes)]
    done = subprocess.run(
        [*launcher, "--main_process_port", "0", "-m", "accel_gpt.cli", *words],
        cwd=tmp_path, env=PLAIN, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == alone  # one process speaks


@pytest.mark.slow
def test_equal_to_transformers_on_the_exported_model(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests import test_hellaswag as asked

    text, folder = tmp_path / "text.txt", tmp_path / "bpe"
    recipe = PrepareConfig(
        source="text", path=str(text), tokenizer="bpe", vocab_size=300, shard_tokens=3000, workers=1
    )
    prepare(recipe, folder)
    shape = ["--data.train", str(folder), "--model.block_size", str(asked.BLOCK)]
    assert launch(small_run(*FOUR, *shape)) == 0
    export(str(tmp_path / "run"), tmp_path / "exported", "last", "fp32", False, False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")

    capsys.readouterr()
    questions = [asked.question(i) for i in range(9)]
    file = asked.write(tmp_path / "h.jsonl", questions)
    words = [str(tmp_path / "run"), "--tokens", "null", "--hellaswag", str(file), "--json"]
    assert call(*words) == 0
    found = json.loads(capsys.readouterr().out)["figures"]

    split, nats, count = open_split(folder, "val"), 0.0, 0
    with torch.no_grad():
        for shard, start in eval_sequences(split, asked.BLOCK, None).tolist():
            size = min(asked.BLOCK + 1, int(split.lengths[shard]) - start)
            row = torch.from_numpy(split.read(shard, start, size).astype("int64"))
            logits = theirs(row[None, :-1]).logits[0].double()
            nats += F.cross_entropy(logits, row[1:], reduction="sum").item()
            count += size - 1
        likely = asked.by_hand(questions, tokenizer.encode, lambda ids: theirs(ids).logits)
    assert found["eval/val_loss"] == pytest.approx(nats / count, abs=1e-4)
    assert found["eval/val_perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    asked.check_figures(found, likely)

    from accel_gpt.evals.hellaswag import ending_losses, read_questions

    model, own = load_pretrained(str(tmp_path / "run"))
    read = read_questions(str(file), own, asked.BLOCK)
    from accelerate import Accelerator

    losses = ending_losses(model, read, Accelerator(cpu=True), 4)
    assert (-losses).tolist() == pytest.approx([x for row in likely for x in row], abs=1e-4)


def test_the_whole_val_split_at_the_end_has_a_key_of_its_own(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--train.max_steps", "8", "--eval.tokens", "64", "--eval.whole_at_end", "true")
    assert launch(small_run(*words)) == 0
    known = records(tmp_path / "run")
    assert [r["step"] for r in known if "eval/whole_val_loss" in r] == [8]
    whole = ("--train.max_steps", "8", "--eval.tokens", "null", "--out_dir", str(tmp_path / "all"))
    assert launch(small_run(*whole)) == 0
    last = records(tmp_path / "all")[-1]
    for key in ("loss", "loss_se", "perplexity", "bits_per_byte"):
        assert known[-1][f"eval/whole_val_{key}"] == last[f"eval/val_{key}"]
    assert known[-1]["eval/val_loss"] != last["eval/val_loss"]
    assert launch(small_run(*words[:2], *words[4:], "--eval.tokens", "null")) == 2
    assert "eval.whole_at_end is true but eval.tokens is null" in capsys.readouterr().err
