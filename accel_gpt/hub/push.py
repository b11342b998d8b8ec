"""A run onto the Hub: exported, with its card, figures and curves, and the checkpoint if asked.

    accel-gpt push RUN --repo user/name

A repository holds the exported model with README.md and loss.png, metrics.csv and metrics.jsonl,
tensorboard/, and with `include_state` the whole checkpoint in checkpoint/. Each push is one commit
on main with a tag step-N, or one on the branch that was asked for.
"""

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, TypeVar

from safetensors import SafetensorError

from accel_gpt.errors import UserError
from accel_gpt.files import link, sha256
from accel_gpt.hub.client import Unreachable, check_repo, told
from accel_gpt.hub.export import write_model
from accel_gpt.hub.facts import public_launch
from accel_gpt.hub.load import load_pretrained
from accel_gpt.hub.logs import copy_logs
from accel_gpt.hub.model_card import write_card
from accel_gpt.hub.privacy import source_name
from accel_gpt.hub.resume import STATE
from accel_gpt.hub.sources import Source
from accel_gpt.training.checkpoint import find_checkpoint, read_json, read_state, verify, write_json
from accel_gpt.training.resume import FREE, NOT_TOLD

T = TypeVar("T")

OURS = (
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("tensorboard/events.out.tfevents.*.accel_gpt", f"{STATE}/*"),
)
SWEPT_SECONDS = 86_400  # no push takes a day; assumption
ATTEMPTS, FIRST_PAUSE_SECONDS = 4, 2.0  # the pause doubles; assumption


@dataclass(frozen=True)
class PushOptions:
    """What is uploaded where; `commands/push.py` documents each option."""

    run: str
    repo: str
    checkpoint: str | None = None
    revision: str | None = None
    private: bool = False
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    include_state: bool = False
    license: str | None = None
    data_license: str | None = None


def push(asked: PushOptions) -> str:
    """Upload what `asked` says; what was uploaded where, for a person.

    Raises `UserError` where the Hub refuses or cannot be reached, `CheckpointError` where the
    checkpoint is damaged or transformers would compute something else.
    """
    check_repo(asked.repo)
    checkpoint = find_checkpoint(Path(asked.run), asked.checkpoint or named_step(asked.revision))
    verify(checkpoint)
    step = read_state(checkpoint).step
    again(lambda: make_repository(asked), asked.repo)  # a refusal is told before the work
    run = checkpoint.resolve().parents[1]
    sweep(checkpoint.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=".push_", dir=checkpoint.parent) as room:
            folder = Path(room) / "upload"
            folder.mkdir()
            fill_folder(asked, run, checkpoint, folder)
            files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
            assert "config.json" in files
            url = again(lambda: upload(asked, files, step), asked.repo)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{asked.run} cannot be made ready to be pushed: {error}") from None
    return f"step {step:,} is at {url}\n"


def sweep(folder: Path) -> None:
    """Remove what pushes that were killed left, once it is certain that they are not at work."""
    for debris in folder.glob(".push_*"):
        with contextlib.suppress(OSError):
            if time.time() - debris.stat().st_mtime > SWEPT_SECONDS:
                shutil.rmtree(debris, ignore_errors=True)


def named_step(revision: str | None) -> str:
    """The step that a revision `step-1000` names, else the last."""
    _, _, step = (revision or "").partition("step-")
    return step if re.fullmatch("[0-9]{1,18}", step) else "last"


def fill_folder(asked: PushOptions, run: Path, checkpoint: Path, folder: Path) -> None:
    """Everything that goes into the repository."""
    model, tokenizer = load_pretrained(str(checkpoint))
    source = Source(asked.run, checkpoint, ours=True)
    exported = write_model(model, tokenizer, source, folder, asked.dtype)
    del model
    write_card(
        *(run, checkpoint, asked.repo, exported.model_class, folder),
        license=asked.license,
        data_license=asked.data_license,
        dtype=asked.dtype,
    )
    copy_logs(run, folder)
    if asked.include_state:
        copy_state(checkpoint, folder / STATE)


def copy_state(checkpoint: Path, to: Path) -> None:
    """A checkpoint as others may have it: without what a run may change freely, such as its paths.

    A resume takes these from the config that it is given.
    """
    manifest = read_json(checkpoint / "manifest.json")
    to.mkdir()
    for name in ("manifest.json", *manifest["files"]):  # and nothing else that lies there
        link(str(checkpoint / name), str(to / name))
    for name in ("trainer_state.json", "model.json"):
        content = read_json(to / name)
        config = content["config"]
        private = {key for key in config if key.startswith((*FREE, "init_from"))}
        content["config"] = {
            key: NOT_TOLD if f"{key}.".startswith("data.val.") and value else value
            for key, value in config.items()
            if key not in private
        }
        if "versions" in content:
            content["versions"] = public_versions(content["versions"])
        for source in content.get("data_sources", ()):
            source["name"] = source_name(source["name"])
        (to / name).unlink()  # it may be the checkpoint's own file
        write_json(to / name, content)
        size, digest = (to / name).stat().st_size, sha256(to / name)
        manifest["files"][name] = {"size": size, "sha256": digest}
    (to / "manifest.json").unlink()
    write_json(to / "manifest.json", manifest)


def public_versions(versions: Mapping[str, str]) -> dict[str, str]:
    """Versions and commit as the card tells them, each only in the form that it must have."""
    launch = public_launch({"versions": versions, "commit": versions.get("commit")})
    found: dict[str, str] = launch["versions"]
    return found | ({"commit": launch["commit"]} if launch["commit"] else {})


# --------------------------------------------------------------------------- the Hub


def again(attempt: Callable[[], T], repo: str) -> T:
    """What `attempt` gives, tried anew while the connection breaks; refusals are told at once."""
    for number in range(ATTEMPTS - 1):
        try:
            with told(repo, "written"):
                return attempt()
        except Unreachable:
            time.sleep(FIRST_PAUSE_SECONDS * 2**number)
    with told(repo, "written"):
        return attempt()


def make_repository(asked: PushOptions) -> None:
    """Make the repository and the branch, where they are missing."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(asked.repo, private=asked.private, exist_ok=True)
    if asked.revision:
        api.create_branch(asked.repo, branch=asked.revision, exist_ok=True)


def upload(asked: PushOptions, files: Mapping[str, Path], step: int) -> str:
    """One commit with `files`, by their names there; its address. What has not changed is not sent.

    What an earlier push left and this one has not, such as shards of the weights, is removed.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    for path in files.values():
        path.stat()  # FileNotFoundError, where the client would have an error of its own
    there = api.list_repo_files(asked.repo, revision=asked.revision)
    stale = {n for n in there if any(fnmatch(n, kind) for kind in OURS)} - files.keys()
    commit = api.create_commit(
        asked.repo,
        [
            *(CommitOperationAdd(name, path) for name, path in sorted(files.items())),
            *(CommitOperationDelete(name) for name in sorted(stale)),
        ],
        commit_message=f"step {step:,}",
        revision=asked.revision,
    )
    if asked.revision is None:
        move_tag(asked.repo, f"step-{step}", commit.oid)
    return f"{api.endpoint}/{asked.repo}/tree/{asked.revision or f'step-{step}'}"


def move_tag(repo: str, name: str, commit: str) -> None:
    """Let the tag `name` point to a commit, whether it exists or not."""
    from huggingface_hub import HfApi

    api = HfApi()
    tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo).tags}
    if tags.get(name) == commit:
        return
    if name in tags:
        api.delete_tag(repo, tag=name)
    api.create_tag(repo, tag=name, revision=commit)
