"""README.md and docs/: their commands run as written, and what they name exists.

The tree and the reading order in docs/explanation/architecture.md, and docs/reference/keys.md, are
made from the code; `ACCEL_GPT_DOCS=write pytest tests/test_docs.py` renews them.
"""

import ast
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow.parquet
import pytest

from accel_gpt.cli import dispatch
from accel_gpt.config.experiment import Config
from accel_gpt.config.names import HF_TRAINER, LLM_C, NANOGPT
from accel_gpt.config.options import field_types, own_options
from accel_gpt.config.parse import leaves, load_config
from accel_gpt.config.plan import make_plan
from tests.conftest import THOROUGH
from tests.hub_server import HubServer, environment

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "accel_gpt"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
READING_ORDER = (
    *("train", "config/experiment", "config/plan"),
    *("model/gpt", "model/layers", "model/documents", "model/loss"),
    *("optim/groups", "optim/adamw", "optim/muon", "optim/schedule"),
    *("data/shards", "data/order", "data/mixture", "data/loader"),
    *("training/accelerator", "training/gradients", "training/anomalies", "training/stopping"),
    *("training/state", "training/checkpoint", "training/saving", "training/resume"),
    "evals/validation",
)
MANUAL = textwrap.dedent(
    """\
    - `accel-gpt train --dump_config [NAME] [--section.key value ...] > my.yaml` writes all of them
      with these texts: the defaults, or the values of a shipped config, a file, a run's folder or a
      preset of the model. The file loads as the config it was made from."""
).splitlines()
# pages that name files of other projects
FOREIGN_FILES = ("fast.md", "from-nanogpt.md", "from-hf-trainer.md", "export.md", "evaluation.md")
SECTIONS = ("train", "data", "model", "optim", "schedule", "eval", "checkpoint", "sample", "log")


def commands(page: str, section: str = "") -> list[str]:
    """Command lines of the shell blocks below a heading, lines joined, comments cut."""
    text = (ROOT / page).read_text(encoding="utf-8")
    below = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0] if section else text
    blocks = re.findall(r"```sh\n(.*?)```", below, flags=re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line) for line in lines if line.strip()]


def tree() -> Iterator[str]:
    """One line for each folder and top-level file of the package, from its docstring."""
    for path in sorted(PACKAGE.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        source = path / "__init__.py" if path.is_dir() else path
        if source.suffix == ".py" and source.exists() and path.name != "__init__.py":
            text = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
            files = sorted(f.stem for f in path.glob("*.py") if f.stem != "__init__")
            name = path.name + "/" * path.is_dir()
            yield f"{name:12}  {text}".rstrip()
            yield from textwrap.wrap(", ".join(files), 100, **INDENT) if path.is_dir() else ()


INDENT = {"initial_indent": " " * 14, "subsequent_indent": " " * 14}


def reading_order() -> Iterator[str]:
    names = ", ".join(f"`{name}`" for name in READING_ORDER)
    yield from textwrap.wrap(f"{names}.", 120)
    yield ""


def keys(kind: type, prefix: str = "") -> Iterator[str]:
    """One row for each key: name, default and what the dataclass says of it."""
    default = kind()
    for name, described in own_options(kind).items():
        value = getattr(default, name)
        shown = json.dumps(value, default=lambda other: other.path) if value != "" else ""
        text = described.description.replace("|", r"\|")
        yield f"| `{prefix}{name}` | {f'`{shown}`' * bool(shown)} | {text} |"


def page_of_keys() -> Iterator[str]:
    hints = field_types(Config)
    yield from (
        "# Keys",
        "",
        "Made from `accel_gpt/config/`; `accel-gpt train --help-all` shows the same.",
        "",
        *MANUAL,
        "",
    )
    for name in ("", *SECTIONS, "hub", "data.prepare"):
        kind = Config
        for part in name.split(".") if name else ():
            kind = field_types(kind)[part]
        yield from (f"## {name or 'The run'}", "", (kind.__doc__ or "").partition("\n")[0], "")
        yield from ("| key | default | meaning |", "|---|---|---|")
        yield from keys(kind, f"{name}." if name else "")
        yield ""
    assert set(hints) - {"out_dir", "seed"} == {*SECTIONS, "hub"}


def table_of_names(trainer: str, names: Mapping[str, str]) -> Iterator[str]:
    """The names of another trainer, each with what to write here; keys set as code."""
    known = sorted(leaves(Config), key=len, reverse=True)
    key = re.compile("|".join(re.escape(name) for name in known if "." in name))
    yield from (f"| {trainer} | here |", "|---|---|")
    for name, answer in names.items():
        text = f"`{answer}`" if answer in known else key.sub(r"`\g<0>`", answer)
        yield f"| `{name}` | {text} |"


def check(page: str, made: str, pattern: str = "(.*)") -> None:
    """Compare what stands between the groups of `pattern` in a page; replace it on request."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(pattern, text, flags=re.S)
    assert found, pattern
    if os.environ.get("ACCEL_GPT_DOCS") == "write":
        path.write_text(text[: found.start(1)] + made + text[found.end(1) :], encoding="utf-8")
    else:
        assert found[1] == made, "ACCEL_GPT_DOCS=write pytest tests/test_docs.py renews it"


def test_what_is_made_from_the_code_is_up_to_date() -> None:
    page = "docs/explanation/architecture.md"
    check(page, "".join(f"{line}\n" for line in tree()), r"<!-- tree -->\n```\n(.*?)```")
    check(page, "\n".join(reading_order()), r"<!-- order -->\n(.*?)\n## ")
    check("docs/reference/keys.md", "\n".join(page_of_keys()).rstrip() + "\n")
    for page, mark, trainer, table in (
        ("docs/how-to/from-nanogpt.md", "nanogpt", "nanoGPT", NANOGPT),
        ("docs/how-to/from-nanogpt.md", "llm.c", "llm.c", LLM_C),
        ("docs/how-to/from-hf-trainer.md", "names", "Trainer, run_clm.py", HF_TRAINER),
    ):
        made = "".join(f"{line}\n" for line in table_of_names(trainer, table))
        check(page, made, rf"<!-- {mark} -->\n(.*?)<!-- end -->")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_loads_plans_and_says_what_it_needs(path: Path) -> None:
    assert path.read_text().startswith("# ")
    assert "# Needs:" in path.read_text()
    assert make_plan(load_config([str(path)], "train.py"), 1).max_steps > 0
    assert path.stem.removeprefix("gpt2") in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_plan_shown_is_the_one_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    plans = (line for line in commands("README.md") if line.startswith("accel-gpt plan"))
    assert dispatch(next(plans).partition("#")[0].split()[1:]) == 0
    check(
        "docs/explanation/cost.md",
        capsys.readouterr().out.rstrip(),
        r"```\n(configs/gpt2_124m\.yaml on.*?)\n```",
    )


RUNS = (
    "gpt2_124m --gpus 8",
    "gpt2_124m --gpus 64 --bandwidth 3200 --train.micro_batch_size 8",
    "gpt2_1558m --gpus 64 --distribution fsdp --bandwidth 3200",
    "gpt2_1558m --gpus 64 --distribution fsdp --bandwidth 400",
    "gpt2_1558m --gpus 64 --distribution hsdp --bandwidth 400",
    *(
        f"llama_7b --vocab_size 32000 --gpus {gpus} --distribution fsdp{network}"
        for gpus, network in ((8, ""), (64, " --bandwidth 3200"), (512, " --bandwidth 3200"))
    ),
    "llama_7b --vocab_size 32000 --gpus 512 --distribution fsdp --bandwidth 400",
)


def test_the_runs_worked_out_are_those_planned(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        "| | GB a device | step, ms | computing | collectives | not hidden | limited by | hours |"
    ]
    rows += ["|---" * 8 + "|"]
    for words in RUNS:
        h100 = ("--gpu", "h100", "--train.mixed_precision", "bf16", "--json")
        assert dispatch(["plan", *words.split(), *h100]) == 0
        report = json.loads(capsys.readouterr().out)
        time, gb = report["time"], report["memory"]["total"] / 1e9
        step = time["step"]
        together = sum(one["seconds"] for one in step["collectives"])
        seconds = (step["total"], step["compute"], together, step["exposed"])
        cells = [f"`{words}`", f"{gb:.1f}", *(f"{1e3 * part:,.0f}" for part in seconds)]
        rows += ["| " + " | ".join([*cells, step["limit"], f"{time['hours']:,.1f}"]) + " |"]
    check("docs/explanation/cost.md", "\n".join(rows), r"<!-- runs -->\n(.*?)\n\n")


@pytest.mark.parametrize("page", PAGES)
def test_what_is_named_exists(page: str) -> None:
    """Keys, links, tests (`tests/faults/test_x.py::test_y`, `tests/` or not) and files."""
    text, known = (ROOT / page).read_text(encoding="utf-8"), leaves(Config)
    sections = {key.partition(".")[0] for key in known if "." in key}
    for name in re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_0-9.]+)", text):
        assert name in {*known, "data.prepare"} or name.endswith((".py", ".bin", ".json")), name
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link
    for file, test in re.findall(r"([\w/]*\btest_\w+\.py)(?:::(\w+))?", text):
        content = (ROOT / "tests" / file.removeprefix("tests/")).read_text()
        assert not test or f"\ndef {test}(" in content, test
    for name in re.findall(r"`(?:accel_gpt/)?([a-z_/]+\.py)`", text):
        places = (PACKAGE, ROOT / "benchmarks", ROOT / "tests", ROOT / "tests/faults", ROOT)
        ours = any((place / name).exists() for place in places)
        assert ours or page.endswith(FOREIGN_FILES), name


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Another folder, with the configs and nothing else."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


def run(command: str, folder: Path) -> str:
    """All that a command prints; it must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_quickstart_reaches_what_the_readme_claims(elsewhere: Path) -> None:
    """Everything but the installation, which whoever runs this has done; 60 steps, or all."""
    install, sample, *_ = commands("README.md", "Quickstart")
    fewer = "" if THOROUGH else " --train.max_steps 60"
    shown = run(install.rpartition("&& ")[2] + fewer, elsewhere)
    assert "accel-gpt sample runs/quickstart" in shown
    last = json.loads((elsewhere / "runs/quickstart/metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/val_bits_per_byte"] <= (1.65 if THOROUGH else 3.5)  # the README says 1.59
    assert run(sample, elsewhere).count("def read(") == 3


@pytest.mark.slow
@pytest.mark.usefixtures("gpt2_vocabulary")
def test_own_data_as_the_page_says(elsewhere: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for number in range(4):
        folder = elsewhere / "notes" / f"part{number}"
        folder.mkdir(parents=True)
        (folder / "note.md").write_text(text)
        (folder / "code.md").write_text((PACKAGE / "train.py").read_text() * (number + 1))
    rows = [{"content": text[i:]} for i in range(120)]
    with gzip.open(elsewhere / "crawl.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    texts = pyarrow.table({"text": [row["content"] for row in rows]})
    pyarrow.parquet.write_table(texts, elsewhere / "wiki.parquet")
    (elsewhere / "input.txt").write_text(text)
    own = commands("docs/how-to/data.md", "Text to shards")
    for command in own:
        short = " --train.max_steps 3 --schedule.warmup_steps 1 --train.cpu_threads 1"
        run(command.replace("4096", "512") + short * ("train " in command), elsewhere)
    for name in ("input", "notes"):
        assert (elsewhere / f"runs/{name}/checkpoints/step_00000003").is_dir()
    names = ("crawl", "piped")
    indexes = [json.loads((elsewhere / f"data/{n}/dataset.json").read_text()) for n in names]
    assert indexes[0]["splits"] == indexes[1]["splits"]
    assert set(commands("README.md", "Your own text")) <= set(own)


@pytest.mark.slow
def test_the_round_trip_as_the_page_says(elsewhere: Path) -> None:
    short = "--train.max_steps 20 --schedule.warmup_steps 2 --eval.tokens 4096 --sample.every 0"
    short += " --train.cpu_threads 1"  # tests run side by side
    run(f"accel-gpt train configs/quickstart.yaml {short}", elsewhere)
    with HubServer() as hub:
        known = " ".join(f"{k}={v}" for k, v in environment(hub, elsewhere / "home").items())
        shown = []
        for command in commands("docs/how-to/export.md"):
            mine = command.replace("user/", "tester/").replace("step-840", "step-20")
            if mine.startswith("accel-gpt train"):
                mine += f" {short} --train.max_steps 22 --checkpoint.allow_change train.max_steps"
            shown.append(run(f"export {known}; {mine}", elsewhere))
        assert len(shown) == 6
        assert "its logits equal ours" in shown[0]
        assert "generated_text" in shown[1]
        assert "resuming runs/moved from step 20" in shown[5]
        assert {"README.md", "loss.png", "config.json"} <= set(hub.files("tester/quickstart"))
