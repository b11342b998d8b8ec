"""Reference curves: what others, or we ourselves, measured with the same model on the same data.

`configs/references/NAME.json` holds one: `title`, `source` (the URL, or the command), `config`,
`commit`, `hardware`, `flops_per_token`, `match` with any of `model`, `vocab_size`,
`data_fingerprint`, `data_folder` and `config`, `curve` with lists `step`, `tokens`, `seconds` and
`val_loss`, and `points`, figures without a curve: `label`, `val_loss` and where it is known `step`
and `tokens`.

A run matches where model and vocabulary are those of `match`, and so is the data (by its
fingerprint, or the name of its folder where the reference names that) or the name of the config.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_gpt.config.changes import changed
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.plan import plural
from accel_gpt.config.shipped import shipped_folder
from accel_gpt.errors import UserError, require
from accel_gpt.files import load_json, write_file
from accel_gpt.report.figures import number
from accel_gpt.report.run_folder import RunFolder, config_name, read_text

# of the config, what changes neither the shape nor what is computed at the start
NO_SHAPE = ("preset", "depth", "init_from", "allow_pickle", "vocab_size", "norm_eps")
# of fields that an older reference, or the config of an older run, lacks
DEFAULTS = MappingProxyType(
    {name: value for name, value in asdict(ModelConfig()).items() if name not in NO_SHAPE}
)
FOLDERS = (Path("configs/references"), shipped_folder() / "references")


def find_reference(asked: str, runs: list[RunFolder]) -> Mapping[str, Any] | None:
    """The reference that `asked` names, or for `auto` the one that the first run matches.

    Raises `UserError` for a name that is not there, or a file that holds none.
    """
    if asked == "none":
        return None
    known = {path.stem: path for folder in reversed(FOLDERS) for path in folder.glob("*.json")}
    if asked == "auto":
        found = [read_reference(path) for _, path in sorted(known.items())]
        return next((one for one in found if matches(one["match"], runs[0])), None)
    if asked.endswith(".json"):
        return read_reference(Path(asked))
    require(
        asked in known,
        f"--reference is {asked!r}; there are {', '.join(['none', 'auto', *sorted(known)])}, or "
        "give the path of a .json file",
    )
    return read_reference(known[asked])


def read_reference(path: Path) -> dict[str, Any]:
    """The content of a file of `configs/references`; `UserError` where it is none."""
    try:
        found = load_json(read_text(path))
        curve = {key: [number(v) for v in found["curve"][key]] for key in CURVE}
        points = [
            {"label": str(p["label"]), **{k: number(p[k]) for k in CURVE if k in p}}
            for p in found["points"]
        ]
        require(len({len(values) for values in curve.values()}) == 1, "its lists differ in length")
        texts = {key: str(found[key]) for key in ("title", "source")}
        require(isinstance(found["match"], dict), "match is no object")
    except OSError as error:
        raise UserError(f"--reference {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no reference curve: {error}") from None
    flops = number(found.get("flops_per_token"))
    found["flops_per_token"] = flops if flops == flops else None
    return {**found, **texts, "curve": curve, "points": points, "name": path.stem}


CURVE = ("step", "tokens", "seconds", "val_loss")


def matches(match: Mapping[str, Any], run: RunFolder) -> bool:
    """Whether a run is one of those that a reference was measured for."""
    folder = run.config.get("data.train")
    found = {
        "data_fingerprint": run.fact("data", "fingerprint"),
        "data_folder": Path(folder).name if isinstance(folder, str) else None,
        "config": config_name(run.fact("command")),
    }
    model = match.get("model")
    same_model = isinstance(model, dict) and DEFAULTS | model == DEFAULTS | shape(run)
    same_vocabulary = match.get("vocab_size") == run.fact("model", "vocab_size")
    same_data = any(value and match.get(key) == value for key, value in found.items())
    return same_model and same_vocabulary and same_data


def shape(run: RunFolder) -> dict[str, Any]:
    """The fields of the model that decide its shape."""
    return {name: run.config.get(f"model.{name}", value) for name, value in DEFAULTS.items()}


def write_reference(run: RunFolder, path: Path) -> None:
    """Write the val losses of a run as a reference for others.

    Raises `UserError` for a run that evaluated nothing or that is not finished.
    """
    steps, losses = run.figures.curve("eval/val_loss")
    require(len(steps) > 0, f"{run.path} has no eval/val_loss, so there is nothing to compare with")
    require(run.status == "finished", f"{run.path} is {run.status}; let it end first")
    rows = run.figures.columns["eval/val_loss"][0]
    command = str(run.fact("command") or "")
    content = {
        "title": f"{config_name(command) or run.name}, measured by us",
        "source": command,
        "config": changed(run.config),
        "commit": run.fact("commit"),
        "hardware": hardware(run),
        "flops_per_token": run.flops_per_token(),
        "match": {
            "model": shape(run),
            "vocab_size": run.fact("model", "vocab_size"),
            "data_fingerprint": run.fact("data", "fingerprint"),
            "config": config_name(command),
        },
        "curve": {
            "step": steps.astype(int).tolist(),
            "tokens": run.figures.tokens[rows].astype(int).tolist(),
            "seconds": run.figures.seconds[rows].round(1).tolist(),
            "val_loss": losses.round(4).tolist(),
        },
        "points": [],
    }
    write_file(path, [json.dumps(content, indent=1).encode() + b"\n"])


def hardware(run: RunFolder) -> str:
    """`8 x NVIDIA H100, precision bf16, torch 2.13.0`."""
    processes, device = run.fact("processes"), run.fact("device")
    if not isinstance(device, str) or not isinstance(processes, int):
        return "not recorded"
    parts = [f"{processes} x {' '.join(device.split())}"]
    threads = run.fact("threads_per_process")
    if isinstance(threads, int) and "cpu" in str(run.fact("versions", "torch")):
        parts.append(plural(threads, "thread"))
    parts += [f"precision {run.fact('mixed_precision')}"]
    return ", ".join([*parts, f"torch {run.fact('versions', 'torch')}"])
