"""Documents come in a fixed order, from any position on, and each is in one split."""

import bz2
import csv
import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accel_gpt.config.data import PrepareConfig
from accel_gpt.errors import DataError, UserError
from accel_gpt.prepare.documents import Piece, Position, split_by_hash
from accel_gpt.prepare.text_files import text_hash
from tests.helpers.texts import opened, read, read_pieces

ROWS = ["one", None, "", "two\r\nlines", "é 👍"]
KEPT = ["one", "two\nlines", "é 👍"]


def zst(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def parquet(texts: list[str | None], kind: pa.DataType) -> bytes:
    sink = io.BytesIO()
    table = pa.table({"n": range(len(texts)), "text": pa.array(texts, pa.string()).cast(kind)})
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue()


def arrow() -> bytes:
    sink = io.BytesIO()
    table = pa.table({"text": ROWS})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def table(separator: str) -> bytes:
    sink = io.StringIO()
    csv.writer(sink, delimiter=separator).writerows([["n", "text"], *enumerate(ROWS)])
    return sink.getvalue().encode()


TEXT = "\ufeffone\r\ntwo\rthree é".encode()
WHOLE = ["one\ntwo\rthree é"]
OBJECTS = [{"n": 1, "text": text} for text in ROWS]
LINES = b"".join(json.dumps(row).encode() + b"\n\n" for row in OBJECTS)
KINDS: dict[str, tuple[bytes, list[str]]] = {
    "x.txt": (TEXT, WHOLE),
    "x.log": (b"a,b\n1,2\n", ["a,b\n1,2\n"]),
    "utf16_le.txt": (TEXT.decode().encode("utf-16-le"), WHOLE),
    "utf32_be.txt.gz": (gzip.compress(TEXT.decode().encode("utf-32-be")), WHOLE),
    "two.txt.gz": (gzip.compress(TEXT[:9]) + gzip.compress(TEXT[9:]), WHOLE),
    "x.md.zst": (zst(TEXT), WHOLE),
    "x.txt.bz2": (bz2.compress(TEXT), WHOLE),
    "x.jsonl": (b"\xef\xbb\xbf" + LINES, KEPT),
    "x.ndjson.gz": (gzip.compress(LINES), KEPT),
    "x.jsonl.zst": (zst(LINES), KEPT),
    "array.json": (json.dumps(OBJECTS).encode(), KEPT),
    "pretty.json": (json.dumps(OBJECTS, indent=2).encode(), KEPT),
    "object.json": (json.dumps(OBJECTS[0], indent=2).encode(), KEPT[:1]),
    "strings.json": (b'["one", "two"]', ["one", "two"]),
    "x.csv": (table(","), KEPT),
    "x.tsv": (table("\t"), KEPT),
    "na.csv": (b"text\nNA\nnull\n", ["NA", "null"]),
    "numbers.csv": (b"text,n\n007,1\n1.50,2\n", ["007", "1.50"]),
    "x.parquet": (parquet(ROWS, pa.large_string()), KEPT),
    "binary.parquet": (parquet(ROWS, pa.binary()), KEPT),
    "x.arrow": (arrow(), KEPT),
    "a[1]*.jsonl": (LINES, KEPT),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.prepare.text_files.CHUNK_BYTES", 7)
    data, expected = KINDS[name]
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path / name) == expected
    assert read(tmp_path) == expected


@pytest.mark.parametrize(
    ("row", "field", "text"),
    [
        ({"text": ["a", None, "b"]}, "text", "a\n\nb"),
        ({"a": {"b": "x"}}, "a.b", "x"),
        ({"a.b": "x"}, "a.b", "x"),
        ({"a": [{"b": "x"}, {"b": "y"}]}, "a.b", "x\n\ny"),
        ({"a": None}, "a.b", None),
    ],
)
def test_lists_and_nested_columns_are_read(
    row: dict[str, Any], field: str, text: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row))
    assert read(path, text_field=field) == [text] * (text is not None)


def test_a_column_that_only_later_rows_have_is_read(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', '{"n": 1}', '{"text": "b", "n": 2}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    assert read(tmp_path / "x.jsonl") == ["a", "b"]
    with pytest.raises(UserError, match=r"text_field is body, but .*x\.jsonl has no such column"):
        read(tmp_path / "x.jsonl", text_field="body")


@pytest.mark.parametrize("without_rows", ["0.jsonl", "5.jsonl"])
def test_files_may_differ_in_what_is_not_read(without_rows: str, tmp_path: Path) -> None:
    """Also rows that come after the first block of a file, and files without rows."""
    lines: dict[str, list[dict[str, Any]]] = {
        "1": [{"text": None, "n": None}],
        "2": [{"text": "a", "n": "x", "m": 1}] * 2,
        "3": [{"n": [1]}],
        "4": [{"text": "b" * 5000}] * 2200 + [{"text": "c", "m": {"k": []}}],
    }
    for name, rows in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / without_rows).write_text("\n")
    assert [text[0] for text in read(tmp_path)] == [*"aa", *"b" * 2200, "c"]
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "0.jsonl").write_text("\n")
    (tmp_path / "x" / "1.jsonl").write_text('{"a.b": "d"}')
    assert read(tmp_path / "x", text_field="a.b") == ["d"]
    folder = tmp_path / "tables"
    folder.mkdir()
    for name, columns in (
        ("0", {"text": pa.array([], pa.string())}),
        ("1", {"text": ["a"], "n": [1]}),
        ("2", {"m": ["x"], "text": pa.array(["b"], pa.large_string()), "n": ["x"]}),
    ):
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    assert read(folder) == ["a", "b"]


# --------------------------------------------------------------------------- positions


def make(folder: Path, kind: str, count: int) -> PrepareConfig:
    """Write files of a kind: long documents in several pieces, short and empty documents."""
    folder.mkdir()
    for unit in range(count):
        rows = ["", *("\n".join(f"{w}é {i}" for i in range(w)) for w in (unit, 9, 1, 30)), "x" * 9]
        path = folder / f"{unit}"
        if kind == "text":
            mark = "\ufeff" if unit % 2 else ""
            path.with_suffix(".txt").write_text(mark + "\r\n".join(rows))
        elif kind == "jsonl":
            path.with_suffix(".jsonl").write_text(
                "".join(json.dumps({"text": row}) + "\n\n" for row in rows)
            )
        else:
            columns = pa.table({"text": rows, "n": list(range(6))})
            pq.write_table(columns, f"{path}.parquet", row_group_size=2)
    return PrepareConfig(source=str(folder), val_fraction=0.3)


def read_from(config: PrepareConfig, start: Position) -> list[tuple[Any, ...]]:
    """Return the pieces after a position."""
    return [one[:5] for one in read_pieces(config, start)]


def check_resume(config: PrepareConfig) -> list[Piece]:
    """Assert that reading resumes exactly after any piece; return the pieces."""
    whole = list(read_pieces(config))
    places = [piece.after for piece in whole]
    assert places == sorted(set(places))
    expected = read_from(config, Position())
    for i, piece in enumerate(whole):
        again = json.loads(json.dumps(piece.after))
        assert read_from(config, Position(*again)) == expected[i + 1 :]
    return whole


@pytest.mark.parametrize(
    ("name", "kind", "count", "longest"),
    [
        ("long", "text", 3, 10),
        ("whole", "text", 3, 10**6),
        ("lines", "jsonl", 2, 0),
        ("columns", "parquet", 2, 0),
    ],
)
def test_reading_goes_on_after_any_piece(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    count: int,
    longest: int,
) -> None:
    monkeypatch.setattr("accel_gpt.prepare.documents.BATCH_CHARACTERS", 12)
    monkeypatch.setattr("accel_gpt.prepare.documents.LONG_TEXT", longest)
    monkeypatch.setattr("accel_gpt.prepare.text_files.CHUNK_BYTES", 7)
    monkeypatch.setattr("accel_gpt.prepare.rows.BATCH_ROWS", 4)
    found = check_resume(make(tmp_path / name, kind, count))
    assert sum(piece.first for piece in found) == sum(piece.last for piece in found) < len(found)


# --------------------------------------------------------------------------- splits


def splits(config: PrepareConfig) -> list[tuple[str, str]]:
    return [(piece.split, piece.text) for piece in read_pieces(config)]


def test_the_end_of_a_long_text_and_of_a_single_file_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.prepare.documents.LONG_TEXT", 50)
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    (tmp_path / "b.txt").write_text("é" * 10)
    config = PrepareConfig(source=str(tmp_path), val_fraction=0.1)
    short = ("train", "é" * 10)
    assert splits(config) == [("train", "abcdefghij" * 9), ("val", "abcdefghij"), short]
    config = replace(config, source=str(tmp_path / "b.txt"))
    assert splits(config) == [("train", "é" * 9), ("val", "é")]


def test_held_out_documents_stay_when_a_folder_grows(tmp_path: Path) -> None:
    held: set[str] = set()
    trained: set[str] = set()
    for count in (20, 99, 101, 200):
        for i in range(count):
            (tmp_path / f"{i}.txt").write_text(f"document {i % 100}")
        found = splits(PrepareConfig(source=str(tmp_path), val_fraction=0.2))
        assert len(found) == count
        now = {text for split, text in found if split == "val"}
        assert held <= now
        assert not trained & now
        held = now
        trained = {text for split, text in found if split == "train"}
    assert len(set(found)) == 100  # equal texts are in one split
    assert 10 <= len(held) <= 30
    # a larger val split keeps its documents
    assert all(split_by_hash(text_hash(text), 0.5) == "val" for text in held)


# --------------------------------------------------------------------------- the Hub

Splits = Callable[[dict[str, list[dict[str, Any]]]], list[Any]]


@pytest.fixture
def on_the_hub(monkeypatch: pytest.MonkeyPatch) -> Splits:
    """Put a data set on the Hub by its splits; return what was asked of `load_dataset`."""
    import datasets

    asked: list[Any] = []

    def put(splits: dict[str, list[dict[str, Any]]]) -> list[Any]:
        def load(*args: Any, **named: Any) -> Any:
            asked.append((args, named))
            return {
                name: datasets.Dataset.from_list(rows).to_iterable_dataset(min(3, len(rows)))
                for name, rows in splits.items()
            }

        monkeypatch.setattr("datasets.load_dataset", load)
        return asked

    return put


def rows_of(*texts: Any) -> list[dict[str, Any]]:
    return [{"n": n, "text": text} for n, text in enumerate(texts)]


def test_a_data_set_of_the_hub_is_streamed_and_its_splits_are_kept(on_the_hub: Splits) -> None:
    asked = on_the_hub(
        {"train": rows_of("a", None, "b"), "validation": rows_of("c"), "test": rows_of("d")}
    )
    config = PrepareConfig(source="me/data", subset="10BT")
    assert [one for one in splits(config) if one[1]] == [
        ("train", "a"),
        ("train", "b"),
        ("val", "c"),
    ]
    assert asked[0] == (("me/data", "10BT"), {"streaming": True})
    test = replace(config, split="test")
    assert splits(test) == [("train", "d"), ("val", "c")]
    with pytest.raises(UserError, match=r"split is tset, but .* no such split; did you mean test"):
        opened(replace(config, split="tset"))
    with pytest.raises(UserError, match=r"text_field is body, but split train of data set me/data"):
        read("me/data", text_field="body")
    on_the_hub({"train": rows_of(3, 4)})
    with pytest.raises(
        DataError,
        match="text in row 0 of shard 0 of split train of data set me/data is not text: 3",
    ):
        read("me/data")


def test_reading_a_data_set_goes_on_after_any_row(
    on_the_hub: Splits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards before that row are not read again."""
    monkeypatch.setattr("accel_gpt.prepare.rows.BATCH_ROWS", 3)
    monkeypatch.setattr("accel_gpt.prepare.documents.BATCH_CHARACTERS", 12)
    texts = [f"row {i} of it\n" * (1 + i % 3) + "end" for i in range(20)]
    rows = rows_of(*texts)
    on_the_hub({"train": rows})
    config = PrepareConfig(source="me/data")
    whole = check_resume(config)
    assert "".join(piece.text for piece in whole) == "".join(texts)
    rows[:14] = rows_of(*["of other shards, which are longer"] * 14)  # two shards of seven rows
    assert [piece.text for piece in read_pieces(config, whole[-2].after)] == [whole[-1].text]


# --------------------------------------------------------------------------- memory

PEAK = """
import sys
from pathlib import Path
import datasets
from accel_gpt.config.data import PrepareConfig
from tests.helpers.texts import read_pieces
def memory_mb():  # without the pages of files
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1000
for name in ("x.txt", "x.jsonl"):
    before, most, total = memory_mb(), 0, 0
    for i, piece in enumerate(read_pieces(PrepareConfig(source=f"{sys.argv[1]}/{name}"))):
        most = most if i % 20 else max(most, memory_mb())
        total += len(piece.text)
    print(total, most - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """260 MB of each kind. Of Parquet, Arrow decodes up to 1 GiB ahead."""
    row = "some words of a text\n" * 500
    count = 260_000_000 // len(row)
    (tmp_path / "x.txt").write_text(row * count)
    (tmp_path / "x.jsonl").write_text((json.dumps({"text": row}) + "\n") * count)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    for line in done.stdout.splitlines():
        total, grown_mb = map(float, line.split())
        assert total > 259_000_000
        assert grown_mb < 150, done.stdout
