"""No command executes a file of the folder in which it starts, nor do its child processes."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accel_gpt.children import launch_child
from tests.test_launch import PLAIN, TRAIN

PROGRAMS = Path(sys.executable).parent
OURS = str(PROGRAMS / "accel-gpt")
TORCHRUN = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc_per_node", "2"]
CONFIG = """
data: {text: ., prepare: {tokenizer: bytes}}
model: {n_layer: 1, n_head: 2, n_embd: 32, block_size: 32}
train: {tokens_per_step: 128, micro_batch_size: 2, max_steps: 2}
eval: {every: 0, tokens: 128}
sample: {every: 0}
log: {trackers: [tensorboard], dashboard: true}
"""
IN_PYTHON = "import accel_gpt; accel_gpt.run('../c.yaml', {'out_dir': '../python'}, processes=2)"
# commands that start children, or that a launcher starts, in a folder of text
STARTED = {
    "train": [OURS, "train", "../c.yaml", "--out_dir", "../a", "--checkpoint.copy_to", "../b"],
    "python": [sys.executable, "-P", "-c", IN_PYTHON],
    "torchrun": [*TORCHRUN, TRAIN, "../c.yaml", "--out_dir", "../torchrun"],
}


def plant(folder: Path) -> Path:
    """Write a module for each name that Python may import; return the file that each appends to."""
    mark = folder.parent / "executed"
    installed = importlib.metadata.packages_distributions()  # also "nvidia/cusparselt"
    names = {*sys.stdlib_module_names, *(name.partition("/")[0] for name in installed)}
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


def test_a_process_that_a_library_starts_imports_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the environment of the command: multiprocessing starts Python so."""
    (tmp_path / "tempfile.py").write_text("raise SystemExit('executed')")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for run in ("run_process(main)", "main([])"):
        program = (
            "import subprocess, sys\n"
            "from accel_gpt.console import run_process\n"
            "child = [sys.executable, '-c', 'import tempfile']\n"
            "def main(argv):\n"
            "    return subprocess.run(child, check=False).returncode\n"
            f"sys.exit({run})\n"
        )
        command = [sys.executable, "-P", "-c", program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stderr == ("" if run == "run_process(main)" else "executed\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED)
def test_a_command_executes_no_file_of_the_working_folder(
    name: str, prepared: Path, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    folder = tmp_path / "text"
    folder.mkdir()
    shutil.copy(prepared / "text.txt", folder)
    mark = plant(folder)
    variables = {**PLAIN, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        STARTED[name], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not mark.exists(), mark.read_text()
