"""Samples: prompts, texts and the steps at which they are due."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import AddedToken, AutoTokenizer

from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.tokenizer import BytesTokenizer, load_tokenizer
from accel_gpt.errors import UserError
from accel_gpt.evals import samples
from accel_gpt.evals.samples import continuation, prompt_ids, sample, samples_due, write_text
from accel_gpt.runs.folder import PROMPT_END
from tests.conftest import tiny
from tests.helpers.processes import Member
from tests.model.test_generate import make, seeded

Arguments = Callable[..., list[str]]


def test_a_prompt_with_a_token_beyond_the_model_is_refused() -> None:
    """A tokenizer may have special tokens that the weights lack."""
    prompt = "<|endoftext|>"  # token 256
    assert prompt_ids(prompt, BytesTokenizer(), 257) == [256]
    with pytest.raises(UserError, match="has token 256"):
        prompt_ids(prompt, BytesTokenizer(), 256)


@pytest.mark.parametrize("prompt", ["<|endoftext|>hi", "a<|im_start|> b<|endoftext|>", "<|im_", ""])
def test_special_tokens_in_a_prompt_are_read_as_transformers_reads_them(
    prompt: str, tmp_path: Path
) -> None:
    """Also with a rule that takes the space after a special token."""
    BytesTokenizer().save(tmp_path)
    known = AutoTokenizer.from_pretrained(tmp_path)
    chat = copy.deepcopy(known)
    chat.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<|im_start|>", rstrip=True)]}
    )
    chat.save_pretrained(tmp_path / "chat")
    for theirs, folder in ((known, tmp_path), (chat, tmp_path / "chat")):
        expected = theirs(prompt).input_ids or [256]
        assert prompt_ids(prompt, load_tokenizer(folder), 999) == expected
    plain = load_tokenizer(tmp_path / "chat").encode(prompt)  # as in training
    assert plain == list(prompt.encode())


def test_a_text_keeps_the_space_after_its_prompt_and_ends_at_end_of_text(tmp_path: Path) -> None:
    """The decoder drops the space before the first word, as SentencePiece's does."""
    vocabulary = {"<|endoftext|>": 0, "\u2581a": 1, "\u2581bad": 2, "\u2581hen": 3}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert continuation(tokenizer, [1], [2, 3, 0, 2]) == " bad hen"


def test_texts_that_end_early_are_reported_as_often_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks stop together, so each of them calls as often."""
    calls: list[int] = []
    model = make(tiny())
    model.vocab_size = 257
    monkeypatch.setattr(samples, "stream", lambda **_: iter([torch.tensor([256])]))
    write_text(
        model=model,
        tokenizer=BytesTokenizer(),
        prompt="a",
        config=SampleConfig(num=1, max_new_tokens=5),
        generator=seeded(),
        on_token=lambda: calls.append(1),
    )
    assert len(calls) == 5


def test_each_process_writes_another_text() -> None:
    torch.manual_seed(0)
    model, config = make(tiny()), SampleConfig(prompts=("a", "a"), num=1, max_new_tokens=12)
    model.vocab_size = 257
    texts = []
    for rank in range(2):
        one: Any = Member(rank, 2, [], None)  # type: ignore[arg-type]
        one.num_processes = 1  # a single process gathers nothing
        text = sample(one, model, BytesTokenizer(), config, seed=1, step=5)
        parts = text.split("--- sample ")[1:]
        assert all(part[1:].startswith(f"\na{PROMPT_END}") for part in parts)
        texts += [part.partition("\n")[2].strip() for part in parts]
    assert len(set(texts)) == len(texts) == 4


def test_the_last_step_has_samples_where_any_are_asked_for() -> None:
    config = SampleConfig(every=10)
    assert [step for step in range(1, 26) if samples_due(config, step, step == 25)] == [10, 20, 25]
    growing = SampleConfig(every=10, growth=1.5)
    assert [step for step in range(1, 99) if samples_due(growing, step, False)] == [10, 25, 47, 81]
    assert not samples_due(SampleConfig(every=0), 25, True)
