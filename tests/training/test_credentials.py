"""Credentials in a URL of a config or command line are rejected, and never printed."""

from pathlib import Path

import pytest

from accel_gpt import cli
from accel_gpt.commands.resolve import load_config
from tests.conftest import launch, run_here

SECRET = "S3CRETPASSWORD"
REFUSED = (
    f"https://user:{SECRET}@host/x",
    f"https://{SECRET}@host/x",
    f"https://host/x?X-Amz-Credential=a&X-Amz-Signature={SECRET}",
    f"hf://datasets/a/b?token={SECRET}",
    f"HTTPS://host/x?api_key={SECRET}",
)
ACCEPTED = (
    "hf://datasets/a/b@main/c",
    "sftp://me@host/x",
    "s3://bucket/x",
    "https://host:8080/x@v2?download=true&design=new",
    "data/openwebtext@v2",
    "Log in at https://user:word@host and say",
)


def test_a_url_with_credentials_is_refused_and_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In each option and file."""
    file = tmp_path / "a.yaml"
    file.write_text("train: {max_steps: 1}\n")
    out = ["--out_dir", str(tmp_path / "run")]
    url = REFUSED[0]
    commands = [lambda url=url: launch([str(file), *out, "--data.train", url]) for url in REFUSED]
    commands += [
        lambda: launch([str(file), *out, "--data.train", f"[{{path: '{url}', weight: 1}}]"]),
        lambda: launch([str(file), *out, "--data.val", f"{{web: '{url}'}}"]),
        lambda: launch([str(file), *out, "--checkpoint.copy_to", url]),
        lambda: run_here(cli.dispatch, ["prepare", url, "--out", str(tmp_path / "o")]),
        lambda: run_here(cli.dispatch, ["inspect", url]),
    ]
    for command in commands:
        assert command() == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "set them in the environment" in told
        assert SECRET not in told
    file.write_text(f"data: {{train: '{url}'}}\n")
    assert launch([str(file), *out]) == 2
    assert "data.train" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


@pytest.mark.parametrize("text", ACCEPTED)
def test_other_urls_and_texts_are_accepted(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {max_steps: 1}\n")
    words = [str(tmp_path / "a.yaml"), f"--data.train={text}", f"--sample.prompts=['{text}']"]
    config = load_config(words, "train")
    assert config.data.train == text
    assert config.sample.prompts == (text,)
