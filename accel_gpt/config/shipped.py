"""The configs that ship with the package: where they are, and the file that a user's word names.

A checkout has `configs/` at its top and a link to it inside the package, as it is once installed.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path

from accel_gpt.errors import UserError
from accel_gpt.files import write_file


def shipped_folder() -> Path:
    """Return the folder of the shipped configs, recipes (`data/`) and reference curves."""
    return (Path(__file__).parents[1] / "configs").resolve()


def shipped_configs(room: str = "") -> Mapping[str, Path]:
    """Map the name of each shipped config to its file; `room` is a folder among them, as `data`."""
    files = sorted((shipped_folder() / room).glob("*.yaml"))
    return {path.stem: path for path in files}


def resolve_config(word: str, room: str = "") -> Path:
    """Return the file that `word` names: one at that path, else the shipped config of that name.

    Raises `UserError`, with the nearest names, if there is neither.
    """
    path = Path(word)
    shipped = shipped_configs(room)
    name = word.removesuffix(".yaml")
    if path.exists() and not (path.is_dir() and name in shipped):
        return path
    if name in shipped:
        return shipped[name]
    beside = {other.stem: str(other) for other in path.parent.glob("*.yaml")}
    known = dict(zip(shipped, shipped, strict=True)) | beside
    near = [known[stem] for stem in difflib.get_close_matches(path.stem, known, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"shipped are {', '.join(shipped)}"
    raise UserError(f"config file {word} does not exist; {hint}")


def copy_shipped(word: str, folder: Path) -> None:
    """Copy the config into the folder of a run, if `word` names a shipped one and no path."""
    path = resolve_config(word)
    if path in shipped_configs().values():
        write_file(folder / path.name, [path.read_bytes()])
