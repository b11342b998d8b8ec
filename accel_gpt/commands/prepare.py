"""`accel-gpt prepare [PATH|RECIPE]`: text -> a folder of token shards."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from glob import has_magic
from pathlib import Path

from accel_gpt.config.data import PrepareConfig, SourceKind
from accel_gpt.config.options import option
from accel_gpt.config.parse import build, check_utf8, parse_command, read_values
from accel_gpt.config.shipped import resolve_config, shipped_configs
from accel_gpt.console import write_out
from accel_gpt.data.sources import is_url
from accel_gpt.errors import UserError, require


@dataclass(frozen=True)
class PrepareCommand(PrepareConfig):
    """Turn text into token shards; if it is stopped, the same command resumes.

    PATH is as --path. RECIPE, a YAML file or the name of a shipped one, holds any of these options
    as `key: value`; those of the command line go first. Examples:
      accel-gpt prepare 'notes/**/*.md' --tokenizer bpe --out data/notes
      accel-gpt prepare fineweb_edu_10bt --workers 8
      accel-gpt prepare --path crawl.jsonl --tokenizer gpt2 --out data/crawl
    """

    source: SourceKind | None = option(
        None,
        "What path or dataset holds; null or auto: what the endings of path's files tell, dataset "
        "with --dataset, else stdlib, the library of this Python.",
    )
    out: str = option(
        "",
        "Folder to make; empty: data/<name of path, or source>_<tokenizer>.",
    )


def main(argv: Sequence[str]) -> int:
    """Make a data folder; errors name the options of this command, not the keys of a config."""
    try:
        return prepare_folder(argv)
    except UserError as error:
        if argv and argv[0].startswith("/dev/fd/"):  # of the config that trains
            raise
        raise type(error)(str(error).replace("data.prepare.", "--")) from None


def prepare_folder(argv: Sequence[str]) -> int:
    """Make a data folder."""
    options = parse_recipe(argv)
    values = {f.name: getattr(options, f.name) for f in fields(PrepareConfig)}
    require("" not in (options.path, options.dataset), "the path is empty; give that of the text")
    if options.source in (None, "auto"):
        require(
            options.path is None or options.dataset is None,
            f"both the path {options.path} and --dataset {options.dataset} are given; give one",
        )
        values["source"] = "dataset" if options.dataset else "stdlib"
        if options.path:
            values["source"] = "auto"
    parts = [] if options.path in (None, "-") else Path(str(options.path)).parts
    name = next((Path(part).stem for part in parts[::-1] if not has_magic(part)), None)
    if name is None:
        from accel_gpt.text.files import guess_source

        name = guess_source(str(options.path)) if values["source"] == "auto" else values["source"]
    tokenizer = Path(options.tokenizer).name.removesuffix(".json")
    out = options.out or f"data/{name}_{tokenizer}"
    from accel_gpt.prepare.prepare import prepare

    if not prepare(PrepareConfig(**values), Path(out)):
        require(
            options.path != "-",
            f"{out} is already prepared, so standard input was not read; delete the folder or give "
            "another --out",
        )
        write_out(f"already prepared: {out}\n")
    return 0


def parse_recipe(argv: Sequence[str]) -> PrepareCommand:
    """Parse `[PATH|RECIPE] --key value ...`; a recipe and the options may set any option."""
    words = list(argv)
    word = words.pop(0) if words and (words[0] == "-" or words[0][:1] != "-") else None
    if word is None or {"-h", "--help"} & set(words):
        return parse_command(PrepareCommand, words, "accel-gpt prepare [PATH|RECIPE]")
    if is_text_path(word):
        twice = any(option.partition("=")[0] == "--path" for option in words)
        require(not twice, f"both the path {word} and --path are given; give one")
        return parse_command(PrepareCommand, ["--path", word, *words], "accel-gpt prepare PATH")
    check_utf8("RECIPE", word)
    values = read_values(PrepareCommand, str(resolve_config(word, "data")), words)
    return build(PrepareCommand, values)


def is_text_path(word: str) -> bool:
    """Whether a word names text, not a recipe: another file than YAML, a folder, a glob, a URL."""
    shipped = word in shipped_configs("data") and not Path(word).is_file()
    if shipped or word.endswith((".yaml", ".yml")) or word.startswith("/dev/fd/"):
        return False
    return Path(word).expanduser().exists() or word == "-" or is_url(word) or has_magic(word)
