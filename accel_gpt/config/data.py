"""Define the options of the data, its order and its preparation. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from accel_gpt.config.options import Section, internal, option, own_options
from accel_gpt.errors import require
from accel_gpt.own_code import OwnFunction


@dataclass(frozen=True)
class PrepareConfig(Section, prefix="data.prepare.", resume="free", per_machine=True):
    """How to prepare the data folder if it is missing."""

    source: str | None = option(
        None,
        "Text to prepare: a file, folder, glob or http(s) URL, a data set of the Hub (user/name), "
        "or stdlib, the source code of Python's standard library. null: nothing is prepared, so "
        "the data folder must exist.",
        essential=True,
        replaces=("data.prepare.val", "data.prepare.subset", "data.prepare.split"),
        path=True,
    )
    val: str | None = option(
        None,
        "Text for validation, given as the source is. null: the source's own validation split if "
        "it has one, otherwise val_fraction of the source.",
        path=True,
    )
    subset: str | None = option(
        None,
        "Subset (configuration) of a data set of the Hub. null: its only one.",
    )
    split: str = option(
        "train",
        "Split to train on, if the source is a data set of the Hub.",
    )
    text_field: str = option(
        "text",
        "Column with the text, if the source has columns; a.b is column b inside a. A list of "
        "strings is joined by blank lines; a list of {role, content} is written with the chat "
        "template of the tokenizer.",
    )
    tokenizer: str = option(
        "gpt2",
        "Tokenizer: bytes, chars, bpe (trained on the text), gpt2, the path of a tokenizer.json, "
        "or a Hub id (user/name).",
        essential=True,
        path=True,
    )
    vocab_size: int = option(
        4096,
        "Vocabulary size if the tokenizer is bpe, including the end-of-text token. A small text "
        "may give fewer tokens.",
        essential=True,
        at_least=257,  # 256 bytes and end-of-text
    )
    val_fraction: float = option(
        0.1,
        "Share of the text held out for validation, 0 to 1, if there is no validation text. Whole "
        "documents are held out; of a text file above 100,000 characters, its end.",
        above=0,
        below=1,
    )
    shard_tokens: int = option(
        100_000_000,
        "Number of tokens in one shard file.",
        above=0,
    )

    def _check(self) -> None:
        made = self.tokenizer == "bpe" or self.tokenizer.endswith(".json")  # maybe not made yet
        if self.vocab_size != self.unset("vocab_size") and not made:
            self.require_use("vocab_size", "tokenizer", ("bpe",))


@dataclass(frozen=True)
class Weighted(Section, prefix="data.train."):
    """One source of a mixture."""

    path: str = option(
        "",
        "Folder of token shards, or its URL.",
        path=True,
    )
    weight: float = option(
        1.0,
        "Share of the sequences, relative to the weights of the other sources.",
        above=0,
    )

    def _check(self) -> None:
        require(bool(self.path), "a source of data.train has no path; give {path, weight}")


@dataclass(frozen=True)
class DataConfig(Section, prefix="data."):
    """Data to train on, and its order."""

    train: str | tuple[Weighted, ...] = option(
        "",
        "Folder of token shards, or its URL. A mixture: a list of {path, weight}. Required unless "
        "data.text is set.",
        essential=True,
        replaces=("data.text", "data.prepare", "sample.prompts"),
        resume="free",
        validation=True,
        per_machine=True,
        path=True,
    )
    text: str | None = option(
        None,
        "Your own text instead of data.train: a file, folder, glob or URL. It is prepared in "
        "out_dir/data with the options of data.prepare.",
        essential=True,
        replaces=(
            "data.train",
            "data.prepare.source",
            "data.prepare.val",
            "data.prepare.subset",
            "data.prepare.split",
            "data.prepare.text_field",
            "sample.prompts",
        ),
        path=True,
    )
    val: str | Mapping[str, str] | None = option(
        None,
        "Folder whose val split is evaluated, or several folders by name: {web: data/web, code: "
        "data/code}. null: the val splits of data.train.",
        validation=True,
        per_machine=True,
        path=True,
    )
    tokenizer: str | None = option(
        None,
        "Tokenizer if the data name none, such as shards of other projects: gpt2, bytes, "
        "the path of a tokenizer.json, or a Hub id (user/name).",
        resume="free",
        per_machine=True,
        path=True,
    )
    shuffle: Literal["global", "groups", "shards", "none", "replacement"] = option(
        "global",
        "Order of the sequences. global: a new permutation of all sequences each epoch. groups: "
        "shards in random order, in groups of 8; the sequences of a group are permuted together. "
        "shards: shards in random order, each read in order. none: all sequences in order. "
        "replacement: random crops, as in nanoGPT.",
        resume="refuse",
    )
    document_mask: bool = option(
        False,
        "true: end attention and loss at the end of each document, and restart the positions. "
        "false: treat a sequence as one text.",
    )
    cache_gb: float = option(
        50.0,
        "Size limit of a run's cache of remote shards on a machine, in GB (1e9 bytes). The cache "
        "is a folder in ~/.cache/accel_gpt/shards, or in XDG_CACHE_HOME, and is removed at the end "
        "of the run.",
        above=0,
        resume="free",
        per_machine=True,
    )
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    commits: Mapping[str, str] | None = internal(None)
    """URL in a repository of the Hub -> the commit that this run reads."""
    own_shards: OwnFunction | None = internal(None)
    """The function `shards` of --code; see `OwnCode`."""

    def _check(self) -> None:
        for name in self.val if isinstance(self.val, Mapping) else ():
            require(
                bool(re.fullmatch(r"[A-Za-z0-9_-]+", name)),
                f"data.val has the name {name!r}; use letters, digits, - and _",
            )
        prepare = self.prepare
        used = [
            name
            for name in own_options(PrepareConfig)
            if getattr(prepare, name) != prepare.unset(name)
        ]
        require(
            prepare.source is not None or not used,
            f"data.prepare sets {', '.join(used)}, but data.prepare.source is null, so nothing is "
            "prepared; set data.prepare.source, or remove data.prepare",
        )

    @property
    def folder(self) -> str | None:
        """The data folder that `data.prepare` may make; None for a mixture."""
        return self.train if isinstance(self.train, str) else None
