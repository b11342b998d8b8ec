"""Find, read and write reference curves: losses of the same model on the same data.

Reads `configs/references/NAME.json`, with these keys:

- `title`, `source` (a URL or the command), `config`, `commit`, `hardware`, `flops_per_token`;
- `match` with any of `model`, `vocab_size`, `data_fingerprint`, `data_prepared`, `data_folder`;
- `curve` with the lists `step`, `tokens`, `seconds` and `val_loss`;
- `points`, a list of single values, each with `label` and `val_loss`.

`write_reference()` writes such a file from a run.

A run matches if its model, vocabulary and data equal the values in `match`. Data is equal if it has
the same fingerprint, the same settings of `data.prepare`, or the same folder name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.config.data import PrepareConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.options import own_options
from accel_gpt.config.shipped import shipped_folder
from accel_gpt.config.values import changed_keys
from accel_gpt.errors import UserError, require
from accel_gpt.files import read_json
from accel_gpt.report.page import describe_hardware
from accel_gpt.report.runs import NamedRun, open_runs
from accel_gpt.training.run_folder import is_number


def matched_defaults(section: ModelConfig | PrepareConfig) -> MappingProxyType[str, Any]:
    """Return the options in which a run must equal a reference, with their defaults."""
    kind: Any = type(section)
    described = own_options(kind)
    found = {name: value for name, value in asdict(section).items() if described[name].matched}
    return MappingProxyType(found)


# used for fields that an older reference or the config of an older run lacks
DEFAULTS = matched_defaults(ModelConfig())
PREPARE_DEFAULTS = matched_defaults(PrepareConfig())
FOLDERS = (Path("configs/references"), shipped_folder() / "references")
CURVE = ("step", "tokens", "seconds", "val_loss")


def find_reference(requested: str, runs: Sequence[NamedRun]) -> Mapping[str, Any] | None:
    """Return the reference with a name or path; for `auto`, the one that the first run matches.

    Returns None for `none`, and for `auto` if no reference matches. Raises `UserError` if the name
    is unknown or the file is not a reference.
    """
    if requested == "none":
        return None
    found = [path for folder in reversed(FOLDERS) for path in folder.glob("*.json")]
    known = {path.stem: path for path in found}
    if requested == "auto":
        curves = [read_reference(path) for _, path in sorted(known.items())]
        return next((one for one in curves if matches_run(one["match"], runs[0])), None)
    if requested.endswith(".json"):
        return read_reference(Path(requested))
    require(
        requested in known,
        f"--reference is {requested!r}; set it to {', '.join(['none', 'auto', *sorted(known)])}, "
        "or the path of a .json file",
    )
    return read_reference(known[requested])


def write_reference(folder: str, path: str) -> None:
    """Write the val losses of the finished run in `folder` to `path`, as a reference curve."""
    [run] = open_runs([folder])
    require(
        run.state == "finished" and bool(run.metrics.keys("eval/val_loss")),
        f"{folder} cannot become a reference curve: it is {run.status}; give a finished run with "
        "evaluations",
    )
    content = json.dumps(make_reference(run), indent=1) + "\n"
    Path(path).write_text(content, encoding="utf-8")


def make_reference(run: NamedRun) -> dict[str, Any]:
    """Return the content of a reference file from a run that has val losses."""
    rows, losses = run.metrics.columns["eval/val_loss"]
    command = str(run.last_launch("command") or "")
    name = config_name(command)
    return {
        "title": f"{name or run.name}, trained with accel_gpt",
        "source": command,
        "config": changed_keys(run.config),
        "commit": run.last_launch("commit"),
        "hardware": describe_hardware(run),
        "flops_per_token": run.flops_per_token,
        "match": {
            "model": shape_fields(run),
            "vocab_size": run.last_launch("model", "vocab_size"),
            "data_fingerprint": run.last_launch("data", "fingerprint"),
            "data_prepared": preparation(run),
        },
        "curve": {
            "step": run.metrics.steps[rows].astype(int).tolist(),
            "tokens": run.metrics.tokens[rows].astype(int).tolist(),
            "seconds": run.metrics.seconds[rows].round(1).tolist(),
            "val_loss": losses.round(4).tolist(),
        },
        "points": [],
    }


def read_reference(path: Path) -> dict[str, Any]:
    """Read a reference. Raises `UserError` if the file is not a reference."""
    try:
        found = read_json(path)
        curve = {key: list(found["curve"][key]) for key in CURVE}
        points = [{"label": str(p["label"]), "val_loss": p["val_loss"]} for p in found["points"]]
        numbers = [point["val_loss"] for point in points]
        for values in curve.values():
            numbers += values
            require(len(values) == len(curve["step"]), "its lists differ in length")
        require(all(is_number(number) for number in numbers), "a value is not a number")
        require(isinstance(found["match"], dict), "match is not an object")
        flops = found.get("flops_per_token")
        return {
            "name": path.stem,
            "title": str(found["title"]),
            "source": str(found["source"]),
            "hardware": str(found.get("hardware") or ""),
            "commit": str(found.get("commit") or ""),
            "match": found["match"],
            "curve": curve,
            "points": points,
            "flops_per_token": flops if is_number(flops) else None,
        }
    except OSError as error:
        raise UserError(
            f"--reference {path} cannot be read: {error.strerror}; check the path"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a reference curve: {error}") from None


def matches_run(match: Mapping[str, Any], run: NamedRun) -> bool:
    """Return whether a run has the model, vocabulary and data of a reference."""
    model = match.get("model")
    same_model = isinstance(model, dict) and DEFAULTS | model == shape_fields(run)
    same_vocabulary = match.get("vocab_size") == run.last_launch("model", "vocab_size")
    return same_model and same_vocabulary and same_data(match, run)


def same_data(match: Mapping[str, Any], run: NamedRun) -> bool:
    """Return whether a run reads the data of a reference."""
    fingerprint = run.last_launch("data", "fingerprint")
    if fingerprint is not None and match.get("data_fingerprint") == fingerprint:
        return True
    made_from = preparation(run)
    expected = match.get("data_prepared")
    if made_from and isinstance(expected, dict) and PREPARE_DEFAULTS | expected == made_from:
        return True
    folder = run.config.get("data.train")
    return isinstance(folder, str) and match.get("data_folder") == Path(folder).name


def preparation(run: NamedRun) -> dict[str, Any] | None:
    """Return the options that made the data of a run; None if they do not identify a text.

    A local path does not identify a text, because other machines may have other content there.
    """
    options = {
        name: run.config.get(f"data.prepare.{name}", value)
        for name, value in PREPARE_DEFAULTS.items()
    }
    is_url = str(options["path"]).startswith(("http://", "https://"))
    return options if is_url or options["source"] in ("stdlib", "dataset") else None


def shape_fields(run: NamedRun) -> dict[str, Any]:
    """Return the fields of the config that determine the model's shape and initial weights."""
    return {name: run.config.get(f"model.{name}", value) for name, value in DEFAULTS.items()}


def config_name(command: object) -> str | None:
    """Return the config name in a command: `x` for `train a/x.yaml` and for `train x`."""
    found = re.search(r"\btrain(?:\.py)? ('[^']+'|\S+)", str(command))
    return re.sub(r"\.ya?ml$", "", Path(found[1].strip("'")).name) if found else None
