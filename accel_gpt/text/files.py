"""The files of a source, in order, and which of them each machine reads.

Downloads go to ~/.cache/accel_gpt (or $XDG_CACHE_HOME/accel_gpt).
"""

import hashlib
import json
import os
import re
import sysconfig
from pathlib import Path
from typing import cast

from accel_gpt.config.data import PrepareConfig, SourceKind
from accel_gpt.data.sources import is_url
from accel_gpt.errors import AccelGPTError, DataError, UserError, require
from accel_gpt.files import read_json
from accel_gpt.text.selection import Selection, kind_of_name, select_files

# Tests and installed packages are no part of the library's own sources.
STDLIB_SKIP = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "_bundled")
)


def check_source(config: PrepareConfig) -> None:
    """`UserError` for a source that is not text, or not of standard input."""
    require(
        config.source is not None,
        "data.prepare.source is not set; for text give stdlib, text, jsonl, "
        "parquet, arrow or dataset, otherwise an existing folder as data.train",
    )
    require(
        config.path != "-" or config.source in ("text", "jsonl"),
        f"data.prepare.source is {config.source}, which cannot be read from standard input; give "
        "text or jsonl, or a file",
    )


def files(config: PrepareConfig) -> list[Path]:
    """Local files of the source, a URL being downloaded first; `UserError` if all are empty."""
    if config.source == "stdlib":
        return stdlib_files()
    found = select(config).files
    require(
        any(path.stat().st_size for path in found),
        f"data.prepare.path is {config.path}, which holds no text: {found[0]} is empty; expected "
        "a file with text in it",
    )
    return found


def select(config: PrepareConfig) -> Selection:
    """Choose the files of a source with a path, a URL being downloaded first."""
    assert config.source is not None
    assert config.path is not None
    found = None
    if is_url(config.path):
        found = [download_text(config.path)]
    elif config.source == "arrow":
        found = saved_files(config.path, config.dataset_split)
    if found is None:
        return select_files(config.path, config.source)
    return Selection(path=config.path, source=config.source, files=found)


def describe_source(config: PrepareConfig, times: bool = True) -> str:
    """A fingerprint (SHA-256 in hex) of what is read, empty for standard input.

    Of files it covers names, sizes and, with `times`, times of change; of a download URL and size;
    of a data set its id.
    """
    check_source(config)
    if config.path == "-":
        return ""
    if config.source == "dataset":
        seen: list[object] = [config.dataset, config.dataset_config, config.dataset_split]
    elif config.path is not None and is_url(config.path):
        seen = [config.path, *(path.stat().st_size for path in files(config))]
    else:
        paths = [path.absolute() for path in files(config)]
        root = os.path.commonpath([path.parent for path in paths])
        states = [(path.relative_to(root).as_posix(), path.stat()) for path in paths]
        seen = [[name, s.st_size, *([s.st_mtime_ns] if times else [])] for name, s in states]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


# --------------------------------------------------------------------------- files


def stdlib_files() -> list[Path]:
    """Python sources of the running interpreter's library, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [n for n in folders if n not in STDLIB_SKIP and not n.startswith(".")]
        python = [n for n in names if n.lower().endswith(".py") and not n.startswith(".")]
        found.extend(path for name in python if (path := Path(folder, name)).is_file())
    found.sort(key=lambda path: path.relative_to(root).parts)
    require(
        bool(found),
        f"this Python has no library sources in {root}; choose another data.prepare.source",
    )
    return found


def saved_files(path: str, split: str) -> list[Path] | None:
    """The files of a folder that `datasets` wrote by save_to_disk, None for other folders.

    Other Arrow files in it are caches of derived data; of several splits `split` is meant.
    """
    folder = Path(os.path.expanduser(path))
    try:
        if os.path.isfile(folder / "dataset_dict.json"):
            held = list(map(str, read_json(folder / "dataset_dict.json")["splits"]))
            require(
                split in held,
                f"data.prepare.dataset_split is {split}, which {path} does not have; it has "
                f"{', '.join(held)}",
            )
            folder /= split
        state = folder / "state.json"
        if not os.path.isfile(state):
            return None
        found = [state.with_name(part["filename"]) for part in read_json(state)["_data_files"]]
        if missing := [file.name for file in found if not file.is_file()]:
            raise ValueError(f"{missing[0]} is missing")
    except AccelGPTError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder / 'state.json'} or dataset_dict.json is not as save_to_disk writes it "
            f"({error!r:.80}); copy the whole folder again"
        ) from None
    return found


def guess_source(path: str) -> SourceKind:
    """Tell what `path` holds: see `select_files`; a URL by its ending, else text.

    Raises `UserError` if there is nothing to read, and for standard input, which has no ending.
    """
    require(
        path != "-",
        "data.prepare.path is -, and standard input does not tell what it holds; give --source "
        "text or --source jsonl",
    )
    folder = os.path.expanduser(path)
    if any(os.path.isfile(f"{folder}/{name}") for name in ("state.json", "dataset_dict.json")):
        return "arrow"
    if is_url(path):
        name = path.split("?")[0].split("#")[0]
        return cast(SourceKind, kind_of_name(name) or "text")
    return select_files(path).source


def download_text(url: str) -> Path:
    """The file at `url`, downloaded once."""
    from accel_gpt.data.remote import Store, Unreachable

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accel_gpt"
    address, mark, query = url.partition("?")
    folder, _, name = address.rstrip("/").rpartition("/")
    number = hashlib.sha256(url.encode()).hexdigest()[:16]
    target = cache / f"{number}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}"
    if target.exists():
        return target
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        store = Store(f"{folder}{mark}{query}")
        with temporary.open("wb") as file:
            for _, data in store.read(name, 0, store.info(name).size):
                file.write(data)
        temporary.rename(target)
    except (OSError, AccelGPTError, Unreachable) as error:
        raise UserError(
            f"{url} could not be downloaded to {cache}: {error}; if the network does not let you, "
            "fetch it by hand and give data.prepare.path the file"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return target
