"""How each trainer is run by `resume.py`: its data, its documented commands, its checkpoints.

All train about the same GPT, of `SHAPE`, on the same stream of token ids: sequences of `T` tokens,
`BATCH` of them an update, `STEPS` updates, a checkpoint every `EVERY` updates, float32, with
dropout if the trainer has it. The ids are random, with a fixed seed; any four in a row occur once,
so the first ids of a sequence tell where in the stream it begins.
"""

import json
import pickle
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from common import OURS, flags, run_command

T = 32  # tokens of a sequence
BATCH = 16  # sequences of an update, over all processes
EPOCH = 41  # updates, of the trainers that read all sequences in turn
EPOCHS = 3  # fixed in Accelerate's example
STEPS = EPOCH * EPOCHS
EVERY = 10  # updates between checkpoints: none falls on the end of an epoch
VOCAB = 1024
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128}
GPT2 = {  # the same for transformers
    **SHAPE,
    "n_positions": T,
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LR = 1e-3
SEED = 42


def make_stream(length: int = EPOCH * BATCH * T) -> np.ndarray:
    """Return token ids (length,), of which any four in a row occur once."""
    stream = np.random.default_rng(SEED).integers(0, VOCAB, length).astype(np.uint16)
    windows = np.lib.stride_tricks.sliding_window_view(stream, 4)
    assert len(np.unique(windows, axis=0)) == len(windows)
    return stream


class Driver:
    """A trainer in a folder of its own, `work`; `peer` is its folder in PEERS.

    `pattern`: of checkpoints in the folder of a run; `area`: of all that a save changes, if more.
    `needs_gpus`: why several processes do.
    """

    name = ""
    repository = ""  # folder in PEERS; its .venv is used if there is one
    pattern = ""
    area = ""
    needs_gpus = ""

    def __init__(self, peers: Path, work: Path) -> None:
        self.work = work
        self.peer = peers / self.repository if self.repository else None
        own_python = self.peer / ".venv/bin/python" if self.peer else None
        self.python = str(own_python) if own_python and own_python.exists() else sys.executable
        self.folder = work  # where commands run
        self.environment: dict[str, str] = {}
        work.mkdir(parents=True)
        make_stream().tofile(work / "train.bin")
        self.prepare()

    def prepare(self) -> None:
        """Write the files that the commands need."""

    def command(self, out: Path, processes: int) -> Sequence[str | Path]:
        """Return the words that start or, if `out` has a checkpoint, resume a run."""
        raise NotImplementedError

    def checkpoints(self, out: Path) -> list[list[Path]]:
        """Return the files or folders of each checkpoint, oldest first."""
        return [[path] for path in sorted(out.glob(self.pattern), key=last_change)]

    def parts(self, row: Sequence[int]) -> list[object]:
        """Return what identifies the data in a sequence that the model read."""
        return [tuple(row[:4])]


class AccelGPT(Driver):
    """Ours: the same command starts and resumes."""

    name = "accel_gpt"
    pattern = "checkpoints/step_*"
    area = "checkpoints/*"

    def prepare(self) -> None:
        """Write a data folder in nanoGPT's form."""
        write_nanogpt_data(self.work / "data", self.work / "train.bin")
        (self.work / "empty.yaml").write_text("{}\n", encoding="utf-8")

    def command(self, out: Path, processes: int) -> Sequence[str | Path]:
        """Return `accel-gpt train`."""
        options = {
            "out_dir": out,
            "data.train": self.work / "data",
            **{f"model.{key}": value for key, value in SHAPE.items()},
            "model.block_size": T,
            "model.dropout": 0.1,
            "train.tokens_per_step": BATCH * T,
            "train.micro_batch_size": BATCH // processes,
            "train.max_steps": STEPS,
            "train.mixed_precision": "no",
            "train.compile": False,
            "optim.lr": LR,
            "schedule.warmup_steps": EVERY,
            "eval.every": 0,
            "sample.every": 0,
            "log.every": 1,
            "checkpoint.every": EVERY,
        }
        return [*OURS, "train", self.work / "empty.yaml", *flags(options)]


# Replaces what Accelerate's example downloads: the data set, tokenizer, metric and BERT become the
# sequences, none, none and a GPT-2 of transformers. On several processes its batch is that of all.
STAND_INS = """
import functools, json, os, re, runpy, sys, types
import accelerate, datasets, numpy, torch, transformers
from transformers import GPT2Config, GPT2LMHeadModel

stream, form = sys.argv[1:3]
shape = json.loads(sys.argv[3])
tokens = numpy.fromfile(stream, numpy.uint16).reshape(-1, shape["n_positions"])

def load_dataset(*_):
    one = datasets.Dataset.from_dict({
        "idx": list(range(len(tokens))), "sentence1": tokens.astype(int).tolist(),
        "sentence2": [""] * len(tokens), "label": [0] * len(tokens)})
    return datasets.DatasetDict({"train": one, "validation": one.select(range(2))})

class Tokenizer:
    def __call__(self, ids, *_, **__):
        return {"input_ids": ids}
    def pad(self, examples, **_):
        ids = torch.tensor([one["input_ids"] for one in examples])
        return transformers.BatchEncoding({"input_ids": ids, "labels": ids})

class Metric:
    def add_batch(self, **_): pass
    def compute(self): return {}

def model(*_, **__):
    return GPT2LMHeadModel(GPT2Config(**shape))

class Repaired(accelerate.Accelerator):
    earlier = 0  # steps in the epochs before the one that the run resumed in

    def skip_first_batches(self, loader, count):
        epoch = int(re.search("step_([0-9]+)$", sys.argv[-1])[1]) // len(loader)
        self.earlier = epoch * len(loader)
        loader.set_epoch(epoch)
        rest = super().skip_first_batches(loader, count)
        loader.iteration = epoch + 1
        return rest

    def save_state(self, folder):
        parent, step = re.match("(.*step_)([0-9]+)$", folder).groups()
        return super().save_state(f"{parent}{int(step) + self.earlier}")

evaluate = types.ModuleType("evaluate")
evaluate.load = lambda *_: Metric()
sys.modules["evaluate"] = evaluate
datasets.load_dataset = load_dataset
transformers.AutoTokenizer.from_pretrained = lambda *_: Tokenizer()
transformers.AutoModelForSequenceClassification.from_pretrained = model
options = {"split_batches": True} if "WORLD_SIZE" in os.environ else {}
if form == "repaired":
    options["use_seedable_sampler"] = True
    accelerate.Accelerator = Repaired
config = functools.partial(accelerate.DataLoaderConfiguration, **options)
accelerate.DataLoaderConfiguration = config
del sys.argv[:4]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class AccelerateExample(Driver):
    """Accelerate's `examples/by_feature/checkpointing.py`, as it is, on our data and model.

    Its usage guide (docs/source/usage_guides/checkpoint.md) shows the same calls. The user names
    the folder to resume from: that which changed last, since numbers count from the last resume.
    """

    name = "Accelerate, its example"
    repository = "accelerate"
    pattern = "step_*"
    form = "as it is"
    options: Sequence[str] = ()

    def prepare(self) -> None:
        """Write the stand-ins for what the example downloads."""
        (self.work / "stand_ins.py").write_text(STAND_INS, encoding="utf-8")

    def command(self, out: Path, processes: int) -> Sequence[str | Path]:
        """Return the example, with the newest folder if there is one."""
        assert self.peer is not None
        words = [self.work / "stand_ins.py", self.work / "train.bin", self.form, json.dumps(GPT2)]
        words += [self.peer / "examples/by_feature/checkpointing.py", "--cpu"]
        words += ["--checkpointing_steps", str(EVERY), "--output_dir", out, *self.options]
        saved = self.checkpoints(out)
        return words + (["--resume_from_checkpoint", str(saved[-1][0])] if saved else [])


class AccelerateStateful(AccelerateExample):
    """The example with its option for the stateful loader of torchdata."""

    name = "Accelerate, stateful"
    options = ("--use_stateful_dataloader",)


class AccelerateRepaired(AccelerateExample):
    """The example with what its users found for its data (issues 2823, 3242, pull request 4071).

    The seedable sampler, the epoch set before batches are skipped and counted on after them, and
    folders named by the step of the run, not of the epoch.
    """

    name = "Accelerate, data repaired"
    form = "repaired"


TRAINER = """
import glob, json, sys
import numpy, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

out, stream, lr = sys.argv[1:4]
batch, steps, every, seed = map(int, sys.argv[4:8])
shape = json.loads(sys.argv[8])
ids = numpy.fromfile(stream, numpy.uint16).astype(int)
tokens = torch.from_numpy(ids).reshape(-1, shape["n_positions"])

class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return len(tokens)
    def __getitem__(self, i):
        return {"input_ids": tokens[i], "labels": tokens[i]}

args = TrainingArguments(
    out, max_steps=steps, per_device_train_batch_size=batch, learning_rate=float(lr), seed=seed,
    save_steps=every, logging_steps=1, use_cpu=True, report_to=[], disable_tqdm=True,
    enable_jit_checkpoint=True,
)
torch.manual_seed(seed)
model = GPT2LMHeadModel(GPT2Config(**shape))
trainer = Trainer(model, args, train_dataset=Sequences())
trainer.train(resume_from_checkpoint=bool(glob.glob(out + "/checkpoint-*")))
"""


class HFTrainer(Driver):
    """transformers' Trainer, resumed by `train(resume_from_checkpoint=True)`.

    `enable_jit_checkpoint`: what its documentation has for preemption.
    """

    name = "Trainer"
    repository = "transformers"
    pattern = "checkpoint-*"

    def prepare(self) -> None:
        """Write the script."""
        (self.work / "trainer.py").write_text(TRAINER, encoding="utf-8")

    def command(self, out: Path, processes: int) -> Sequence[str | Path]:
        """Return the script with its arguments."""
        numbers = map(str, (LR, BATCH // processes, STEPS, EVERY, SEED))
        script = self.work / "trainer.py"
        return [script, out, self.work / "train.bin", *numbers, json.dumps(GPT2)]


class NanoGPT(Driver):
    """nanoGPT's train.py, resumed by `--init_from=resume`; saves whatever the loss is."""

    name = "nanoGPT"
    repository = "nanoGPT"
    pattern = "ckpt.pt"
    needs_gpus = "DDP sets a CUDA device"

    def prepare(self) -> None:
        """Write its data."""
        assert self.peer is not None
        self.folder = self.peer
        write_nanogpt_data(self.work / "data", self.work / "train.bin")

    def command(self, out: Path, processes: int) -> Sequence[str | Path]:
        """Return train.py with its options."""
        options = {
            "out_dir": out,
            "dataset": self.work / "data",  # an absolute path replaces its folder `data`
            "device": "cpu",
            "dtype": "float32",
            "compile": False,
            **SHAPE,
            "block_size": T,
            "dropout": 0.1,
            "batch_size": BATCH // processes,
            "gradient_accumulation_steps": processes,
            "max_iters": STEPS - 1,  # it makes one more
            "lr_decay_iters": STEPS,
            "warmup_iters": EVERY,
            "learning_rate": LR,
            "log_interval": 1,
            "eval_interval": EVERY,  # it saves when it evaluates
            "eval_iters": 1,
            "always_save_checkpoint": True,
        }
        words = [f"--{key}={value}" for key, value in options.items()]
        resume = ["--init_from=resume"] if (out / "ckpt.pt").exists() else []
        return ["train.py", *words, *resume]


PREPARE_LITGPT = """
import sys
import numpy, torch
from litdata import TokensLoader, optimize

stream, folder, block, parts = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
pieces = numpy.fromfile(stream, numpy.uint16).astype(numpy.int64).reshape(parts, -1)

def read(number):
    yield torch.from_numpy(pieces[number])

if __name__ == "__main__":
    optimize(fn=read, inputs=list(range(parts)), output_dir=folder, num_workers=1,
             chunk_size=pieces.shape[1], item_loader=TokensLoader(block_size=block))
"""


class LitGPT(Driver):
    """LitGPT's `pretrain --resume auto` (its tutorials/pretrain.md), on a data set of LitData."""

    name = "LitGPT"
    repository = "litgpt"
    pattern = "step-*"
    needs_gpus = "FSDP shards over GPUs"

    def prepare(self) -> None:
        """Write the data set in eight chunks, by LitData, and the config."""
        block = T + 1  # the last token is a target only
        make_stream(EPOCH * BATCH * block).tofile(self.work / "train.bin")
        script = self.work / "prepare.py"
        script.write_text(PREPARE_LITGPT, encoding="utf-8")
        words = [self.work / "train.bin", self.work / "data", str(block), "8"]
        run_command([self.python, script, *words], self.work)
        config = {
            "model_name": "pythia-14m",
            "model_config": {
                "name": "small",
                "block_size": T,
                "vocab_size": VOCAB,
                "padded_vocab_size": VOCAB,
                **SHAPE,
                "intermediate_size": 4 * SHAPE["n_embd"],
            },
            "precision": "32-true",
            "resume": "auto",
            "seed": SEED,
            "data": {
                "class_path": "litgpt.data.LitData",
                "init_args": {"data_path": str(self.work / "data"), "num_workers": 2},
            },
            "train": {
                "save_interval": EVERY,
                "log_interval": 1,
                "global_batch_size": BATCH,
                "lr_warmup_steps": EVERY,
                "max_tokens": STEPS * BATCH * T,
                "max_norm": 1.0,
                "min_lr": LR / 10,
            },
            "eval": {"interval": 1000, "max_iters": 1, "final_validation": False},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": LR}},
            "logger_name": "csv",
        }
        text = json.dumps(config)  # which is YAML, too
        (self.work / "config.yaml").write_text(text, encoding="utf-8")

    def command(self, out: Path, processes: int) -> Sequence[str | Path]:
        """Return `litgpt pretrain`, which starts its processes itself."""
        words = ["-m", "litgpt", "pretrain", "--config", self.work / "config.yaml"]
        words += ["--out_dir", out, "--devices", str(processes)]
        return [*words, "--train.micro_batch_size", str(BATCH // processes)]


PREPARE_NANOCHAT = """
import sys
import numpy, pyarrow, pyarrow.parquet

folder, files, groups = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
words = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"]
draw = numpy.random.default_rng(0)
for file in range(files):
    numbers = range(100_000 + file * groups * 1024, 100_000 + (file + 1) * groups * 1024)
    texts = [f"{n} " + " ".join(draw.choice(words, draw.integers(20, 40))) for n in numbers]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, f"{folder}/shard_{file:05}.parquet", row_group_size=1024)
"""


class Nanochat(Driver):
    """nanochat's scripts.base_train, with the options that runs/runcpu.sh has for CPUs.

    Resumed by `--resume-from-step`; the user names the newest step. Its data are documents, which
    begin with their number, in row groups of 1,024, as its own.
    """

    name = "nanochat"
    repository = "nanochat"
    area = "*"
    needs_gpus = "on CPUs each process trains alone"

    def prepare(self) -> None:
        """Write documents, and train its tokenizer on them."""
        assert self.peer is not None
        self.folder = self.peer
        base = self.work / "base"
        (base / "base_data_climbmix").mkdir(parents=True)
        (base / "base_checkpoints").symlink_to(self.work)
        self.environment = {"NANOCHAT_BASE_DIR": str(base)}
        script = self.work / "prepare.py"
        script.write_text(PREPARE_NANOCHAT, encoding="utf-8")
        run_command([self.python, script, base / "base_data_climbmix", "5", "8"], self.work)
        tokenizer = [self.python, "-m", "scripts.tok_train", "--vocab-size", str(VOCAB)]
        run_command(tokenizer, self.folder, **self.environment)

    def command(self, out: Path, processes: int) -> Sequence[str | Path]:
        """Return the training script; checkpoints of the tag lie in `out`."""
        options = {
            "depth": 4,
            "aspect-ratio": 32,
            "head-dim": 32,
            "window-pattern": "L",
            "max-seq-len": T,
            "device-batch-size": BATCH // processes,
            "total-batch-size": BATCH * T,
            "num-iterations": STEPS,
            "eval-every": -1,
            "core-metric-every": -1,
            "sample-every": -1,
            "save-every": EVERY,
            "model-tag": out.name,
        }
        saved = self.checkpoints(out)
        if saved:
            options["resume-from-step"] = step_of(saved[-1][0])
        return ["-m", "scripts.base_train", *flags(options)]

    def checkpoints(self, out: Path) -> list[list[Path]]:
        """Return the files of each step that has model, metadata and optimizer, written last."""
        steps = sorted({step_of(path) for path in out.iterdir()})
        found = [sorted(out.glob(f"*_{step:06}*")) for step in steps]
        return [files for files in found if len(files) >= 3]  # two, and one of each rank

    def parts(self, row: Sequence[int]) -> list[object]:
        """Return the numbers of the documents in a row: three tokens after each start."""
        start = row[0]  # each row begins with a document
        places = [place for place, token in enumerate(row) if token == start]
        found = [tuple(row[place + 1 : place + 4]) for place in places]
        return [one for one in found if len(one) == 3]


def step_of(path: Path) -> int:
    """Return the step in the name of a file of nanochat."""
    return int(path.stem.split("_")[1])


def last_change(path: Path) -> int:
    """Return when a file or folder was changed, in nanoseconds."""
    return path.stat().st_mtime_ns


def write_nanogpt_data(folder: Path, stream: Path) -> None:
    """Write a data folder of nanoGPT: the stream, and a vocabulary of as many characters."""
    folder.mkdir(parents=True)
    shutil.copy(stream, folder / "train.bin")
    np.fromfile(stream, np.uint16)[: 8 * T].tofile(folder / "val.bin")
    characters = {chr(0x4E00 + number): number for number in range(VOCAB)}
    meta = {
        "vocab_size": VOCAB,
        "stoi": characters,
        "itos": {number: character for character, number in characters.items()},
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


DRIVERS = {
    one.name: one
    for one in (
        AccelGPT,
        AccelerateExample,
        AccelerateStateful,
        AccelerateRepaired,
        HFTrainer,
        NanoGPT,
        LitGPT,
        Nanochat,
    )
}
