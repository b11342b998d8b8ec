"""Write the val losses of a finished run as a reference curve for `accel-gpt report`.

python benchmarks/reference.py runs/quickstart configs/references/quickstart.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

from accel_gpt.config.parse import changed_keys
from accel_gpt.report.page import hardware
from accel_gpt.report.references import config_name, prepared, shape
from accel_gpt.report.runs import NamedRun, open_runs


def main() -> None:
    """Write the reference of the run that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("json", type=Path)
    args = parser.parse_args()
    [run] = open_runs([args.run])
    if run.state != "finished" or not run.metrics.keys("eval/val_loss"):
        parser.error(f"{run.name} is {run.status}; expected a finished run with eval/val_loss")
    args.json.write_text(json.dumps(reference(run), indent=1) + "\n", encoding="utf-8")


def reference(run: NamedRun) -> dict[str, Any]:
    """The content of a file that `accel_gpt/report/references.py` reads."""
    rows, losses = run.metrics.columns["eval/val_loss"]
    command = str(run.last_launch("command") or "")
    name = config_name(command)
    return {
        "title": f"{name or run.name}, measured by us",
        "source": command,
        "config": changed_keys(run.config),
        "commit": run.last_launch("commit"),
        "hardware": hardware(run),
        "flops_per_token": run.flops_per_token,
        "match": {
            "model": shape(run),
            "vocab_size": run.last_launch("model", "vocab_size"),
            "data_fingerprint": run.last_launch("data", "fingerprint"),
            "data_prepared": prepared(run),
        },
        "curve": {
            "step": run.metrics.steps[rows].astype(int).tolist(),
            "tokens": run.metrics.tokens[rows].astype(int).tolist(),
            "seconds": run.metrics.seconds[rows].round(1).tolist(),
            "val_loss": losses.round(4).tolist(),
        },
        "points": [],
    }


if __name__ == "__main__":
    main()
