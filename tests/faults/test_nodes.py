"""Two nodes as network namespaces joined by veth interfaces, see docs/how-to/several-nodes.md.

Needs no root, only a Linux that lets a process make user and network namespaces.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_gpt.runs.checkpoint import verify_checkpoint
from tests.conftest import thorough
from tests.faults.launches import config, steps_told, until
from tests.launch.test_accelerate_configs import FOLDER
from tests.test_launch import ACCELERATE, PLAIN, TRAIN, finish

pytestmark = pytest.mark.slow
LAUNCH = [*ACCELERATE, "--config_file", str(FOLDER / "multinode_ddp.yaml"), "--num_processes", "2"]
LAUNCH += ["--mixed_precision", "no"]
MAIN = "10.77.0.1"


class Nodes:
    """A process that holds each namespace, and the launchers within."""

    def __init__(self) -> None:
        hold = ["sh", "-c", "ip link set lo up && echo ready && exec sleep 1000"]
        self.held: list[subprocess.Popen[str]] = []
        self.launched: list[subprocess.Popen[str]] = []
        self.hold(["unshare", "-Urn", *hold])
        self.hold([*self.inside(0, net=False), "unshare", "-n", *hold])
        self.ip(0, f"link add eth0 type veth peer name eth0 netns {self.held[1].pid}")
        for node in (0, 1):
            self.ip(node, f"addr add 10.77.0.{node + 1}/24 dev eth0")
            self.ip(node, "link set eth0 up")

    def hold(self, command: list[str]) -> None:
        """Start the process of a namespace; skip the test if that is not allowed."""
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.held.append(process)
        assert process.stdout
        if (line := process.stdout.readline()) != "ready\n":
            self.close()
            pytest.skip(f"this machine lets no process have a network of its own: {line}")

    def inside(self, node: int, net: bool = True) -> list[str]:
        """Return the prefix that runs a command on a node."""
        words = ["nsenter", "-t", str(self.held[node].pid), "-U", "--preserve-credentials"]
        return [*words, *(["-n"] if net else [])]

    def ip(self, node: int, words: str) -> None:
        """Change the network of a node."""
        subprocess.run([*self.inside(node), "ip", *words.split()], check=True)

    def launch(self, folder: Path, argv: list[str], interface: bool = True) -> None:
        """Run `accelerate launch` on both; the host name resolves to the loopback interface."""
        environment = {**PLAIN, **({"GLOO_SOCKET_IFNAME": "eth0"} if interface else {})}
        for node in (0, 1):
            words = [*self.inside(node), *LAUNCH, "--machine_rank", str(node)]
            words += ["--main_process_ip", MAIN, TRAIN, *argv]
            with (folder / f"node{node}.txt").open("w") as log:
                self.launched.append(
                    subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
                )

    def wait(self, seconds: float) -> list[int]:
        """Return the exit codes of the launchers."""
        until(lambda: all(one.poll() is not None for one in self.launched), seconds)
        codes = [one.returncode for one in self.launched]
        self.launched.clear()
        return codes

    def close(self) -> None:
        """End all."""
        for process in [*self.launched, *self.held]:
            process.kill()
            process.communicate()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.close()


def shown(folder: Path) -> list[str]:
    return [(folder / f"node{node}.txt").read_text() for node in (0, 1)]


def test_two_nodes_train_and_one_goes_on(nodes: Nodes, prepared: Path, tmp_path: Path) -> None:
    argv = [str(config(tmp_path, prepared / "corpus", steps=12))]
    nodes.launch(tmp_path, argv)
    assert nodes.wait(120) == [0, 0], shown(tmp_path)
    assert "x 2 processes" in shown(tmp_path)[0]
    assert steps_told(tmp_path / "run") == 12
    more = ["--train.max_steps", "16", "--checkpoint.allow_change", "train.max_steps"]
    one = [*ACCELERATE, "--config_file", str(FOLDER / "one_gpu.yaml"), "--mixed_precision", "no"]
    told = finish([*one, "--main_process_port", "0", TRAIN, *argv, *more], tmp_path)
    assert "resuming" in told
    assert steps_told(tmp_path / "run") == 16


@thorough
def test_cut_link_ends_both_and_harms_no_checkpoint(
    nodes: Nodes, prepared: Path, tmp_path: Path
) -> None:
    argv = [str(config(tmp_path, prepared / "corpus", steps=100_000))]
    nodes.launch(tmp_path, [*argv, "--train.step_timeout", "8s"])
    until(lambda: steps_told(tmp_path / "run") > 20, 120)
    nodes.ip(1, "link set eth0 down")
    assert 0 not in nodes.wait(120)
    for text in shown(tmp_path):
        assert "within 8s (train.step_timeout)" in text or "another process of the run" in text
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert checkpoints
    for path in checkpoints:
        verify_checkpoint(path)
