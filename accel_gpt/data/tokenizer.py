"""Convert text to token ids and back, with one interface for every kind of tokenizer.

Reads any tokenizer.json in Hugging Face's format, with tokenizer_config.json and the chat template
in the same folder. Writes a tokenizer.json that `tokenizers` and transformers can open.
"""

import hashlib
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from accel_gpt.data import tokenizer_json
from accel_gpt.data.shards import Split, token_dtype
from accel_gpt.data.tokenizer_json import (
    BYTE_CHARS,
    CONFIG,
    EOT,
    FILE,
    HUB_FILES,
    PATTERN,
)
from accel_gpt.errors import AccelGPTError, DataError, UserError, one_line, require
from accel_gpt.files import is_local
from accel_gpt.hub import SCHEME, download_repo, is_repo
from accel_gpt.json_files import read_json_object

if TYPE_CHECKING:
    import tiktoken

Ids = NDArray[Any]

# The class that reads tokenizer.json unchanged. transformers 5 calls it TokenizersBackend and knows
# this name too; transformers 4 and the servers built on it know only this name.
TOKENIZER_CLASS = "PreTrainedTokenizerFast"

# GPT-2's files, with the SHA-256 of each (tiktoken_ext/openai_public.py)
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_FILES = MappingProxyType(
    {
        "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    }
)
# Texts that tokenizers may change or lack: a first letter, white space, all of ASCII, letters of
# many scripts. Together they hold every byte that UTF-8 has.
PROBES = (
    "a",
    " A  b\n\n\tc. ",
    "".join(map(chr, range(0x80))),
    "".join(map(chr, range(0x80, 0xD800, 61))),
    "".join(map(chr, [*range(0xE000, 0x10000, 61), *range(0x10000, 0x110000, 0x3FFF)])),
)


class Tokenizer(ABC):
    """Convert text to ids and back.

    Text that spells a special token is encoded as plain text, except in a prompt. `decode` writes
    `eot_id` as text.
    """

    kind: str
    vocab_size: int
    eot_id: int | None
    eot = EOT
    """The text of the end-of-text token, if there is one."""
    file_text: str
    """The tokenizer.json from which `load_tokenizer` makes an equal tokenizer."""
    fingerprint: str
    """SHA-256 (hex) of the kind, vocabulary, pattern and special tokens."""
    token_bytes: NDArray[np.int64]
    """(V,): UTF-8 bytes of each token's text, 0 for special tokens."""
    config: Mapping[str, Any] = MappingProxyType({})
    """Content of tokenizer_config.json and chat_template.jinja; it does not change any id."""
    unk_id: int | None = None
    """The token that stands for unknown text, if there is one."""
    bytes_add_up = True
    """Whether the `token_bytes` of any text's ids sum to its UTF-8 bytes."""

    @property
    def needed_vocab_size(self) -> int:
        """Return the smallest vocabulary of a model that can read every document.

        Special tokens other than end-of-text and unknown do not occur in a document.
        """
        return self.vocab_size

    @abstractmethod
    def encode_array(self, text: str) -> Ids:
        """Encode a text without lone surrogates; return an array of any unsigned type."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with U+FFFD for bytes that are not UTF-8."""

    def encode(self, text: str) -> list[int]:
        """Encode `text`, without end-of-text."""
        ids: list[int] = self.encode_array(clean(text)).tolist()
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Encode `text` and read each special token that it spells, as transformers does."""
        if self.eot_id is None:
            return self.encode(text)
        first, *others = text.split(self.eot)
        ids = self.encode(first)
        for part in others:
            ids += [self.eot_id, *self.encode(part)]
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text as `token_dtype(vocab_size)`."""
        dtype = token_dtype(self.vocab_size)
        return [self.encode_array(clean(text)).astype(dtype) for text in texts]

    def bytes_within(self, split: Split) -> NDArray[np.float64]:
        """Return the UTF-8 bytes of each token's text in `split`, (V,).

        Without `bytes_add_up`, every token gets the split's mean bytes per token, or NaN if the
        index does not record the bytes.
        """
        if self.bytes_add_up:
            return self.token_bytes.astype(np.float64)
        whole = sum(shard.bytes or 0 for shard in split.shards)
        return np.full(self.vocab_size, whole / split.tokens if whole else np.nan)

    def require_same(
        self, other: "Tokenizer", ours: str, theirs: str, error: type[AccelGPTError] = DataError
    ) -> None:
        """Raise `error` unless `other` gives every text the same ids.

        `ours` and `theirs`: the owners of the two tokenizers, for the message.
        """
        if self.fingerprint != other.fingerprint:
            raise error(
                f"{ours} has a different tokenizer ({self.summary}) than {theirs} "
                f"({other.summary}); prepare the data again with the same tokenizer.json"
            )

    @property
    def summary(self) -> str:
        """Return kind, vocabulary size and fingerprint, for error messages."""
        return f"{self.kind} of {self.vocab_size:,}, {self.fingerprint[:12]}"

    def save(
        self, folder: str | Path, block_size: int | None = None, vocab_size: int | None = None
    ) -> None:
        """Write the tokenizer as files that `AutoTokenizer` opens.

        `encode(text)`, `decode(ids)` and `eos_token_id` of transformers then equal our
        `encode_prompt(text)`, `decode(ids)` and `eot_id`. But of a character that a chars tokenizer
        does not know, transformers says "Missing [UNK] token". `block_size`: tokens, for
        model_max_length; None: as the tokenizer came. `vocab_size`: rows of the model; None: as
        many as the tokenizer has tokens.

        tokenizer_config.json holds the settings that the tokenizer came with, and ours. The token
        that ends a document in the training data also begins the next one, as in GPT-2; a text gets
        neither by default. A token that tokenizer.json does not add is left out: transformers would
        add it beyond the rows of the model, or cut a text at an ordinary token, which training did
        not.
        """
        content = json.loads(self.file_text)
        added = {
            token["content"]
            for token in content.get("added_tokens", ())
            if vocab_size is None or token["id"] < vocab_size
        }
        config = {"tokenizer_class": TOKENIZER_CLASS, **self.config}
        for key in ("pad_token", "unk_token"):
            if config.get(key) not in added:
                config.pop(key, None)
        if block_size is not None:
            config["model_max_length"] = block_size
        config["clean_up_tokenization_spaces"] = False
        config.pop("eos_token", None)
        if self.eot_id is not None:
            config["bos_token"] = self.eot
            config["eos_token"] = self.eot
        config["add_bos_token"] = False
        config["add_eos_token"] = False
        split = content.get("pre_tokenizer") or {}
        if "add_prefix_space" in split:  # transformers 4 takes its own default otherwise
            config["add_prefix_space"] = split["add_prefix_space"]
        settings = json.dumps(config, ensure_ascii=False, indent=2)
        (Path(folder) / FILE).write_text(self.file_text, encoding="utf-8")
        (Path(folder) / CONFIG).write_text(settings + "\n", encoding="utf-8")


class BytesTokenizer(Tokenizer):
    """One token for each of the 256 bytes, and end-of-text."""

    kind = "bytes"
    vocab_size = 257
    eot_id = 256

    def __init__(self) -> None:
        self.fingerprint = digest("bytes", "", [EOT], [])
        self.token_bytes = np.array([1] * 256 + [0])
        self.file_text = to_json(tokenizer_json.bytes_content())

    def encode_array(self, text: str) -> Ids:
        """Return the UTF-8 bytes of the text as ids."""
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the ids as UTF-8 bytes."""
        parts = (EOT.encode() if i == 256 else bytes([i]) for i in ids)
        return b"".join(parts).decode("utf-8", "replace")


class CharsTokenizer(Tokenizer):
    """One token for each character of a text, as in nanoGPT's shakespeare_char; no end-of-text."""

    kind = "chars"
    eot_id = None

    def __init__(self, chars: str) -> None:
        self.chars = chars
        self.vocab_size = len(chars)
        self.fingerprint = digest("chars", "", [], [c.encode() for c in chars])
        codes = np.array([ord(char) for char in chars], np.int64)
        self.ids = np.full(codes.max(initial=0) + 2, len(chars))  # the last entry: all higher codes
        self.ids[codes] = np.arange(len(chars))
        self.token_bytes = np.array([len(c.encode()) for c in chars])
        self.file_text = to_json(tokenizer_json.chars_content(chars))

    def encode_array(self, text: str) -> Ids:
        """Return the id of each character. Raises `UserError` if a character has no id."""
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        ids: Ids = self.ids[np.minimum(codes, len(self.ids) - 1)]
        unknown = np.flatnonzero(ids == self.vocab_size)
        if len(unknown):
            raise UserError(
                f"the chars tokenizer has no token for character {text[unknown[0]]!r}; remove the "
                "character, or prepare the data with another tokenizer"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the characters of `ids`."""
        return "".join(self.chars[i] for i in ids)


class BPETokenizer(Tokenizer):
    """The kind bpe or gpt2: a byte-level BPE, run by tiktoken.

    On one core, tiktoken encodes 6 to 9 times as fast as `tokenizers` (7 to 8 MB/s of Python code).
    `content`: its tokenizer.json. `pattern`: the regex that splits text into words.
    """

    def __init__(self, kind: str, content: dict[str, Any], pattern: str) -> None:
        to_byte = {char: byte for byte, char in enumerate(BYTE_CHARS)}
        spelled = tokenizer_json.tokens_by_id(content["model"]["vocab"])
        vocabulary = [bytes(to_byte[char] for char in token) for token in spelled]
        self.kind = kind
        self.pattern = pattern
        self.ranks = {token: i for i, token in enumerate(vocabulary)}
        self.eot_id: int = len(vocabulary)
        self.vocab_size = len(vocabulary) + 1
        self.of_thread = threading.local()
        self.token_bytes = np.array([*map(len, vocabulary), 0])
        self.fingerprint = digest(kind, pattern, [EOT], vocabulary)
        self.file_text = to_json(tokenizer_json.as_trained(content))

    @property
    def encoding(self) -> "tiktoken.Encoding":
        """The encoding of this thread; two threads that share one lose a quarter of their speed."""
        if not hasattr(self.of_thread, "encoding"):
            import tiktoken

            self.of_thread.encoding = tiktoken.Encoding(
                self.kind,
                pat_str=self.pattern,
                mergeable_ranks=self.ranks,
                special_tokens={EOT: self.eot_id},
            )
        encoding: tiktoken.Encoding = self.of_thread.encoding
        return encoding

    def encode_array(self, text: str) -> Ids:
        """Encode with tiktoken.

        tiktoken's regex fails on about a million white spaces in a row, so longer runs are cut.
        """
        encode = self.encoding.encode_to_numpy
        try:
            return encode(text, disallowed_special=())
        except ValueError:
            parts = re.split(r"(\s{100000})", text)
            if len(parts) == 1:
                raise
        whole = map("".join, zip(parts[::2], [*parts[1::2], ""], strict=True))
        return np.concatenate([encode(part, disallowed_special=()) for part in whole])

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the bytes of the tokens as UTF-8."""
        return self.encoding.decode(list(ids))


class HFTokenizer(Tokenizer):
    """Any tokenizer.json of Hugging Face `tokenizers`, without template, padding or truncation."""

    kind = "hf"

    def __init__(self, content: dict[str, Any], where: Path, config: Mapping[str, Any]) -> None:
        import tokenizers

        self.where = where
        content = tokenizer_json.as_trained(content)
        self.file_text = to_json(content)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(self.file_text)
        except Exception as error:  # tokenizers raises no class of its own
            raise DataError(f"{where} is not a valid tokenizer.json: {error}") from None
        self.tokenizer.encode_special_tokens = True
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        self.eot = tokenizer_json.find_eot(content, ids, where, config)
        self.eot_id: int = ids[self.eot]
        self.tokenizer.add_special_tokens([self.eot])  # as transformers does with an eos_token
        model = content["model"]
        self.unk_id = ids.get(model.get("unk_token"), model.get("unk_id"))
        parts = {k: v for k, v in content.items() if k not in tokenizer_json.BESIDE_THE_POINT}
        self.fingerprint = digest("hf", json.dumps(parts, sort_keys=True), [self.eot], [])
        self.token_bytes = self.count_bytes(parts.get("decoder"))
        self.bytes_add_up = self.count_all_bytes(content.get("normalizer"))

    @property
    def needed_vocab_size(self) -> int:
        """Return the smallest vocabulary of a model that can read every document."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        unused = {i for i, token in added if token.special} - {self.eot_id, self.unk_id}
        used = set(self.tokenizer.get_vocab(with_added_tokens=True).values()) - unused
        return max(used) + 1

    def encode_array(self, text: str) -> Ids:
        """Encode with the normalizer, the pre-tokenizer and the model of the tokenizer.json."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode the texts in one call, which uses all cores."""
        try:
            found = self.tokenizer.encode_batch_fast(
                [clean(text) for text in texts], add_special_tokens=False
            )
        except Exception as error:  # tokenizers raises no class of its own
            beginning = f" that begins with {texts[0][:40]!r}" if len(texts) == 1 else ""
            raise DataError(
                f"the tokenizer of {self.where} cannot encode the text{beginning}: {error}"
            ) from None
        dtype = token_dtype(self.vocab_size)
        return [np.array(one.ids, dtype) for one in found]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode `text` and read each special token that it spells, as transformers does."""
        self.tokenizer.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self.tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        """Decode with the decoder of the tokenizer.json."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def count_all_bytes(self, normalizer: Mapping[str, Any] | None) -> bool:
        """Return `bytes_add_up`.

        A normalizer may change text that no probe holds, except the one that spells spaces. Other
        parts may add a leading space, drop spaces, or lack characters or bytes.
        """
        steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
        if any(step != tokenizer_json.SPACE_MARK for step in steps):
            return False
        try:
            lengths = [self.token_bytes[self.encode(text)].sum() for text in PROBES]
        except DataError:
            return False
        return lengths == [len(text.encode()) for text in PROBES]

    def count_bytes(self, decoder: object) -> NDArray[np.int64]:
        """Count the UTF-8 bytes of each token's text from its spelling in the vocabulary.

        A ByteLevel decoder spells each byte as one character. SentencePiece and WordPiece spell
        text, with markers for spaces and continued words.
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


def digest(kind: str, pattern: str, specials: list[str], vocabulary: Iterable[bytes]) -> str:
    """Return a SHA-256 (hex) of everything that determines the ids of a text."""
    tokens = [token.hex() for token in vocabulary]
    return hashlib.sha256(json.dumps([kind, pattern, specials, tokens]).encode()).hexdigest()


def to_json(content: dict[str, Any]) -> str:
    """Serialize the content of a tokenizer.json."""
    return json.dumps(content, ensure_ascii=False)


def clean(text: str) -> str:
    """Replace each lone surrogate by U+FFFD, because UTF-8 cannot encode it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# --------------------------------------------------------------------------- loading


def named_tokenizer(
    spec: str, key: str = "data.tokenizer", kinds: str = "gpt2, bytes"
) -> Tokenizer:
    """Load the tokenizer that a config names: gpt2, bytes, a path or a Hub id (user/name).

    A path that exists takes precedence over a Hub id. Raises `UserError` for any other name.
    `key` and `kinds`: the option and the names that it accepts, for the message.
    """
    if spec == "gpt2":
        return load_gpt2()
    if spec == "bytes":
        return BytesTokenizer()
    if Path(spec).exists():
        return load_tokenizer(spec)
    could_be_repo = "/" in spec and not spec.endswith(".json") and not is_local(spec)
    if could_be_repo and is_repo(spec.removeprefix(SCHEME).partition("@")[0]):
        return load_tokenizer(download_repo(spec, *HUB_FILES))
    raise UserError(
        f"{key} is {spec!r}, but there is no such file; expected {kinds}, the path of a "
        "tokenizer.json or a Hub id (user/name)"
    )


def load_gpt2() -> Tokenizer:
    """Load the GPT-2 tokenizer from tiktoken's cache or the network."""
    from tiktoken import load

    try:
        vocabulary, merges = (
            load.read_file_cached(f"{GPT2_URL}/{name}", sha256)
            for name, sha256 in GPT2_FILES.items()
        )
    except Exception as error:  # errors of requests, or OSError and ValueError of the cache
        raise UserError(
            f"the gpt2 tokenizer could not be downloaded ({one_line(error)}); without a network, "
            "set TIKTOKEN_CACHE_DIR to a folder that holds its files"
        ) from None
    return gpt2_tokenizer(tokenizer_json.gpt2_content(json.loads(vocabulary), merges.decode()))


def gpt2_tokenizer(content: dict[str, Any]) -> Tokenizer:
    """Make the tokenizer of kind gpt2 from its tokenizer.json."""
    from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]  # no types

    return BPETokenizer("gpt2", content, r50k_pat_str)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json, or the tokenizer in a folder: tokenizer.json or GPT-2's older files.

    A file that this package wrote gives the kind bytes, chars or bpe, and GPT-2's gives gpt2. Any
    other file gives the kind hf, as does one whose tokenizer_config.json names another end-of-text
    token. Raises `UserError` if there is no tokenizer, `DataError` if it cannot be read.
    """
    where = Path(path) / FILE if Path(path).is_dir() else Path(path)
    require(where.exists(), f"there is no tokenizer at {where}; expected a {FILE}")
    content = read_json_object(where, DataError)
    config = tokenizer_json.read_config(where)
    kind = "hf"
    if config.get("eos_token", "") in ("", EOT):
        kind = tokenizer_json.kind_of(content)
    tokenizer: Tokenizer
    if kind == "bytes":
        tokenizer = BytesTokenizer()
    elif kind == "chars":
        tokenizer = CharsTokenizer("".join(tokenizer_json.tokens_by_id(content["model"]["vocab"])))
    elif kind == "bpe":
        tokenizer = BPETokenizer("bpe", content, PATTERN)
    elif kind == "gpt2":
        tokenizer = gpt2_tokenizer(content)
    else:
        tokenizer = HFTokenizer(content, where, config)
    tokenizer.config = config
    return tokenizer
