"""The Python interface: functions do what commands do, and leave the process unchanged."""

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_gpt
from accel_gpt.cli import dispatch
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.launcher import SIGNALS
from tests.test_layout import ROOT, loaded_by

Arguments = Callable[..., list[str]]
SHORT = {"train.max_steps": 3, "schedule.warmup_steps": 0, "eval.every": 2, "sample.every": 0}


def test_importing_the_package_imports_nothing_else() -> None:
    assert not {"accel_gpt.api", "torch"} & loaded_by("import accel_gpt").keys()


def in_thread(call: Callable[[], Any]) -> Any:
    """Call in a thread that is not the main one, and return the result or the error."""
    with ThreadPoolExecutor() as pool:
        try:
            return pool.submit(call).result()
        except AccelGPTError as error:
            return error


def process() -> list[Any]:
    """Return what a run could change for its process, beside the settings that each test keeps."""
    return [
        [signal.getsignal(number) for number in SIGNALS],
        sorted(thread.name for thread in threading.enumerate()),
        dict(os.environ),
        list(sys.path),
        random.getstate(),
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.slow
def test_a_run_in_a_thread_trains_fails_and_leaves_the_process_as_it_was(
    small_run: Arguments, corpus: Path
) -> None:
    before = process()
    options: dict[str, Any] = SHORT | {"train.max_steps": 2}
    options |= {"data.val": {"a": str(corpus), "b": str(corpus)}}
    run = in_thread(lambda: accel_gpt.run(*small_run(), options))
    assert run.metrics.index[-1] == 2
    assert {"eval/val_loss/a", "eval/val_loss/b"} <= set(run.metrics)
    for shard in corpus.glob("*_0*"):
        os.truncate(shard, 100)
    options["out_dir"] = str(run.path.parent / "second")
    error = in_thread(lambda: accel_gpt.run(*small_run(), options))
    assert type(error) is DataError
    assert str(corpus) in str(error)
    assert process() == before


@pytest.mark.slow
def test_a_run_from_start_to_export(
    small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = small_run()
    accel_gpt.run(path, SHORT | {"train.max_steps": 2, "train.mixed_precision": "bf16"})
    more = {"checkpoint.allow_change": ["train.max_steps", "train.mixed_precision"]}
    run = accel_gpt.run(path, SHORT | more)  # another precision in the same process
    assert "resuming" in capsys.readouterr().err
    assert run.path == tmp_path / "run"
    assert list(run.metrics.index) == [1, 2, 3]
    assert run.metrics["train/loss"].notna().all()
    assert run._repr_png_().startswith(b"\x89PNG")

    options = {"num": 2, "max_new_tokens": 4, "seed": 7}
    texts = run.sample("the", **options)
    words = [f"--{key}={value}" for key, value in options.items()]
    assert dispatch(["sample", str(run.path), "--prompt", "the", *words]) == 0
    assert capsys.readouterr().out == "\n---------------\n".join(texts) + "\n"
    assert in_thread(run.evaluate)["eval/val_loss"] == run.metrics["eval/val_loss"][3]
    model, tokenizer = accel_gpt.load(run.path, checkpoint=2)
    assert not model.training
    assert tokenizer.decode(tokenizer.encode("the king")) == "the king"
    assert (run.export(tmp_path / "exported") / "model.safetensors").is_file()


@pytest.mark.slow
def test_mistakes_are_exceptions(small_run: Arguments, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean train\.max_steps"):
        accel_gpt.run("quickstart", {"train.max_step": 3})
    run = accel_gpt.Run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="nowhere is not a folder"):
        _ = run.metrics
    with pytest.raises(UserError, match="did you mean --temperature"):
        run.sample(temprature=0)
    with pytest.raises(UserError, match="nowhere"):
        run.evaluate()
    with pytest.raises(UserError, match="expected a whole number above 0"):
        accel_gpt.run(*small_run(), processes=0)


@pytest.mark.slow
@pytest.mark.parametrize("own_thread", [False, True])
def test_an_interrupt_saves_and_returns(
    own_thread: bool, small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The main thread passes it on. Beside it, the child gets that of the terminal."""
    receiver = "os.getpid()" if own_thread else "os.getppid()"
    code = tmp_path / "interrupt.py"
    code.write_text(
        "import os, signal\n\n\ndef metrics(run):\n    if run.state.step == 2:\n"
        f"        os.kill({receiver}, signal.SIGINT)\n    return {{}}\n"
    )
    options = SHORT | {"train.max_steps": 100_000, "code": code}
    call = partial(accel_gpt.run, *small_run(), options)
    run = in_thread(call) if own_thread else call()
    assert "SIGINT: saved at step" in capsys.readouterr().err
    assert any((run.path / "checkpoints").glob("step_*"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_two_processes_train_beside_one(
    small_run: Arguments, capfd: pytest.CaptureFixture[str]
) -> None:
    options = SHORT | {"train.micro_batch_size": 4}
    run = accel_gpt.run(*small_run(), options, processes=2)
    assert "2 processes" in capfd.readouterr().err
    assert list(run.metrics.index) == [1, 2, 3]
    with pytest.raises(UserError, match="tokens_per_step"):
        accel_gpt.run(*small_run(), options | {"train.micro_batch_size": 5}, processes=2)


# --------------------------------------------------------------------------- in a notebook


def in_kernel(cells: list[str], folder: Path) -> list[Any]:
    """Run a notebook in a kernel in `folder`; return its cells."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    found: list[Any] = notebook.cells
    return found


def shown(cell: Any, kind: str) -> list[str]:
    """Return the outputs of a cell of one MIME type, such as image/png."""
    return [o["data"][kind] for o in cell.outputs if kind in o.get("data", {})]


def printed(cell: Any, stream: str = "stdout") -> str:
    """Return what a cell wrote to a stream."""
    return "".join(o["text"] for o in cell.outputs if o.get("name") == stream)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """On its own text, with a smaller model and fewer steps; nothing is shown in red."""
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    small = SHORT | {"data.prepare.vocab_size": 300, "model.n_layer": 1, "model.block_size": 32}
    small |= {"train.tokens_per_step": 128, "train.micro_batch_size": 4, "eval.tokens": 512}
    small |= {"train.compile": False, "train.mixed_precision": "no"}
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/note.txt").write_text("def read(it):\n    return it\n\n" * 1000)
    code[1] = code[1].replace('"train.max_steps": 600', f"**{small!r}").replace("200}", "2}")
    executed = in_kernel(code, tmp_path)
    assert [printed(cell, "stderr") for cell in executed] == [""] * len(executed)
    _, train, resumed, sample, evaluate, metrics, export = executed
    assert "saved at step 2 of 3" in printed(train)
    assert "from step 2" in printed(resumed)
    assert shown(resumed, "image/png")
    assert printed(sample).count("def read(") >= 3
    assert 0 < float(shown(evaluate, "text/plain")[0]) < 10
    assert "train/loss" in shown(metrics, "text/html")[0]
    assert "model.safetensors" in shown(export, "text/plain")[0]
