"""The model card of a push: what it shows, and what it never shows."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from huggingface_hub import ModelCard

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.values import leaves, to_flat
from accel_gpt.data.tokenizer import BytesTokenizer
from accel_gpt.publish import model_card
from accel_gpt.publish.model_card import write_card
from accel_gpt.runs.folder import RunFolder
from accel_gpt.runs.state import InitialWeights, TrainState
from tests.conftest import tiny
from tests.helpers.runs import png_size

CONFIG = """
out_dir: runs/tiny
data: {train: DATA}
model: {n_layer: 2, n_head: 4, n_embd: 32, block_size: 16}
train: {tokens_per_step: 256, micro_batch_size: 4, max_steps: 40}
optim: {lr: 1e-2}
schedule: {warmup_steps: 2}
"""
MACHINE = {
    "versions": {"python": "3.11.7", "torch": "2.13.0+cu130", "other": "/home/alice/other"},
    "commit": "0123456789ab-dirty",
    "device": "NVIDIA H100 80GB HBM3",
    "processes": 4,
    "mixed_precision": "bf16",
    "host": "build-node-17",
}
Make = Callable[..., Path]
LATER = MACHINE | {"device": "NVIDIA B200", "commit": "fedcba987654"}


def record(step: int, **more: float | None) -> dict[str, Any]:
    return {"step": step, "tokens": step * 256, "time": step * 0.5, "train/loss": 5 - step / 20} | (
        {key.replace("__", "/"): value for key, value in more.items()}
    )


@pytest.fixture
def make(tmp_path: Path, corpus: Path) -> Make:
    """Write a run of 40 steps; return its checkpoint of step 30."""

    def made(settings: dict[str, Any] | None = None, initial: InitialWeights | None = None) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(CONFIG.replace("DATA", str(corpus)))
        flat = to_flat(load_config([str(path)], "test")) | (settings or {})
        state = TrainState(30, 480, 7680, 7200.0, 3.1, 3.0, 25, 4, config=flat)
        state.initial_weights = initial
        run = tmp_path / "run"
        checkpoint = run / "checkpoints" / "step_00000030"
        checkpoint.mkdir(parents=True)
        shape = {"config": asdict(tiny()), "vocab_size": 257}
        files = {
            checkpoint / "trainer_state.json": {"format": 1, **asdict(state)},
            checkpoint / "model.json": {"format": 1, **shape},
            checkpoint / "tokenizer.json": json.loads(BytesTokenizer().file_text),
            run / "run.json": {"launches": [{"step": 0, **MACHINE}, {"step": 30, **LATER}]},
        }
        names = [file.name for file in files if file.parent == checkpoint]
        files[checkpoint / "manifest.json"] = {"format": 1, "files": {n: {} for n in names}}
        for file, content in files.items():
            file.write_text(json.dumps(content))
        records = [record(step) for step in range(1, 41)]
        swag = {"eval__hellaswag_acc": 0.26, "eval__hellaswag_acc_norm": 0.27}
        records += [record(20, eval__val_loss=3.2, eval__val_perplexity=24.5325, **swag)]
        records += [record(30, eval__val_loss=3.1, eval__val_bits_per_byte=4.4724)]
        records += [record(40, eval__val_loss=2.9, eval__hellaswag_acc=0.9)]
        lines = [json.dumps(one) + "\n" for one in records]
        (run / "metrics.jsonl").write_text("".join(lines))
        return checkpoint

    return made


def write(checkpoint: Path, to: Path, drawn: bool = False) -> str:
    """Return the text of a card; unless `drawn`, the slow plot is an empty file."""
    to.mkdir(parents=True, exist_ok=True)
    (to / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    run = RunFolder(checkpoint.parents[1])
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(model_card, "loss_curves", lambda _, path: path.touch())
        write_card(run, checkpoint, to, "ada/tiny", "fp32", "MIT")
    return (to / "README.md").read_text(encoding="utf-8")


def config_in(text: str) -> str:
    return text.split("```yaml\n")[1].split("\n```")[0]


def test_shows_what_was_reached_at_the_checkpoint(make: Make, tmp_path: Path) -> None:
    text = write(make(), tmp_path / "card", drawn=True)
    data = ModelCard(text).data
    assert (data.license, data.library_name, data.tags) == ("mit", "transformers", ["accel_gpt"])
    for shown in (
        "after step 30",
        "on `corpus`",
        "| `eval/val_loss` | 3.1000 |",
        "| `eval/val_perplexity` | 24.5325 |",
        "| `eval/hellaswag_acc` | 0.2600 |",
        "| Hardware | 4 x NVIDIA H100 80GB HBM3 |",
        "2.0 hours",
        "| Precision | bf16 |",
        "0123456789ab-dirty",
        'model="ada/tiny"',
        "![Train and val loss",
    ):
        assert shown in text
    assert not [word for word in ("2.9000", "0.9000", "B200", "fedcba987654") if word in text]
    assert png_size(tmp_path / "card" / "loss.png") == (1200, 700)


def test_config_in_the_card_is_one_that_can_be_trained(make: Make, tmp_path: Path) -> None:
    again = tmp_path / "again.yaml"
    settings: dict[str, Any] = {"model.bias": False, "log.every": 7}  # the second is not published
    settings["stages"] = [{"from": 0.5, "data.train": "data/best", "train.micro_batch_size": 4}]
    again.write_text(config_in(write(make(settings), tmp_path / "card")))
    assert set(yaml.safe_load(again.read_text())["model"]) >= {"n_layer", "bias"}
    first, second = (
        to_flat(load_config([str(p)], "test")) for p in (tmp_path / "config.yaml", again)
    )
    different = {key for key in first if first[key] != second[key]}
    assert different == {"out_dir", "data.train", "model.bias", "stages"}
    assert second["data.train"] == "corpus"
    assert second["stages"] == [{**settings["stages"][0], "data.train": "best"}]


# values of options that can hold a path; only the last part may be shown
PRIVATE = (
    "/home/alice/runs/books",
    "~alice/books",
    r"C:\Users\alice\books",
    "alice@build-node-17:/data/acme/books",
    "https://alice:s3cr3t@build-node-17.internal/shards/books?token=s3cr3t",
    "https://build-node-17.internal",
    "s3://acme-bucket/books?X-Amz-Signature=s3cr3t",
    "hf://datasets/acme/books@alice/x?x=s3cr3t",
    "export HF_TOKEN=s3cr3t from $SECRET_ENV",
    "/home/alice",
)
FORBIDDEN = (
    *("alice", "/home", "s3cr3t", "acme-bucket", "build-node-17", "internal", "SECRET_ENV"),
    *("~", "Users", "/data/", "tmp", "laptop"),
)


def holds_text(hint: Any) -> bool:
    return hint is str or any(map(holds_text, get_args(hint)))


@pytest.mark.parametrize("value", PRIVATE)
def test_no_option_shows_a_path_person_or_machine(make: Make, tmp_path: Path, value: str) -> None:
    """In every text option, in a mixture, in a key of a later version, and in a metric."""
    texts = [key for key, hint in leaves(Config).items() if holds_text(hint)]
    assert len(texts) > 20
    settings: dict[str, Any] = dict.fromkeys([*texts, "later.key", "data.val.web"], value)
    settings |= {"sample.prompts": [value], "checkpoint.allow_change": [value]}
    if value in PRIVATE[::2]:
        settings["data.train"] = [{"path": value, "weight": 1, "key": "s3cr3t"}]
    source = {"path": value, "weight": 1, "key": "s3cr3t"}
    settings["stages"] = [{"from": 0.5, "data.train": [source], "key": "s3cr3t"}]
    checkpoint = make(settings, InitialWeights(value, 7, "0a" * 32))
    with (checkpoint.parents[1] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(30) | {f"data/epochs/{value}": 1}) + "\n")
    text = write(checkpoint, tmp_path / "card").replace("\\", "")
    assert [word for word in FORBIDDEN if word in text] == []


def test_the_header_links_the_data_and_the_first_weights(make: Make, tmp_path: Path) -> None:
    shares = {"books": 3, "hf://datasets/user/shards@v1/gpt2": 1}
    sources = [{"path": name, "weight": weight} for name, weight in shares.items()]
    checkpoint = make({"data.train": sources}, InitialWeights("gpt2", None, "0a" * 32))
    text = write(checkpoint, tmp_path / "card")
    assert "from the weights of `gpt2` on `books`, `gpt2`" in text
    assert f"| Initial weights | `gpt2`, SHA-256 {'0a' * 32} |" in text
    assert ModelCard(text).data.datasets == ["user/shards"]
    assert ModelCard(text).data.base_model == "openai-community/gpt2"
