"""Tokenizers of others: any tokenizer.json of Hugging Face `tokenizers`."""

import json
import re
import string
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from accel_gpt.data.tokenizer import Ids, Tokenizer, digest, to_json
from accel_gpt.data.tokenizer_json import find_eot
from accel_gpt.errors import DataError

OTHER_SCRIPTS = "\u00e9\u4e2d\u0430\U0001f600"  # Latin, Chinese, Cyrillic, emoji
# of what tokenizers change or lack: a text's first letter, white space, letters of many scripts
PROBES = (
    "a",
    " A  b\n\n\tc. ",
    unicodedata.normalize("NFC", "".join(map(chr, range(0xA0, 0xD7FF, 97))) + "ÉİßﬁＡ½🙂"),
)


class HFTokenizer(Tokenizer):
    """A tokenizer without the template, padding and truncation of its file."""

    kind = "hf"
    cuts_at_lines = False

    def __init__(self, text: str, where: Path, config: Mapping[str, Any]) -> None:
        self.where = where
        with self.explained():  # also whether the text is a tokenizer.json at all
            self.tokenizer = tokenizers.Tokenizer.from_str(text)
        content = json.loads(text)
        if content["model"].get("dropout"):  # draws the merges of each text anew
            sys.stderr.write(
                f"WARNING: {where} has a model with dropout {content['model']['dropout']}, which "
                "gives a text other tokens each time; it is switched off\n"
            )
            content["model"]["dropout"] = None
            text = to_json(content)
            self.tokenizer = tokenizers.Tokenizer.from_str(text)
        self.file_text = text
        if lost := dropped_character(self.tokenizer):
            raise DataError(
                f"the tokenizer of {where} drops {lost!r}, so its tokens would not hold the whole "
                "text; use another tokenizer"
            )
        self.tokenizer.post_processor = None  # a template may drop or repeat the text itself
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self.eot = find_eot(ids, where, config)
        self.eot_id: int = ids[self.eot]
        parts = {k: v for k, v in content.items() if k not in ("truncation", "padding")}
        self.fingerprint = digest("hf", json.dumps(parts, sort_keys=True), [self.eot], [])
        self.token_bytes = self.count_bytes(parts.get("decoder"))
        try:  # many put a space before a text, drop spaces or accents, or lack characters
            lengths = [self.token_bytes[self.encode(text)].sum() for text in PROBES]
            self.bytes_add_up = lengths == [len(text.encode()) for text in PROBES]
        except DataError:
            self.bytes_add_up = False

    def encode_array(self, text: str) -> Ids:
        """Ids without the tokens that a template would add."""
        with self.explained():
            (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(found.ids, np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text by the decoder of the file."""
        with self.explained():
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn what the library raises, a bare Exception or a panic that is none, into an error."""
        try:
            yield
        except BaseException as error:
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise DataError(f"the tokenizer of {self.where} failed: {error}") from None

    def count_bytes(self, decoder: object) -> NDArray[np.int64]:
        """Bytes of each token by its spelling, which depends on the decoder: of SentencePiece and
        WordPiece, or where a character stands for a byte.
        """
        sizes = np.zeros(self.vocab_size, np.int64)
        byte_level = '"ByteLevel"' in json.dumps(decoder)
        for token, i in self.tokenizer.get_vocab(with_added_tokens=False).items():
            plain = re.sub(r"^<0x..>$|\u2581", " ", token).removeprefix("##")
            sizes[i] = len(token) if byte_level else len(plain.encode())
        for i, added in self.tokenizer.get_added_tokens_decoder().items():
            sizes[i] = 0 if added.special else len(added.content.encode())
        sizes[self.eot_id] = 0
        return sizes


def dropped_character(tokenizer: tokenizers.Tokenizer) -> str | None:
    """Return a visible character that the normalizer or pre-tokenizer drops, or None."""
    steps = []
    if tokenizer.normalizer:
        steps.append(tokenizer.normalizer.normalize_str)
    if tokenizer.pre_tokenizer:
        steps.append(tokenizer.pre_tokenizer.pre_tokenize_str)
    for character in string.printable + OTHER_SCRIPTS:
        if not character.isspace() and not all(step(character) for step in steps):
            return character
    return None
