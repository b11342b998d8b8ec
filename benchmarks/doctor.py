"""Prove `accel-gpt doctor`: thirty sick runs with one fault each, and thirty healthy runs.

    python benchmarks/doctor.py [--out runs/doctor] [--texts FOLDER] [--half A|B|all]
        [--only NAME,...] [--jobs 2] [--make | --judge] [--again] [--json FILE]

1. Texts, in --texts (default: OUT/texts), up to 4 MB each:

   code                       modules of Python's standard library on this machine
   prose                      descriptions, documentation and licences of the installed packages
   german, russian, japanese  manual pages of Debian; without them, the runs on them are skipped

   On Debian and Ubuntu, get the manual pages without root, in the folder of --texts:

       apt-get download manpages-de manpages-ru manpages-ja
       for file in manpages-*.deb; do dpkg-deb -x "$file" man; done

2. Data folders, in OUT/data: the texts as tokens, some of them with a fault.
3. Runs, in OUT/runs, on one thread each: `SICK` and `HEALTHY` below. The files of --code are in
   `doctor_code/`. Seeds are fixed. A run that is complete is kept, unless its case has changed.
4. `accel-gpt doctor RUN --json` for each run. A sick run is a hit if one of the expected lines says
   look or wrong. A healthy run should have none that does.

Thresholds of the doctor are chosen on half A only; half B is held out. For the halves, the names of
each group are sorted by their SHA-256: even places are half A, odd places are half B.

All runs take about half an hour with --jobs 2 on two cores.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from common import OURS, ROOT, make_parser, print_table, run_command, save_report, start_report

from accel_gpt.commands.verify_resume import kill_tree
from accel_gpt.config.values import to_nested
from accel_gpt.prepare.sources import STDLIB_SKIP
from accel_gpt.runs.folder import RunFolder

CODE = ROOT / "benchmarks/doctor_code"
POLL = 0.05  # seconds between two looks at a run that will be killed
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
DIVERGED = 5  # exit code of a run whose weights are not finite
Ids = npt.NDArray[np.uint16]
Options = Mapping[str, Any]  # keys with dots, as on the command line

# --------------------------------------------------------------------------- texts

MOST_CHARACTERS = 4_000_000  # of a text
SHORTEST, LONGEST = 1_000, 30_000  # characters of a document
SIMILAR = 0.2  # share of lines that another document has: such a document is left out
LONG_LINE = 20  # characters of a line that counts for it
LEFT_OUT = STDLIB_SKIP | {"encodings", "pydoc_data"}  # tables, and one text of 700 kB
LANGUAGES = {"german": "de", "russian": "ru", "japanese": "ja"}
# macros of a manual page whose arguments are text
SHOWN = re.compile(r"^\.\s*(SH|SS|B|I|BR|IR|BI|IB|RB|RI|TP|IP|SM|SB)\b\s*")
FONT = re.compile(r"\\f(\(..|\[.*?\]|.)")
ESCAPE = re.compile(r"\\\*?\(..|\\[&,/|^]")


def make_texts(folder: Path) -> None:
    """Write the texts that are missing, one file a document."""
    library = Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))
    modules = (path for path in library.rglob("*.py") if not LEFT_OUT & set(path.parts))
    about = (
        path
        for path in packages.rglob("*")
        if path.name == "METADATA" or path.suffix in (".md", ".rst", ".txt")
    )
    write_text(folder / "code", map(read_utf8, in_fixed_order(modules)))
    write_text(folder / "prose", map(read_utf8, in_fixed_order(about)))
    for name, language in LANGUAGES.items():
        pages = (folder / "man/usr/share/man" / language).rglob("*.gz")
        write_text(folder / name, map(read_page, in_fixed_order(pages)))
    for name, derive in DERIVED.items():
        source = folder / derive.source
        if source.is_dir():
            documents = [path.read_text(encoding="utf-8") for path in sorted(source.iterdir())]
            write_documents(folder / name, derive.change(documents))


def in_fixed_order(paths: Iterable[Path]) -> list[Path]:
    """Sort files by a hash of their names, so that neighbours have nothing in common."""
    return sorted(
        paths, key=lambda path: hashlib.sha256("/".join(path.parts[-2:]).encode()).hexdigest()
    )


def read_utf8(path: Path) -> str:
    """Return the text of a file; nothing if it is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return ""


def read_page(path: Path) -> str:
    """Return the text of a manual page without its markup."""
    lines: list[str] = []
    with gzip.open(path, "rt", encoding="utf-8", errors="ignore") as page:
        for line in page.read().splitlines():
            shown = SHOWN.match(line)
            if line.startswith((".", "'")) and shown is None:
                if line.strip() in (".PP", ".P", ".LP", ".sp"):
                    lines.append("")
                continue
            if shown:
                if shown[1] in ("SH", "SS"):
                    lines.append("")
                line = line[shown.end() :].replace('"', "")
            line = ESCAPE.sub("", FONT.sub("", line))
            lines.append(line.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " "))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def write_text(folder: Path, documents: Iterable[str]) -> None:
    """Write documents that are not alike, up to `MOST_CHARACTERS`."""
    if folder.is_dir():
        return
    kept: list[str] = []
    for document in without_copies(documents):
        kept.append(document)
        if sum(map(len, kept)) > MOST_CHARACTERS:
            break
    write_documents(folder, kept)


def without_copies(documents: Iterable[str]) -> Iterator[str]:
    """Yield the documents of a usual length that share few lines with those before."""
    seen: set[str] = set()
    for document in documents:
        lines = [line.strip() for line in document.splitlines() if len(line.strip()) > LONG_LINE]
        if lines and SHORTEST < len(document) < LONGEST:
            if sum(line in seen for line in lines) <= SIMILAR * len(lines):
                yield document
            seen.update(lines)


def write_documents(folder: Path, documents: Sequence[str]) -> None:
    """Write one file for each document, unless the folder exists or there is none."""
    if folder.is_dir() or not documents:
        return
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for number, document in enumerate(documents):
        (unfinished / f"{number:05}.txt").write_text(document, encoding="utf-8")
    unfinished.rename(folder)


@dataclass(frozen=True)
class Derived:
    """A text that is made of another one."""

    source: str
    change: Callable[[list[str]], list[str]]


def few_with_copies(documents: list[str]) -> list[str]:
    """Return a tenth of the documents, ten times."""
    return documents[: len(documents) // 10] * 10


def decoded_as_ascii(documents: list[str]) -> list[str]:
    """Read UTF-8 as ASCII: each byte of another character becomes U+FFFD."""
    return [document.encode().decode("ascii", errors="replace") for document in documents]


DERIVED = {
    "code_little": Derived("code", lambda documents: documents[:6]),
    "code_end": Derived("code", lambda documents: documents[-40:]),
    "copies": Derived("code", few_with_copies),
    "prose_part": Derived("prose", lambda documents: documents[::3]),
    "russian_part": Derived("russian", lambda documents: documents[::3]),
    "russian_lost": Derived("russian", decoded_as_ascii),
}

# --------------------------------------------------------------------------- data folders


@dataclass(frozen=True)
class Place:
    """Where texts, data folders and runs are."""

    out: Path
    texts: Path

    def data(self, name: str) -> Path:
        """Return the path of a data folder."""
        return self.out / "data" / name


def prepare(
    place: Place,
    folder: Path,
    text: str,
    tokenizer: str,
    vocab_size: int | None = None,
    val: str | None = None,
) -> None:
    """Prepare a text; `tokenizer` may be another data folder, whose tokenizer is used."""
    if tokenizer in DATA:
        make_data(place, tokenizer)
        tokenizer = str(place.data(tokenizer) / "tokenizer.json")
    source = "stdlib" if text == "stdlib" else place.texts / text
    words: list[str | Path] = ["prepare", source, "--tokenizer", tokenizer, "--out", folder]
    words += ["--vocab_size", str(vocab_size)] if vocab_size else []
    words += ["--val", place.texts / val] if val else []
    run_command([sys.executable, *OURS, *words], OMP_NUM_THREADS="1")


def write_shards(place: Place, folder: Path, source: str, change: Callable[..., None]) -> None:
    """Write shards of another project from the token ids of the data folder `source`."""
    make_data(place, source)
    prepared = place.data(source)
    train, val = (
        np.concatenate([np.load(file) for file in sorted(prepared.glob(f"{split}_*.npy"))])
        for split in ("train", "val")
    )
    end = json.loads((prepared / "dataset.json").read_text())["eot_id"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(prepared / name, folder)
    change(folder, train, val, end)


def save_npy(folder: Path, train: Ids, val: Ids) -> None:
    """Write the two splits as build-nanogpt does."""
    np.save(folder / "tokens_train_000000.npy", train)
    np.save(folder / "tokens_val_000000.npy", val)


def val_from_train(folder: Path, train: Ids, val: Ids, end: int) -> None:
    """Validate on a part of the train tokens."""
    train = train[:300_000]
    save_npy(folder, train, train[100_000:140_000])


def as_uint32(folder: Path, train: Ids, val: Ids, end: int) -> None:
    """Write uint32 where nanoGPT's names say uint16: each other id that is read is zero."""
    train.astype("<u4").tofile(folder / "train.bin")
    val.astype("<u4").tofile(folder / "val.bin")


def without_ends(folder: Path, train: Ids, val: Ids, end: int) -> None:
    """Leave out each end-of-text token."""
    save_npy(folder, train[train != end], val[val != end])


def padded(folder: Path, train: Ids, val: Ids, end: int) -> None:
    """Cut the text into rows of 128 tokens, of which 90 are padding by the end-of-text token."""

    def rows(ids: Ids) -> Ids:
        text = ids[: len(ids) // 38 * 38].reshape(-1, 38)
        return np.pad(text, ((0, 0), (0, 90)), constant_values=end).reshape(-1)

    save_npy(folder, rows(train), rows(val))


def with_other_tokenizer(folder: Path, train: Ids, val: Ids, end: int) -> None:
    """Remove the right tokenizer; the case names another one as `data.tokenizer`."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    save_npy(folder, train, val)


DATA: dict[str, partial[None]] = {  # how each data folder is made
    "code_1024": partial(prepare, text="code", tokenizer="bpe", vocab_size=1024),
    "code_2048": partial(prepare, text="code", tokenizer="bpe", vocab_size=2048),
    "code_4096": partial(prepare, text="code", tokenizer="bpe", vocab_size=4096),
    "code_8192": partial(prepare, text="code", tokenizer="bpe", vocab_size=8192),
    "code_bytes": partial(prepare, text="code", tokenizer="bytes"),
    "code_little": partial(prepare, text="code_little", tokenizer="code_1024", val="code_end"),
    "stdlib_2048": partial(prepare, text="stdlib", tokenizer="bpe", vocab_size=2048),
    "prose_1024": partial(prepare, text="prose", tokenizer="bpe", vocab_size=1024),
    "prose_chars": partial(prepare, text="prose", tokenizer="chars"),
    "prose_part": partial(prepare, text="prose_part", tokenizer="bpe", vocab_size=1024),
    "prose_by_code": partial(prepare, text="prose", tokenizer="code_2048"),
    "german_1024": partial(prepare, text="german", tokenizer="bpe", vocab_size=1024),
    "german_2048": partial(prepare, text="german", tokenizer="bpe", vocab_size=2048),
    "german_bytes": partial(prepare, text="german", tokenizer="bytes"),
    "russian_1024": partial(prepare, text="russian", tokenizer="bpe", vocab_size=1024),
    "russian_part": partial(prepare, text="russian_part", tokenizer="bpe", vocab_size=1024),
    "russian_chars": partial(prepare, text="russian", tokenizer="chars"),
    "japanese_2048": partial(prepare, text="japanese", tokenizer="bpe", vocab_size=2048),
    # with a fault
    "copies": partial(prepare, text="copies", tokenizer="bpe", vocab_size=1024, val="code_end"),
    "lost_characters": partial(prepare, text="russian_lost", tokenizer="bpe", vocab_size=1024),
    "val_in_train": partial(write_shards, source="code_1024", change=val_from_train),
    "wrong_tokenizer": partial(write_shards, source="code_2048", change=with_other_tokenizer),
    "wrong_dtype": partial(write_shards, source="prose_1024", change=as_uint32),
    "no_ends": partial(write_shards, source="german_1024", change=without_ends),
    "padded": partial(write_shards, source="prose_1024", change=padded),
}


def make_data(place: Place, name: str) -> None:
    """Make a data folder unless it is complete."""
    folder = place.data(name)
    complete = folder.with_suffix(".complete")
    if complete.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not is_prepared(name):
        folder.mkdir()
    DATA[name](place, folder)
    complete.touch()


def is_prepared(name: str) -> bool:
    """Return whether `accel-gpt prepare` makes a data folder."""
    return DATA[name].func is prepare


# --------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Launch:
    """One launch of a run, to its end or to a step after which it is killed."""

    options: Options = field(default_factory=dict)
    code: str | None = None
    """Instead of the case's file of --code."""
    kill_at: int | None = None
    processes: int = 1


@dataclass(frozen=True)
class Case:
    """A run: what is wrong with it or what it is, and the lines that should say so."""

    name: str
    what: str
    data: str | Mapping[str, float]
    """A data folder, or the weights of several."""
    options: Options
    expected: tuple[str, ...] = ()
    code: str | None = None
    """A file in `doctor_code/` or `examples/`."""
    launches: tuple[Launch, ...] = (Launch(),)
    exit_codes: tuple[int, ...] = (0,)


def recipe(**sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with dots from sections."""
    return {
        f"{name}.{key}": value for name, keys in sections.items() for key, value in keys.items()
    }


SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 128}
SMALL_STEPS = {"tokens_per_step": 1024, "micro_batch_size": 8, "max_steps": 600}
# learning rates: the best of three by hand for each family, as far as 600 steps tell
GPT2 = recipe(  # with the usual deviation of 0.02, 64 channels learn half as fast
    model=SHAPE | {"bias": False, "init_std": 0.08},
    train=SMALL_STEPS | {"max_steps": 800},
    optim={"lr": 4e-3},
    schedule={"warmup_steps": 40, "min_lr": 4e-4},
)
LLAMA = recipe(
    model=SHAPE | {"preset": "llama"},
    train=SMALL_STEPS,
    optim={"lr": 5e-3},
    schedule={"warmup_steps": 40, "min_lr": 5e-4},
)
QWEN3 = LLAMA | {"model.preset": "qwen3"}
# configs/quickstart.yaml
FAST = recipe(
    model=SHAPE | {"preset": "fast", "rope_theta": 500, "logit_softcap": None},
    train={"tokens_per_step": 2048, "micro_batch_size": 16, "max_steps": 300},
    optim={
        "name": "muon",
        "lr": 1e-2,
        "embedding_lr": 0.1,
        "muon_momentum": 0.9,
        "beta1": 0.8,
        "weight_decay": 0,
        "grad_clip": 0,
    },
    schedule={"name": "wsd", "warmup_steps": 10, "decay_share": 0.7},
)
WIDER = {"model.n_layer": 3, "model.n_embd": 96}

SICK = [
    Case(
        "rate_times_30",
        "the learning rate is 30 times too high",
        "code_1024",
        LLAMA | {"optim.lr": 0.15, "schedule.min_lr": 0.015},
        ("counting", "rates", "curve"),
        exit_codes=(0, DIVERGED),
    ),
    Case(
        "rate_hundredth",
        "the learning rate is 100 times too low",
        "german_1024",
        LLAMA | {"optim.lr": 5e-5, "schedule.min_lr": 5e-6},
        ("counting", "rates", "fit"),
    ),
    Case(
        "no_warmup",
        "no warm-up, at a high rate",
        "prose_1024",
        GPT2 | {"schedule.warmup_steps": 0, "optim.lr": 1e-2, "schedule.min_lr": 1e-3},
        ("curve", "rates"),
        exit_codes=(0, DIVERGED),
    ),
    Case(
        "no_decay",
        "the rate stays at its peak until the end",
        "code_2048",
        QWEN3
        | {"schedule.name": "constant", "optim.lr": 1e-2, "schedule.min_lr": 0.0}
        | {"train.max_steps": 500},
        ("curve",),
    ),
    Case(
        "decay_on_vectors",
        "strong weight decay, on the scales of the norms too",
        "code_1024",
        LLAMA,
        ("rates",),
        code="decay_on_vectors.py",
    ),
    Case(
        "own_token",
        "each token learns to predict itself",
        "code_1024",
        LLAMA | {"train.max_steps": 300},
        ("leak", "counting", "fit"),
        code="own_token.py",
    ),
    Case(
        "shuffled_targets",
        "the targets are shuffled",
        "german_1024",
        GPT2 | {"train.max_steps": 400},
        ("counting",),
        code="shuffled_targets.py",
    ),
    Case(
        "sees_future",
        "attention without a causal mask",
        "prose_1024",
        LLAMA,
        ("leak",),
        code="sees_future.py",
    ),
    Case(
        "val_in_train",
        "the validation text is a part of the training text",
        "val_in_train",
        FAST | {"train.max_steps": 400},
        ("leak",),
    ),
    Case(
        "copies",
        "nine documents in ten are copies",
        "copies",
        LLAMA | WIDER,
        ("data", "fit"),
    ),
    Case(
        "wrong_tokenizer",
        "the tokenizer is that of another text",
        "wrong_tokenizer",
        QWEN3 | {"data.tokenizer": "DATA/german_2048/tokenizer.json"},
        ("data", "counting"),
    ),
    Case(
        "wrong_dtype",
        "ids of four bytes are read as ids of two",
        "wrong_dtype",
        GPT2 | {"train.max_steps": 500},
        ("data", "counting", "leak"),
    ),
    Case(
        "no_ends",
        "no end-of-text token between the documents",
        "no_ends",
        LLAMA,
        ("data",),
    ),
    Case(
        "overfitted",
        "forty epochs of a little text",
        "code_little",
        LLAMA | WIDER | {"train.max_steps": 900},
        ("fit",),
    ),
    Case(
        "stopped_early",
        "stopped after a tenth of the steps, with the rate still high",
        "code_2048",
        LLAMA | {"train.max_steps": 2000, "eval.every": 50, "checkpoint.every": 100},
        ("curve", "fit", "counting"),
        launches=(Launch({"train.stop_at": 200}),),
    ),
    Case(
        "dropout",
        "dropout of 0.9",
        "code_1024",
        GPT2 | {"model.dropout": 0.9},
        ("fit", "counting"),
    ),
    Case(
        "batch_of_one",
        "a step has one short sequence",
        "russian_1024",
        LLAMA
        | {"model.block_size": 64, "train.tokens_per_step": 64, "train.micro_batch_size": 1}
        | {"train.max_steps": 1500, "schedule.warmup_steps": 75},
        ("fit", "rates", "curve"),
    ),
    Case(
        "frozen_block",
        "one block of three never trains",
        "german_2048",
        LLAMA | {"model.n_layer": 3},
        ("rates",),
        code="frozen_block.py",
    ),
    Case(
        "untied",
        "two embeddings of 8,192 tokens around blocks with 32 channels",
        "code_8192",
        GPT2 | {"model.tie_embeddings": False, "model.n_embd": 32, "train.max_steps": 400},
        ("fit", "rates"),
    ),
    Case(
        "bf16_weights",
        "the weights are bfloat16",
        "code_1024",
        LLAMA | {"optim.lr": 1e-3, "schedule.min_lr": 1e-4},
        ("rates",),
        code="bf16_weights.py",
    ),
    Case(
        "padded",
        "seven tokens in ten are padding that counts",
        "padded",
        LLAMA,
        ("data", "counting"),
    ),
    Case(
        "slow_reads",
        "a step waits for the disk",
        "code_1024",
        LLAMA | {"train.max_steps": 300},
        ("machine",),
        code="slow_reads.py",
    ),
    Case(
        "save_every_step",
        "a checkpoint after each step",
        "prose_1024",
        LLAMA | WIDER | {"train.max_steps": 200, "checkpoint.every": 1},
        ("machine",),
    ),
    Case(
        "slow_rank",
        "one of two processes is slow",
        "code_2048",
        LLAMA | {"train.max_steps": 300, "train.micro_batch_size": 4},
        ("machine",),
        code="slow_rank.py",
        launches=(Launch(processes=2),),
    ),
    Case(
        "eval_every_step",
        "an evaluation after each step",
        "german_1024",
        GPT2 | {"train.max_steps": 100, "eval.every": 1, "eval.tokens": 8192},
        ("machine",),
    ),
    Case(
        "samples_every_step",
        "samples after every other step",
        "russian_1024",
        FAST | {"train.max_steps": 100, "sample.every": 2, "sample.num": 4},
        ("machine",),
    ),
    Case(
        "lost_moments",
        "a resume begins with empty moments",
        "code_1024",
        LLAMA | {"optim.lr": 2e-2, "schedule.min_lr": 2e-3},
        ("curve", "rates"),
        code="lost_moments.py",
        launches=(Launch({"train.stop_at": 250}), Launch()),
    ),
    Case(
        "never_saved",
        "killed at its end, without a checkpoint",
        "prose_1024",
        QWEN3 | {"checkpoint.every": 1000, "checkpoint.keep_best": False},
        ("kill",),
        launches=(Launch(kill_at=570),),
    ),
    Case(
        "other_code",
        "resumed with another loss and other weight decay",
        "german_1024",
        LLAMA,
        ("identity", "curve"),
        code="z_loss.py",
        launches=(
            Launch({"train.stop_at": 300}),
            Launch(
                {
                    "checkpoint.allow_change": ["code", "optim.weight_decay"],
                    "optim.weight_decay": 0.0,
                },
                code="smoothed.py",
            ),
        ),
    ),
    Case(
        "lost_characters",
        "most characters were lost in decoding",
        "lost_characters",
        LLAMA,
        ("data",),
    ),
]

HEALTHY = [
    Case("gpt2_code", "GPT-2, AdamW, cosine", "code_1024", GPT2),
    Case("gpt2_german", "GPT-2 with three blocks", "german_2048", GPT2 | {"model.n_layer": 3}),
    Case(
        "gpt2_prose_three_epochs",
        "GPT-2, three epochs of a part of the prose",
        "prose_part",
        GPT2 | {"train.max_steps": 650, "model.dropout": 0.1},
    ),
    Case("llama_code", "Llama, AdamW, cosine", "code_1024", LLAMA),
    Case(
        "llama_german_bytes",
        "Llama on bytes",
        "german_bytes",
        LLAMA | {"train.max_steps": 1000, "model.n_layer": 3},
    ),
    Case(
        "llama_russian_chars",
        "Llama on characters",
        "russian_chars",
        LLAMA | {"train.max_steps": 1000},
    ),
    Case(
        "llama_prose_linear",
        "Llama, a linear decay to zero",
        "prose_1024",
        LLAMA | {"schedule.name": "linear", "schedule.min_lr": 0.0},
    ),
    Case("qwen3_code", "Qwen3, AdamW, cosine", "code_2048", QWEN3),
    Case("qwen3_japanese", "Qwen3 on Japanese", "japanese_2048", QWEN3),
    Case(
        "qwen3_german_wsd",
        "Qwen3, constant rate, then a linear decay",
        "german_1024",
        QWEN3 | {"schedule.name": "wsd", "schedule.min_lr": 0.0},
    ),
    Case("fast_code", "the fast recipe: Muon", "code_1024", FAST),
    Case(
        "fast_german_bytes",
        "the fast recipe on bytes",
        "german_bytes",
        FAST | {"train.max_steps": 500},
    ),
    Case(
        "fast_russian_epoch",
        "the fast recipe, one epoch",
        "russian_1024",
        FAST | {"train.max_steps": 240},
    ),
    Case(
        "fast_wide",
        "the fast recipe, 3.3 million parameters",
        "code_4096",
        FAST
        | {"model.n_layer": 4, "model.n_embd": 192, "model.n_head": 4}
        | {"train.tokens_per_step": 1024, "train.micro_batch_size": 8, "train.max_steps": 240},
    ),
    Case(
        "llama_tiny",
        "Llama, 50,000 parameters",
        "code_bytes",
        LLAMA
        | {"model.n_embd": 32, "optim.lr": 1e-2, "schedule.min_lr": 1e-3}
        | {"train.max_steps": 1200, "schedule.warmup_steps": 60},
    ),
    Case(
        "muon_llama",
        "Llama, Muon at AdamW's rate",
        "german_1024",
        LLAMA | {"optim.name": "muon"},
    ),
    Case(
        "stopped_and_resumed",
        "stopped in the middle, resumed",
        "prose_1024",
        LLAMA,
        launches=(Launch({"train.stop_at": 310}), Launch()),
    ),
    Case(
        "killed_and_resumed",
        "killed in the middle, resumed",
        "code_2048",
        QWEN3,
        launches=(Launch(kill_at=380), Launch()),
    ),
    Case(
        "killed_twice",
        "killed twice, resumed twice",
        "russian_1024",
        GPT2 | {"train.max_steps": 500, "optim.lr": 3e-3, "schedule.min_lr": 3e-4},
        launches=(Launch(kill_at=180), Launch(kill_at=330), Launch()),
    ),
    Case(
        "ema",
        "evaluated by an average of the weights",
        "code_1024",
        LLAMA,
        code="ema.py",
    ),
    Case(
        "own_metrics",
        "metrics of its own",
        "german_1024",
        QWEN3 | {"train.max_steps": 500},
        code="own_metrics.py",
    ),
    Case(
        "own_optimizer",
        "AdamW of torch in a file of its own, stopped and resumed",
        "code_1024",
        LLAMA,
        code="own_adamw.py",
        launches=(Launch({"train.stop_at": 300}), Launch()),
    ),
    Case(
        "own_targets",
        "the first targets of a sequence are left out",
        "code_2048",
        LLAMA,
        code="with_context.py",
    ),
    Case(
        "accumulation",
        "four micro-batches a step",
        "prose_1024",
        LLAMA
        | {"train.tokens_per_step": 2048, "train.micro_batch_size": 4, "train.max_steps": 400},
    ),
    Case(
        "two_processes",
        "two processes",
        "code_1024",
        LLAMA | {"train.micro_batch_size": 4, "train.max_steps": 500},
        launches=(Launch(processes=2),),
    ),
    Case(
        "budget",
        "a length of 20 seconds",
        "german_2048",
        FAST | {"train.budget": "20s"},
    ),
    Case(
        "document_mask",
        "attention ends with the document",
        "prose_1024",
        LLAMA | {"data.document_mask": True},
    ),
    Case(
        "mixture",
        "code and prose, 7 to 3",
        {"code_2048": 0.7, "prose_by_code": 0.3},
        LLAMA,
    ),
    Case(
        "characters_of_prose",
        "configs/fast_shakespeare_cpu.yaml on other text",
        "prose_chars",
        FAST
        | {"model.n_embd": 128, "model.zero_init": False, "optim.muon_lr": 2e-2}
        | {"train.max_steps": 200, "schedule.warmup_steps": 5},
    ),
    Case(
        "whole_library",
        "configs/quickstart.yaml, shorter, on the whole standard library",
        "stdlib_2048",
        FAST
        | {"model.n_layer": 3, "train.max_steps": 300, "train.tokens_per_step": 4096}
        | {"train.micro_batch_size": 32},
    ),
]


def halves(cases: Sequence[Case]) -> dict[str, str]:
    """Return the half of each case by its name."""
    names = sorted(
        (case.name for case in cases), key=lambda name: hashlib.sha256(name.encode()).digest()
    )
    return {name: "AB"[place % 2] for place, name in enumerate(names)}


HALF = halves(SICK) | halves(HEALTHY)

# --------------------------------------------------------------------------- runs


def make_runs(place: Place, cases: Sequence[Case], jobs: int, again: bool) -> None:
    """Make texts and data, and train the runs that are missing."""
    make_texts(place.texts)
    for name in dict.fromkeys(name for case in cases for name in needed_data(case)):
        make_data(place, name)
    with ThreadPoolExecutor(jobs) as pool:
        for line in pool.map(partial(make_run, place, again), cases):
            print(line, flush=True)


def data_of(case: Case) -> list[str]:
    """Return the names of the data folders of a case."""
    return [case.data] if isinstance(case.data, str) else list(case.data)


def complete_file(place: Place, case: Case) -> Path:
    """Return the file that says that a run is complete, and of which case."""
    return place.out / "complete" / f"{case.name}.json"


def needed_data(case: Case) -> list[str]:
    """Return the data folders of a case, and those whose files its options name."""
    return data_of(case) + re.findall(r"DATA/(\w+)", str(case.options))


def make_run(place: Place, again: bool, case: Case) -> str:
    """Train a run unless it is complete; return what happened."""
    complete = complete_file(place, case)
    digest = fingerprint(case)
    if complete.exists() and not again and json.loads(complete.read_text())["case"] == digest:
        return f"{case.name}: kept"
    complete.unlink(missing_ok=True)
    run = place.out / "runs" / case.name
    shutil.rmtree(run, ignore_errors=True)
    start = time.monotonic()
    for number, launch in enumerate(case.launches):
        log = place.out / "logs" / f"{case.name}_{number}.log"
        code = start_launch(place, case, launch, log)
        expected = (-9,) if launch.kill_at else case.exit_codes
        if code not in expected:
            last = log.read_text(encoding="utf-8").strip().splitlines()[-1:]
            return f"{case.name}: FAILED with exit code {code}: {' '.join(last)}"
    seconds = time.monotonic() - start
    complete.parent.mkdir(parents=True, exist_ok=True)
    complete.write_text(json.dumps({"case": digest, "seconds": round(seconds, 1)}))
    return f"{case.name}: {seconds:.0f} s"


def fingerprint(case: Case) -> str:
    """Return a hash of what decides a run: the case, but not its sentences, and its files."""
    facts = repr((case.data, case.options, case.code, case.launches))
    for code in (case.code, *(launch.code for launch in case.launches)):
        facts += code_file(code).read_text(encoding="utf-8") if code else ""
    return hashlib.sha256(facts.encode()).hexdigest()


def code_file(name: str) -> Path:
    """Return the path of a file of --code."""
    return CODE / name if (CODE / name).exists() else ROOT / "examples" / name


def start_launch(place: Place, case: Case, launch: Launch, log: Path) -> int:
    """Launch a run and wait for its end, or kill it; return the exit code."""
    config = place.out / "configs" / f"{case.name}.yaml"
    for path in (config, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(to_nested(all_options(place, case)), sort_keys=False))
    words: list[str | Path] = ["train", config]
    for key, value in launch.options.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{key}", str(one)]
    code = launch.code or case.code
    words += ["--code", code_file(code)] if code else []
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    starter = [*ranks, str(launch.processes)] if launch.processes > 1 else []
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *starter, *OURS, *map(str, words)],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
        )
    try:
        while process.poll() is None:
            if launch.kill_at and RunFolder(place.out / "runs" / case.name).step >= launch.kill_at:
                break
            time.sleep(POLL)
    finally:
        if process.poll() is None:
            kill_tree(process)
    return process.returncode


def all_options(place: Place, case: Case) -> dict[str, Any]:
    """Return the options of a case with its paths, and with intervals that follow its length."""
    steps = case.options["train.max_steps"]
    paths = {name: str(place.data(name)) for name in data_of(case)}
    mixture = [{"path": paths[name], "weight": weight} for name, weight in mixed(case).items()]
    options = {
        "out_dir": str(place.out / "runs" / case.name),
        "data.train": mixture or paths[data_of(case)[0]],
        "train.mixed_precision": "auto",
        "eval.every": steps // 10,
        "eval.tokens": 32_768,
        "sample.every": steps // 2,
        "sample.max_new_tokens": 64,
        "checkpoint.every": steps // 4,
        "log.every": 5,
        "log.trackers": [],
        **case.options,
    }
    if "data.tokenizer" in options:
        options["data.tokenizer"] = options["data.tokenizer"].replace("DATA", str(place.data("")))
    return options


def mixed(case: Case) -> Mapping[str, float]:
    """Return the weights of a mixture; empty for one data folder."""
    return {} if isinstance(case.data, str) else case.data


# --------------------------------------------------------------------------- the doctor

Page = dict[str, Any]  # what `accel-gpt doctor --json` prints


def judge(place: Place, cases: Sequence[Case], jobs: int) -> dict[str, Page]:
    """Call the doctor for each run; a page by the name of its case."""

    def page(case: Case) -> Page:
        run = place.out / "runs" / case.name
        if not complete_file(place, case).exists():
            return {"error": "not trained", "lines": []}
        done = subprocess.run(
            [sys.executable, *OURS, "doctor", str(run), "--json"],
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            parsed: Page = json.loads(done.stdout)
        except json.JSONDecodeError:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            return {"error": f"no page: {' '.join(last)[:100]}", "lines": []}
        return parsed

    with ThreadPoolExecutor(jobs) as pool:
        pages = list(pool.map(page, cases))
    return {case.name: page for case, page in zip(cases, pages, strict=True)}


def verdicts(page: Page) -> dict[str, str]:
    """Return the lines of a page that say look or wrong."""
    return {
        line["name"]: line["verdict"]
        for line in page["lines"]
        if line["verdict"] in ("look", "wrong")
    }


def show(page: Page) -> str:
    """Return the lines that say look or wrong as the cell of a table."""
    if "error" in page:
        return str(page["error"])
    found = verdicts(page)
    return ", ".join(f"{name} ({verdict})" for name, verdict in found.items()) or "none"


def is_hit(case: Case, page: Page) -> bool:
    """Return whether a line that should tell the fault says look or wrong."""
    return any(name in verdicts(page) for name in case.expected)


def print_pages(cases: Sequence[Case], pages: Mapping[str, Page]) -> None:
    """Print a table of the sick runs, one of the healthy runs, and the totals of each half."""
    sick = [case for case in cases if case.expected]
    healthy = [case for case in cases if not case.expected]
    rows = []
    for case in sick:
        page = pages[case.name]
        result = "hit" if is_hit(case, page) else "MISS"
        expected = " or ".join(case.expected)
        rows.append([case.name, HALF[case.name], case.what, expected, show(page), result])
    print_table(["sick run", "half", "fault", "expected", "look or wrong", "result"], rows)
    rows = []
    for case in healthy:
        page = pages[case.name]
        counts = [*verdicts(page).values()]
        numbers = [str(counts.count("look")), str(counts.count("wrong"))]
        rows.append([case.name, HALF[case.name], case.what, *numbers, show(page)])
    print_table(["healthy run", "half", "what", "look", "wrong", "lines"], rows)
    rows = []
    for half in "AB":
        ill = [case for case in sick if HALF[case.name] == half]
        well = [case for case in healthy if HALF[case.name] == half]
        if not ill and not well:
            continue
        hits = sum(is_hit(case, pages[case.name]) for case in ill)
        told = [verdicts(pages[case.name]).values() for case in well]
        alarms = [
            f"{sum(level in values for values in told)} of {len(well)}"
            for level in ("look", "wrong")
        ]
        rows.append([half, f"{hits} of {len(ill)}", *alarms])
    print_table(["half", "sick runs found", "healthy with a look", "healthy with a wrong"], rows)


# --------------------------------------------------------------------------- the command


def main() -> None:
    """Train the runs, and print what the doctor says about them."""
    parser = make_parser(__doc__, peer=False)
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--texts", type=Path, help="folder of the texts; default: OUT/texts")
    parser.add_argument("--half", choices=["A", "B", "all"], default="all")
    parser.add_argument("--only", help="names of cases, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="runs that train at a time")
    parser.add_argument("--make", action="store_true", help="train only")
    parser.add_argument("--judge", action="store_true", help="call the doctor only")
    parser.add_argument("--again", action="store_true", help="train complete runs again")
    args = parser.parse_args()
    out = args.out.resolve()
    place = Place(out, (args.texts or out / "texts").resolve())
    cases = [case for case in [*SICK, *HEALTHY] if args.half in (HALF[case.name], "all")]
    if args.only:
        cases = [case for case in cases if case.name in args.only.split(",")]
    cases = without_text(place, cases)
    report = start_report()
    if not args.judge:
        make_runs(place, cases, args.jobs, args.again)
    if not args.make:
        report["pages"] = judge(place, cases, args.jobs)
        print_pages(cases, report["pages"])
    save_report(args.json, report)


def without_text(place: Place, cases: Sequence[Case]) -> list[Case]:
    """Return the cases whose texts can be had; name the others."""
    missing = [
        name
        for name, language in LANGUAGES.items()
        if not (place.texts / name).is_dir()
        and not (place.texts / "man/usr/share/man" / language).is_dir()
    ]
    left_out: list[Case] = []
    kept: list[Case] = []
    for case in cases:
        needed = needed_data(case)
        sources = [
            DATA[name].keywords.get("text") or DATA[name].keywords["source"] for name in needed
        ]
        lacks = any(source.startswith(name) for source in sources for name in missing)
        (left_out if lacks else kept).append(case)
    if left_out:
        names = ", ".join(case.name for case in left_out)
        print(f"no text in {', '.join(missing)}; skipped: {names}", flush=True)
    return kept


if __name__ == "__main__":
    main()
