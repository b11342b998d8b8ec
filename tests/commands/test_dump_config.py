"""`--dump_config`: the dumped config loads unchanged, and editors can check it."""

import re
from pathlib import Path
from typing import Any

import pytest

from accel_gpt.cli import dispatch
from accel_gpt.commands.dump_config import commented_yaml
from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.options import field_types, own_options
from accel_gpt.config.parse import shipped_configs
from accel_gpt.config.values import is_section, leaves
from accel_gpt.files import load_yaml

# the configs that take no model from the Hub
SHIPPED = [n for n, path in shipped_configs().items() if "init_from" not in path.read_text()]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_dumped_config_loads_as_the_same(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["train", name, "--dump_config", "--seed", "7"]) == 0
    (tmp_path / "dumped.yaml").write_text(capsys.readouterr().out)
    assert load_config([str(tmp_path / "dumped.yaml")], "") == load_config(
        [name, "--seed", "7"], ""
    )


def test_a_dumped_config_has_every_key_with_its_docstring() -> None:
    text = commented_yaml(load_config(["quickstart", '--sample.prompts=["a\\nb", "ü"]'], ""))
    values: Any = load_yaml(text)
    assert values["sample"]["prompts"] == ["a\nb", "ü"]
    for key in leaves(Config).keys() - {"code"}:  # only the command line sets it
        value = values
        for part in key.split("."):
            assert part in value, key
            value = value[part]
    joined = re.sub(r"\s*\n\s*# ", " ", text)
    config = Config()
    sections = [value for name in field_types(Config) if is_section(value := getattr(config, name))]
    parts = [config, *sections]
    for part in parts:
        documented = own_options(type(part))
        for one in documented.values():
            assert (one.description in joined) != one.command_line_only
        inner = {name for name in field_types(type(part)) if is_section(getattr(part, name))}
        assert documented.keys() | inner == field_types(type(part)).keys()
    assert "Default: 524288.\n  tokens_per_step: 4096" in text
