"""The texts that a run wrote while it trained: `samples/step_00001000.txt`."""

import re
from collections.abc import Mapping
from pathlib import Path

from accel_gpt.redact import redact_tokens

NAME = re.compile(r"step_(\d{8,15})\.txt")
LARGEST_FILE = 4 << 20  # bytes read of one file


def sample_files(run: Path) -> Mapping[int, Path]:
    """The files of samples by step, ascending."""
    found = {
        int(match[1]): path
        for path in (run / "samples").glob("step_*.txt")
        if (match := NAME.fullmatch(path.name)) and path.is_file()
    }
    return dict(sorted(found.items()))


def texts_in(path: Path) -> list[str]:
    """The texts of one file of samples, access tokens starred."""
    with path.open("rb") as file:
        text = file.read(LARGEST_FILE).decode(errors="replace").removesuffix("\n")
    texts: list[str] = []
    number = 1
    for part in re.split(r"^(?=--- sample \d+$)", text, flags=re.MULTILINE):
        head, _, body = part.partition("\n")
        if head == f"--- sample {number}":
            texts.append(body)
            number += 1
        elif texts:  # a line of the text itself
            texts[-1] += part
    last = len(texts) - 1
    cut = [t if i == last else t.removesuffix("\n").removesuffix("\n") for i, t in enumerate(texts)]
    return [redact_tokens(t) for t in cut]
