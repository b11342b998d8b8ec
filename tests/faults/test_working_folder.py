"""No command executes a file of the folder in which it starts, nor do its child processes."""

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_gpt.children import launch_child
from accel_gpt.commands.options import COMMANDS
from tests.conftest import thorough
from tests.helpers.hub_server import HubServer, environment
from tests.test_launch import PLAIN, TRAIN

PROGRAMS = Path(sys.executable).parent
OURS = str(PROGRAMS / "accel-gpt")
ACCELERATE = [str(PROGRAMS / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--main_process_port", "0", "--no_python"]
TORCHRUN = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc_per_node", "2"]
CONFIG = """
data: {text: ., prepare: {tokenizer: bytes}}
model: {n_layer: 1, n_head: 2, n_embd: 32, block_size: 32}
train: {tokens_per_step: 128, micro_batch_size: 2, max_steps: 2, cpu_threads: 1}
eval: {every: 0, tokens: 128}
sample: {every: 0}
log: {trackers: [tensorboard], dashboard: true}
"""
IN_PYTHON = "import accel_gpt; accel_gpt.run('../c.yaml', {'out_dir': '../python'}, processes=2)"
# the command line, started in a folder of text and in the folder of a run
STARTED = {
    "train": [OURS, "train", "../c.yaml", "--out_dir", "../a", "--checkpoint.copy_to", "../b"],
    "prepare": [OURS, "prepare", ".", "--tokenizer", "bytes", "--out", "../data"],
    "sample": [OURS, "sample", "../run", "--max_new_tokens", "2"],
    "evaluate": [OURS, "evaluate", "../run"],
    "export": [OURS, "export", "../run", "--to", "../exported"],
    "push": [OURS, "push", "../run", "--repo", "user/model"],
    "inspect": [OURS, "inspect", "../run"],
    "plan": [OURS, "plan", "../c.yaml"],
    "sweep": [OURS, "sweep", "../c.yaml", "--optim.lr", "1e-3,2e-3", "--out_dir", "../sweep"],
    "bench": [OURS, "bench", "../c.yaml", "--steps", "2"],
    "report": [OURS, "report", "../run", "--out", "../report.html"],
    "verify-resume": [OURS, "verify-resume", "../c.yaml", "--steps", "3", "--kills", "1"],
    "python": [sys.executable, "-P", "-c", IN_PYTHON],
    "python -m": [sys.executable, "-P", "-m", "accel_gpt", "evaluate", "../run"],
    "accelerate": [*ACCELERATE, OURS, "evaluate", "../run"],
    "torchrun": [*TORCHRUN, TRAIN, "../c.yaml", "--out_dir", "../torchrun"],
}  # fmt: skip


# those that start children, or that a launcher starts
ALWAYS = ("train", "sweep", "python", "torchrun")


def plant(folder: Path) -> Path:
    """Write a module for each name that Python may import; return the file that each appends to."""
    mark = folder.parent / "executed"
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    names |= {"accel_gpt", "planted", "sitecustomize", "usercustomize"}
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ')\n")
    # torch and TensorBoard import what the metadata of any installed package names
    metadata = folder / "planted-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    points = "[torch.backends]\np = planted:p\n[tensorboard_plugins]\np = planted:p\n"
    (metadata / "entry_points.txt").write_text(points)
    return mark


@pytest.mark.parametrize(
    "processes", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["alone", "torchrun"]
)
def test_a_child_imports_nothing_from_the_working_folder(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without our variable the same child executes the first planted module that it imports."""
    folder = tmp_path / "folder"
    folder.mkdir()
    mark = plant(folder)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with launch_child(["--version"], processes=processes) as child:
        assert child.wait() == 0
    assert not mark.exists()
    subprocess.run([sys.executable, "-m", "accel_gpt"], capture_output=True, check=False)
    assert mark.exists()


@pytest.fixture(scope="module")
def home(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text to train on, and a run, whose folders hold planted modules."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "c.yaml").write_text(CONFIG)
    (folder / "text").mkdir()
    shutil.copy(prepared / "text.txt", folder / "text")
    quiet = ["--log.dashboard", "false", "--out_dir", "../run"]
    command = [OURS, "train", "../c.yaml", *quiet]
    subprocess.run(command, cwd=folder / "text", check=True, capture_output=True)
    plant(folder / "text")
    plant(folder / "run")
    return folder


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ALWAYS else [thorough]) for name in STARTED],
)
def test_a_command_executes_no_file_of_the_working_folder(
    name: str, home: Path, hub: HubServer, tmp_path: Path
) -> None:
    where = home / ("run" if "../run" in STARTED[name] else "text")
    executed = home / "executed"
    executed.unlink(missing_ok=True)
    variables = {**PLAIN, **environment(hub, tmp_path), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        STARTED[name], cwd=where, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not executed.exists(), executed.read_text()


def test_each_command_is_started_in_such_a_folder() -> None:
    assert COMMANDS.keys() <= STARTED.keys()
