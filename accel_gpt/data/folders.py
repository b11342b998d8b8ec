"""What a data place is: a folder of ours or of another project, here or behind a URL."""

from pathlib import Path

from accel_gpt.config.data import DataConfig
from accel_gpt.data.foreign import open_foreign
from accel_gpt.data.remote.folder import RemoteFolder, is_url
from accel_gpt.data.shards import INDEX, Split, open_split, read_index
from accel_gpt.data.tokenizer import Tokenizer, load_tokenizer
from accel_gpt.errors import DataError


def open_place(
    place: str, split: str, data: DataConfig, known: Tokenizer | None = None
) -> tuple[Split, Tokenizer]:
    """A split of `place` (folder or URL) and the tokenizer that made it.

    `data` tells the tokenizer where the place does not, and where fetched shards are kept; `known`
    is that of a folder of ours, where another split of it was opened before. Raises
    `UserError` when there is no such place or its tokenizer is not known, `DataError` when it
    cannot be trained on.
    """
    if is_url(place):
        return open_remote(RemoteFolder(place, data.cache_dir, data.cache_gb), split, data)
    folder = Path(place)
    if folder.is_dir() and not (folder / INDEX).exists():
        sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
        return open_foreign(folder, sizes, folder.joinpath, split, data.tokenizer)
    read_index(folder)
    return checked(open_split(folder, split), known or load_tokenizer(folder))


def open_remote(remote: RemoteFolder, split: str, data: DataConfig) -> tuple[Split, Tokenizer]:
    """The same behind a URL: its small files are fetched, its shards when they are needed."""
    if not remote.has(INDEX):
        return open_foreign(
            remote.folder, remote.sizes(), remote.fetch, split, data.tokenizer, remote
        )
    for name in (INDEX, "tokenizer.json", "tokenizer_config.json"):
        if remote.has(name):
            remote.fetch(name)
    opened = open_split(remote.folder, split, remote)
    return checked(opened, load_tokenizer(remote.folder))


def checked(split: Split, tokenizer: Tokenizer) -> tuple[Split, Tokenizer]:
    """Both, once it is known that they belong together."""
    if split.tokenizer_fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"the {split.name} shards of {split.folder} were made with another tokenizer "
            f"({split.tokenizer_kind}, {split.tokenizer_fingerprint[:12]}) than the one beside them"
            f" ({tokenizer.kind}, {tokenizer.fingerprint[:12]}); prepare them again"
        )
    return split, tokenizer
