"""The reader of a run's folder accepts any content."""

import json
from pathlib import Path

from accel_gpt.runs.folder import RunFolder


def test_an_empty_folder_is_a_run_without_anything(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert (run.launches, run.config, list(run.records()), run.csv_records()) == ((), {}, [], [])
    assert (run.step, run.max_steps, run.in_use) == (0, None, False)
    assert (run.samples, run.checkpoints) == ({}, {})


def test_launches_and_config(tmp_path: Path) -> None:
    launches = [{"step": 0}, {"step": 4, "plan": {"max_steps": 9}}]
    (tmp_path / "run.json").write_text(json.dumps({"launches": launches}))
    (tmp_path / "config.yaml").write_text("seed: 1\noptim: {lr: 0.5}\n")
    run = RunFolder(tmp_path)
    assert [launch["step"] for launch in run.launches] == [0, 4]
    assert (run.max_steps, run.last_launch("plan", "max_steps", "x")) == (9, None)
    assert run.config == {"seed": 1, "optim.lr": 0.5}
    for broken in ("- a\n", "7: x\n", "a: ["):
        (tmp_path / "config.yaml").write_text(broken)
        assert RunFolder(tmp_path).config == {}


def test_the_step_of_a_run_is_that_of_its_last_record(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "x": "x" * 500}) for step in range(1, 1001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, "not json", '{"step": 1001, "tr']))
    assert RunFolder(tmp_path).step == 1000


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    text = "--- sample 1\nA\n\nB\n\n--- sample 2\nC\n\n"
    (tmp_path / "samples/step_00000003.txt").write_text(text)
    (tmp_path / "samples/step_3.txt").write_text("none of ours")
    run = RunFolder(tmp_path)
    assert list(run.samples) == [3]
    assert run.sample_texts(3) == ["A\n\nB", "C\n"]
