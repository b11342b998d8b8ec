"""The option of another trainer is an error that names ours."""

import pytest

from accel_gpt.commands.resolve import load_config
from accel_gpt.config.experiment import Config
from accel_gpt.config.values import OTHER_NAMES, leaves, sections
from accel_gpt.errors import UserError
from accel_gpt.files import load_yaml


def test_the_error_for_another_trainers_option_names_ours() -> None:
    names = load_yaml(OTHER_NAMES.read_text())
    assert names["learning_rate"] == "optim.lr"
    assert len(names) <= 120
    for name, ours in names.items():
        assert ours in {*leaves(Config), *sections(Config)}, name
        with pytest.raises(UserError, match="unknown key") as error:
            load_config(["quickstart", f"--{name}=1"], "test")
        assert str(error.value).endswith(f"; did you mean {ours}?")


def test_a_section_is_not_proposed_for_itself() -> None:
    with pytest.raises(UserError, match=r"key model .*; accel-gpt train --help-all shows all keys"):
        load_config(["quickstart", "--model=x"], "test")
