"""The README: its commands run as written, and what it names exists."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from accel_gpt.cli import dispatch
from accel_gpt.commands.plan import PlanCommand
from accel_gpt.commands.plan_forecast import forecast
from accel_gpt.config.experiment import Config
from accel_gpt.config.parse import leaves, load_config
from accel_gpt.config.plan import make_plan
from tests.hub_server import HubServer, environment

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", TEXT, flags=re.M)}


def commands(section: str) -> list[str]:
    """Command lines of the shell blocks of a section, continued lines joined, comments cut."""
    blocks = re.findall(r"```sh\n(.*?)```", SECTIONS[section], flags=re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line) for line in lines if line.strip()]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_loads_plans_and_says_what_it_needs(path: Path) -> None:
    assert path.read_text().startswith("# ")
    assert "# Needs:" in path.read_text()
    assert make_plan(load_config([str(path)], "train.py"), 1).max_steps > 0
    assert path.stem.removeprefix("gpt2") in SECTIONS["The real run"]


def test_the_plan_shown_is_the_one_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = commands("What will it take?")
    assert dispatch(command.split()[1:]) == 0
    assert capsys.readouterr().out.rstrip() in SECTIONS["What will it take?"]


def test_named_keys_tests_and_files_exist() -> None:
    keys = leaves(Config)
    sections = {key.partition(".")[0] for key in keys if "." in key}
    for name in re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_.]+)", TEXT):
        known = {*keys, "data.prepare", *sections}
        assert name.rstrip(".") in known or name.endswith((".py", ".bin")), name
    for name in re.findall(r"`(\w+\.py)`", SECTIONS["Map of the files"]):
        rooms = (ROOT / "accel_gpt", ROOT / "benchmarks")
        assert any(list(room.rglob(name)) for room in rooms), name
    for link in re.findall(r"\]\(([\w./]+)\)", TEXT):
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda p: p.stem
)
def test_every_test_that_is_named_exists(path: Path) -> None:
    """`tests/faults/test_x.py::test_y` with or without `tests/`, or a file alone."""
    for file, test in re.findall(r"([\w/]*\btest_\w+\.py)(?:::(\w+))?", path.read_text()):
        content = (ROOT / "tests" / file.removeprefix("tests/")).read_text()
        assert not test or f"\ndef {test}(" in content, test


def test_the_remedy_shown_is_the_one_that_is_found() -> None:
    told = re.search(r"`(--train\.micro.*?)` for `(\w+)` in bf16 on one `(\w+)`", TEXT)
    assert told
    asked = PlanCommand(str(ROOT / f"configs/{told[2]}.yaml"), gpu=told[3])
    config = load_config([asked.config, "--train.mixed_precision", "bf16"], "test")
    assert told[1] in forecast(asked, config)["memory"]["remedies"]


def test_every_folder_and_module_is_on_the_map() -> None:
    shown = SECTIONS["Map of the files"].replace("accel_gpt/", "")
    for path in (ROOT / "accel_gpt").iterdir():
        name = f"{path.name}/" if path.is_dir() else path.name
        assert name in ("__init__.py", "__pycache__/", "py.typed") or f"`{name}`" in shown


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Another folder, with the configs and nothing else."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


def run(command: str, folder: Path) -> str:
    """All that a command shows; it must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_quickstart_reaches_what_the_readme_claims(elsewhere: Path) -> None:
    """Everything but the installation, which whoever runs this has behind him."""
    install, sample, _ = commands("Five minutes on a CPU")[:3]
    shown = run(install.rpartition("&& ")[2], elsewhere)
    assert "accel-gpt sample runs/quickstart" in shown
    last = json.loads((elsewhere / "runs/quickstart/metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/val_bits_per_byte"] <= 1.65  # the README says 1.59
    assert run(sample, elsewhere).count("def read(") == 3


@pytest.mark.slow
@pytest.mark.usefixtures("gpt2_vocabulary")
def test_own_data_as_the_readme_says(elsewhere: Path) -> None:
    for number in range(4):
        folder = elsewhere / "notes" / f"part{number}"
        folder.mkdir(parents=True)
        shutil.copy(ROOT / "README.md", folder / "note.md")
        text = (ROOT / "accel_gpt" / "parse.py").read_text() * (number + 1)
        (folder / "code.md").write_text(text)
    rows = [{"content": ROOT.joinpath("README.md").read_text()[i:]} for i in range(120)]
    with gzip.open(elsewhere / "crawl.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    texts = pyarrow.table({"text": [row["content"] for row in rows]})
    pyarrow.parquet.write_table(texts, elsewhere / "wiki.parquet")
    *own, train = commands("Your own data")
    for command in own:
        run(command.replace("4096", "512"), elsewhere)
    run(f"{train} --train.max_steps 3 --schedule.warmup_steps 1", elsewhere)
    assert (elsewhere / "runs/notes/checkpoints/step_00000003").is_dir()
    indexes = [
        json.loads((elsewhere / f"data/{n}/dataset.json").read_text()) for n in ("crawl", "piped")
    ]
    assert indexes[0]["splits"] == indexes[1]["splits"]


@pytest.mark.slow
def test_the_round_trip_as_the_readme_says(elsewhere: Path) -> None:
    short = "--train.max_steps 20 --schedule.warmup_steps 2 --sample.every 0"
    run(f"accel-gpt train configs/quickstart.yaml {short}", elsewhere)
    with HubServer() as hub:
        known = " ".join(f"{k}={v}" for k, v in environment(hub, elsewhere / "home").items())
        shown = []
        for command in commands("Both ways with transformers, and the Hub"):
            mine = command.replace("user/", "tester/").replace("step-840", "step-20")
            if mine.startswith("accel-gpt train"):
                mine += f" {short} --train.max_steps 22 --checkpoint.allow_change train.max_steps"
            shown.append(run(f"export {known}; {mine}", elsewhere))
        assert len(shown) == 6
        assert "its logits equal ours" in shown[0]
        assert "generated_text" in shown[1]
        assert "resuming runs/moved from step 20" in shown[5]
        assert {"README.md", "loss.png", "config.json"} <= set(hub.files("tester/quickstart"))
