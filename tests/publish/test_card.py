"""Model card and logs of a push: what they show, what they never show, valid Markdown."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.values import leaves, to_flat
from accel_gpt.data.shards import open_split
from accel_gpt.data.sources import TrainedSource
from accel_gpt.data.tokenizer import BytesTokenizer
from accel_gpt.publish import model_card
from accel_gpt.publish.model_card import write_card
from accel_gpt.publish.push import write_logs
from accel_gpt.publish.redaction import public_source
from accel_gpt.runs.folder import RunFolder
from accel_gpt.runs.state import TrainState
from tests.conftest import tiny
from tests.helpers.runs import png_size

CONFIG = """
out_dir: runs/tiny
data: {train: DATA}
model: {n_layer: 2, n_head: 4, n_embd: 32, block_size: 16}
train: {tokens_per_step: 256, micro_batch_size: 4, max_steps: 40}
optim: {lr: 1e-2}
schedule: {warmup_steps: 2}
sample: {num: 2}
"""
MACHINE = {
    "versions": {"python": "3.11.7", "torch": "2.13.0+cu130", "other": "/home/alice/other"},
    "commit": "0123456789ab-dirty",
    "device": "NVIDIA H100 80GB HBM3",
    "processes": 4,
    "mixed_precision": "bf16",
    "platform": "Linux-6.1-alice-laptop",
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

    def made(settings: dict[str, Any] | None = None, samples: str = "--- sample 1\nof a king\n"):
        path = tmp_path / "config.yaml"
        path.write_text(CONFIG.replace("DATA", str(corpus)))
        flat = to_flat(load_config([str(path)], "test")) | (settings or {})
        print_ = open_split(corpus, "train").fingerprint
        state = TrainState(30, 480, 7680, 7200.0, 3.1, 3.0, 25, 4, print_, config=flat)
        state.data_sources = [TrainedSource("corpus", 1.0, print_)]
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
        (run / "samples").mkdir()
        for step in (5, 10):
            text = f"--- sample 1\nolder, of step {step}\n"
            (run / "samples" / f"step_{step:08d}.txt").write_text(text)
        (run / "samples" / "step_00000020.txt").write_text(samples, encoding="utf-8")
        (run / "samples" / "step_00000040.txt").write_text("--- sample 1\nfrom the future\n")
        return checkpoint

    return made


def write(
    checkpoint: Path, to: Path, licence: str | None = "mit", drawn: bool = False, **more: Any
) -> str:
    """Return the text of a card; unless `drawn`, the slow plot is an empty file."""
    to.mkdir(parents=True, exist_ok=True)
    names = "ada/tiny", "GPT2LMHeadModel", "float32", licence
    run = RunFolder(checkpoint.parents[1])
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(model_card, "loss_curves", lambda _, path: path.touch())
        write_card(run, checkpoint, BytesTokenizer(), to, *names, **more)
    return (to / "README.md").read_text(encoding="utf-8")


def config_in(text: str) -> str:
    return text.split("```yaml\n")[1].split("\n```")[0]


def test_shows_what_was_reached_at_the_checkpoint(make: Make, tmp_path: Path) -> None:
    text = write(make(), tmp_path / "card", drawn=True)
    data = ModelCard.load(tmp_path / "card" / "README.md").data
    assert (data.license, data.library_name, data.pipeline_tag) == (
        *("mit", "transformers", "text-generation"),
    )
    assert {"accel_gpt", "gpt2"} <= set(data.tags)
    values = {(r.dataset_name, r.metric_type): r.metric_value for r in data.eval_results}
    assert values == {
        ("corpus, held-out text", "loss"): 3.1,
        ("corpus, held-out text", "perplexity"): 24.5325,
        ("corpus, held-out text", "bits_per_byte"): 4.4724,
    }
    for shown in (
        "after step 30",
        "| Val loss, nats per token | 3.1000 |",
        r"| eval/hellaswag\_acc | 0.2600 |",
        "| Hardware | 4 x NVIDIA H100 80GB HBM3 |",
        "2.0 hours",
        "| Precision | bf16 |",
        "--num_processes 4",
        "0123456789ab-dirty",
        'model="ada/tiny"',
        "![Train and val loss",
    ):
        assert shown in text
    positions = [text.index(word) for word in ("of a king", "of step 10", "of step 5")]
    assert positions == sorted(positions)  # three samples, although each step wrote one
    assert not [word for word in ("from the future", "B200", "fedcba987654") if word in text]
    assert png_size(tmp_path / "card" / "loss.png") == (1200, 700)


def test_config_in_the_card_is_one_that_can_be_trained(make: Make, tmp_path: Path) -> None:
    again = tmp_path / "again.yaml"
    settings = {"model.bias": False, "log.every": 7}  # the second is not published
    again.write_text(config_in(write(make(settings), tmp_path / "card")))
    assert set(yaml.safe_load(again.read_text())["model"]) >= {"n_layer", "bias"}
    first, second = (
        to_flat(load_config([str(p)], "test")) for p in (tmp_path / "config.yaml", again)
    )
    different = {key for key in first if first[key] != second[key]}
    assert different == {"out_dir", "data.train", "model.bias"}
    assert second["data.train"] == "corpus"


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
    checkpoint = make(settings)
    with (checkpoint.parents[1] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(30) | {f"data/epochs/{value}": 1}) + "\n")
    text = write(checkpoint, tmp_path / "card").replace("\\", "")
    assert [word for word in FORBIDDEN if word in text] == []


BREAKING = (
    "---\nlicense: evil\n---\n# Title\n```\n````js\n</details><script>alert(1)</script>\r\n"
    "<!-- \ufffd \x00 \x1b[31m \u202e | a | b |\n~~~\n--- sample 9\n![x](http://x)\n"
)


def test_no_sample_and_no_licence_breaks_the_page(make: Make, tmp_path: Path) -> None:
    samples = f"--- sample 1\n{BREAKING}\n\n--- sample 2\nthe second\n\n--- sample 3\n\n"
    evil = "cc0 | <b>x</b>\n---\nfoo: [bar](http://x) *y* `z`"
    checkpoint = make(samples=samples)
    launches = {"launches": [{"step": 0, **MACHINE, "device": evil}]}
    (checkpoint.parents[1] / "run.json").write_text(json.dumps(launches))
    text = write(checkpoint, tmp_path / "card", evil)
    card = ModelCard.load(tmp_path / "card" / "README.md")
    assert card.data.license == "cc0 | <b>x</b> --- foo: [bar](http://x) *y* `z`"
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(card.text)
    blocks = [token.content for token in tokens if token.type == "fence"]
    block = next(content for content in blocks if "evil" in content)
    assert block.startswith("---\nlicense: evil\n---\n# Title\n```\n````js\n</details><script>")
    assert block.rstrip().endswith("--- sample 9\n![x](http://x)")
    assert "the second\n" in blocks
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)
    outside = [token for token in tokens if token.type != "fence"]
    assert [t.content for t in outside if t.type == "html_block"] == [
        "<details>\n<summary>config.yaml</summary>\n",
        "</details>\n",
    ]
    headings = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"]
    assert headings == [
        *("tiny", "Use it", "Results", "Samples", "Model and training"),
        *("Reproduce it", "Limitations"),
    ]
    assert "4 x cc0 | &lt;b&gt;x&lt;/b&gt; --- foo: [bar](http://x) *y* `z`</td>" in (
        MarkdownIt("commonmark").enable("table").render(card.text)
    )


def test_a_mixture_lists_its_sources_with_their_shares(make: Make, tmp_path: Path) -> None:
    shares = {"books": 3, "hf://datasets/user/shards@v1/gpt2": 1}
    sources = [{"path": name, "weight": weight} for name, weight in shares.items()]
    checkpoint = make({"data.train": sources})
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state["data_sources"] = [
        {"name": name, "weight": weight, "fingerprint": "unknown"}
        for name, weight in (("books", 3), ("gpt2", 1))
    ]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    text = write(checkpoint, tmp_path / "card", language="en, de")
    assert "**books (75.0%) + gpt2 (25.0%)**" in text
    assert ModelCard(text).data.datasets == ["user/shards"]
    assert ModelCard(text).data.language == ["en", "de"]


# --------------------------------------------------------------------------- logs


def test_logs_hold_the_metrics_and_nothing_private(make: Make, tmp_path: Path) -> None:
    run, to = make().parents[1], tmp_path / "out"
    url = "s3://acme/books?key=s3cr3t"
    with (run / "metrics.jsonl").open("a") as file:
        more = {f"eval/val_loss/{url}": 1.5, "train/loss": None, "note": 7, "eval/text": "/home/al"}
        file.write(json.dumps({"step": 41, "time": 20.5, **more}) + '\n{"step": 3, "/home/al')
    to.mkdir()
    write_logs(RunFolder(run), to)
    for path in filter(Path.is_file, to.rglob("*")):
        assert not [w for w in (b"/home", b"s3cr3t", b"acme") if w in path.read_bytes()]
    lines = (to / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines[:40]] == [record(step) for step in range(1, 41)]
    public = f"eval/val_loss/{public_source(url)}"
    assert json.loads(lines[-1]) == {"step": 41, "time": 20.5, public: 1.5, "train/loss": None}
    found: Any = EventAccumulator(str(to / "tensorboard"))
    found.Reload()
    losses = [(one.step, one.value) for one in found.Scalars("train/loss")]
    assert losses[:40] == [(step, pytest.approx(5 - step / 20)) for step in range(1, 41)]
    assert found.Scalars(public)[0].value == 1.5
