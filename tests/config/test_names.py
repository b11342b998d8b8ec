"""The tables of other trainers' names: each name leads to an option that exists."""

import re
from collections.abc import Mapping

import pytest

from accel_gpt.config.experiment import Config
from accel_gpt.config.names import HF_TRAINER, LITGPT, LLM_C, NAMES, NANOGPT, SECTIONS
from accel_gpt.config.values import leaves, sections

# the globals of nanoGPT's train.py
NANOGPT_GLOBALS = """
out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log
wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer
n_head n_embd dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr
warmup_iters lr_decay_iters min_lr backend device dtype compile
"""
KEYS = {*leaves(Config), *sections(Config)}
SECTION = "|".join(sorted(sections(Config), key=len, reverse=True))
PART = re.compile(rf"\b(?:{SECTION})\.[a-z_0-9]+(?:\.[a-z_0-9]+)*")


@pytest.mark.parametrize("table", [NANOGPT, LLM_C, LITGPT, HF_TRAINER, SECTIONS])
def test_every_key_in_an_answer_exists(table: Mapping[str, str]) -> None:
    for name, answer in table.items():
        assert " " in answer or answer in KEYS, name
        for key in PART.findall(answer):
            assert key in KEYS, name


def test_every_name_of_nanogpt_is_answered() -> None:
    assert set(NANOGPT) == set(NANOGPT_GLOBALS.split())


def test_an_answer_is_one_short_sentence_for_the_end_of_a_line() -> None:
    for name, answer in NAMES.items():
        assert len(answer.split()) <= 25, name
        assert not answer.endswith("."), name


def test_a_name_that_two_trainers_share_has_one_answer() -> None:
    for table in (NANOGPT, LLM_C, LITGPT, HF_TRAINER, SECTIONS):
        for name, answer in table.items():
            assert NAMES[name] == answer, name
