"""How fast text becomes shards and shards become batches, as ratios measured in one run.

    python benchmarks/data.py TEXT.jsonl [--nanogpt FOLDER] [--only loader,shards,seek,prepare,bpe]
        [--workers 2] [--rounds 5] [--json OUT.json]

TEXT.jsonl: documents, one a line, under "text"; 100 MB or more give steady figures. FOLDER: a
checkout of karpathy/nanoGPT, whose `get_batch` and data/openwebtext/prepare.py are run unmodified.
Whatever is compared runs in turn, a round of each, in this process or as whole processes; printed
are medians over the rounds and their ratio.
"""

import argparse
import ast
import contextlib
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from accel_gpt.config.plan import Plan
from accel_gpt.data.loader import Loader, read_sequences
from accel_gpt.data.mixture import Mixture
from accel_gpt.data.shards import Shard, open_split, token_dtype
from accel_gpt.data.sources import Source
from accel_gpt.data.tokenizer import BytesTokenizer
from accel_gpt.prepare.shard_writer import ShardWriter, write_index

B, T = 12, 1024
VOCAB = 50_257
TOKENS = 100_000_000
Report = dict[str, Any]


def main() -> None:
    """Measure what `--only` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--only", default="loader,shards,seek,prepare,bpe")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    reports: dict[str, Report] = {}
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            reports[name] = MEASURES[name](options, Path(folder))
        for key, value in reports[name].items():
            print(f"{name:<8} {key:<58} {value}")
    if options.json:
        options.json.write_text(json.dumps(reports, indent=1))


# --------------------------------------------------------------------------- loading


def measure_loader(options: argparse.Namespace, folder: Path) -> Report:
    """Batches of 12 x 1,024 tokens: ours, nanoGPT's get_batch, and a copy of the same windows."""
    make_shards(folder / "one", 1, TOKENS)
    read = windows_of(folder / "one")
    loader = Loader(windows_of(folder / "one"), B, torch.device("cpu"))
    array = np.load(folder / "one" / "train_000000.npy")
    random = np.random.default_rng(0)
    rows = np.empty((B, T + 1), np.uint16)

    def copy() -> None:
        for row, start in zip(rows, random.integers(0, TOKENS - T - 1, B).tolist(), strict=True):
            row[:] = array[start : start + T + 1]

    subjects: dict[str, Callable[[], object]] = {
        "ours, reading alone": lambda: next(read),  # a portion of many batches
        "ours, as training gets it": lambda: next(loader),
        "plain copy of such windows in memory": copy,
    }
    if options.nanogpt:
        array.tofile(folder / "train.bin")
        subjects["nanoGPT's get_batch"] = nanogpt_get_batch(options.nanogpt, folder)
    rate = {name: B * T / s for name, s in medians(subjects, options.rounds, 200).items()}
    rate["ours, reading alone"] *= len(next(read)[0]) / B
    busy = waiting(loader)
    loader.close()
    found: Report = {f"{name}, tokens/s": f"{value:,.0f}" for name, value in rate.items()}
    ours = rate["ours, as training gets it"]
    if options.nanogpt:
        ratio = ours / rate["nanoGPT's get_batch"]
        found["ratio to nanoGPT's get_batch"] = f"{ratio:.1f}"
    plain = rate["plain copy of such windows in memory"]
    found["reading alone, share of the plain copy"] = f"{rate['ours, reading alone'] / plain:.2f}"
    found["training thread, us a batch when it is ready"] = f"{busy * 1e6:.0f}"
    return found


def waiting(loader: Loader) -> float:
    """Median seconds that `next` takes of the thread that trains, the reader being ahead."""
    times = []
    for _ in range(100):
        time.sleep(0.005)
        times.append(timed(lambda: next(loader)))
    return statistics.median(times)


def measure_shards(options: argparse.Namespace, folder: Path) -> Report:
    """The same number of tokens in 1 and in 10,000 shards."""
    make_shards(folder / "one", 1, TOKENS)
    make_shards(folder / "many", 10_000, TOKENS)
    opening = statistics.median(timed(lambda: open_split(folder / "many", "train")) for _ in "abc")
    one, many = windows_of(folder / "one"), windows_of(folder / "many")
    for _ in range(1500):  # every shard has been opened
        next(one), next(many)
    subjects: dict[str, Callable[[], object]] = {
        "1": lambda: next(one),
        "10,000": lambda: next(many),
    }
    seconds = medians(subjects, 8 * options.rounds, 64)
    tokens = len(next(one)[0]) * T
    return {
        "opening 10,000 shards, ms": f"{opening * 1e3:.0f}",
        "file descriptors held for 10,000 shards": len(os.listdir("/proc/self/fd")),
        "1 shard, tokens/s": f"{tokens / seconds['1']:,.0f}",
        "10,000 shards, tokens/s": f"{tokens / seconds['10,000']:,.0f}",
        "ratio": f"{seconds['1'] / seconds['10,000']:.3f}",
    }


def measure_seek(options: argparse.Namespace, folder: Path) -> Report:
    """Reading a batch at random places of 10 billion tokens (100 shards, sparse on disk)."""
    each = 100_000_000
    folder.mkdir(exist_ok=True)
    shards = [Shard(f"train_{i:06d}.npy", each, 1, each, "0" * 64, 0) for i in range(100)]
    np.save(folder / "empty.npy", np.empty(0, np.uint16))
    with (folder / shards[0].name).open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<u2", "fortran_order": False, "shape": (each,)}
        )
        file.truncate(file.tell() + 2 * each)
    for shard in shards[1:]:
        os.link(folder / shards[0].name, folder / shard.name)
    index(folder, shards)
    before = resident_mb()
    places = np.random.default_rng(0).integers(0, 10**13, 20).tolist()
    seconds = [timed(lambda at=at: next(windows_of(folder, position=at))) for at in places]
    return {
        "tokens": "10,000,000,000",
        "opening, seeking, a first portion, median ms": f"{statistics.median(seconds) * 1e3:.1f}",
        "the slowest of 20": f"{max(seconds) * 1e3:.1f}",
        "resident memory grew by, MB": f"{resident_mb() - before:.1f}",
    }


def windows_of(folder: Path, position: int = 0) -> Iterator[Any]:
    """Our reader on the train split of a folder."""
    split = open_split(folder, "train")
    source = Source("x", str(folder), 1.0, split, BytesTokenizer())
    mixture = Mixture((source,), T, "global", 1, 1)
    return read_sequences(mixture, Plan(1, B, T, 1, 1, 0, 1), VOCAB, 0, position)


def make_shards(folder: Path, count: int, tokens: int) -> None:
    """A data folder of random tokens."""
    folder.mkdir()
    writer = ShardWriter(folder, "train", token_dtype(VOCAB), tokens // count)
    ids = np.random.default_rng(0).integers(0, VOCAB, tokens).astype(np.uint16)
    writer.add(ids, 1, tokens)
    index(folder, writer.finish())


def index(folder: Path, shards: list[Shard]) -> None:
    """Write dataset.json beside shards that are there."""
    gpt2: Any = SimpleNamespace(
        kind="gpt2", fingerprint="0" * 64, vocab_size=VOCAB, eot_id=VOCAB - 1
    )
    write_index(folder, gpt2, {"train": shards}, {})


def nanogpt_get_batch(nanogpt: Path, data: Path) -> Callable[[], object]:
    """Its function, cut out of its train.py and run as it is."""
    tree = ast.parse((nanogpt / "train.py").read_text())
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "get_batch"]
    names: dict[str, Any] = {"np": np, "torch": torch, "os": os, "data_dir": str(data)}
    names |= {"block_size": T, "batch_size": B, "device": "cpu", "device_type": "cpu"}
    exec(compile(ast.Module(found, []), "train.py", "exec"), names)
    return lambda: names["get_batch"]("train")


# --------------------------------------------------------------------------- preparing


def measure_prepare(options: argparse.Namespace, folder: Path) -> Report:
    """Whole processes: ours, a loop of tiktoken on one thread, nanoGPT's recipe."""
    size = text_bytes(options.text)
    rounds = max(1, options.rounds // 2)
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        out = folder / f"ours{number}"
        ours = [sys.executable, "-m", "accel_gpt.cli", "prepare", "--source", "jsonl"]
        ours += ["--path", str(options.text), "--tokenizer", "gpt2", "--out", str(out)]
        ours += ["--val_fraction", "0.0005", "--workers", str(options.workers)]
        run(times, "ours", ours)
        shutil.rmtree(out)
        run(times, "tiktoken", [sys.executable, "-c", TIKTOKEN, str(options.text)])
        if options.nanogpt:
            work = folder / f"nanogpt{number}"
            work.mkdir()
            script = work / "prepare.py"
            shutil.copy(options.nanogpt / "data/openwebtext/prepare.py", script)
            (work / "wrapper.py").write_text(NANOGPT)
            home = {"HF_HOME": str(work / "home")}
            command = [sys.executable, "wrapper.py", str(options.text.resolve())]
            run(times, "nanoGPT", command, work, home)
            shutil.rmtree(work)
    median = {name: statistics.median(values) for name, values in times.items()}
    found: Report = {f"{n}, MB/s of text": f"{size / s / 1e6:.2f}" for n, s in median.items()}
    share = median["tiktoken"] / median["ours"] / options.workers
    found["text, MB; workers"] = f"{size / 1e6:.0f}; {options.workers}"
    found["share of one tiktoken thread times the workers"] = f"{share:.2f}"
    if options.nanogpt:
        found["ratio to nanoGPT's recipe"] = f"{median['nanoGPT'] / median['ours']:.2f}"
    return found


TIKTOKEN = """
import json, sys, tiktoken
encoding = tiktoken.get_encoding("gpt2")
for line in open(sys.argv[1]):
    encoding.encode_ordinary(json.loads(line)["text"])
"""
# Its script names a Hub id; here it gets the same file that we read. It writes each split in 1,024
# parts, and fails where the val split has fewer documents: its share is raised to that.
NANOGPT = """
import runpy, sys
import datasets
text = sys.argv[1]
load, split = datasets.load_dataset, datasets.Dataset.train_test_split
datasets.load_dataset = lambda name, num_proc: datasets.DatasetDict(
    train=load("json", data_files=text, split="train")
)
datasets.Dataset.train_test_split = lambda self, test_size, **options: split(
    self, test_size=max(test_size, 1024 / len(self)), **options
)
if __name__ == "__main__":
    runpy.run_path("prepare.py", run_name="__main__")
"""


def measure_bpe(options: argparse.Namespace, folder: Path) -> Report:
    """Training 32,768 tokens: ours with all that it adds, and the bare library."""
    with options.text.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    kept = list(itertools.takewhile(lambda pair: pair[0] < 100_000_000, running(texts)))
    (folder / "sample.json").write_text(json.dumps([text for _, text in kept]))
    times: dict[str, list[float]] = {}
    for _ in range(max(1, options.rounds // 2)):
        for name, code in (("ours", OUR_BPE), ("tokenizers", PLAIN_BPE)):
            run(times, name, [sys.executable, "-c", code, str(folder / "sample.json")])
    ours, plain = (statistics.median(times[name]) for name in ("ours", "tokenizers"))
    return {
        "text, MB": f"{sum(len(t.encode()) for _, t in kept) / 1e6:.0f}",
        "ours, s": f"{ours:.1f}",
        "tokenizers, s": f"{plain:.1f}",
        "ratio": f"{ours / plain:.3f}",
    }


def running(texts: list[str]) -> Iterator[tuple[int, str]]:
    """Each text with the bytes of those before it."""
    size = 0
    for text in texts:
        yield size, text
        size += len(text.encode())


OUR_BPE = """
import json, sys
from accel_gpt.prepare.bpe import train_bpe
train_bpe(json.load(open(sys.argv[1])), 32768)
"""
PLAIN_BPE = """
import json, sys
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from accel_gpt.data.tokenizer_json import PATTERN
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(PATTERN), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
])
trainer = trainers.BpeTrainer(
    vocab_size=32768, show_progress=False, min_frequency=2,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"],
)
tokenizer.train_from_iterator(json.load(open(sys.argv[1])), trainer)
"""


# --------------------------------------------------------------------------- timing


def medians(subjects: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Median over the rounds of the mean seconds a call, the subjects in turn."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds + 1):
        for name, subject in subjects.items():
            times[name].append(timed(lambda s=subject: [s() for _ in range(calls)]) / calls)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run(
    times: dict[str, list[float]],
    name: str,
    command: list[str],
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    """Add the seconds of a whole process, which must succeed."""
    variables = {**os.environ, **(environment or {})}

    def work() -> None:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)[:300]} failed:\n{done.stderr[-3000:]}")

    times.setdefault(name, []).append(timed(work))


def text_bytes(path: Path) -> int:
    """UTF-8 bytes of text in a JSONL file."""
    with path.open(encoding="utf-8") as lines:
        return sum(len(json.loads(line)["text"].encode()) for line in lines)


def resident_mb() -> float:
    """Resident memory of this process."""
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6
    return 0.0


MEASURES = {
    "loader": measure_loader,
    "shards": measure_shards,
    "seek": measure_seek,
    "prepare": measure_prepare,
    "bpe": measure_bpe,
}


if __name__ == "__main__":
    main()
