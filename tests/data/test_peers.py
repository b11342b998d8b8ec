"""Read what other projects write, and compute the same values as they do.

Their scripts run as they are. Set ACCEL_GPT_PEERS to a folder with checkouts of nanoGPT,
build-nanogpt and llm.c (they need requests, tqdm, tiktoken and transformers), and
ACCEL_GPT_DATATROVE to a Python with datatrove.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accel_gpt.config.data import DataConfig
from accel_gpt.data.sources import open_data
from accel_gpt.prepare.bpe import train_bpe
from tests.conftest import text_of

pytestmark = pytest.mark.slow

TEXT = text_of(60_000).replace(" king", ".\n\nKing") + "naïve ☃ end.\n"
DOCUMENTS = TEXT.split("\n\n")
EOT = "<|endoftext|>"


def checkout(name: str, folder: str, to: Path) -> Path:
    """A copy of the scripts in a folder of a checkout."""
    if "ACCEL_GPT_PEERS" not in os.environ:
        pytest.skip("ACCEL_GPT_PEERS is not set")
    to.mkdir()
    for script in (Path(os.environ["ACCEL_GPT_PEERS"]) / name / folder).glob("*.py"):
        shutil.copy(script, to)
    return to


def run(*command: str | Path, folder: Path, python: str = sys.executable) -> None:
    environment = {**os.environ, "PYTHONUTF8": "1", "PYTHONPATH": ""}
    subprocess.run([python, *command], cwd=folder, env=environment, check=True, timeout=300)


def text_in(folder: Path, split: str, tokenizer: str | None = None) -> str:
    opened, made_by = open_data(str(folder), split, DataConfig(tokenizer=tokenizer))
    parts = [opened.read(i, 0, int(n)).tolist() for i, n in enumerate(opened.lengths)]
    return made_by.decode([token for part in parts for token in part])


@pytest.mark.parametrize(
    ("script", "tokenizer"), [("shakespeare_char", None), ("shakespeare", "gpt2")]
)
def test_nanogpt(tmp_path: Path, script: str, tokenizer: str | None) -> None:
    folder = checkout("nanoGPT", f"data/{script}", tmp_path / "copy")
    (folder / "input.txt").write_text(TEXT, encoding="utf-8")
    run("prepare.py", folder=folder)
    cut = int(len(TEXT) * 0.9)
    assert text_in(folder, "train", tokenizer) == TEXT[:cut]
    assert text_in(folder, "val", tokenizer) == TEXT[cut:]


def test_build_nanogpt(tmp_path: Path) -> None:
    folder = checkout("build-nanogpt", ".", tmp_path / "copy")
    documents = json.dumps([{"text": document} for document in DOCUMENTS])
    (folder / "documents.json").write_text(documents)
    (folder / "datasets.py").write_text(  # stands in for the library, which would download
        "import json\ndef load_dataset(*a, **k): return json.load(open('documents.json'))\n"
    )
    script = (folder / "fineweb.py").read_text()
    assert "shard_size = int(1e8)" in script
    (folder / "fineweb.py").write_text(script.replace("int(1e8)", "20_000"))
    run("fineweb.py", folder=folder)
    written = folder / "edu_fineweb10B"
    assert len(list(written.iterdir())) > 2
    text = text_in(written, "val", "gpt2") + text_in(written, "train", "gpt2")
    assert text == "".join(EOT + document for document in DOCUMENTS)


def test_llmc(tmp_path: Path) -> None:
    folder = checkout("llm.c", "dev/data", tmp_path / "copy")
    written = folder / "tinyshakespeare"
    written.mkdir()
    (written / "tiny_shakespeare.txt").write_text(TEXT, encoding="utf-8")
    run("tinyshakespeare.py", folder=folder)
    example = {"label": 1, "ctx_tokens": [1, 2], "ending_tokens": [[3]] * 4}
    evaluation = f"write_evalfile('tinyshakespeare/hellaswag_val.bin', [{example}])"
    run("-c", f"from data_common import *; {evaluation}", folder=folder)
    expected = "".join(EOT + document + "\n\n" for document in DOCUMENTS).removesuffix("\n\n")
    assert text_in(written, "val") + text_in(written, "train") == expected


DATATROVE = """
from datatrove.data import Document
from datatrove.pipeline.tokens.tokenizer import DocumentTokenizer
texts = open("text.txt", encoding="utf-8").read().split("\\n\\n")
DocumentTokenizer(
    "written", "tokenizer.json", eos_token="<|endoftext|>", max_tokens_per_file=20_000, seed=1,
    shuffle_documents=True,
).run(Document(text=text, id=str(i)) for i, text in enumerate(texts))
"""


def test_datatrove(tmp_path: Path) -> None:
    if "ACCEL_GPT_DATATROVE" not in os.environ:
        pytest.skip("ACCEL_GPT_DATATROVE is not set")
    train_bpe([TEXT], 300).save(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    run("-c", DATATROVE, folder=tmp_path, python=os.environ["ACCEL_GPT_DATATROVE"])
    read = text_in(tmp_path / "written", "train", str(tmp_path / "tokenizer.json"))
    documents = read.removesuffix(EOT).split(EOT)
    assert sorted(documents) == sorted(DOCUMENTS)
    assert len(list((tmp_path / "written").glob("*.ds"))) > 1
