"""The start of several processes: a mistake on one ends all before the model is built."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.launches import Direct, Server, config
from tests.helpers.ports import free_port
from tests.test_launch import PLAIN

pytestmark = pytest.mark.slow
NODES = {rank: {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} for rank in (0, 1)}


@pytest.fixture
def argv(tmp_path: Path, prepared: Path) -> list[str]:
    return [str(config(tmp_path, prepared / "corpus", steps=4))]


def test_out_dir_that_is_not_shared(server: Server, argv: list[str], tmp_path: Path) -> None:
    own = {1: ["--out_dir", str(tmp_path / "other")]}
    launch = Direct(server, tmp_path, argv, environment=NODES, own_argv=own)
    assert launch.wait() == [2, 2]
    assert launch.shown().startswith(f"error: out_dir {tmp_path}/run is not shared: rank 1 on ")
    assert launch.shown().count("\n") == 1
    assert not launch.shown(1)
    assert not list((tmp_path / "run").iterdir())


def preparing(text: Path, folder: Path) -> list[str]:
    given = ["--data.prepare.source", str(text)]
    given += ["--data.prepare.tokenizer", "bytes"]
    return [*given, "--data.train", str(folder)]


@pytest.mark.parametrize("rank", [0, 1])
def test_preparation_that_fails_ends_all(
    rank: int, server: Server, argv: list[str], tmp_path: Path
) -> None:
    """On rank 0 the other processes of the node wait for it; on another node they do not."""
    text, missing = tmp_path / "text.txt", tmp_path / "missing.txt"
    text.write_text("the king of the sea " * 2000)
    own = {r: preparing(missing if r == rank else text, tmp_path / str(r) / "data") for r in (0, 1)}
    if rank == 0:
        own[1] = own[0]
    environment = NODES if rank else {}
    launch = Direct(server, tmp_path, argv, environment=environment, own_argv=own)
    assert launch.wait() == [2, 2], launch.shown() + launch.shown(1)
    assert "missing.txt" in launch.shown(rank)
    assert (launch.shown(0) + launch.shown(1)).count("error:") == 1


@pytest.mark.parametrize("shared", [True, False])
def test_data_is_prepared_once_a_node_or_once_where_the_folder_is_shared(
    shared: bool, server: Server, argv: list[str], tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the king of the sea " * 2000)
    own = {r: preparing(text, tmp_path / ("0" if shared else str(r)) / "data") for r in (0, 1)}
    launch = Direct(server, tmp_path, argv, environment=NODES, own_argv=own)
    assert launch.wait() == [0, 0]
    assert launch.shown(0).count("prepared ") == 1
    assert launch.shown(1).count("prepared ") == (not shared)
    names = {path.name for path in (tmp_path / "0").iterdir()}
    assert names == {"data"}


def test_process_that_meets_no_other_ends(server: Server, argv: list[str], tmp_path: Path) -> None:
    """Nobody listens on the port, since the main process has not started."""
    alone = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = {0: ["--train.step_timeout", "3s"]}
    launch = Direct(server, tmp_path, argv, processes=1, environment={0: alone}, own_argv=own)
    assert launch.wait() == [70]
    where = f"127.0.0.1:{alone['MASTER_PORT']}"
    assert f"error: process 1 has not met the others at {where} within 3s " in launch.shown()


HANGS = """
import sys, time
from accel_gpt import train
from accel_gpt.commands import train as command
from accel_gpt.console import run_main
train.open_corpus = lambda *_: time.sleep(60)
sys.exit(run_main(command.main, sys.argv[1:]))
"""


def test_hang_before_the_first_step_ends(argv: list[str], tmp_path: Path) -> None:
    script = [sys.executable, "-c", HANGS, *argv, "--train.step_timeout", "3s"]
    done = subprocess.run(
        script, cwd=tmp_path, env=PLAIN, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 70, done.stderr
    assert "(train.step_timeout)" in done.stderr
    assert "in set_up" in done.stderr  # the stacks
