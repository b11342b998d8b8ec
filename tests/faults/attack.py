"""Files of an attacker: pickles that leave a canary when read, and manifests that match."""

import hashlib
import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch


class Payload:
    """Touches a file when a pickle of it is loaded."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def pickled(canary: Path) -> bytes:
    """Return a pickle that executes."""
    return pickle.dumps({"state": Payload(canary)})


def zipped(canary: Path) -> bytes:
    """Return the same in the format of `torch.save`."""
    buffer = io.BytesIO()
    torch.save({"state": Payload(canary)}, buffer)
    return buffer.getvalue()


def plant(checkpoint: Path, name: str, content: bytes, fitting: bool) -> None:
    """Write a file into a checkpoint; `fitting`: also add it to the manifest."""
    (checkpoint / name).parent.mkdir(exist_ok=True)
    (checkpoint / name).write_bytes(content)
    if fitting and name != "manifest.json":
        fit(checkpoint, name, content)


def fit(checkpoint: Path, name: str, content: bytes) -> None:
    """Set the size and hash of a file in the manifest."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"][name] = {"size": len(content), "sha256": digest}
    path.write_text(json.dumps(manifest))
