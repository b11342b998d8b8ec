"""Push a run to the Hub: the exported model, its card, metrics and curves.

    accel-gpt push RUN --repo user/name

A repository holds the exported model, README.md, loss.png and metrics.jsonl. Each push is one
commit with a tag step-N.
"""

import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from accel_gpt.console import run_process
from accel_gpt.hub import hub_errors
from accel_gpt.publish.model_card import write_card
from accel_gpt.publish.redaction import public_records
from accel_gpt.publish.upload import upload_as_child
from accel_gpt.runs.checkpoint import find_checkpoint, read_state, verify_checkpoint
from accel_gpt.runs.folder import RunFolder
from accel_gpt.training.metrics import as_jsonl
from accel_gpt.transformers_io.export import write_model
from accel_gpt.transformers_io.exportable import check_exportable, load_exportable
from accel_gpt.transformers_io.pretrained import Pretrained

# files of an earlier push that a later push removes, unless it writes them itself
REPLACED = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
)


def push(
    run: str,
    repo: str,
    *,
    checkpoint: str | None = None,
    private: bool = False,
    dtype: str = "fp32",
    license: str | None = None,  # noqa: A002 - as the Hub names it
    if_missing: bool = False,
) -> tuple[int, str]:
    """Push a run, or one checkpoint; return the step and its address.

    `accel-gpt push --help` describes the options. `if_missing`: do nothing if the repository has
    the tag of this step. Raises `UserError` if the Hub rejects the push or cannot be reached;
    `CheckpointError` if the checkpoint is damaged, or if transformers computes other values.
    """
    from huggingface_hub import HfApi

    path = find_checkpoint(Path(run), checkpoint)
    verify_checkpoint(path)
    pretrained = Pretrained(run, path, is_checkpoint=True)
    check_exportable(pretrained)
    step = read_state(path).step
    api = HfApi()
    address = f"{api.endpoint}/{repo}/tree/{tag_of(step)}"
    with hub_errors(repo, "written"):  # it may reject the push before the export takes minutes
        api.create_repo(repo, private=private, exist_ok=True)
        if if_missing and tag_of(step) in tags_of(repo):
            return step, address
    with tempfile.TemporaryDirectory(prefix=".push_", dir=path.parent) as temporary:
        folder = Path(temporary) / "upload"
        folder.mkdir()
        model, tokenizer = load_exportable(pretrained)
        write_model(model, tokenizer, folder, dtype)
        del model
        run_folder = RunFolder(path.resolve().parents[1])
        write_card(
            run=run_folder,
            checkpoint=path,
            folder=folder,
            repo=repo,
            dtype=dtype,
            license=license,
        )
        (folder / "metrics.jsonl").write_bytes(as_jsonl(public_records(run_folder)))
        with hub_errors(repo, "written"):
            upload(folder, repo, step)
    return step, address


def tag_of(step: int) -> str:
    """Return the tag of a push."""
    return f"step-{step}"


def tags_of(repo: str) -> dict[str, str]:
    """Return the tags of a repository, each with its commit."""
    from huggingface_hub import HfApi

    return {ref.name: ref.target_commit for ref in HfApi().list_repo_refs(repo).tags}


def upload(folder: Path, repo: str, step: int) -> None:
    """Commit the files of `folder` with the tag of the step.

    One commit holds all files; `upload_folder` makes a commit after five minutes, when the Hub
    would have weights of one step and a config of another. Unchanged files are not sent again.
    Files of an earlier push that this one lacks, such as shards of the weights, are removed.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    assert "config.json" in files  # a missing folder must delete nothing
    operations: list[CommitOperationAdd | CommitOperationDelete] = []
    for name, path in sorted(files.items()):
        operations.append(CommitOperationAdd(name, path))
    for name in sorted(set(api.list_repo_files(repo)) - files.keys()):
        if any(fnmatch(name, pattern) for pattern in REPLACED):
            operations.append(CommitOperationDelete(name))
    commit = api.create_commit(repo, operations, commit_message=f"step {step:,}")
    tag = tag_of(step)
    if tags_of(repo).get(tag, commit.oid) != commit.oid:
        api.delete_tag(repo, tag=tag)
    api.create_tag(repo, tag=tag, revision=commit.oid, exist_ok=True)


def main(argv: Sequence[str]) -> int:
    """Make one upload; see `upload.py`."""
    return upload_as_child(argv, push)


if __name__ == "__main__":
    run_process(main)
