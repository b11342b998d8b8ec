"""The interactive sampler: whole characters, texts as `sample` writes them, a real terminal."""

import io
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel_gpt.commands.interactive import USE, interact, spell
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.tokenizer import (
    BytesTokenizer,
    CharsTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from accel_gpt.errors import UserError
from accel_gpt.evals.samples import write_text
from accel_gpt.model.gpt import GPT
from tests.conftest import text_of, tiny

TEXT = "é, 👩‍👩‍👧 naïve 東京! A new line\nwith  two spaces, ü👍🏽👍 and a wor ##d."


class Terminal(io.StringIO):
    """A screen, or a keyboard on which an interrupt is typed as `^C`."""

    def isatty(self) -> bool:
        return True

    def readline(self, *_: Any) -> str:
        line = super().readline()
        if "^C" in line:
            raise KeyboardInterrupt
        return line


def model_of(tokenizer: Tokenizer) -> GPT:
    torch.manual_seed(0)
    return GPT(tiny(), tokenizer.vocab_size)


def says(tokenizer: Tokenizer, script: Sequence[int]) -> GPT:
    """A model that says `script` whatever the prompt, again and again."""
    model = model_of(tokenizer)
    left: list[int] = []

    def forward(tokens: Tensor, **_: Any) -> Tensor:
        left[:] = left or script
        logits = torch.full((1, 1, tokenizer.vocab_size), -1e9)
        logits[0, 0, left.pop(0)] = 0.0
        return logits

    model.forward = forward  # type: ignore[method-assign]
    return model


def run(
    lines: TextIO,
    out: io.StringIO,
    tokenizer: Tokenizer | None = None,
    model: GPT | None = None,
    **changes: Any,
) -> str:
    tokenizer = tokenizer or BytesTokenizer()
    config = SampleConfig(**{"max_new_tokens": 12, **changes})
    generator = torch.Generator().manual_seed(3)
    parts = (config, generator, lines, out, [].append)
    interact(model or model_of(tokenizer), tokenizer, *parts)
    return out.getvalue()


# ------------------------------------------------------------------------------- text of tokens


def sentencepiece() -> str:
    """As Llama 2's: a space before the first word, characters it does not know as their bytes."""
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
    text: str = made.to_str()
    return text


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    def load(text: str) -> Tokenizer:
        path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
        path.write_text(text)
        return load_tokenizer(path)

    trained = train_bpe([TEXT * 3, text_of(200)], 300)
    content = json.loads(trained.file_text)
    content["pre_tokenizer"]["use_regex"] = True  # else it is recognized as ours
    return {
        "bytes": BytesTokenizer(),
        "bpe": trained,
        "byte-level of another": load(json.dumps(content)),
        "sentencepiece": load(sentencepiece()),
    }


@pytest.mark.parametrize("kind", ["bytes", "bpe", "byte-level of another", "sentencepiece"])
def test_pieces_make_up_the_text_and_show_no_part_of_a_character(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer, cuts = tokenizers[kind], 0
    for cut in range(len(TEXT)):
        ids = tokenizer.encode(TEXT[:cut])
        rest = tokenizer.encode(TEXT)[len(ids) :]
        if tokenizer.decode(ids) != TEXT[:cut] or tokenizer.decode([*ids, *rest]) != TEXT:
            continue  # a word that the longer text spells otherwise
        pieces = list(spell(tokenizer, rest, context=ids))
        assert TEXT[:cut] + "".join(pieces) == TEXT
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""  # nothing was kept to the end
        assert len(pieces) == len(rest) + 1
        cuts += 1
    assert cuts > 20


@settings(max_examples=300)
@given(data=st.binary(max_size=80) | st.text("é👍a\ufffd").map(str.encode))
def test_pieces_make_up_any_bytes(data: bytes) -> None:
    tokenizer = BytesTokenizer()
    pieces = list(spell(tokenizer, [*data, 256, 65], context=b"before"))
    assert "".join(pieces) == data.decode("utf-8", "replace")


def test_bytes_that_are_no_characters_are_not_held_back_for_ever() -> None:
    pieces = list(spell(BytesTokenizer(), [0xFF] * 20))
    assert len("".join(pieces[:10])) == 9


def test_a_text_without_context_starts_without_the_space(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["sentencepiece"]
    ids = tokenizer.encode("a bad hen")
    assert "".join(spell(tokenizer, ids)) == "a bad hen"
    assert "".join(spell(tokenizer, ids, context=tokenizer.encode("one"))) == " a bad hen"
    model = says(tokenizer, ids)
    out = run(Terminal("one\n\n"), Terminal(), tokenizer, model, max_new_tokens=len(ids))
    assert out.removeprefix(USE) == ">  a bad hen\n> a bad hen\n> \n"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_the_work_grows_with_the_tokens_not_with_their_square(
    tokenizers: dict[str, Tokenizer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, decoded = tokenizers[kind], []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    text = "ab é 👍👍👍👍👍👍 de " * 200
    ids = tokenizer.encode(text)
    assert len(ids) > 2000
    assert "".join(spell(tokenizer, ids)) == text
    assert sum(decoded) < 50 * len(ids)


def test_a_model_that_writes_characters_byte_by_byte_shows_them_whole() -> None:
    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            assert "\ufffd" not in text
            return super().write(text)

    tokenizer = BytesTokenizer()
    model = says(tokenizer, [*"é👍\n".encode(), 256])
    assert run(io.StringIO("x\n"), Screen(), tokenizer, model, max_new_tokens=50) == "xé👍\n\n"
    cut = run(io.StringIO("x\n"), io.StringIO(), tokenizer, model, max_new_tokens=3)
    assert cut == "xé\ufffd\n"
    broken = says(tokenizer, [0xC3, 0x28, 256])
    assert run(io.StringIO("x\n"), io.StringIO(), tokenizer, broken) == "x\ufffd(\n"


# -------------------------------------------------------------------------------------- a pipe


def test_a_pipe_gets_what_sample_writes() -> None:
    tokenizer = BytesTokenizer()
    model, config = model_of(tokenizer), SampleConfig(max_new_tokens=40)
    generator = torch.Generator().manual_seed(3)
    prompts = ["To be", "", "a\nb \\n"]
    texts = [write_text(model, tokenizer, p, config, generator)[0] for p in prompts]
    lines = io.StringIO("To be\n\na\\nb \\\\n")  # the last line without an end
    out = run(lines, io.StringIO(), tokenizer, model, max_new_tokens=40)
    assert out == "\n---------------\n".join(texts) + "\n"
    assert not out.startswith(">")


def test_a_pipe_without_prompts_gets_nothing_and_num_texts_for_each() -> None:
    assert run(io.StringIO(""), io.StringIO()) == ""
    model = says(BytesTokenizer(), [*b"ok", 256])
    out = run(io.StringIO("a\nb\n"), io.StringIO(), model=model, num=2)
    assert out == "\n---------------\n".join(["aok", "aok", "bok", "bok"]) + "\n"


def test_each_token_is_written_when_it_comes() -> None:
    flushed: list[str] = []

    class Pipe(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    tokenizer = CharsTokenizer("abc")
    text = run(io.StringIO("ab\n"), Pipe(), tokenizer, max_new_tokens=5)
    assert [text[:i] for i in range(2, 8)] == flushed[:6]


def test_a_prompt_that_cannot_be_encoded_ends_a_pipe_after_the_texts_before() -> None:
    out = io.StringIO()
    with pytest.raises(UserError, match="'x' is not among the 3"):
        run(io.StringIO("ab\nx\nab\n"), out, CharsTokenizer("abc"), max_new_tokens=5)
    assert len(out.getvalue()) == len("ab" + "12345" + "\n")
    lines = io.TextIOWrapper(io.BytesIO(b"a\n\xff\n"), encoding="utf-8")
    with pytest.raises(UserError, match=r"not valid utf-8 \(invalid start byte\)"):
        run(lines, io.StringIO())


# ---------------------------------------------------------------------------------- a terminal


def test_a_terminal_shows_signs_and_continuations_alone() -> None:
    model = says(BytesTokenizer(), [*b"ok", 256])
    out = run(Terminal("a\n\nb\n"), Terminal(), model=model)
    assert out == USE + "> ok\n> ok\n> ok\n> \n"
    out = run(Terminal("a\n^C\nb\n"), Terminal(), model=model, num=2)
    assert out == USE + "> ok\n---------------\nok\n> \n"


def test_a_terminal_asks_again_for_a_prompt_that_cannot_be_encoded() -> None:
    tokenizer = CharsTokenizer("abc")
    out = run(Terminal("x\na\n"), Terminal(), tokenizer, says(tokenizer, [1]), max_new_tokens=2)
    assert "> character 'x' is not among the 3 of" in out
    assert out.endswith("\n> bb\n> \n")

    class Latin(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    out = run(Latin(io.BytesIO(b"\xff\n"), encoding="utf-8"), Terminal())
    assert out == USE + "> a prompt is not valid utf-8 (invalid start byte); convert it\n> \n"


def test_a_terminal_is_spared_control_characters() -> None:
    model = says(BytesTokenizer(), [*b"\x1b[2J\x07\t\n\x7f", 256])
    out = run(io.StringIO("a\n"), Terminal(), model=model)
    assert out == "a\\x1b[2J\\x07\t\n\\x7f\n"
    assert run(io.StringIO("a\n"), io.StringIO(), model=model) == "a\x1b[2J\x07\t\n\x7f\n"


def test_an_interrupt_stops_the_texts_of_a_prompt_on_a_terminal_and_the_whole_in_a_pipe() -> None:
    tokenizer = BytesTokenizer()
    model = says(tokenizer, [*b"okay", 256])
    speak = model.forward
    calls: list[int] = []

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return speak(*args, **kwargs)

    model.forward = forward  # type: ignore[method-assign]
    model.train()
    out = run(Terminal("a\nb\n"), Terminal(), tokenizer, model, num=2)
    assert out == USE + "> ok\n> ay\n---------------\nokay\n> \n"
    assert model.training
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        run(io.StringIO("a\nb\n"), io.StringIO(), tokenizer, model)


SESSION = """
import fcntl, signal, sys, termios
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests run in the background
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is an interrupt
import torch
from accel_gpt.config.experiment import SampleConfig
from accel_gpt.data.tokenizer import CharsTokenizer
from accel_gpt.commands.interactive import interact
from accel_gpt.model.gpt import GPT
from tests.conftest import tiny
torch.set_num_threads(1)
config = SampleConfig(max_new_tokens=1_000_000)
model = GPT(tiny(), 3)
interact(model, CharsTokenizer("abc"), config, torch.Generator(), sys.stdin, sys.stdout, print)
"""


@pytest.mark.slow
def test_a_session_on_a_real_terminal() -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path)}
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=environment,
    )
    os.close(theirs)
    seen = ""

    def until(reached: Callable[[], bool]) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while not reached():
            ready, _, _ = select.select([ours], [], [], deadline - time.monotonic())
            assert ready, seen
            seen += os.read(ours, 10_000).decode()

    try:
        until(lambda: seen.endswith("> "))
        os.write(ours, b"cab\n")
        until(lambda: len(seen.partition("> cab\r\n")[2]) > 20)  # of a million tokens
        os.write(ours, b"\x03")
        until(lambda: seen.endswith("\r\n> "))
        os.write(ours, b"x\n")
        until(lambda: seen.count("> ") == 3)
        os.write(ours, b"\x04")
        assert session.wait(60) == 0
    finally:
        session.kill()
        session.wait()
        os.close(ours)
    first, text, again, _ = seen.split("> ")
    assert first == USE.replace("\n", "\r\n")
    # a quick Ctrl-C may come before all three letters have
    assert set(text.removeprefix("cab\r\n").replace("^C", "").rstrip()) <= set("abc")
    assert again.startswith("x\r\ncharacter 'x' is not among the 3")
