"""Parts of a data folder, made by several machines -> one folder, without tokenizing again.

Reads `<out>.part{rank:05d}-of-{world:05d}`. The parts stay: their shards are linked, so that the
merged folder takes no space of its own. A merge that was stopped can be run again.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_gpt.data.shards import HEADER, INDEX, check_size, read_index, token_dtype
from accel_gpt.errors import UserError, require
from accel_gpt.files import lock, write_file
from accel_gpt.prepare.prepare import part_folder, publish, summary
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
    try:
        notice = f"another process prepares {out}; waiting for it\n"
        with lock(out.with_name(f"{out.name}.lock"), notice=notice):
            if not out.exists() or (out.is_dir() and not any(out.iterdir())):
                folder.mkdir(exist_ok=True)
                link_shards(folder, merged, sources)
                for path in parts[0].glob("tokenizer*.json"):
                    write_file(folder / path.name, [path.read_bytes()])
                save_index(folder, merged)
                publish(folder, out)
            elif not (out / INDEX).exists() or read_index(out) != merged:
                raise UserError(
                    f"{out} exists and is not what its parts make; remove it, or the parts"
                )
    except OSError as error:
        raise UserError(
            f"data folder {out} could not be written: {error}; run the same command again"
        ) from None
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
    first, first_name = common(indexes[0]), parts[0].name
    for rank, (part, index) in enumerate(zip(parts, indexes, strict=True)):
        made = index["prepared"]
        require(
            (made.get("rank"), made.get("world")) == (rank, len(parts)),
            f"{part} holds part {made.get('rank')} of {made.get('world')}, not the one of its "
            "name; rename it",
        )
        differ = differences(first, common(index))
        require(
            not any(one.startswith("source_fingerprint") for one in differ),
            f"{part} was made from other files than {first_name} (their names or sizes "
            "differ); copy the files and make the part again",
        )
        require(
            not differ,
            f"{part} was prepared with other settings than {first_name} ({'; '.join(differ)}); "
            "make it again with the same",
        )
        require(
            index["tokenizer"] == indexes[0]["tokenizer"],
            f"{part} was made with another tokenizer than {first_name}; make it again with the "
            "same tokenizer and text",
        )


def common(index: Index) -> Mapping[str, Any]:
    """The settings that all parts share."""
    return {k: v for k, v in index["prepared"].items() if k not in ("rank", "skipped")}


def merged_index(parts: list[Path], indexes: list[Index]) -> tuple[Index, dict[str, Path]]:
    """The index of the merged folder, and the shard of a part behind each of its names."""
    splits: dict[str, list[Any]] = {split: [] for split in SPLITS}
    sources: dict[str, Path] = {}
    for split, shards in splits.items():
        for part, index in zip(parts, indexes, strict=True):
            for shard in index["splits"].get(split, ()):
                name = f"{split}_{len(shards):06d}.npy"
                shards.append({**shard, "name": name})
                sources[name] = part / shard["name"]
        tokens = sum(shard["tokens"] for shard in shards)
        require(
            tokens > 1,
            f"there is too little text to train on: the parts have {tokens} tokens for {split}, "
            "expected at least 2; give more text or another data.prepare.val_fraction",
        )
    prepared = {k: v for k, v in common(indexes[0]).items() if k != "world"}
    if any("skipped" in index["prepared"] for index in indexes):
        prepared["skipped"] = sum(index["prepared"].get("skipped", 0) for index in indexes)
    return {**indexes[0], "prepared": prepared, "splits": splits}, sources


def link_shards(folder: Path, merged: Index, sources: Mapping[str, Path]) -> None:
    """Link each shard into `folder` under its new name, or move it where links are impossible.

    A file that is there already and no longer in its part was moved by a merge that was stopped.
    """
    moved, itemsize = False, token_dtype(merged["vocab_size"]).itemsize
    for shard in (shard for split in merged["splits"].values() for shard in split):
        source, target = sources[shard["name"]], folder / shard["name"]
        if source.exists() and not (target.exists() and target.samefile(source)):
            target.unlink(missing_ok=True)
            try:
                target.hardlink_to(source)
            except OSError:
                source.rename(target)
                moved = True
        check_size(target, HEADER + shard["tokens"] * itemsize)
    if moved:
        sys.stderr.write("links are impossible here: the shards were moved\n")
