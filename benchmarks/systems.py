"""The systems that are compared, each a whole process that trains one model on the same data.

nanoGPT is driven unmodified, in a copy of its checkout; transformers' Trainer and litgpt from their
packages. Each reports its time of a step (median over windows of some steps, after warm-up) and its
peak memory: of the CUDA allocator, or on a CPU the highest resident set of the process.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import Metrics, call, last_json, pace, window_means

CHARS, GPT2 = "shakespeare_char", "shakespeare"  # folders of nanoGPT's data
VOCABULARIES = {CHARS: 65, GPT2: 50304}  # as nanoGPT takes them


@dataclass(frozen=True)
class Job:
    """A model, its batch, and how long it trains."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    batch: int  # sequences a step
    data: str
    steps: int
    warmup: int  # steps that are not counted, a multiple of window
    window: int  # steps whose mean is one time
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.block_size

    def step_ms(self, times: list[float]) -> float:
        """Milliseconds of a step, by the times of all steps."""
        return statistics.median(window_means(times[self.warmup :], self.window))

    def json(self, work: Path, compiled: bool, bf16: bool = False) -> str:
        """What the scripts below read."""
        more = {
            "bf16": bf16 or self.device == "cuda",
            "train": str(work / "nanoGPT/data" / self.data / "train.bin"),
            "vocab_size": VOCABULARIES[self.data],
            "compiled": compiled,
        }
        return json.dumps(asdict(self) | more)


def gather(nanogpt: Path, text: Path, work: Path, data: Iterable[str]) -> Path:
    """Copy nanoGPT to `work` and prepare its data folders from `text` by its own scripts.

    Returns the path of the copy.
    GPT-2 tokens need tiktoken and its vocabulary (without a network: TIKTOKEN_CACHE_DIR).
    """
    peer = work / "nanoGPT"
    shutil.copytree(nanogpt, peer, ignore=shutil.ignore_patterns(".git", "*.bin", "*.pkl"))
    for name in sorted(set(data)):
        shutil.copy(text, peer / "data" / name / "input.txt")
        call([sys.executable, "prepare.py"], peer / "data" / name)
    return peer


# runs a script unmodified and prints at its end what memory it took
PROBE = """
import atexit, json, resource, runpy, sys
sys.path.insert(0, "")
def report():
    import torch
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    print(json.dumps({"memory_gb": peak / 1e9}))
atexit.register(report)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def nanogpt(work: Path, job: Job, compiled: bool = False) -> Metrics:
    """Its train.py; the times are those of its own log."""
    options = {
        **{"device": job.device, "compile": compiled, "dataset": job.data, "dropout": 0.0},
        **{"n_layer": job.n_layer, "n_head": job.n_head, "n_embd": job.n_embd},
        **{"block_size": job.block_size, "batch_size": job.batch, "log_interval": 1},
        **{"eval_interval": 10**6, "eval_iters": 1, "max_iters": job.steps},
        "dtype": "bfloat16" if job.device == "cuda" else "float32",
    }
    command = [sys.executable, "-c", PROBE, "train.py", "config/train_shakespeare_char.py"]
    command += [f"--{key}={value}" for key, value in options.items()]
    output = call(command, work / "nanoGPT")
    times = [float(ms) for ms in re.findall(r"time ([\d.]+)ms", output)][1:]  # the first has more
    return {"step_ms": job.step_ms(times), **last_json(output)}


OURS = ("-m", "accel_gpt.cli")
WHOLE_LOGITS = (  # ours without the loss in chunks
    "-c",
    "from accel_gpt.model import loss; loss.chunk_tokens = lambda *_: 2**62; "
    "from accel_gpt.cli import main; main()",
)


def ours(work: Path, job: Job, *options: str, start: Sequence[str] = OURS) -> Metrics:
    """`accel-gpt train`; the times are those of its metrics.jsonl."""
    out = work / "ours"
    shutil.rmtree(out, ignore_errors=True)
    fixed: dict[str, object] = {
        "out_dir": out,
        "data.train": work / "nanoGPT/data" / job.data,
        **{f"model.{key}": getattr(job, key) for key in ("n_layer", "n_head", "n_embd")},
        **{"model.block_size": job.block_size, "model.bias": "false", "model.mlp": "gelu_erf"},
        **{"train.tokens_per_step": job.tokens, "train.micro_batch_size": job.batch},
        **{"train.max_steps": job.steps, "optim.lr": 1e-3, "schedule.warmup_steps": job.steps // 2},
        **{"log.every": job.window, "sample.every": 0, "checkpoint.every": 0},
        **{"eval.every": 0, "eval.tokens": job.block_size},
        "train.cpu_threads": torch.get_num_threads(),  # as the others, OMP_NUM_THREADS or all
    }
    if job.data == GPT2:
        fixed["data.tokenizer"] = "gpt2"
    if job.device == "cuda":
        fixed["train.mixed_precision"] = "bf16"
    words = [word for key, value in fixed.items() for word in (f"--{key}", str(value))]
    config = work / "empty.yaml"
    config.write_text("{}\n")
    call([sys.executable, *start, "train", config, *words, *options], work)
    found = pace(out, job.warmup // job.window)
    shutil.rmtree(out)
    return found


SCRIPT = """
import json, resource, sys, time
import numpy as np, torch
job = json.loads(sys.argv[1])
T, cuda = job["block_size"], job["device"] == "cuda"
tokens = np.memmap(job["train"], dtype=np.uint16, mode="r")

class Sequences(torch.utils.data.Dataset):
    extra = 0  # tokens after the last of a sequence
    def __len__(self):
        return (len(tokens) - self.extra) // T
    def __getitem__(self, i):
        return torch.from_numpy(tokens[i * T : (i + 1) * T + self.extra].astype(np.int64))

def report(metrics):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if cuda else peak
    print(json.dumps({"memory_gb": peak / 1e9} | metrics))
"""
TRAINER = (
    SCRIPT
    + """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(0)
shape = {key: job[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
quiet |= {"bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(n_positions=T, **shape, **quiet))
ends = []

class Clock(TrainerCallback):
    def on_step_end(self, *_, **__):
        if cuda:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

args = TrainingArguments(
    sys.argv[2], max_steps=job["steps"] + 1, per_device_train_batch_size=job["batch"],
    learning_rate=1e-3, weight_decay=0.1, use_cpu=not cuda, bf16=job["bf16"], save_strategy="no",
    torch_compile=job["compiled"], report_to=[], disable_tqdm=True, logging_steps=10**6,
)
def collate(sequences):
    return {"input_ids": torch.stack(sequences), "labels": torch.stack(sequences)}

Trainer(model, args, collate, Sequences(), callbacks=[Clock()]).train()
report({"times": [1e3 * (b - a) for a, b in zip(ends, ends[1:])]})
"""
)
LITGPT = (
    SCRIPT
    + """
from pathlib import Path
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.pretrain import setup

class Data(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch = batch_size
    def train_dataloader(self):
        sequences = Sequences()
        sequences.extra = 1
        return torch.utils.data.DataLoader(sequences, self.batch, shuffle=True, drop_last=True)
    val_dataloader = train_dataloader

config = Config(
    name="peer", block_size=T, n_layer=job["n_layer"], n_head=job["n_head"], n_embd=job["n_embd"],
    vocab_size=job["vocab_size"], padded_vocab_size=job["vocab_size"], bias=False,
    parallel_residual=False, intermediate_size=4 * job["n_embd"], rotary_percentage=1.0,
)
out = Path(sys.argv[2])
sys.argv[1:] = ["peer"]  # it parses the command line again when it saves
setup(
    "peer", config, out, "bf16-mixed" if cuda else "32-true", data=Data(),
    train=TrainArgs(
        save_interval=None, log_interval=1, global_batch_size=job["batch"], max_norm=1.0,
        micro_batch_size=job["batch"], max_tokens=(job["steps"] + 1) * job["batch"] * T,
        lr_warmup_steps=1, tie_embeddings=True,
    ),
    eval=EvalArgs(interval=10**6, max_iters=1, final_validation=False),
    optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "weight_decay": 0.1}},
    devices=1, logger_name="csv",
)
report({})
"""
)


def trainer(work: Path, job: Job, compiled: bool = False, bf16: bool = False) -> Metrics:
    """transformers' Trainer on GPT2LMHeadModel with random weights."""
    words = ["-c", TRAINER, job.json(work, compiled, bf16), work / "trainer"]
    found = last_json(call([sys.executable, *words], work))
    return {"step_ms": job.step_ms(found.pop("times")), **found}


def litgpt(work: Path, job: Job, python: str) -> Metrics:
    """litgpt's pretrain, which compiles; rotary positions, as it has no learned ones.

    Its times leave out the reading of the batch.
    """
    out = work / "litgpt"
    output = call([python, "-c", LITGPT, job.json(work, True), out], work)
    times = [float(ms) for ms in re.findall(r"iter time: ([\d.]+) ms", output)][1:]
    shutil.rmtree(out, ignore_errors=True)
    return {"step_ms": job.step_ms(times), **last_json(output)}


def has_litgpt(python: str) -> bool:
    """Whether a Python can import litgpt."""
    done = subprocess.run([python, "-c", "import litgpt"], capture_output=True, check=False)
    return done.returncode == 0


def subjects(work: Path, job: Job, litgpt_python: str) -> dict[str, Callable[[], Metrics]]:
    """All systems by name. nanoGPT has no bf16 on a CPU."""

    def mine(precision: str, compiled: str) -> Callable[[], Metrics]:
        options = ("--train.mixed_precision", precision, "--train.compile", compiled)
        return lambda: ours(work, job, *options)

    found: dict[str, Callable[[], Metrics]] = {
        "nanoGPT": lambda: nanogpt(work, job),
        "nanoGPT, compiled": lambda: nanogpt(work, job, compiled=True),
        "Trainer": lambda: trainer(work, job),
        "Trainer, compiled": lambda: trainer(work, job, compiled=True),
        "Trainer, bf16": lambda: trainer(work, job, bf16=True),
        "Trainer, bf16 compiled": lambda: trainer(work, job, compiled=True, bf16=True),
        "litgpt, compiled": lambda: litgpt(work, job, litgpt_python),
        "accel_gpt": mine("no", "false"),
        "accel_gpt, compiled": mine("no", "true"),
        "accel_gpt, bf16": mine("bf16", "false"),
        "accel_gpt, bf16 compiled": mine("bf16", "true"),
        "accel_gpt, auto": mine("auto", "auto"),  # as the CPU configs ship
    }
    return found
