"""configs/accelerate: `accelerate launch` and the trainer accept each file."""

import os
import shlex
from pathlib import Path

import pytest
from accelerate.commands import launch
from accelerate.utils import launch as environments

from accel_gpt.children import PREFIXES
from accel_gpt.commands.resolve import load_config
from accel_gpt.config.plan import make_plan
from accel_gpt.errors import UserError
from accel_gpt.launch.unsupported import check_accelerate_config

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "accelerate"
PROCESSES = {
    **{"one_gpu": 1, "cpu_2": 2, "ddp_8": 8, "fp8_ddp_8": 8, "fsdp2_8": 8},
    **{"multinode_ddp": 16, "hsdp_2x8": 16},
}


def environment_of(*words: str) -> dict[str, str]:
    """Return the variables that `accelerate launch` with arguments `words` sets for a process."""
    parser = launch.launch_command_parser()
    arguments, *_ = launch._validate_launch_command(parser.parse_args(words))
    assert arguments.use_fsdp or arguments.multi_gpu  # so it starts the stated number of processes
    found = environments.prepare_multi_gpu_env(arguments)
    added = {key: value for key, value in found.items() if key.startswith(PREFIXES)}
    return added | {"WORLD_SIZE": str(arguments.num_processes)}


def command_of(path: Path) -> list[str]:
    """Return the arguments of `accelerate launch` in the comment of a file."""
    lines = [line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#")]
    text = " ".join(lines).replace("\\ ", " ")
    return shlex.split(text.partition("accelerate launch --config")[2])[1:]


def test_there_are_those_that_the_pages_name() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == PROCESSES.keys()


@pytest.mark.parametrize("name", PROCESSES)
def test_accelerate_launch_and_the_trainer_accept_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the command of its comment, with a config whose batch its processes divide."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(environments, "is_fp8_available", lambda: True)
    monkeypatch.setattr(environments, "is_port_in_use", lambda _: False)
    path = FOLDER / f"{name}.yaml"
    words = command_of(path)
    assert words[0] == f"configs/accelerate/{name}.yaml"
    script = words.index("accel_gpt/train.py")
    for key, value in environment_of("--config_file", *words).items():
        monkeypatch.setenv(key, value)
    assert os.environ["WORLD_SIZE"] == str(PROCESSES[name])
    check_accelerate_config()
    make_plan(load_config(words[script + 1 :], ""), PROCESSES[name])
    if name == "hsdp_2x8":
        monkeypatch.setenv("WORLD_SIZE", "8")
        with pytest.raises(UserError, match=r"sharding over 16 of 8 processes"):
            check_accelerate_config()
