"""The weights that `evaluated()` of --code returns, on each engine, after two kills.

The val loss of the run, the one of `evaluate` on its checkpoint and the one of transformers on its
export are one number.
"""

import json
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from accel_gpt import cli
from accel_gpt.data.shards import open_split
from accel_gpt.runs.folder import RunFolder
from tests.conftest import run_here
from tests.faults.harness import FSDP, KILLED, Server, Tiny, assert_same, finish, newest
from tests.faults.launches import Direct, until

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 30
ROUNDING = 2e-6  # nats
ENGINES: dict[str, tuple[int, dict[str, str]]] = {
    "one process": (1, {}),
    "DDP": (2, {}),
    "FSDP2": (2, FSDP),
}


def loss_of_transformers(folder: Path, corpus: Path) -> float:
    """Return the mean cross entropy of an exported model on the first sequences of val."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    split = open_split(corpus, "val")
    ids = torch.from_numpy(split.read(0, 0, int(split.lengths[0])).astype("int64"))
    nats = []
    for first in range(0, len(ids) - 1, 16):
        text = ids[first : first + 17]
        with torch.no_grad():
            logits = model(text[None, :-1]).logits[0]
        nats.append(F.cross_entropy(logits, text[1:], reduction="none"))
    return torch.cat(nats).mean().item()


def kill_at(
    step: int, server: Server, arguments: list[str], environments: list[dict[str, str]]
) -> None:
    """Launch a run, and kill all its processes when it has recorded a step."""
    run = Path(arguments[arguments.index("--out_dir") + 1])
    world = len(environments)
    launched = Direct(
        server, run.parent, arguments, world, environment=dict(enumerate(environments))
    )
    until(lambda: RunFolder(run).step >= step, 60)
    launched.send(signal.SIGKILL, *range(world))
    assert launched.wait() == [KILLED] * world
    assert step <= RunFolder(run).step < STEPS


def command(*words: object) -> int:
    return run_here(cli.dispatch, [str(word) for word in words])


@pytest.mark.parametrize(
    ("example", "engine"), [("schedule_free", "FSDP2"), *(("ema", engine) for engine in ENGINES)]
)
def test_the_run_its_checkpoint_and_its_export_have_one_val_loss(
    example: str,
    engine: str,
    server: Server,
    tiny: Tiny,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    world, environment = ENGINES[engine]
    options = ["--code", str(EXAMPLES / f"{example}.py"), "--eval.tokens", "null"]
    options += ["--checkpoint.every", "1", "--model.dropout", "0", "--train.micro_batch_size", "1"]
    options += ["--train.max_steps", str(STEPS)]
    environments = [environment] * world
    whole = tmp_path / "whole"
    finish(server, tiny.arguments(whole, *options), world, environment=environments)
    run = tmp_path / "run"
    for step in (5, 15):
        kill_at(step, server, tiny.arguments(run, *options), environments)
    finish(server, tiny.arguments(run, *options), world, environment=environments)
    assert_same(run, whole, STEPS)

    *_, last = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert last["step"] == STEPS
    exported = {}
    for weights in ("evaluated", "trained"):
        to = tmp_path / weights
        assert command("export", newest(run), "--to", to, "--weights", weights) == 0
        exported[weights] = loss_of_transformers(to, tiny.config.parent / "corpus")
        capfd.readouterr()
        assert command("evaluate", run, "--checkpoint", "last", "--weights", weights, "--json") == 0
        found = json.loads(capfd.readouterr().out)["metrics"]["eval/val_loss"]
        assert found == pytest.approx(exported[weights], abs=ROUNDING)
    assert last["eval/val_loss"] == pytest.approx(exported["evaluated"], abs=ROUNDING)
    assert abs(exported["trained"] - exported["evaluated"]) > 10 * ROUNDING
