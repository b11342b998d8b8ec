"""Files changed at random: commands succeed, or fail with one sentence and an exit code.

`ACCEL_GPT_THOROUGH=1 pytest -n 0 -m slow tests/faults/test_fuzz.py` tries 2,000 (a night).
A case number means the same on every machine.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.conftest import THOROUGH, text_of
from tests.data.test_tokenizer import other
from tests.faults.attack import pickled
from tests.faults.harness import Server, Tiny, finish, records

CASES, PARTS = 2000 * THOROUGH or 24, 4
SECONDS = 60.0  # time limit of a command; the slowest takes 3
OURS = {0, 2, 3, 4, 5}
VALUES = (None, True, 0, -1, 0.5, 10**30, float("nan"), float("inf"), "", "\u00b2", [], {}, [[]])
VALUES += ({"a": 1}, "../elsewhere", "9" * 30, 2**53)
LATEST = "checkpoints/step_00000012"


class Target(NamedTuple):
    """Files of one kind, and the commands that read them (training options start with -)."""

    files: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]


MORE = ("-", "--train.max_steps", "13", "--checkpoint.allow_change", "train.max_steps")
ANEW = ("-", "--train.max_steps", "1", "--schedule.warmup_steps", "0", "--out_dir", "{}/new")
SAMPLE = ("--max_new_tokens", "4")
PREPARE = ("prepare", "--path", "{}/text.txt", "--out", "{}/made", "--workers", "1")
PREPARE += ("--tokenizer", "bytes")
RUN = (
    MORE,
    ("inspect", "{}/run"),
    ("sample", "{}/run", *SAMPLE),
    ("report", "{}/run", "--out", "{}/r.html"),
    ("evaluate", "{}/run"),
)
TARGETS = (
    Target(("run/config.yaml", "run/run.json", "run/metrics.jsonl", "run/metrics.csv"), RUN),
    Target((f"run/{LATEST}/*", f"run/{LATEST}/*", "run/best"), RUN[:3]),
    Target(("corpus/*",), (ANEW, ("inspect", "{}/corpus"))),
    Target(("theirs/*",), ((*PREPARE, "--tokenizer", "{}/theirs/tokenizer.json"),)),
    Target(("text.jsonl", "text.txt"), (PREPARE, (*PREPARE[:2], "{}/text.jsonl", *PREPARE[3:]))),
    Target(("tiny.yaml",), (ANEW, ("plan", "{}/tiny.yaml"))),
    Target(
        ("hub/*",),
        (
            ("sample", "{}/hub", *SAMPLE),
            (*ANEW, "--model.init_from", "{}/hub"),
        ),
    ),
)


# --------------------------------------------------------------------------- what is changed


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of keys to each value in JSON content."""
    inside = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else inside:
        yield (*at, key)
        yield from places(inner, (*at, key))


def edited(value: Any, draw: random.Random) -> Any:
    """Return `value` with one key removed or renamed, or one value replaced."""
    chosen = [*places(value)]
    if not chosen:
        return draw.choice(VALUES)
    *way, last = draw.choice(chosen)
    inner = value
    for key in way:
        inner = inner[key]
    how = draw.random()
    if how < 0.15:
        del inner[last]
    elif how < 0.3 and isinstance(inner, dict):
        inner[f"{last}x"] = inner.pop(last)
    else:
        inner[last] = draw.choice(VALUES)
    return value


def edit(path: Path, draw: random.Random) -> None:
    """Change one value in a file of JSON, JSON lines or YAML."""
    text = path.read_text()
    if path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(edited(yaml.safe_load(text), draw)))
    elif path.suffix == ".jsonl":
        lines = text.splitlines()
        number = draw.randrange(len(lines))
        lines[number] = json.dumps(edited(json.loads(lines[number]), draw))
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text(json.dumps(edited(json.loads(text), draw)))


def flip(path: Path, draw: random.Random) -> None:
    """Flip some bits; half of the time near the start, where headers are."""
    data = bytearray(path.read_bytes())
    most = 8 * min(len(data), draw.choice((256, len(data))))
    for _ in range(draw.choice((1, 1, 4))):
        bit = draw.randrange(most) if most else 0
        data[bit // 8 : bit // 8 + 1] = bytes(b ^ 1 << bit % 8 for b in data[bit // 8 :][:1])
    path.write_bytes(data)


def cut(path: Path, draw: random.Random) -> None:
    """Truncate a file, sometimes to nothing."""
    data = path.read_bytes()
    path.write_bytes(data[: draw.choice((0, draw.randrange(len(data) + 1), len(data) - 1))])


def insert(path: Path, draw: random.Random) -> None:
    """Insert a few bytes."""
    data = path.read_bytes()
    at = draw.randrange(len(data) + 1)
    path.write_bytes(data[:at] + draw.randbytes(draw.choice((1, 3, 64))) + data[at:])


def swap(path: Path, draw: random.Random) -> None:
    """Replace a file by something else, or remove it."""
    path.unlink()
    how = draw.choice(("folder", "/nowhere", path.name, "nothing"))
    if how == "folder":
        path.mkdir()
    elif how != "nothing":
        path.symlink_to(how)


def plant(path: Path, draw: random.Random) -> None:
    """Plant a pickle that creates `executed` beside the run if it is loaded."""
    root = next(parent for parent in path.parents if (parent / "tiny.yaml").exists())
    path.write_bytes(pickled(root / "executed"))


def change(root: Path, target: Target, draw: random.Random) -> tuple[Path, str]:
    """Change one file of a target; return which and how."""
    found = sorted(root.glob(draw.choice(target.files)))
    path = draw.choice([path for path in found if path.is_file()])
    hows: list[Callable[[Path, random.Random], None]] = [flip, cut, insert, swap, plant]
    if path.suffix in (".json", ".jsonl", ".yaml"):
        hows += [edit] * 5
    if path.name == "tiny.yaml":
        hows.remove(swap)  # a pipe as a config would wait for a writer
    how = draw.choice(hows)
    how(path, draw)
    return path, how.__name__


# --------------------------------------------------------------------------- what is run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server, and a folder with all that is read: text, data, config, run, exported model."""
    root = tmp_path_factory.mktemp("base")
    (root / "text.txt").write_text(text_of(400))
    rows = [{"text": text_of(20, seed)} for seed in range(200)]
    (root / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other(root / "theirs")
    (root / "theirs" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    shutil.copy(root / "text.txt", root / "kept.txt")
    tiny = Tiny(root)
    text = tiny.config.read_text()  # a learning rate that does not depend on the number of steps
    tiny.config.write_text(text.replace("warmup_steps: 2", "name: constant, warmup_steps: 2"))
    shutil.move(root / "kept.txt", root / "text.txt")
    with Server(root / "server.txt") as server:
        finish(server, tiny.arguments(root / "run"))
        (root / "run" / "best").write_text("12\n")
        for words in (*RUN[1:], ("plan", "{}/tiny.yaml"), PREPARE):
            finish(server, at(words, root), command=True)
        finish(server, ["export", str(root / "run"), "--to", str(root / "hub")], command=True)
        shutil.rmtree(root / "made")
        yield server, root


def at(words: Sequence[str], root: Path) -> list[str]:
    return [word.replace("{}", str(root)) for word in words]


def launch(server: Server, root: Path, words: Sequence[str]) -> tuple[int, str]:
    """Run a command on the files in `root`; return its exit code and output."""
    training = words[0] == "-"
    arguments = at(words, root)
    if training:
        arguments = [f"{root}/tiny.yaml", "--out_dir", f"{root}/run", *arguments[1:]]
    answer = server.launch(arguments, command=not training, timeout=SECONDS)
    return -999 if answer.hung else answer.codes[0], answer.outputs[0]


def case(number: int, server: Server, base: Path, room: Path) -> str | None:
    """Return what is wrong after a command on a changed file; None if nothing is."""
    draw = random.Random(number)
    root = shutil.copytree(base, room / f"case{number}", symlinks=True)
    for path in [root / "tiny.yaml", root / "run" / "config.yaml"]:
        path.write_text(path.read_text().replace(str(base), str(root)))
    target = draw.choice(TARGETS)
    path, how = change(root, target, draw)
    words = draw.choice(target.commands)
    code, told = launch(server, root, words)
    lines = [line for line in told.splitlines() if line.startswith(("error: ", "usage: "))]
    wrong = None
    if code not in OURS:
        wrong = f"ended with {code}" if code != -999 else "hung"
    elif "Traceback" in told or "panicked at" in told:
        wrong = "a traceback"
    elif code and not lines and words[0] != "inspect":
        wrong = "no sentence"
    elif (root / "executed").exists():
        wrong = "code of a file was executed"
    elif not code and words == MORE and LATEST in str(path) and path.is_file():
        losses, ours = ({line["step"]: line["train/loss"] for line in records(folder / "run")}
                        for folder in (base, root))  # fmt: skip
        same = len(ours) == 13 and losses.items() <= ours.items()
        wrong = None if same else "other losses, or not of each step once"
    shutil.rmtree(root)
    found = f"case {number}: {how} of {path.relative_to(root)}, {' '.join(words)}: {wrong}"
    return f"{found}\n{told[-1500:]}" if wrong else None


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_file_changed_at_random_ends_in_one_sentence(
    part: int, base: tuple[Server, Path], tmp_path: Path
) -> None:
    found = [case(number, *base, tmp_path) for number in range(part, CASES, PARTS)]
    problems = [problem for problem in found if problem]
    assert not problems, "\n\n".join(problems)
