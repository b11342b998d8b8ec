"""The options of the data: what is trained on, in which order, and how it is prepared. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from accel_gpt.config.checks import Fraction, NotNegative, Positive, Section
from accel_gpt.errors import require

SourceKind = Literal["stdlib", "auto", "text", "jsonl", "parquet", "arrow", "dataset"]


@dataclass(frozen=True)
class PrepareConfig(Section, prefix="data.prepare."):
    """How to make the data folder when it is missing."""

    source: SourceKind | None = None
    """Kind of the source in path or dataset. null: do not prepare, the folder must exist. auto: the
    kind with the most bytes in path, by the endings of its files; any other ending is text."""
    path: str | None = None
    """File, folder, glob, http(s) URL, or - for standard input; for text, jsonl, parquet and
    arrow."""
    dataset: str | None = None
    """Id of a Hub dataset, for source dataset. It is streamed, never downloaded whole."""
    dataset_config: str | None = None
    """Configuration name of the Hub dataset."""
    dataset_split: str = "train"
    """Split of the Hub dataset."""
    text_field: str = "text"
    """Name of the column that holds the text; for jsonl, parquet, arrow and dataset."""
    loss_on: Literal["text", "completions"] = "text"
    """completions: a row of jsonl is {prompt, completion}, or {messages} for the chat template of
    the tokenizer, and only the completion, or the last message, is trained on. Training packs whole
    examples into sequences; it needs data.document_mask."""
    tokenizer: str = "gpt2"
    """bytes, chars, bpe (trained on the text), gpt2, the path of a tokenizer.json, or a Hub id
    (user/name)."""
    vocab_size: int = 4096
    """Vocabulary size of a trained bpe, including the end-of-text token; a small text reaches
    less."""
    sample_bytes: Positive[int] = 1_000_000_000
    """UTF-8 bytes of text, spread over the source, on which a bpe is trained."""
    val_fraction: Fraction[float] = 0.1
    """Share of the text held out for validation, 0 to 1: whole documents, or the end of each text
    where there are few."""
    keep_crlf: bool = False
    """Keep the line ends of Windows. false: they become those of Unix."""
    skip_invalid: bool = False
    """Skip and count documents that cannot be decoded, instead of stopping at the first."""
    shard_tokens: Positive[int] = 100_000_000
    """Number of tokens in one shard file."""
    workers: NotNegative[int] = 0
    """Number of processes that tokenize. 0: one per core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            self.vocab_size >= 257,
            "vocab_size",
            "a byte-level bpe needs at least 257 (256 bytes and end-of-text)",
        )
        require(
            self.loss_on == "text"
            or (self.source in (None, "auto", "jsonl") and self.tokenizer not in ("bpe", "chars")),
            f"data.prepare.loss_on is completions, but data.prepare.source is {self.source} and "
            f"data.prepare.tokenizer {self.tokenizer}; expected jsonl, and bytes, gpt2 or the path "
            "of a tokenizer.json",
        )
        if self.source == "stdlib":
            require(
                not (self.path or self.dataset),
                f"data.prepare.source is stdlib but {self.path or self.dataset} is given as well; "
                "set data.prepare.source to text, jsonl, parquet, arrow or dataset",
            )
        elif self.source:
            key, what = "path", "a file, a folder or a glob"
            if self.source == "dataset":
                key, what = "dataset", "a Hub id"
            empty = f"data.prepare.source is {self.source} but data.prepare.{key} is empty"
            require(bool(getattr(self, key)), f"{empty}; give {what}")


@dataclass(frozen=True)
class Weighted(Section, prefix="data.train."):
    """One source of a mixture."""

    path: str = ""
    """Folder of token shards, or its URL."""
    weight: Positive[float] = 1.0
    """Share of the sequences, relative to the others."""

    def __post_init__(self) -> None:
        require(bool(self.path), "a source of data.train has no path; give {path, weight}")
        super().__post_init__()


@dataclass(frozen=True)
class TextStream(Section, prefix="data.train."):
    """Text that is tokenized while training, without shards."""

    streaming: bool = False
    """Must be true: text is tokenized while training."""
    dataset: str | None = None
    """Id of the Hub dataset."""
    dataset_config: str | None = None
    """Configuration name of the Hub dataset."""
    dataset_split: str = "train"
    """Split of the Hub dataset."""
    path: str | None = None
    """Files of text, jsonl, parquet or arrow, in place of dataset."""
    text_field: str = "text"
    """Name of the column that holds the text."""
    val_fraction: Fraction[float] = 0.01
    """Share of the documents held out for validation, 0 to 1."""

    def __post_init__(self) -> None:
        require(
            self.streaming,
            "data.train names a text source without streaming: true; add it, or make shards of "
            "the text with data.prepare",
        )
        super().__post_init__()
        require(
            bool(self.dataset) != bool(self.path),
            f"data.train streams from dataset {self.dataset} and path {self.path}; give one of the "
            "two",
        )
        require(
            self.path != "-",
            "data.train streams from standard input, which cannot be read twice; give files",
        )


@dataclass(frozen=True)
class DataConfig(Section, prefix="data."):
    """Data to train on, and its order."""

    train: str | tuple[Weighted, ...] | TextStream = ""
    """Folder of token shards, or its URL. A mixture: a list of {path, weight}. Or text to tokenize
    while training: {dataset: Hub id, streaming: true}."""
    text: str | None = None
    """Your own text in place of data.train: a file, folder, glob or URL. It is prepared in the
    folder data of out_dir, as data.prepare says: this key sets data.train, data.prepare.path and
    data.prepare.source."""
    val: str | Mapping[str, str] | None = None
    """Folder whose val split is evaluated, or several by name: {web: data/web, code: data/code}.
    null: the val splits of data.train."""
    tokenizer: str | None = None
    """Tokenizer of data that does not name one (shards of other projects, streamed text): gpt2,
    bytes, the path of a tokenizer.json, or a Hub id (user/name)."""
    shuffle: Literal["global", "groups", "shards", "none", "replacement"] = "global"
    """global: a new permutation of all sequences each epoch. groups: shards in random order, a
    permutation of the sequences of each shuffle_group shards. shards: shards in random order, each
    read in order. none: in order. replacement: random crops, as in nanoGPT."""
    shuffle_group: Positive[int] = 8
    """Number of shards in a group, for shuffle groups. The cache of a URL must hold two groups."""
    document_mask: bool = False
    """End attention, loss and positions at document boundaries. false: a sequence is one text."""
    cache_dir: str | None = None
    """Folder in which shards of a URL are cached. null: ~/.cache/accel_gpt/shards."""
    cache_gb: Positive[float] = 50.0
    """Size limit of that cache, in units of 1e9 bytes. Shards that have been read are evicted
    first."""
    prepare: PrepareConfig = field(default_factory=PrepareConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.val if isinstance(self.val, Mapping) else ():
            require(
                bool(re.fullmatch(r"[A-Za-z0-9_-]+", name)),
                f"data.val has the name {name!r}; use letters, digits, - and _",
            )

    @property
    def folder(self) -> str | None:
        """The one folder that `prepare` may make; None for mixtures and streamed text."""
        return self.train if isinstance(self.train, str) else None
