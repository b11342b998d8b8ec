"""Files changed at random: commands succeed, or fail with one sentence and an exit code.

`ACCEL_GPT_THOROUGH=1 pytest -n 0 -m slow tests/faults/test_fuzz.py` tries 2,000 (a night).
A case number means the same on every machine.
"""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import THOROUGH
from tests.faults.attack import pickled
from tests.faults.harness import Server, Tiny, finish, records

CASES = 2000 * THOROUGH or 20
OURS = {0, 2, 3, 4, 5}
VALUES = (None, True, -1, 0.5, 10**30, float("nan"), "", "\u00b2", [], {}, [[]], {"a": 1})
LATEST = "checkpoints/step_00000012"
# files, and the commands that read them; - stands for a training of the run
MORE = ("-", "--train.max_steps", "13", "--checkpoint.allow_change", "train.max_steps")
ANEW = ("-", "--train.max_steps", "1", "--schedule.warmup_steps", "0", "--out_dir", "{}/new")
SAMPLE = ("sample", "{}/run", "--max_new_tokens", "4")
TARGETS = (
    ("run/*.*", (MORE, ("inspect", "{}/run"), SAMPLE)),
    (f"run/{LATEST}/*", (MORE, ("inspect", "{}/run"), SAMPLE)),
    ("corpus/*", (ANEW, ("inspect", "{}/corpus"))),
    ("tiny.yaml", (ANEW, ("plan", "{}/tiny.yaml"))),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of keys to each value in JSON content."""
    inside = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else inside:
        yield (*at, key)
        yield from places(inner, (*at, key))


def edit(path: Path, draw: random.Random) -> None:
    """Remove a key in a file of JSON or YAML, or replace a value."""
    content = yaml.safe_load(path.read_text())
    chosen = [*places(content)]
    if chosen:
        *way, last = draw.choice(chosen)
        inner = content
        for key in way:
            inner = inner[key]
        inner[last] = draw.choice(VALUES)
        if draw.random() < 0.2:
            del inner[last]
    path.write_text(json.dumps(content))  # is YAML, too


def change(path: Path, draw: random.Random) -> str:
    """Edit, flip, cut, remove or replace a file; return how."""
    data = path.read_bytes()
    root = next(parent for parent in path.parents if (parent / "tiny.yaml").exists())
    hows = ["flip", "cut", "remove", "pickle"]
    if path.suffix in (".json", ".yaml"):
        hows += ["edit"] * 4
    how = draw.choice(hows)
    if how == "edit":
        edit(path, draw)
    elif how == "flip":
        bit = draw.randrange(8 * draw.choice((min(len(data), 256), len(data))))
        flipped = data[bit // 8] ^ 1 << bit % 8
        path.write_bytes(data[: bit // 8] + bytes([flipped]) + data[bit // 8 + 1 :])
    elif how == "cut":
        path.write_bytes(data[: draw.randrange(len(data))])
    elif how == "remove":
        path.unlink()
    else:  # creates `executed` if it is loaded
        path.write_bytes(pickled(root / "executed"))
    return how


@pytest.fixture(scope="module")
def base(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that is read: data, config, run."""
    root = tmp_path_factory.mktemp("base")
    tiny = Tiny(root)
    text = tiny.config.read_text()  # a learning rate that does not depend on the number of steps
    tiny.config.write_text(text.replace("warmup_steps: 2", "name: constant, warmup_steps: 2"))
    finish(server, tiny.arguments(root / "run"))
    return root


def case(number: int, server: Server, base: Path, room: Path) -> str | None:
    """Return what is wrong after a command on a changed file; None if nothing is."""
    draw = random.Random(number)
    root = shutil.copytree(base, room / f"case{number}", symlinks=True)
    for path in [root / "tiny.yaml", root / "run" / "config.yaml"]:
        path.write_text(path.read_text().replace(str(base), str(root)))
    files, commands = draw.choice(TARGETS)
    path = draw.choice([path for path in sorted(root.glob(files)) if path.stat().st_size])
    how = change(path, draw)
    words = draw.choice(commands)
    arguments = [word.replace("{}", str(root)) for word in words]
    if words[0] == "-":
        arguments = [f"{root}/tiny.yaml", "--out_dir", f"{root}/run", *arguments[1:]]
    answer = server.launch(arguments, command=words[0] != "-")
    code, told = answer.codes[0], answer.outputs[0]
    wrong = None
    if code not in OURS:
        wrong = f"ended with {code}"
    elif "Traceback" in told or "panicked at" in told:
        wrong = "a traceback"
    elif code and words[0] != "inspect" and not re.search("^(error|usage): ", told, re.MULTILINE):
        wrong = "no sentence"
    elif (root / "executed").exists():
        wrong = "code of a file was executed"
    elif not code and words == MORE and LATEST in str(path) and path.is_file():
        losses, ours = ({line["step"]: line["train/loss"] for line in records(folder / "run")}
                        for folder in (base, root))  # fmt: skip
        same = len(ours) == 13 and losses.items() <= ours.items()
        wrong = None if same else "other losses, or not of each step once"
    shutil.rmtree(root)
    found = f"case {number}: {how} {path.relative_to(root)}, {' '.join(words)}: {wrong}"
    return f"{found}\n{told[-1500:]}" if wrong else None


@pytest.mark.slow
def test_a_file_changed_at_random_ends_in_one_sentence(
    server: Server, base: Path, tmp_path: Path
) -> None:
    found = [case(number, server, base, tmp_path) for number in range(CASES)]
    problems = [problem for problem in found if problem]
    assert not problems, "\n\n".join(problems)
