"""Read a file of any kind row by row; name damage, or skip and count it."""

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from accel_gpt.config.data import PrepareConfig, SourceKind
from accel_gpt.errors import DataError, UserError
from accel_gpt.prepare.documents import Position
from accel_gpt.prepare.readers import Row, Skipped, json_lines
from accel_gpt.prepare.sources import guess_source
from tests.helpers.texts import read_pieces, read_sample, read_texts

ROWS = ["one", None, "", "two\nlines", "é 👍"]
KEPT = ["one", "two\nlines", "é 👍"]


def asked(path: Path, source: SourceKind, **more: Any) -> PrepareConfig:
    return PrepareConfig(source=source, path=str(path), **more)


def read(path: Path, source: SourceKind, **more: Any) -> list[str]:
    return list(read_texts(asked(path, source, **more)))


def after_skips(path: Path, source: SourceKind) -> tuple[list[str], int]:
    """Return the texts in order, and the number of skipped rows."""
    skipped = Skipped(allowed=True)
    found = read_pieces(asked(path, source, skip_invalid=True), True, skipped=skipped)
    return [piece.text for piece in found], skipped.count


def lines(*texts: str | None) -> bytes:
    return b"".join(json.dumps({"n": 1, "body": text}).encode() + b"\n" for text in texts)


def compress(data: bytes, ending: str) -> bytes:
    """Compress `data` for a file ending; several such parts make one file."""
    if ending == ".zst":
        return bytes(pa.Codec("zstd").compress(data, asbytes=True))
    others = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    return others[ending](data)


# --------------------------------------------------------------------------- JSON lines


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_json_lines_are_read_plain_and_compressed(tmp_path: Path, name: str, ending: str) -> None:
    data = b"\xef\xbb\xbf" + lines(*ROWS) + b"\r\n \n" + b'{"body": "last"}'
    path = tmp_path / f"{name}{ending}"
    path.write_bytes(compress(data[:40], ending) + compress(data[40:], ending))
    assert read(path, "jsonl", text_field="body") == [*KEPT, "last"]
    with pytest.raises(UserError, match=r"'text', but line 1 of .* columns: n, body") as error:
        read(path, "jsonl")
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": \n', r"line 2 of .*x\.jsonl is not JSON: Expecting value.*jq -c \. joins"),
        (b"[\n", r"line 2 of .*x\.jsonl is not JSON: .*jq -c '\.\[\]' converts an array"),
        (b"[" * 100_000 + b"\n", r"line 2 of .*x\.jsonl is not JSON"),
        (b'["text"]\n', r"line 2 of .*x\.jsonl is \['text'\]; expected an object"),
        (
            b'{"text": {"en": "a"}}\n',
            r"has \{'en': 'a'\} in column text; expected text; only a column at the top level is "
            r"read, so move it there: jq -c '\{text: \(\.text\.en\)\}' .*x\.jsonl >",
        ),
        (b'{"text": 3}\n', r"line 2 of .*x\.jsonl has 3 in column text; expected text"),
        (b'{"text": "\xff"}\n', r"x\.jsonl is not UTF-8: byte 0xff at offset 25, in line 2"),
        (b'{"text": "' + b"x" * 5000 + b'"}\n', r"line 2 of .*x\.jsonl is longer than 200 bytes"),
    ],
)
def test_a_bad_line_is_named_by_its_number_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, message: str
) -> None:
    limit = 200 if len(line) < 9999 else 10**6
    monkeypatch.setattr("accel_gpt.prepare.readers.LONGEST_JSON_LINE", limit)
    monkeypatch.setattr("accel_gpt.prepare.readers.CHUNK_BYTES", 16)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "ab"}\n' + line + b'{"text": "b"}\n')
    with pytest.raises(DataError, match=message):
        read(path, "jsonl")
    assert after_skips(path, "jsonl") == (["ab", "b"], 1)
    assert read(path, "jsonl", skip_invalid=True) == ["ab", "b"]


@pytest.mark.parametrize(
    ("value", "command"),
    [
        ({"text": "deep"}, "jq -c '{text: (.data.text)}' "),
        ([{"text": "deep"}], r"""jq -c '{text: ([.data[].text] | join("\n"))}' """),
    ],
)
def test_a_column_inside_another_one_is_refused_with_the_way_to_the_top(
    tmp_path: Path, value: object, command: str
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"data": value}))
    with pytest.raises(UserError, match="which lies inside the column data of line 1") as error:
        read(tmp_path / "x.jsonl", "jsonl", text_field="data.text")
    assert f"so move it there: {command}{tmp_path / 'x.jsonl'} > flat.jsonl" in str(error.value)


@pytest.mark.parametrize(
    ("name", "field", "command"),
    [
        ("x y.jsonl", "a.b-c", "jq -c '{text: (.a.\"b-c\")}' 'x y.jsonl' > flat.jsonl"),
        ("x.jsonl.gz", "a.d", "gzip -dc x.jsonl.gz | jq -c '{text: (.a.d)}' > flat.jsonl"),
    ],
)
def test_the_command_for_a_column_inside_another_one_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, field: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"a": {"b-c": "deep", "d": "deep"}})
    Path(name).write_bytes(compress(row.encode(), ".gz" if name.endswith(".gz") else ""))
    with pytest.raises(UserError) as error:
        read(Path(name), "jsonl", text_field=field)
    assert str(error.value).endswith(f": {command}")


def test_a_column_inside_another_one_of_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "{it's}.parquet"
    pq.write_table(pa.Table.from_pylist([{"data": {"text": "deep"}}]), path)
    with pytest.raises(UserError, match=r"from_parquet\('.*/\{it\\'s\}\.parquet'\)"):
        read(path, "parquet", text_field="data.text")
    with pytest.raises(
        UserError, match=r"inside the column data .*flatten\(\).*names it data\.text"
    ):
        read(path, "parquet", text_field="data.text")
    with pytest.raises(DataError, match=r"column data of .* holds struct.* it data\.text"):
        read(path, "parquet", text_field="data")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_text_with_the_mark_of_another_encoding_is_read(
    tmp_path: Path, encoding: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.prepare.readers.CHUNK_BYTES", 37)
    text = "".join(f"Zeile {i}: é 👍 中文\r\n" for i in range(100))
    for name, content in (("a.txt", text), ("b.jsonl", json.dumps({"text": text}))):
        path = tmp_path / f"{name}{ending}"
        path.write_bytes(compress(f"\ufeff{content}".encode(encoding), ending))
        expected = tmp_path / f"{encoding}{ending}.{name}"
        expected.write_text(content, newline="")
        source = guess_source(str(path))
        assert read(path, source) == [text.replace("\r\n", "\n")]
        pieces = [piece.text for piece in read_pieces(asked(path, source))]
        assert pieces == [piece.text for piece in read_pieces(asked(expected, source))]
    whole = list(read_pieces(asked(tmp_path / f"a.txt{ending}", "text")))
    assert (
        list(read_pieces(asked(tmp_path / f"a.txt{ending}", "text"), True, whole[0].after))
        == (whole[1:])
    )
    cut = f"\ufeff{text}".encode(encoding)[:-1]
    (tmp_path / f"cut.txt{ending}").write_bytes(compress(cut, ending))
    with pytest.raises(DataError, match=r"cut\.txt.* cannot be read completely as text"):
        read(tmp_path / f"cut.txt{ending}", "text")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_latin_text_in_another_encoding_needs_no_mark(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("Zeile: é\r\n".encode(encoding) * 100)
    assert guess_source(str(path)) == "text"
    assert read(path, "text") == ["Zeile: é\n" * 100]
    path.write_bytes(bytes(range(200)) * 20 + b"a\0" * 4000)
    with pytest.raises(UserError, match="binary, not UTF-8 text"):
        guess_source(str(path))


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a\\ud800b \\ud83d\\udc4d"}')
    assert after_skips(tmp_path, "jsonl") == (["a\ufffdb 👍"], 0)


def test_line_numbers_and_offsets_go_on_after_a_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_gpt.prepare.readers.LONGEST_JSON_LINE", 20)
    told: list[str] = []
    data = b"x" * 21 + b"\n" + b"y" * 99 + b"\n\n" + b'{"t": "\xff"}\n' + b'{"t": "a"}\n'
    rows = json_lines(io.BytesIO(data), "it", "t", 0, told.append)
    assert list(rows) == [Row(3, "a")]
    assert [t[:9] for t in told] == ["line 1 of", "line 2 of", "it is not"]
    assert f"at offset {data.index(0xFF)}, in line 4" in told[2]


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_a_truncated_archive_is_named(tmp_path: Path, ending: str) -> None:
    data = b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(5000))
    path = tmp_path / f"x.jsonl{ending}"
    path.write_bytes(compress(data, ending)[:-9])
    with pytest.raises(DataError, match=rf"{ending} cannot be read completely as jsonl: "):
        read(path, "jsonl")
    texts, count = after_skips(path, "jsonl")
    assert texts == [str(i * i) for i in range(len(texts))]
    assert count >= 1
    path.write_bytes(b"no archive at all, but long enough to tell")
    with pytest.raises(DataError, match="download or write it again"):
        read(path, "jsonl")


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_text_is_read_as_plain_text_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """In pieces that start anywhere; damage is named."""
    monkeypatch.setattr("accel_gpt.prepare.documents.BATCH_CHARACTERS", 500)
    monkeypatch.setattr("accel_gpt.prepare.readers.CHUNK_BYTES", 99)
    text = "".join(f"line {i * i} of the é text\n" for i in range(2000))
    plain = tmp_path / "plain" / "x.txt"
    packed = tmp_path / "packed" / f"x.txt{ending}"
    for path, data in ((plain, text.encode()), (packed, compress(text.encode(), ending))):
        path.parent.mkdir()
        path.write_bytes(data)
    expected = list(read_pieces(asked(plain, "text"), True))
    config = PrepareConfig(source=guess_source(str(packed.parent)), path=str(packed.parent))
    assert config.source == "text"
    assert list(read_pieces(config, True)) == expected
    assert list(read_pieces(config, True, expected[20].after)) == expected[21:]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"x\.txt{ending} cannot be read completely as text"):
        list(read_pieces(config, True))


# --------------------------------------------------------------------------- Parquet, Arrow


def write(path: Path, table: pa.Table, kind: str) -> None:
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
        return
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("parquet", pa.string()),
        ("parquet", pa.dictionary(pa.int32(), pa.string())),
        ("file", pa.dictionary(pa.int32(), pa.string())),
        ("file", pa.binary()),
        ("stream", pa.large_string()),
        ("stream", pa.string_view()),
    ],
    ids=str,
)
def test_columns_of_text_are_read(tmp_path: Path, kind: str, column: pa.DataType) -> None:
    if column == pa.string_view():
        try:
            pa.array(["a"], column).cast(pa.large_binary())
        except pa.ArrowNotImplementedError:
            pytest.skip("this pyarrow reads no string_view")
    encoded = pa.types.is_dictionary(column)
    body = pa.array(ROWS, pa.string()).dictionary_encode() if encoded else pa.array(ROWS, column)
    table = pa.table({"n": list(range(5)), "body": body, "other": [[1]] * 5})
    source: SourceKind = "parquet" if kind == "parquet" else "arrow"
    path = tmp_path / f"x.{source}"
    write(path, table, kind)
    assert read(path, source, text_field="body") == KEPT
    with pytest.raises(UserError, match=r"'text', but .* columns: n, body, other"):
        read(path, source)
    with pytest.raises(DataError, match=r"column n of .* holds int64; expected text"):
        read(path, source, text_field="n")
    with pytest.raises(DataError, match=r"column other of .* holds list.*; expected text"):
        read(path, source, text_field="other")
    assert list(read_sample(asked(path, source, text_field="body"), 10**6)) == KEPT


def test_only_the_row_groups_and_the_column_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"text": [f"row {i}" for i in range(10)], "n": list(range(10))})
    write(tmp_path / "x.parquet", table, "parquet")
    seen: list[Any] = []
    real = pq.ParquetFile.iter_batches

    def spy(self: Any, **asked: Any) -> Any:
        seen.append((list(asked["row_groups"]), asked["columns"]))
        return real(self, **asked)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    config = asked(tmp_path / "x.parquet", "parquet")
    assert [p.text for p in read_pieces(config, True, Position(0, 7))] == [
        "row 7",
        "row 8",
        "row 9",
    ]
    assert seen == [([3, 4], ["text"])]


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_bytes_that_are_not_utf8_are_named_by_their_row(tmp_path: Path, kind: str) -> None:
    column = pa.array([b"a", b"b", b"c\xff", b"d"]).view(pa.string())
    source: SourceKind = "parquet" if kind == "parquet" else "arrow"
    path = tmp_path / f"x.{source}"
    write(path, pa.table({"text": column}), kind)
    with pytest.raises(DataError, match=r"row 2 of .* is not UTF-8: byte 0xff at offset 1 of its"):
        read(path, source)
    assert after_skips(path, source) == (["a", "b", "d"], 1)


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    source: SourceKind = "parquet" if kind == "parquet" else "arrow"
    path = tmp_path / f"x.{source}"
    write(path, pa.table({"text": [f"{i * i} and more" for i in range(1000)]}), kind)
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b"no such thing", whole[:3]):
        path.write_bytes(data)
        match = rf"{source} cannot be read completely as {source}"
        with pytest.raises(DataError, match=match) as error:
            read(path, source)
        assert error.value.exit_code == 3
        assert after_skips(path, source)[1] == 1


def test_flipped_bytes_never_kill_the_process(tmp_path: Path) -> None:
    """Arrow uses the offsets in a file: unchecked offsets would read any memory."""
    path = tmp_path / "x.arrow"
    write(path, pa.table({"text": [f"{i}" * 9 for i in range(100)]}), "file")
    whole = path.read_bytes()
    offset = whole.index(b"\x09\x00\x00\x00\x12\x00\x00\x00")  # start and end of the second row
    path.write_bytes(whole[:offset] + b"\xff\xff\xff\x7f" + whole[offset + 4 :])
    code = "from tests.helpers.texts import read_texts\n"
    code += "from accel_gpt.config.data import PrepareConfig\n"
    code += f"list(read_texts(PrepareConfig(source='arrow', path={str(path)!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot be read completely as arrow" in done.stderr


def test_a_folder_of_save_to_disk_is_read_without_its_caches(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(20)]})
    data.save_to_disk(str(tmp_path / "one"), num_shards=2)
    (tmp_path / "one" / "cache-0123.arrow").write_bytes(b"derived")
    assert read(tmp_path / "one", "arrow") == [f"row {i}" for i in range(20)]
    both = datasets.DatasetDict({"train": data, "test": data.select(range(3))})
    both.save_to_disk(str(tmp_path / "both"))
    assert len(read(tmp_path / "both", "arrow")) == 20
    assert len(read(tmp_path / "both", "arrow", dataset_split="test")) == 3
    with pytest.raises(UserError, match=r"dataset_split is val, but .*: train, test"):
        read(tmp_path / "both", "arrow", dataset_split="val")


# --------------------------------------------------------------------------- memory

PEAK = """
import sys
from pathlib import Path
import pyarrow.parquet, pyarrow.ipc
from accel_gpt.config.data import PrepareConfig
from tests.helpers.texts import read_pieces
def memory_mb():  # without the pages of files
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1000
for source in ("text", "jsonl", "parquet", "arrow"):
    before, most, total = memory_mb(), 0, 0
    for i, piece in enumerate(read_pieces(PrepareConfig(source=source, path=sys.argv[1]))):
        most = most if i % 20 else max(most, memory_mb())
        total += len(piece.text)
    print(total, most - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """130 MB of each kind: text, lines, one row group, batches. Measured: 68 MB for Parquet at 100
    and 400 MB alike, 10 MB for the others.
    """
    row = "some words of a text\n" * 500
    count = 130_000_000 // len(row)
    (tmp_path / "x.txt").write_text(row * count)
    (tmp_path / "x.jsonl").write_text((json.dumps({"text": row}) + "\n") * count)
    table = pa.table({"text": [f"{i}{row}" for i in range(count)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=count)
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    for line in done.stdout.splitlines():
        total, grown_mb = map(float, line.split())
        assert total > 129_000_000
        assert grown_mb < 100, done.stdout
