"""Parts of a data folder, made by several machines -> one folder, without tokenizing again.

Reads `<out>.part{rank:05d}-of-{world:05d}`. The parts stay: their shards are linked, so that the
merged folder takes no space of its own, or copied where the file system has no links. A merge that
was stopped can be run again.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from accel_gpt.data.shards import HEADER, INDEX, check_size, index_dtype, read_index
from accel_gpt.errors import require
from accel_gpt.files import link, write_file
from accel_gpt.prepare.prepare import check_enough_text, part_folder, publish, summary, writing
from accel_gpt.prepare.recipe import differences
from accel_gpt.prepare.shard_writer import save_index
from accel_gpt.text.documents import SPLITS

Index = dict[str, Any]


def merge(out: Path) -> None:
    """Join all parts of `out` beside it, in rank order.

    Raises `UserError` for parts that are missing or do not belong together, `DataError` for shards
    that are missing or cut short.
    """
    out = Path(out).resolve()
    parts = find_parts(out)
    indexes = [read_index(part) for part in parts]
    check_parts(parts, indexes)
    merged, sources = merged_index(parts, indexes)
    folder = out.with_name(f"{out.name}.merging")
    with writing(out, "; run the same command again"):
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            itemsize = index_dtype(merged).itemsize
            for shard in (shard for split in merged["splits"].values() for shard in split):
                check_size(sources[shard["name"]], HEADER + shard["tokens"] * itemsize)
                link(str(sources[shard["name"]]), str(folder / shard["name"]))
            for path in parts[0].glob("tokenizer*.json"):
                write_file(folder / path.name, [path.read_bytes()])
            save_index(folder, merged)
            publish(folder, out)
        require(
            (out / INDEX).exists() and read_index(out) == merged,
            f"{out} exists and is not what its parts make; remove it, or the parts",
        )
    sys.stdout.write(
        f"merged {out}: {len(parts)} parts, {summary(merged)}; the parts may be deleted: "
        f"{out}.part*-of-{len(parts):05d}\n"
    )


def find_parts(out: Path) -> list[Path]:
    """The folders of all parts, in rank order."""
    pattern = re.compile(re.escape(out.name) + r"\.part(\d{5,})-of-(\d{5,})")
    names = [path.name for path in out.parent.iterdir()] if out.parent.is_dir() else []
    found = sorted((int(m[2]), int(m[1])) for m in map(pattern.fullmatch, names) if m)
    require(
        bool(found),
        f"{out} has no parts beside it ({out.name}.part00000-of-...); make them with accel-gpt "
        "prepare --rank and --world",
    )
    world = found[0][0]
    require(
        found[-1][0] == world,
        f"the parts of {out} are of different numbers of machines: {world} and {found[-1][0]}; "
        "remove those that do not belong to it",
    )
    missing = sorted(set(range(world)) - {rank for _, rank in found})
    require(
        not missing,
        f"{out} lacks part {', '.join(map(str, missing))} of {world}; make it with accel-gpt "
        f"prepare --rank {missing[0] if missing else 0} --world {world}",
    )
    return [part_folder(out, rank, world) for rank in range(world)]


def check_parts(parts: list[Path], indexes: list[Index]) -> None:
    """All must be made in the same way, from the same files, with the same tokenizer."""
    first = made_with(indexes[0])
    for rank, (part, index) in enumerate(zip(parts, indexes, strict=True)):
        expected = first | {"rank": rank, "world": len(parts)}
        differ = differences(made_with(index) | index["prepared"], expected)
        require(
            not differ,
            f"{part} does not belong to {parts[0].name} ({'; '.join(differ)}); make it again with "
            "the same settings, files and tokenizer",
        )


def made_with(index: Index) -> Index:
    """What all parts share: settings, files (by names and sizes) and tokenizer."""
    shared = {k: v for k, v in index["prepared"].items() if k not in ("rank", "world", "skipped")}
    return shared | {"fingerprint of the tokenizer": index["tokenizer"]["fingerprint"][:12]}


def merged_index(parts: list[Path], indexes: list[Index]) -> tuple[Index, dict[str, Path]]:
    """The index of the merged folder, and the shard of a part behind each of its names."""
    splits: dict[str, list[Index]] = {split: [] for split in SPLITS}
    sources: dict[str, Path] = {}
    for split, shards in splits.items():
        for part, index in zip(parts, indexes, strict=True):
            for shard in index["splits"].get(split, ()):
                name = f"{split}_{len(shards):06d}.npy"
                shards.append({**shard, "name": name})
                sources[name] = part / shard["name"]
    prepared = {k: v for k, v in indexes[0]["prepared"].items() if k not in ("rank", "world")}
    tokens = {split: sum(shard["tokens"] for shard in shards) for split, shards in splits.items()}
    check_enough_text(tokens, prepared["val_fraction"])
    if any("skipped" in index["prepared"] for index in indexes):
        prepared["skipped"] = sum(index["prepared"].get("skipped", 0) for index in indexes)
    return {**indexes[0], "prepared": prepared, "splits": splits}, sources
