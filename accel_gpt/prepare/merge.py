"""Parts of a data folder, made by several machines -> one folder, without tokenizing again.

Reads `<out>.part{rank:05d}-of-{world:05d}`. The parts stay: their shards are linked, so that the
merged folder takes no room of its own. Killed and called again it goes on.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_gpt.data.shards import HEADER, INDEX, check_size, read_index, token_dtype
from accel_gpt.errors import UserError, require
from accel_gpt.files import lock, write_file
from accel_gpt.prepare.builder import SPLITS, differences
from accel_gpt.prepare.prepare import part_folder, publish, summary
from accel_gpt.prepare.shard_writer import save_index

OF_A_PART = ("rank", "skipped")  # what may differ between parts
Index = dict[str, Any]
Names = dict[str, tuple[Path, int]]  # name in the whole -> file of a part, tokens


def merge(out: Path) -> None:
    """Join all parts of `out` beside it, in rank order.

    Raises `UserError` for parts that are missing or do not belong together, `DataError` for shards
    that are.
    """
    out = Path(out).resolve()
    parts = find_parts(out)
    indexes = [read_index(part) for part in parts]
    check_parts(parts, indexes)
    merged, names = merged_index(parts, indexes)
    folder = out.with_name(f"{out.name}.merging")
    try:
        notice = f"another process prepares {out}; waiting for it\n"
        with lock(out.with_name(f"{out.name}.lock"), notice=notice):
            if not is_merged(out, merged):
                folder.mkdir(exist_ok=True)
                moved = gather(folder, names, token_dtype(merged["vocab_size"]).itemsize)
                for path in parts[0].glob("tokenizer*.json"):
                    write_file(folder / path.name, [path.read_bytes()])
                save_index(folder, merged)
                publish(folder, out)
                if moved:
                    sys.stderr.write("links are impossible here: the shards were moved\n")
    except OSError as error:
        raise UserError(
            f"data folder {out} could not be written: {error}; run the same command again: it "
            "goes on"
        ) from None
    sys.stdout.write(
        f"merged {out}: {len(parts)} parts, {summary(merged)}; the parts may be deleted: "
        f"{out}.part*-of-{len(parts):05d}\n"
    )


def find_parts(out: Path) -> list[Path]:
    """The folders of all parts, in rank order."""
    pattern = re.compile(re.escape(out.name) + r"\.part(\d{5,})-of-(\d{5,})")
    names = sorted(path.name for path in out.parent.iterdir()) if out.parent.is_dir() else []
    found = [(int(m[1]), int(m[2])) for m in map(pattern.fullmatch, names) if m]
    require(
        bool(found),
        f"{out} has no parts beside it ({out.name}.part00000-of-...); make them with accel-gpt "
        "prepare --rank and --world",
    )
    worlds = sorted({world for _, world in found})
    require(
        len(worlds) == 1,
        f"the parts of {out} are of different numbers of machines: "
        f"{' and '.join(map(str, worlds))}; remove those that do not belong to it",
    )
    missing = sorted(set(range(worlds[0])) - {rank for rank, _ in found})
    require(
        not missing,
        f"{out} lacks part {', '.join(map(str, missing))} of {worlds[0]}; make it with accel-gpt "
        f"prepare --rank {missing[0] if missing else 0} --world {worlds[0]}",
    )
    return [part_folder(out, rank, worlds[0]) for rank in range(worlds[0])]


def check_parts(parts: list[Path], indexes: list[Index]) -> None:
    """All must be made in the same way, from the same files, with the same tokenizer."""
    first = common(indexes[0])
    for rank, (part, index) in enumerate(zip(parts, indexes, strict=True)):
        made = index["prepared"]
        require(
            (made.get("rank"), made.get("world")) == (rank, len(parts)),
            f"{part} holds part {made.get('rank')} of {made.get('world')}, which is not what its "
            "name says; give it its name back",
        )
        differ = differences(first, common(index), "there")
        files = any(one.startswith("source_fingerprint") for one in differ)
        require(
            not files,
            f"{part} was made from other files than {parts[0].name} (their names or sizes "
            "differ); copy the files and make the part again",
        )
        require(
            not differ,
            f"{part} was prepared with other settings than {parts[0].name} "
            f"({'; '.join(differ)}); make it again with the same",
        )
        require(
            index["tokenizer"] == indexes[0]["tokenizer"],
            f"{part} was made with another tokenizer than {parts[0].name}; make it again with the "
            "same tokenizer and text",
        )


def common(index: Index) -> Mapping[str, Any]:
    """The settings that all parts share."""
    return {key: value for key, value in index["prepared"].items() if key not in OF_A_PART}


def merged_index(parts: list[Path], indexes: list[Index]) -> tuple[Index, Names]:
    """The index of the whole, and where its shards are."""
    splits: dict[str, list[Any]] = {}
    names: Names = {}
    for split in SPLITS:
        splits[split] = []
        for part, index in zip(parts, indexes, strict=True):
            for shard in index["splits"].get(split, ()):
                name = f"{split}_{len(splits[split]):06d}.npy"
                splits[split].append({**shard, "name": name})
                names[name] = (part / shard["name"], shard["tokens"])
        tokens = sum(shard["tokens"] for shard in splits[split])
        require(
            tokens > 1,
            f"there is too little text to train on: the parts have {tokens} tokens for {split}, "
            "expected at least 2; give more text or another data.prepare.val_fraction",
        )
    prepared = {k: v for k, v in common(indexes[0]).items() if k != "world"}
    if any("skipped" in index["prepared"] for index in indexes):
        prepared["skipped"] = sum(index["prepared"].get("skipped", 0) for index in indexes)
    return {**indexes[0], "prepared": prepared, "splits": splits}, names


def is_merged(out: Path, merged: Index) -> bool:
    """Whether `out` is this already; `UserError` when it is something else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    require(
        (out / INDEX).exists() and read_index(out) == merged,
        f"{out} exists and is not what its parts make; remove it, or the parts",
    )
    return True


def gather(folder: Path, names: Names, itemsize: int) -> bool:
    """Link each shard into `folder` under its new name, or move it there; whether one was moved.

    A file that is there already and not in its part any more was moved by a merge that was killed.
    """
    moved = False
    for name, (source, tokens) in names.items():
        target = folder / name
        if source.exists() and not (target.exists() and target.samefile(source)):
            target.unlink(missing_ok=True)
            try:
                target.hardlink_to(source)
            except OSError:
                source.rename(target)
                moved = True
        check_size(target, HEADER + tokens * itemsize)
    return moved
