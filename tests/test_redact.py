"""The command that `run.json` keeps: readable, and without secrets."""

import shlex

import pytest

from accel_gpt.redact import command_line, redact


def test_a_command_can_be_typed_again() -> None:
    words = ["/opt/venv/bin/accel-gpt", "train", "a b.yaml", "--sample.prompts", "it's"]
    told = command_line(words)
    assert shlex.split(told) == ["accel-gpt", *words[1:]]
    assert command_line([]) == "''"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("https://user:PASSWORD@host/x", "https://***@host/x"),
        ("--data.train=s3://KEY:a@b@bucket/x", "--data.train=s3://***@bucket/x"),
        ("https://host/x?X-Amz-Signature=PASSWORD&a=1", "https://host/x?***"),
        ("hf_CANARYxxxxxxxxxxxx", "***"),
        ("data/openwebtext@v2 me@home", "data/openwebtext@v2 me@home"),
        ("https://host/x/input.txt", "https://host/x/input.txt"),
    ],
)
def test_secrets_are_starred(text: str, told: str) -> None:
    assert redact(text) == told
    assert told in command_line(["accel-gpt", text]) or "*" in told
