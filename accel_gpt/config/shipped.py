"""Find the configs that ship with the package.

They are in the folder `configs` of the installed package. In a checkout, this is a link.
"""

from collections.abc import Mapping
from pathlib import Path

from accel_gpt.errors import UserError, did_you_mean
from accel_gpt.files import write_file

YAML = (".yaml", ".yml")  # endings of config files


def shipped_folder() -> Path:
    """Return the folder of the shipped configs and recipes (`data/`)."""
    return (Path(__file__).parents[1] / "configs").resolve()


def shipped_configs(folder: str = "") -> Mapping[str, Path]:
    """Map the name of each shipped config to its file, for a folder inside the shipped folder."""
    files = sorted((shipped_folder() / folder).glob("*.yaml"))
    return {path.stem: path for path in files}


def resolve_config(word: str, folder: str = "") -> Path:
    """Return the config file at the path `word`, or else the shipped config with that name.

    `folder` is a folder inside the shipped folder. Raises `UserError` with similar names if there
    is no such config. A leading ~ is the home folder.
    """
    path = Path(word).expanduser()
    shipped = shipped_configs(folder)
    name = word.removesuffix(".yaml")
    if path.exists() and not (path.is_dir() and name in shipped):
        return path
    if name in shipped:
        return shipped[name]
    nearby = {str(other): other.stem for other in path.parent.glob("*.yaml")}
    expected = f"expected a file or {', '.join(shipped)}"
    near = did_you_mean(word, [*shipped, *nearby], expected)
    raise UserError(f"config file {word} does not exist; {near}")


def copy_shipped(word: str, folder: Path) -> None:
    """Copy the config that `word` names into the folder of a run if it is a shipped config."""
    path = resolve_config(word)
    if path in shipped_configs().values():
        write_file(folder / path.name, [path.read_bytes()])
