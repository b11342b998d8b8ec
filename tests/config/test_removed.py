"""Options of earlier versions: an old config still loads; using such an option gives advice."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_gpt.cli import dispatch
from accel_gpt.config.parse import load_config, to_flat
from accel_gpt.config.removed import REMOVED
from accel_gpt.errors import UserError
from tests.conftest import launch, run_here


def write_config(path: Path, key: str, value: object) -> str:
    """Write a config in which the removed option `key` is set."""
    section, _, name = key.partition(".")
    path.write_text(f"train: {{max_steps: 3}}\n{section}: {{{name}: {json.dumps(value)}}}\n")
    return str(path)


@pytest.mark.parametrize("key", REMOVED)
def test_an_old_default_is_ignored(key: str, tmp_path: Path) -> None:
    config = load_config([write_config(tmp_path / "a.yaml", key, REMOVED[key].default)], "train")
    assert key not in to_flat(config)


@pytest.mark.parametrize("key", REMOVED)
def test_another_value_gets_the_advice(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{key} .*no longer exists; ") as caught:
        load_config([write_config(tmp_path / "a.yaml", key, "17")], "train")
    assert REMOVED[key].advice in str(caught.value)


@pytest.mark.parametrize("key", REMOVED)
def test_an_option_on_the_command_line_gets_the_advice(key: str, tmp_path: Path) -> None:
    path = write_config(tmp_path / "a.yaml", "model.n_layer", 2)
    with pytest.raises(UserError, match=f"--{key} no longer exists; "):
        load_config([path, f"--{key}", "17"], "train")


@pytest.mark.parametrize("command", ["train", "inspect", "prepare"])
def test_a_folder_of_prompts_is_refused(
    command: str,
    small_run: Callable[..., list[str]],
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    index = json.loads((corpus / "dataset.json").read_text())
    (corpus / "dataset.json").write_text(json.dumps(index | {"completions": True}))
    if command == "train":
        code = launch(small_run())
    elif command == "inspect":
        code = run_here(dispatch, ["inspect", str(corpus)])
    else:
        code = run_here(dispatch, ["prepare", "--source", "stdlib", "--out", str(corpus)])
    assert code == 3
    (sentence,) = capsys.readouterr().err.splitlines()
    assert f"{corpus} holds prompts and completions, which accel_gpt no longer" in sentence
    assert "SFTTrainer; docs/how-to/finetune.md has an example" in sentence
