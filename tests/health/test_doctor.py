"""`accel-gpt doctor` on real runs: trained, running, damaged, someone else's."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt.api import Run
from accel_gpt.cli import dispatch
from accel_gpt.commands import train as command
from accel_gpt.errors import UserError
from accel_gpt.files import locked_file
from accel_gpt.health.doctor import QUESTIONS
from tests.conftest import QUIET, launch, run_here

NAMES = [*QUESTIONS]


@pytest.fixture
def run(train_once: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a finished run, to change."""
    copied = tmp_path / "copied"
    shutil.copytree(train_once() / "run", copied)
    return copied


def lines_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    capsys.readouterr()
    assert run_here(dispatch, ["doctor", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in report["lines"]] == NAMES
    return {line["name"]: line for line in report["lines"]}


def test_the_page_of_a_run(
    train_once: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_once() / "run"
    assert run_here(dispatch, ["doctor", str(run)]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"{run}: ")
    assert len(re.findall(r"^(?:fine  |look  |wrong |-     ) \w.*", page, flags=re.M)) == 9
    assert max(map(len, page.splitlines()[1:])) <= 80
    lines = lines_of(run, capsys)
    assert [line.question for line in Run(run).doctor()] == [
        line["question"] for line in lines.values()
    ]
    assert lines["kill"]["figure"].startswith("checkpoint of step 12 is intact; 0 steps since")
    assert "documents" in lines["data"]["figure"]
    updated = json.loads((run / "run.json").read_text())["launches"][-1]["optimizer"]
    assert updated["decayed_vectors"] == updated["never_updated"] == 0
    assert 0 < updated["vectors"] < updated["weights"]
    assert "unigram" in lines["counting"]["compared"]


def test_a_run_ends_with_its_verdict(
    small_run: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = small_run(*QUIET, "--train.stop_at", "4")
    assert launch(arguments) == 0
    assert "health" not in capsys.readouterr().err
    assert launch(small_run(*QUIET)) == 0
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.match(r"health   .*fine; accel-gpt doctor ", last)


def test_a_failure_of_the_doctor_does_not_fail_a_run(
    small_run: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(run: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(command, "examine", fail)
    assert launch(small_run(*QUIET)) == 0
    assert capsys.readouterr().err.endswith("health   not known: a mistake of ours\n")


def test_a_run_without_its_data_or_checkpoints(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub("train: .*corpus", "train: nowhere", config))
    shutil.rmtree(run / "checkpoints")
    lines = lines_of(run, capsys)
    for name in ("counting", "leak", "data"):
        assert lines[name]["verdict"] is None
        assert "nowhere" in lines[name]["compared"]
    assert lines["curve"]["verdict"] is not None
    assert lines["kill"]["figure"].startswith("no intact checkpoint; 12 steps since")


def test_a_run_whose_checkpoints_were_removed_has_none_left(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for state, max_steps, expected in (("finished", 12, "look"), ("stopped", 400, "wrong")):
        record = json.loads((run / "run.json").read_text())
        record["launches"][-1]["plan"]["max_steps"] = max_steps
        (run / "run.json").write_text(json.dumps(record))
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(last | {"step": max_steps if max_steps == 12 else 200}) + "\n")
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        line = lines_of(run, capsys)["kill"]
        assert line["verdict"] == expected, state


def test_a_signal_ends_the_last_look_at_a_finished_run(
    small_run: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(run: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    monkeypatch.setattr(command, "examine", wait)
    with pytest.raises(SystemExit) as ended:
        launch(small_run(*QUIET))
    assert ended.value.code == 0
    assert "SIGTERM: stopped" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_wrong_and_stays(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = sorted((run / "checkpoints").iterdir())[-1] / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    line = lines_of(run, capsys)["kill"]
    assert line["verdict"] == "wrong"
    assert "model.safetensors" in line["todo"]
    assert line["figure"].startswith("checkpoint of step 8 is intact")
    assert newest.read_bytes() == content


def test_a_run_that_trains_can_be_examined(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads((run / "run.json").read_text())
    record["launches"][-1]["plan"]["max_steps"] = 1000
    (run / "run.json").write_text(json.dumps(record))
    first = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:3]]
    first.append(first[-1] | {"step": 40})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in first))
    shutil.rmtree(run / "checkpoints")
    with locked_file(run / ".lock", wait=False):
        lines = lines_of(run, capsys)
    assert "wrong" not in {line["verdict"] for line in lines.values()}
    assert lines["kill"]["verdict"] == "fine"  # its first save is not due yet


def test_a_file_of_code_is_not_executed(
    small_run: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "my.py"
    code.write_text("def targets(tokens, targets, documents):\n    return targets\n")
    assert launch(small_run(*QUIET, "--code", str(code))) == 0
    for file in (code, tmp_path / "run" / "code.py"):
        file.write_text("raise SystemExit('executed')\n")
    line = lines_of(tmp_path / "run", capsys)["counting"]
    assert line["verdict"] is None
    assert "targets()" in line["compared"]


def test_what_is_not_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run"):
        dispatch(["doctor", str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"no config\.yaml"):
        dispatch(["doctor", str(tmp_path)])
    with pytest.raises(UserError, match="--jsn"):
        dispatch(["doctor", str(tmp_path), "--jsn"])


def test_the_report_begins_with_the_doctor(train_once: Callable[..., Path], tmp_path: Path) -> None:
    run = train_once() / "run"
    out = tmp_path / "report.html"
    assert run_here(dispatch, ["report", str(run), "--out", str(out)]) == 0
    page = out.read_text()
    assert page.index("Health</h2>") < page.index("Curves</h2>")
    assert page.count('class="verdict ') == 9
    assert run_here(dispatch, ["report", str(run), str(run), "--out", str(out)]) == 0
    assert out.read_text().count('class="verdict ') == 18
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    assert run_here(dispatch, ["report", str(run), str(bare), "--out", str(out)]) == 0
    assert out.read_text().count('class="verdict ') == 9  # a run without a config has none
