"""The tables of other trainers' names: each name leads to an option that exists."""

import re
from collections.abc import Mapping

import pytest

from accel_gpt.commands.options import COMMANDS
from accel_gpt.config.experiment import Config
from accel_gpt.config.foreign_names import (
    COMMAND_OPTIONS,
    FOREIGN_NAMES,
    HF_MODEL,
    HF_TRAINER,
    LITGPT,
    LLM_C,
    NANOGPT,
    SECTIONS,
    WORDS,
)
from accel_gpt.config.options import own_options
from accel_gpt.config.values import leaves, sections

KEYS = {*leaves(Config), *sections(Config)}
SECTION = "|".join(sorted(sections(Config), key=len, reverse=True))
PART = re.compile(rf"\b(?:{SECTION})\.[a-z_0-9]+(?:\.[a-z_0-9]+)*")


@pytest.mark.parametrize("table", [NANOGPT, LLM_C, LITGPT, HF_MODEL, HF_TRAINER, WORDS, SECTIONS])
def test_every_key_in_an_answer_exists(table: Mapping[str, str]) -> None:
    for name, answer in table.items():
        assert " " in answer or answer in KEYS, name
        for key in PART.findall(answer):
            assert key in KEYS, name


def test_an_answer_is_one_short_sentence_for_the_end_of_a_line() -> None:
    for name, answer in FOREIGN_NAMES.items():
        assert len(answer.split()) <= 25, name
        assert not answer.endswith("."), name


def test_every_option_that_is_advised_for_another_word_exists() -> None:
    known = {name for command in COMMANDS.values() for name in own_options(command)}
    for word, names in COMMAND_OPTIONS.items():
        assert known.issuperset(names), word
