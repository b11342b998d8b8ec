"""The interactive sampler: whole characters as they come, a real terminal."""

import builtins
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel_gpt.commands.interactive import USAGE, interact
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.tokenizer import BytesTokenizer, CharsTokenizer, Tokenizer, load_tokenizer
from accel_gpt.evals.samples import Continuation
from accel_gpt.model.gpt import GPT
from accel_gpt.prepare.bpe import train_bpe
from tests.conftest import text_of, tiny
from tests.helpers.terminals import Terminal, in_python
from tests.training.test_dashboard import soon

TEXT = "é, 👩‍👩‍👧 naïve 東京! A new line\nwith  two spaces, ü👍🏽👍 and a wor ##d."


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def pieces_of(tokenizer: Tokenizer, tokens: Iterable[int], prompt: Iterable[int]) -> list[str]:
    """Return what each token adds to the text after a prompt, then the rest."""
    text = Continuation(tokenizer, list(prompt))
    pieces = []
    for token in tokens:
        text.add(token)
        if text.ended:
            break
        pieces.append(text.new_text())
    text.ended = True
    return [*pieces, text.new_text()]


def model_of(tokenizer: Tokenizer) -> GPT:
    torch.manual_seed(0)
    return GPT(tiny(), tokenizer.vocab_size)


def scripted(tokenizer: Tokenizer, script: Sequence[int]) -> GPT:
    """A model that repeats `script` after any prompt."""
    model = model_of(tokenizer)
    left: list[int] = []

    def forward(tokens: Tensor, **_: Any) -> Tensor:
        left[:] = left or script
        logits = torch.full((1, 1, tokenizer.vocab_size), -1e9)
        logits[0, 0, left.pop(0)] = 0.0
        return logits

    model.forward = forward  # type: ignore[method-assign]  # scripted
    return model


@pytest.fixture
def converse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Type lines (`^C` interrupts); return what the screen shows."""

    def run(
        typed: str, model: GPT, tokenizer: Tokenizer | None = None, num: int = 1, new: int = 12
    ) -> str:
        lines, screen = typed.splitlines(), Screen()

        def read(prompt: str) -> str:
            screen.write(prompt)
            if not lines:
                raise EOFError
            if lines[0] == "^C":
                raise KeyboardInterrupt
            return lines.pop(0)

        monkeypatch.setattr(builtins, "input", read)
        monkeypatch.setattr(sys, "stdout", screen)
        config = SampleConfig(num=num, max_new_tokens=new)
        interact(model, tokenizer or BytesTokenizer(), config, torch.Generator(), warned.append)
        return screen.getvalue().removeprefix(USAGE)

    warned: list[str] = []
    return run


def sentencepiece() -> str:
    """Like Llama 2's: a space before the first word, and bytes for unknown characters."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    words = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdefghijklmnopqrstuvw"]
    vocab = {word: i for i, word in enumerate([*words, "▁a", "▁n", "ne"])}
    merges = [("▁", "a"), ("▁", "n"), ("n", "e")]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<unk>", "</s>"])
    text: str = made.to_str()
    return text


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(sentencepiece())
    trained = train_bpe([TEXT * 3, text_of(200)], 300)
    return {"bytes": BytesTokenizer(), "bpe": trained, "sentencepiece": load_tokenizer(path)}


@pytest.mark.parametrize("kind", ["bytes", "bpe", "sentencepiece"])
def test_pieces_make_up_the_text_and_show_no_part_of_a_character(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer, cuts = tokenizers[kind], 0
    for cut in range(len(TEXT)):
        ids = tokenizer.encode(TEXT[:cut])
        rest = tokenizer.encode(TEXT)[len(ids) :]
        if tokenizer.decode(ids) != TEXT[:cut] or tokenizer.decode([*ids, *rest]) != TEXT:
            continue  # the longer text splits this word in another way
        pieces = pieces_of(tokenizer, rest, ids)
        assert TEXT[:cut] + "".join(pieces) == TEXT
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""  # nothing was held back until the end
        assert len(pieces) == len(rest) + 1
        cuts += 1
    assert cuts > 20


@settings(max_examples=300)
@given(tokens=st.lists(st.integers(0, 298), max_size=80), prompt=st.text(max_size=8))
@example(tokens=[0, 65, 195], prompt="a\ufffd")
def test_pieces_make_up_the_text_of_any_tokens(
    tokenizers: dict[str, Tokenizer], tokens: list[int], prompt: str
) -> None:
    tokenizer = tokenizers["bpe"]
    start = tokenizer.encode(prompt)
    text = Continuation(tokenizer, start)
    for token in tokens:
        text.add(token)
    assert "".join(pieces_of(tokenizer, tokens, start)) == text.text()


def test_a_text_keeps_the_space_after_its_prompt(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    ids = tokenizer.encode("a bad hen")
    assert "".join(pieces_of(tokenizer, ids, [])) == "a bad hen"
    assert "".join(pieces_of(tokenizer, ids, tokenizer.encode("one"))) == " a bad hen"


def test_a_terminal_shows_continuations_alone_and_whole_characters(
    converse: Callable[..., str],
) -> None:
    tokenizer = BytesTokenizer()
    assert converse("a\n\nb", scripted(tokenizer, [*b"ok", 256])) == "> ok\n> ok\n> ok\n> \n"
    two = converse("a\n^C\nb", scripted(tokenizer, [*b"ok", 256]), num=2)
    assert two == "> ok\n---------------\nok\n> \n"
    assert converse("x", scripted(tokenizer, [*"é👍\n".encode(), 256])) == "> é👍\n\n> \n"
    control = scripted(tokenizer, [*b"\x1b[2J\x07\t\n\x7f", 256])
    assert converse("a", control) == "> \\x1b[2J\\x07\t\n\\x7f\n> \n"


def test_a_prompt_that_cannot_be_encoded_is_asked_for_again(converse: Callable[..., str]) -> None:
    tokenizer = CharsTokenizer("abc")
    out = converse("x\na", scripted(tokenizer, [1]), tokenizer, new=2)
    assert "> the chars tokenizer has no token for character 'x'" in out
    assert out.endswith("\n> bb\n> \n")


def test_an_interrupt_stops_the_texts_of_a_prompt(converse: Callable[..., str]) -> None:
    model, calls = scripted(BytesTokenizer(), [*b"okay", 256]), list[int]()
    forward = model.forward

    def interrupted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    model.train().forward = interrupted  # type: ignore[method-assign]  # scripted
    assert converse("a\nb", model, num=2) == "> ok\n> ay\n---------------\nokay\n> \n"
    assert model.training


SESSION = """
import torch
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.tokenizer import CharsTokenizer
from accel_gpt.commands.interactive import interact
from accel_gpt.model.gpt import GPT
from tests.conftest import tiny
torch.set_num_threads(1)
config = SampleConfig(max_new_tokens=1_000_000)
interact(GPT(tiny(), 3), CharsTokenizer("abc"), config, torch.Generator(), print)
"""


@pytest.mark.slow
def test_a_session_on_a_real_terminal() -> None:
    path = os.pathsep.join(sys.path)
    with Terminal(in_python(SESSION), TERM="dumb", PYTHONPATH=path) as terminal:
        terminal.wait_for("exits.\r\n> ")
        terminal.press(b"cab\n")
        terminal.wait_for("> cab\r\n")
        time.sleep(1)  # to write some of a million tokens
        terminal.press(b"\x03")
        soon(lambda: terminal.written.endswith(b"\r\n> "))
        terminal.press(b"x\n")
        terminal.wait_for("> x\r\n")
        terminal.press(b"\x04")
        assert terminal.finish() == 0
    first, text, again, _ = terminal.written.decode().split("> ")
    assert first == USAGE.replace("\n", "\r\n")
    assert set(text.removeprefix("cab\r\n").replace("^C", "").rstrip()) == set("abc")
    assert again.startswith("x\r\nthe chars tokenizer has no token for character 'x'")
