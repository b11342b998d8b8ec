"""Runs and data folders of commit 99e4bb0 still resume with the same results.

`tests/fixtures/run_99e4bb0` holds them; its README says how they were written.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_gpt.cli import dispatch
from tests.conftest import launch, run_here, text_of
from tests.faults.harness import FSDP, Server, by_clock, finish

OLD = Path(__file__).parent / "fixtures" / "run_99e4bb0"
ALONE = ("plain", "muon", "async_save")
TWO = ("two_ranks", "sharded")  # names of the runs of two processes
# Another kind of CPU or build of torch rounds differently. Another batch or a lost moment of the
# optimizer changes losses by more than 1e-4.
TOLERANCE = {"rel": 1e-5, "abs": 1e-6}

Records = list[dict[str, float]]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a copy of the fixtures the working directory, with the text of their data."""
    folder = tmp_path / "old"
    shutil.copytree(OLD, folder)
    (folder / "text.txt").write_text(text_of(1500, seed=0))
    (folder / "more.txt").write_text(text_of(500, seed=1))
    monkeypatch.chdir(folder)
    return folder


def read_records(path: Path) -> Records:
    """Return the lines of a metrics.jsonl without clock figures."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not by_clock(key)} for line in lines]


def assert_went_on(folder: Path, name: str) -> None:
    """Compare the records of a resumed run with the undisturbed run."""
    found = read_records(folder / name / "metrics.jsonl")
    expected = read_records(OLD / "whole" / f"{name}.jsonl")
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, **TOLERANCE)


@pytest.mark.parametrize("name", ALONE)
def test_a_run_goes_on_with_the_losses_it_would_have_had(
    name: str, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch([f"{name}.yaml"]) == 0
    assert f"resuming {name} from step 4 " in capsys.readouterr().err
    assert_went_on(old, name)


def test_a_run_goes_on_with_the_config_in_its_folder(old: Path) -> None:
    assert launch(["plain/config.yaml"]) == 0
    assert_went_on(old, "plain")


@pytest.mark.parametrize("name", TWO)
def test_one_process_goes_on_with_a_run_of_two(name: str, old: Path) -> None:
    assert launch([f"{name}.yaml"]) == 0
    assert_went_on(old, name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server") / "log.txt") as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_two_processes_go_on_with_a_run_of_two(name: str, old: Path, server: Server) -> None:
    """The server works in another directory, so the paths become absolute."""
    config = old / f"{name}.yaml"
    text = config.read_text().replace("data/", f"{old}/data/")
    config.write_text(text.replace(f"out_dir: {name}", f"out_dir: {old / name}"))
    engine = FSDP if name == "sharded" else {}
    finish(server, [str(config)], processes=2, environment=[dict(engine), dict(engine)])
    assert_went_on(old, name)


def greedy_sample(model: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of `accel-gpt sample`."""
    capsys.readouterr()
    options = ["--prompt", "the king", "--temperature", "0", "--max_new_tokens", "8"]
    assert run_here(dispatch, ["sample", model, *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [*ALONE, *TWO])
def test_a_run_is_evaluated_and_sampled(
    name: str, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = read_records(old / name / "metrics.jsonl")[3]
    assert run_here(dispatch, ["evaluate", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 4
    assert found["metrics"]["eval/val_loss"] == pytest.approx(saved["eval/val_loss"], **TOLERANCE)
    assert "the king" in greedy_sample(name, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "sharded"])
def test_a_run_is_exported(name: str, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = greedy_sample(name, capsys)
    assert run_here(dispatch, ["export", name, "--to", "exported"]) == 0
    assert greedy_sample("exported", capsys) == before


@pytest.mark.parametrize("name", ["plain", "muon"])
def test_a_prepared_folder_is_taken_as_it_is(
    name: str, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new run on it has the losses of the old run from the first step."""
    data = {path: path.read_bytes() for path in old.glob("data/*/*")}
    shutil.rmtree(old / name)
    assert launch([f"{name}.yaml"]) == 0
    shown = capsys.readouterr()
    assert "has changed" not in shown.err
    assert "prepared" not in shown.out
    assert {path: path.read_bytes() for path in old.glob("data/*/*")} == data
    assert_went_on(old, name)
