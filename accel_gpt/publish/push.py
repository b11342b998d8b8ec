"""Push a run to the Hub: the exported model, its card, metrics and curves.

    accel-gpt push RUN --repo user/name

A repository holds the exported model, README.md and loss.png, metrics.csv, metrics.jsonl and
tensorboard/. Each push is one commit with a tag step-N.
"""

import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TypeVar

from accel_gpt.hub import UnreachableError, hub_errors
from accel_gpt.publish.model_card import write_card
from accel_gpt.publish.redaction import write_logs
from accel_gpt.runs.checkpoint import find_checkpoint, read_state, verify_checkpoint
from accel_gpt.runs.folder import RunFolder
from accel_gpt.transformers_io.export import write_model
from accel_gpt.transformers_io.load import check_exportable, load_exportable
from accel_gpt.transformers_io.pretrained import Pretrained

T = TypeVar("T")

# files of an earlier push that a later push removes, unless it writes them itself
REPLACED = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tensorboard/events.out.tfevents.*.accel_gpt",
)
PAUSES_SECONDS = (2.0, 4.0, 8.0)  # before each further attempt; assumption


def push(
    run: str,
    repo: str,
    *,
    checkpoint: str = "last",
    private: bool = False,
    dtype: str = "fp32",
    license: str | None = None,  # noqa: A002 - as the Hub names it
    language: str | None = None,
    if_missing: bool = False,
) -> tuple[int, str]:
    """Push a run, or one checkpoint; return the step and its address.

    `accel-gpt push --help` describes the options. `if_missing`: do nothing if the repository has
    the tag of this step. Raises `UserError` if the Hub rejects the push or cannot be reached;
    `CheckpointError` if the checkpoint is damaged, or if transformers computes other values.
    """
    path = find_checkpoint(Path(run), checkpoint)
    verify_checkpoint(path)
    pretrained = Pretrained(run, path, is_checkpoint=True)
    check_exportable(pretrained)
    step = read_state(path).step
    with_retries(partial(create_repo, repo, private), repo)  # the Hub may reject it
    if if_missing:
        known = with_retries(partial(find_step, repo, step), repo)
        if known is not None:
            return step, known
    with tempfile.TemporaryDirectory(prefix=".push_", dir=path.parent) as temporary:
        folder = Path(temporary) / "upload"
        folder.mkdir()
        model, tokenizer = load_exportable(pretrained)
        exported = write_model(model, tokenizer, pretrained, folder, dtype)
        del model
        run_folder = RunFolder(path.resolve().parents[1])
        write_card(
            run_folder,
            path,
            tokenizer,
            folder,
            repo=repo,
            model_class=exported.model_class,
            dtype=dtype,
            license=license,
            language=language,
        )
        write_logs(run_folder, folder)
        url = with_retries(partial(upload, folder, repo, step), repo)
    return step, url


def with_retries(call: Callable[[], T], repo: str) -> T:
    """Call `call`, and retry if the connection breaks; raise other errors at once."""
    for pause in PAUSES_SECONDS:
        try:
            with hub_errors(repo, "written"):
                return call()
        except UnreachableError:
            time.sleep(pause)
    with hub_errors(repo, "written"):
        return call()


def create_repo(repo: str, private: bool) -> None:
    """Create the repository, unless it exists."""
    from huggingface_hub import HfApi

    HfApi().create_repo(repo, private=private, exist_ok=True)


def find_step(repo: str, step: int) -> str | None:
    """Return the address of an earlier push of a step, if there is one."""
    from huggingface_hub import HfApi

    api = HfApi()
    tags = [ref.name for ref in api.list_repo_refs(repo).tags]
    return f"{api.endpoint}/{repo}/tree/step-{step}" if f"step-{step}" in tags else None


def upload(folder: Path, repo: str, step: int) -> str:
    """Commit the files of `folder` with the tag of the step; return their address.

    One commit holds all files; `upload_folder` may make several. Unchanged files are not sent
    again. Files of an earlier push that this one lacks, such as shards of the weights, are removed.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    (folder / "config.json").stat()  # raises an error: a missing folder must delete nothing
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    api = HfApi()
    operations: list[CommitOperationAdd | CommitOperationDelete] = []
    for name, path in sorted(files.items()):
        operations.append(CommitOperationAdd(name, path))
    for name in sorted(api.list_repo_files(repo)):
        replaced = any(fnmatch(name, pattern) for pattern in REPLACED)
        if replaced and name not in files:
            operations.append(CommitOperationDelete(name))
    commit = api.create_commit(repo, operations, commit_message=f"step {step:,}")
    tag = f"step-{step}"
    tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo).tags}
    if tag in tags and tags[tag] != commit.oid:
        api.delete_tag(repo, tag=tag)
    api.create_tag(repo, tag=tag, revision=commit.oid, exist_ok=True)
    return f"{api.endpoint}/{repo}/tree/{tag}"
