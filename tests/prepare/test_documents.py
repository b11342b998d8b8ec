"""Documents come in a fixed order, from any position on, and each is in one split."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accel_gpt.config.data import PrepareConfig, SourceKind
from accel_gpt.errors import DataError, UserError
from accel_gpt.prepare.documents import Piece, Position, split_by_hash, split_hash
from tests.helpers.hub_server import HubServer, environment
from tests.helpers.texts import read_pieces, read_sample, read_texts

ROWS = ["one", None, "", "two\r\nlines", "é 👍", "a\ud800b"]
KEPT = ["one", "two\nlines", "é 👍", "a\ufffdb"]


def zst(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def parquet(texts: list[str | None], kind: pa.DataType | None = None) -> bytes:
    sink = io.BytesIO()
    column = pa.array(texts, pa.string())
    column = column.dictionary_encode() if kind is None else column.cast(kind)
    table = pa.table({"n": range(len(texts)), "text": column})
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue()


LINES = b"".join(json.dumps({"n": 1, "text": text}).encode() + b"\n\n" for text in ROWS)
MARKED = b"\xef\xbb\xbf" + LINES
TEXT = "\ufeffone\r\ntwo\rthree é".encode()
CLEAN: list[str | None] = [
    None if text is None else text.replace("\ud800", "\ufffd") for text in ROWS
]
KINDS: dict[str, tuple[bytes, list[str]]] = {
    "x.txt": (TEXT, ["one\ntwo\rthree é"]),
    "x.log": (b"a,b\n1,2\n", ["a,b\n1,2\n"]),
    "utf16_le.txt": (TEXT.decode().encode("utf-16-le"), ["one\ntwo\rthree é"]),
    "utf16_be.txt.gz": (gzip.compress(TEXT.decode().encode("utf-16-be")), ["one\ntwo\rthree é"]),
    "utf32_le.txt": (TEXT.decode().encode("utf-32-le"), ["one\ntwo\rthree é"]),
    "utf32_be.txt": (TEXT.decode().encode("utf-32-be"), ["one\ntwo\rthree é"]),
    "utf16_le.jsonl": (MARKED.decode().encode("utf-16-le"), KEPT),
    "utf16_be.jsonl.gz": (gzip.compress(MARKED.decode().encode("utf-16-be")), KEPT),
    "x.txt.gz": (gzip.compress(TEXT[:9]) + gzip.compress(TEXT[9:]), ["one\ntwo\rthree é"]),
    "x.md.zst": (zst(TEXT), ["one\ntwo\rthree é"]),
    "x.jsonl": (MARKED, KEPT),
    "x.json": (LINES, KEPT),
    "x.ndjson.gz": (gzip.compress(LINES), KEPT),
    "x.jsonl.zst": (zst(LINES[:40]) + zst(LINES[40:]), KEPT),
    "x.parquet": (parquet(CLEAN, pa.string()), KEPT),
    "large.parquet": (parquet(CLEAN, pa.large_string()), KEPT),
    "binary.parquet": (parquet(CLEAN, pa.binary()), KEPT),
    "dictionary.parquet": (parquet(CLEAN), KEPT),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.prepare.readers.CHUNK_BYTES", 7)
    data, expected = KINDS[name]
    (tmp_path / name).write_bytes(data)
    config = PrepareConfig("auto", str(tmp_path / name))
    assert [text for text in read_texts(config) if text] == expected


# --------------------------------------------------------------------------- positions


def make(folder: Path, source: SourceKind, count: int) -> PrepareConfig:
    """Write files of a source: long documents in several pieces, short and empty documents."""
    folder.mkdir()
    separator = "<s>" if source == "text" and folder.name == "separated" else None
    for unit in range(count):
        rows = ["", *("\n".join(f"{w}é {i}" for i in range(w)) for w in (unit, 9, 1, 30)), "x" * 9]
        path = folder / f"{unit}"
        if source == "text":
            mark = "\ufeff" if unit % 2 else ""
            path.with_suffix(".txt").write_text(mark + (separator or "\r\n").join(rows))
        elif source == "jsonl":
            lines = "".join(json.dumps({"text": row}) + "\n\n" for row in rows)
            with (gzip.open if unit else open)(f"{path}.jsonl{'.gz' * bool(unit)}", "wt") as file:
                file.write(lines)
        else:
            table = pa.table({"text": rows, "n": list(range(6))})
            pq.write_table(table, f"{path}.parquet", row_group_size=2)
    return PrepareConfig(source=source, path=str(folder), val_fraction=0.3, separator=separator)


def read_from(config: PrepareConfig, start: Position) -> list[Piece]:
    """Return the pieces after a position, without the states of `datasets`, which vary."""
    found = read_pieces(config, start)
    return [piece._replace(after=piece.after._replace(state=None)) for piece in found]


def check_resume(config: PrepareConfig) -> None:
    """Assert that reading resumes exactly after any piece."""
    whole = list(read_pieces(config))
    places = [piece.after[:3] for piece in whole]
    assert places == sorted(set(places))
    assert len(whole) > 1
    expected = read_from(config, Position())
    for i, piece in enumerate(whole):
        again = json.loads(json.dumps(piece.after))
        assert read_from(config, Position(*again)) == expected[i + 1 :]


@pytest.mark.parametrize(
    ("name", "source", "count", "few"),
    [
        ("few", "text", 3, 100),
        ("many", "text", 3, 2),
        ("separated", "text", 2, 100),
        ("lines", "jsonl", 3, 100),
        ("columns", "parquet", 3, 100),
    ],
)
def test_reading_goes_on_after_any_piece(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    source: SourceKind,
    count: int,
    few: int,
) -> None:
    monkeypatch.setattr("accel_gpt.prepare.documents.BATCH_CHARACTERS", 12)
    monkeypatch.setattr("accel_gpt.prepare.documents.FEW_TEXTS", few)
    monkeypatch.setattr("accel_gpt.prepare.readers.CHUNK_BYTES", 7)
    config = make(tmp_path / name, source, count)
    check_resume(config)
    found = list(read_pieces(config))
    assert sum(piece.first for piece in found) == sum(piece.last for piece in found) < len(found)
    assert {piece.split for piece in found} == {"train", "val"} or few == 2


# --------------------------------------------------------------------------- splits


def key_of(text: str) -> bytes:
    return split_hash(text.encode()).digest()


def splits(config: PrepareConfig) -> list[tuple[str, str]]:
    return [(piece.split, piece.text) for piece in read_pieces(config)]


def test_few_texts_are_parted_at_their_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    (tmp_path / "b.txt").write_text("é" * 7)
    config = PrepareConfig(source="text", path=str(tmp_path), val_fraction=0.1)
    parted = [("train", "abcdefghij" * 9), ("val", "abcdefghij"), ("train", "é" * 6), ("val", "é")]
    assert splits(config) == parted


def test_many_texts_are_held_out_whole_by_their_content(tmp_path: Path) -> None:
    for i in range(400):
        (tmp_path / f"{i}.txt").write_text(f"document {i % 200}")
    config = PrepareConfig(source="text", path=str(tmp_path), val_fraction=0.2)
    found = splits(config)
    assert sorted(text for _, text in found) == sorted(f"document {i % 200}" for i in range(400))
    assert len(set(found)) == 200  # equal texts are in one split
    assert 20 <= sum(split == "val" for split, _ in set(found)) <= 60
    more = {text for split, text in set(found) if split == "val"}
    # a larger val split keeps its documents
    assert all(split_by_hash(key_of(text), 0.5) == "val" for text in more)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_a_sample_is_spread_over_the_source(tmp_path: Path, source: SourceKind) -> None:
    words = [f"{number:05d} " + "word " * 40 for number in range(2000)]
    place = tmp_path / f"x.{source}"
    if source == "text":
        place.write_text("\n".join(words))
    elif source == "jsonl":
        place.write_text("".join(json.dumps({"text": w}) + "\n" for w in words))
    else:
        pq.write_table(pa.table({"text": words}), place, compression="none", use_dictionary=False)
    config = PrepareConfig(source=source, path=str(place))
    size = 50_000
    sample = list(read_sample(config, size))
    expected = size if source != "parquet" else size / 3
    assert expected * 0.7 < sum(len(t.encode()) for t in sample) < expected * 1.3
    taken = [int(n) for n in re.findall(r"\d{5}", " ".join(sample))]
    assert all(any(low <= n < low + 500 for n in taken) for low in range(0, 2000, 500))
    assert taken == sorted(set(taken))
    assert list(read_sample(config, size)) == sample
    assert "".join(read_sample(config, 10**7)) == "".join(read_texts(config))


# --------------------------------------------------------------------------- data sets


def test_a_hub_data_set_is_streamed_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows: list[dict[str, Any]] = [{"text": "a", "n": 1}, {"text": None}, {"text": "b"}]

    def load(*args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
        asked.append((args, kwargs))
        return iter(rows)

    monkeypatch.setattr("datasets.load_dataset", load)
    config = PrepareConfig(
        source="dataset", dataset="me/data", dataset_config="10BT", dataset_split="validation"
    )
    assert "".join(read_texts(config)) == "ab"
    assert "".join(read_sample(config, 1)) == "a"  # its size is unknown, so its beginning
    assert asked[0] == (("me/data", "10BT"), {"split": "validation", "streaming": True})
    rows[2] = {"text": 3}
    with pytest.raises(DataError, match="row 2 of data set me/data has 3 in column text"):
        list(read_texts(config))
    rows[0] = {"body": "a"}
    with pytest.raises(UserError, match=r"'text', but row 0 of data set me/data .*columns: body"):
        list(read_texts(config))


def test_what_the_hub_refuses_is_told_with_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ValueError("Bad split: x")

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    told = r"data set me/data .*ValueError: Bad split: x\); check its id, configuration and split"
    with pytest.raises(UserError, match=told):
        list(read_pieces(PrepareConfig(source="dataset", dataset="me/data")))


def test_reading_a_hub_data_set_goes_on_after_any_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses the state of the data set, so that few rows are read again."""
    import datasets

    monkeypatch.setattr("accel_gpt.prepare.readers.STATE_ROWS", 3)
    monkeypatch.setattr("accel_gpt.prepare.documents.BATCH_CHARACTERS", 12)
    texts = [f"row {i} of it\n" * (1 + i % 3) + "end" for i in range(20)]

    def load(*_: Any, **__: Any) -> Any:
        return datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset(num_shards=3)

    monkeypatch.setattr("datasets.load_dataset", load)
    config = PrepareConfig(source="dataset", dataset="me/data")
    check_resume(config)
    whole = list(read_pieces(config))
    assert "".join(piece.text for piece in whole) == "".join(texts)
    state = whole[-2].after.state
    assert state is not None
    assert state["row"] == 18
    texts[:7] = ["of another shard"] * 7  # the first shard is not read again
    assert [piece.text for piece in read_pieces(config, whole[-2].after)] == [whole[-1].text]


def rows_file(number: int) -> bytes:
    """A Parquet file of a data set, with 3 MB of text."""
    texts = [f"row {i} of file {number}\n" * 10 for i in range(15_000)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "n": range(15_000)}), sink, row_group_size=3000)
    return sink.getvalue()


@pytest.mark.slow
def test_a_stopped_preparation_from_the_hub_resumes_where_it_was(tmp_path: Path) -> None:
    """It gives the same bytes without reading earlier files, and without a disk cache."""
    words = [sys.executable, "-m", "accel_gpt", "prepare", "--dataset", "tester/text"]
    words += ["--tokenizer", "bytes", "--shard_tokens", "300000", "--workers", "1", "--out"]
    with HubServer() as hub:
        hub.add("tester/text", {f"train-{n}.parquet": rows_file(n) for n in range(3)})
        environ = os.environ | environment(hub, tmp_path / "home")

        def start(name: str, **more: str) -> "subprocess.Popen[str]":
            command = [*words, str(tmp_path / name)]
            return subprocess.Popen(
                command, env=environ | more, text=True, stdout=PIPE, stderr=PIPE
            )

        whole = start("whole")
        assert "prepared" in whole.communicate()[0]
        stopped = start("stopped")
        while not (tmp_path / "stopped.partial" / "train_000014.npy").exists():
            assert stopped.poll() is None
            time.sleep(0.001)
        stopped.kill()
        stopped.communicate()
        hub.requests.clear()
        assert "resuming from" in start("stopped").communicate()[1]
        read = Counter(path.rpartition("/")[2] for _, path in hub.requests)
        assert read["train-0.parquet"] < read["train-1.parquet"]  # only for the columns
        offline = start("other", HF_HUB_OFFLINE="1")
        assert "unset HF_HUB_OFFLINE" in offline.communicate()[1]
        assert offline.returncode == 2
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "stopped" / path.name).read_bytes()
    cached = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in cached) < 20_000


# --------------------------------------------------------------------------- memory

PEAK = """
import sys
from pathlib import Path
import pyarrow.parquet
from accel_gpt.config.data import PrepareConfig
from tests.helpers.texts import read_pieces
def memory_mb():  # without the pages of files
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1000
for source in ("text", "jsonl", "parquet"):
    before, most, total = memory_mb(), 0, 0
    for i, piece in enumerate(read_pieces(PrepareConfig(source=source, path=sys.argv[1]))):
        most = most if i % 20 else max(most, memory_mb())
        total += len(piece.text)
    print(total, most - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """130 MB of each kind. Measured: 68 MB for Parquet at 100 and 400 MB alike, else 10 MB."""
    row = "some words of a text\n" * 500
    count = 130_000_000 // len(row)
    (tmp_path / "x.txt").write_text(row * count)
    (tmp_path / "x.jsonl").write_text((json.dumps({"text": row}) + "\n") * count)
    table = pa.table({"text": [f"{i}{row}" for i in range(count)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=count)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    for line in done.stdout.splitlines():
        total, grown_mb = map(float, line.split())
        assert total > 129_000_000
        assert grown_mb < 100, done.stdout
