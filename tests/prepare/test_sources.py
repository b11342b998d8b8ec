"""Documents come in a fixed order, and what cannot be read is named."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_gpt.config.data import PrepareConfig, SourceKind
from accel_gpt.data.index import read_index
from accel_gpt.errors import DataError, UserError
from accel_gpt.prepare.documents import (
    Piece,
    Position,
    split_by_hash,
    split_hash,
)
from accel_gpt.prepare.pieces import pieces
from accel_gpt.prepare.prepare import prepare
from accel_gpt.prepare.readers import Skipped
from accel_gpt.prepare.sources import (
    DATA_ENDINGS,
    TEXT_ENDINGS,
    guess_source,
    select_files,
    stdlib_files,
)
from tests.helpers.hub_server import HubServer, environment
from tests.helpers.texts import fingerprint, read_pieces, read_sample, read_texts, text_bytes


def read(path: object, source: SourceKind = "text", **more: Any) -> list[str]:
    return list(read_texts(PrepareConfig(source=source, path=str(path), **more)))


def key_of(text: str) -> bytes:
    return split_hash(text.encode()).digest()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.md", "a/b/c.py", "a.TXT", "odd.log", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    return tmp_path


def test_a_folder_gives_its_text_files_in_order(tree: Path) -> None:
    assert read(tree) == ["a/b/c.py", "a/z.md", "a.TXT", "b.txt", "odd.log"]
    config = PrepareConfig(source="text", path=str(tree))
    assert text_bytes(config) == sum(map(len, read(tree)))
    assert read(tree / "odd.log") == ["odd.log"]
    assert read(tree / "*.[ltp]*") == ["b.txt", "odd.log"]
    assert read(tree / "**/*.py") == ["a/b/c.py"]
    (tree / "lines.jsonl").write_text("[]" * 999)
    # a file that only a glob names may have any ending
    assert read(tree / "*.jsonl") == ["[]" * 999]


def test_text_is_read_as_it_is_but_for_the_line_ends_of_windows(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("\ufeffone\r\ntwo\rthree é".encode())
    assert read(tmp_path / "x.txt") == ["one\ntwo\rthree é"]


def test_what_is_not_there_is_named(tree: Path) -> None:
    (tree / "empty").mkdir()
    for name, problem in (
        ("none.txt", r"none\.txt, but it does not exist \(looked for /"),
        ("*.gone", r"\*\.gone, but it matches no file"),
        ("empty", r"empty, but it holds no file; put text into it"),
        ("x" * 5000, "does not exist"),
    ):
        with pytest.raises(UserError, match=problem):
            read(tree / name)
    with pytest.raises(UserError, match=r"data\.prepare\.source is not set"):
        read_texts(PrepareConfig())


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_text_that_is_not_utf8_is_refused_with_its_offset(tmp_path: Path, mark: bytes) -> None:
    (tmp_path / "x.txt").write_bytes(mark + b"abc\xff\xfe")
    offset = 3 + len(mark)
    with pytest.raises(DataError, match=rf"x\.txt is not UTF-8: byte 0xff at offset {offset}"):
        read(tmp_path)


def test_the_library_is_read_without_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stdlib_files()
    assert len(real) > 300
    assert not {"test", "tests", "site-packages"} & {part for p in real for part in p.parts[-3:]}
    for name in ("b.py", "a/x.py", "test/t.py", "a/tests/t.py", "site-packages/p.py", "empty.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else f"# {name}\n")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    texts = list(read_texts(PrepareConfig(source="stdlib")))
    assert texts == ["# a/x.py\n", "# b.py\n"]
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "none"))
    with pytest.raises(UserError, match="no library sources"):
        list(read_texts(PrepareConfig(source="stdlib")))


# --------------------------------------------------------------------------- network


class Handler(BaseHTTPRequestHandler):
    """Serves /good.txt; cuts /short.txt off; answers 404 to the rest."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        name = self.path.split("?")[0]
        self.send_response(200 if name in ("/good.txt", "/short.txt") else 404)
        self.send_header("Content-Length", "5" if name == "/good.txt" else "50")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    running: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.asked = []
    running.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def test_a_url_is_downloaded_once(server: Any, tmp_path: Path) -> None:
    for _ in range(3):
        assert read(f"{server.url}/good.txt?a=1") == ["hello"]
    assert set(server.asked) == {"/good.txt?a=1"}
    count = len(server.asked)
    assert read(f"{server.url}/good.txt?a=1") == ["hello"]
    assert read(f"{server.url}/good.txt?a=2") == ["hello"]
    assert len(server.asked) == 2 * count
    assert len(list((tmp_path / "cache/accel_gpt").iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short.txt", "(received 5 of 50 bytes|payload is not completed)"),
        ("none.txt", "does not exist; check"),
    ],
)
def test_a_failed_download_leaves_nothing(
    server: Any, tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(UserError, match=rf"{name} could not be downloaded.*{message}.*yourself"):
        read(f"{server.url}/{name}")
    assert list((tmp_path / "cache/accel_gpt").iterdir()) == []


# --------------------------------------------------------------------------- data sets


def test_a_hub_data_set_is_streamed_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> Iterator[dict[str, str]]:
        asked.append((args, kwargs))
        return iter([{"text": "a"}, {"text": "b"}])

    monkeypatch.setattr("datasets.load_dataset", load)
    config = PrepareConfig(
        source="dataset", dataset="me/data", dataset_config="10BT", dataset_split="validation"
    )
    assert list(read_texts(config)) == ["a", "b"]
    assert asked == [(("me/data", "10BT"), {"split": "validation", "streaming": True})]

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        list(read_texts(config))


class GatedRepoError(Exception):
    """Named as the Hub's."""


class RepositoryNotFoundError(Exception):
    """Named as the Hub's."""


class ConnectError(Exception):
    """Named as the Hub's."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            GatedRepoError("401"),
            r"gated: accept its terms at .*me/data, then run hf auth login, or set",
        ),
        (RepositoryNotFoundError("404"), r"does not exist or is private.*HF_TOKEN"),
        (ConnectError("refused"), "the Hub cannot be reached: check the network"),
        (ConnectionError("Couldn't reach"), "cannot be reached: .*Couldn't reach"),
        (ValueError("Bad split: x"), "check its id, configuration and split .*Bad split"),
    ],
)
def test_what_the_hub_refuses_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    from datasets.exceptions import DatasetNotFoundError

    def load(*_: Any, **__: Any) -> None:
        if not isinstance(error, GatedRepoError | RepositoryNotFoundError):
            raise error
        gated = isinstance(error, GatedRepoError)
        raise DatasetNotFoundError("is a gated dataset" if gated else "doesn't exist") from error

    monkeypatch.setattr("datasets.load_dataset", load)
    config = PrepareConfig(source="dataset", dataset="me/data")
    with pytest.raises(UserError, match=message) as raised:
        list(read_pieces(config, True))
    assert raised.value.exit_code == 2


def test_rows_of_the_hub_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "a", "n": 1}, {"text": None}, {"text": 3}, {"text": "b"}]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: iter(rows))
    config = PrepareConfig(source="dataset", dataset="me/data")
    with pytest.raises(DataError, match="row 2 of data set me/data has 3 in column text"):
        list(read_texts(config))
    assert list(read_texts(replace(config, skip_invalid=True))) == ["a", "b"]
    with pytest.raises(UserError, match=r"'body', but data set me/data .*columns: text, n"):
        list(read_texts(replace(config, text_field="body")))


def rows_file(number: int) -> bytes:
    """A Parquet file of a data set, with 3 MB of text."""
    texts = [f"row {i} of file {number}\n" * 10 for i in range(15_000)]
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "n": range(15_000)}), sink, row_group_size=3000)
    return sink.getvalue()


@pytest.mark.slow
def test_a_stopped_preparation_from_the_hub_resumes_where_it_was(tmp_path: Path) -> None:
    """It gives the same bytes without reading earlier files, and without a disk cache."""
    words = [sys.executable, "-m", "accel_gpt.cli", "prepare", "--dataset", "tester/text"]
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
        assert "HF_HUB_OFFLINE is set" in offline.communicate()[1]
        assert offline.returncode == 2
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "stopped" / path.name).read_bytes()
    cached = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in cached) < 20_000


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
    whole = list(read_pieces(config, True))
    assert "".join(piece.text for piece in whole) == "".join(texts)
    state = whole[-2].after.state
    assert state is not None
    assert state["row"] == 18
    texts[:7] = ["of another shard"] * 7  # the first shard is not read again
    last = list(read_pieces(config, True, whole[-2].after))
    assert [piece.text for piece in last] == [whole[-1].text]


# --------------------------------------------------------------------------- splits


def splits(config: PrepareConfig) -> list[tuple[str, str]]:
    return [(piece.split, piece.text) for piece in read_pieces(config, False)]


def test_few_texts_are_parted_at_their_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    (tmp_path / "b.txt").write_text("é" * 7)
    config = PrepareConfig(source="text", path=str(tmp_path), val_fraction=0.1)
    parted = [("train", "abcdefghij" * 9), ("val", "abcdefghij"), ("train", "é" * 6), ("val", "é")]
    assert splits(config) == parted
    keys = [piece.key for piece in read_pieces(config, False)]
    assert keys == [key_of(text) for _, text in parted]


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


@pytest.mark.parametrize("fraction", [0.001, 0.3])
def test_the_share_held_out_is_that_asked_for(fraction: float) -> None:
    """Within five standard deviations of the binomial, without rounding to 1/256."""
    texts = 50_000
    found = sum(split_by_hash(key_of(f"document {i}"), fraction) == "val" for i in range(texts))
    deviation = (texts * fraction * (1 - fraction)) ** 0.5
    assert abs(found - texts * fraction) < 5 * deviation


def test_long_documents_are_cut_only_where_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.prepare.documents.BATCH_CHARACTERS", 10)
    head, tail = "line one\nline two\nline three\nxxx", "xxxx"
    (tmp_path / "a.txt").write_text(head + tail)
    config = PrepareConfig(source="text", path=str(tmp_path))
    train, val = key_of(head), key_of(tail)
    assert list(read_pieces(config, True)) == [
        Piece("train", "line one\nline two\n", True, False, train, Position(0, 18)),
        Piece("train", "line three\n", False, False, train, Position(0, 29)),
        Piece("train", "xxx", False, True, train, Position(0, 32)),
        Piece("val", "xxxx", True, True, val, Position(0, 36)),
    ]
    assert [len(piece.text) for piece in read_pieces(config, False)] == [32, 4]


# --------------------------------------------------------------------------- positions


def make(folder: Path, source: SourceKind, count: int = 3) -> PrepareConfig:
    """Write files of a source: long documents in several pieces, short and empty documents."""
    folder.mkdir()
    for unit in range(count):
        rows = ["", *("\n".join(f"{w}é {i}" for i in range(w)) for w in (unit, 9, 1, 30)), "x" * 9]
        table = pa.table({"text": rows, "n": list(range(6))})
        path = folder / f"{unit}"
        if source == "text":
            mark = "\ufeff" if unit % 2 else ""
            path.with_suffix(".txt").write_text(mark + "\r\n".join(rows))
        elif source == "jsonl":
            lines = "".join(json.dumps({"text": row}) + "\n\n" for row in rows)
            with (gzip.open if unit else open)(f"{path}.jsonl{'.gz' * bool(unit)}", "wt") as file:
                file.write(lines)
        elif source == "parquet":
            pq.write_table(table, f"{path}.parquet", row_group_size=2)
        else:
            new = pa.ipc.new_file if unit else pa.ipc.new_stream
            with new(f"{path}.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=4)
    return PrepareConfig(source=source, path=str(folder), val_fraction=0.3)


FILES: tuple[SourceKind, ...] = ("text", "jsonl", "parquet", "arrow")


def read_from(config: PrepareConfig, start: Position) -> list[Piece]:
    """Return the pieces after a position, without the states of `datasets`, which vary."""
    found = read_pieces(config, True, start)
    return [piece._replace(after=piece.after._replace(state=None)) for piece in found]


def check_resume(config: PrepareConfig) -> None:
    """Assert that reading resumes exactly after any piece."""
    whole = list(read_pieces(config, True))
    places = [piece.after[:3] for piece in whole]
    assert places == sorted(set(places))
    assert len(whole) > 1
    expected = read_from(config, Position())
    for i, piece in enumerate(whole):
        again = json.loads(json.dumps(piece.after))
        assert read_from(config, Position(*again)) == expected[i + 1 :]


@pytest.mark.parametrize("source", FILES)
@pytest.mark.parametrize(("count", "few"), [(3, 100), (3, 2), (1, 100)])
def test_reading_goes_on_after_any_piece(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: SourceKind,
    count: int,
    few: int,
) -> None:
    monkeypatch.setattr("accel_gpt.prepare.documents.BATCH_CHARACTERS", 12)
    monkeypatch.setattr("accel_gpt.prepare.documents.FEW_TEXTS", few)
    monkeypatch.setattr("accel_gpt.prepare.readers.CHUNK_BYTES", 7)
    config = make(tmp_path / "made", source, count)
    check_resume(config)
    pieces = list(read_pieces(config, True))
    assert not all(p.first and p.last for p in pieces)
    assert {p.split for p in pieces} == {"train", "val"} or few == 2


# --------------------------------------------------------------------------- standard input


class Input:
    """Standard input that holds `data`."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def test_standard_input_is_read_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_gpt.prepare.documents.BATCH_CHARACTERS", 30)

    def read_stdin(source: SourceKind, data: str, *start: Any) -> list[Piece]:
        monkeypatch.setattr("sys.stdin", Input(data.encode()))
        config = PrepareConfig(source=source, path="-", val_fraction=0.2)
        return list(read_pieces(config, True, *start))

    text = "".join(f"line {i} of the text\n" for i in range(20))
    lines = "".join(json.dumps({"text": t}) + "\n" for t in (text, "short", "", "b" * 40))
    for source, data in (("text", "\ufeff" + text), ("jsonl", lines)):
        found = read_stdin(source, data)  # type: ignore[arg-type]
        joined = text if source == "text" else text + "short" + "b" * 40
        assert "".join(p.text for p in found) == joined
        for i, piece in enumerate(found):
            assert read_stdin(source, data, piece.after) == found[i + 1 :]  # type: ignore[arg-type]
    parted = read_stdin("text", text)
    assert [p.split for p in parted] == ["train", "val"] * (len(parted) // 2)
    assert all(p.first and p.last and p.key == key_of(p.text) for p in parted)


def test_standard_input_is_read_once_and_as_lines_only() -> None:
    config = PrepareConfig(source="text", path="-", tokenizer="bpe")
    for read_first in (read_texts, lambda c: read_sample(c, 10)):
        with pytest.raises(UserError, match=r"standard input can be read only once, .* bpe needs"):
            list(read_first(config))
    with pytest.raises(UserError, match="parquet, but standard input"):
        read_pieces(replace(config, source="parquet"), True)
    assert text_bytes(config) is None
    assert fingerprint(config) == ""


# --------------------------------------------------------------------------- samples, names, skips


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


def test_a_sample_of_unknown_amount_is_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ({"text": f"{i:03d} and more"} for i in range(1000))
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: rows)
    sample = list(read_sample(PrepareConfig(source="dataset", dataset="me/data"), 120))
    assert sample == [f"{i:03d} and more" for i in range(10)]


def test_a_fingerprint_tells_what_is_read(tree: Path) -> None:
    config = PrepareConfig(source="text", path=str(tree))
    seen = {fingerprint(config)}
    assert seen == {fingerprint(config)}
    os.utime(tree / "b.txt", ns=(1, 1))
    seen.add(fingerprint(config))
    (tree / "b.txt").rename(tree / "c.txt")
    seen.add(fingerprint(config))
    (tree / "c.txt").write_text("others")
    os.utime(tree / "c.txt", ns=(1, 1))
    seen.add(fingerprint(config))
    hub = PrepareConfig(source="dataset", dataset="me/data")
    seen |= {fingerprint(hub), fingerprint(replace(hub, dataset_config="10BT"))}
    assert len(seen) == 6
    assert all(len(one) == 64 for one in seen)


def test_the_source_is_guessed_from_endings(tree: Path, tmp_path: Path) -> None:
    assert guess_source(str(tree)) == "text"
    (tree / "data.jsonl.GZ").write_bytes(b"x" * 1000)
    assert guess_source(str(tree)) == "jsonl"
    for source, endings in {"text": (*TEXT_ENDINGS, ".log", ""), **DATA_ENDINGS}.items():
        for ending in endings:
            path = tmp_path / f"one{ending}"
            path.write_text("")
            assert guess_source(str(path)) == guess_source(f"https://x.org/a{ending}?b") == source
    with pytest.raises(UserError, match="set --source text or --source jsonl"):
        guess_source("-")
    with pytest.raises(UserError, match=r"image\.png, but it is binary, not UTF-8 text; give"):
        guess_source(str(tree / "image.png"))
    with pytest.raises(UserError, match="does not exist"):
        guess_source(str(tree / "none.txt"))
    with pytest.raises(UserError, match=r"/dev/null, but it is neither a file nor a folder"):
        guess_source("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        UserError, match=r"pipe, but it is a pipe, which can be read only once; give"
    ):
        guess_source(str(tmp_path / "pipe"))


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv.gz"])
def test_a_table_is_read_only_as_text_and_on_request(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("id,text\n1,a\n")
    for asked in (str(path), str(tmp_path), str(tmp_path / "*"), f"https://x.org/{name}?b"):
        with pytest.raises(UserError, match=r"a table; .*Dataset\.from_csv.*source to text"):
            guess_source(asked)
    assert select_files(str(path), "text").files == [path]
    assert select_files(str(tmp_path), "text").files == [path]
    (tmp_path / "a.txt").write_text("a")
    chosen = select_files(str(tmp_path))
    assert [file.name for file in chosen.files] == ["a.txt"]
    assert "a table; to read one of its columns" in chosen.lines()[1]


def test_bare_json_describes_other_files(tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text("x" * 9000)
    assert guess_source(str(tmp_path)) == "jsonl"
    (tmp_path / "LICENSE").write_text("a licence beside rows in .json")
    assert guess_source(str(tmp_path)) == "jsonl"
    (tmp_path / "a.txt").write_text("text")
    assert guess_source(str(tmp_path)) == "text"


def test_what_is_read_and_what_is_left_out_is_counted_by_ending(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "README").write_text("text without an ending " * 9)
    (tree / "rows.jsonl").write_text('{"text": "a"}\n')
    (tree / "program").write_bytes(b"\x7fELF\2\1\1" + bytes(300))
    (tree / "paper.pdf").write_bytes(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n\x01\x02")
    (tree / "link").symlink_to("a")
    (tree / "gone.txt").symlink_to("nowhere")
    for mark in ("runs/a/run.json", "data/b/dataset.json", "data/c.partial/progress.json"):
        (tree / mark).parent.mkdir(parents=True)
        (tree / mark).write_text("{}")
        (tree / mark).with_name("notes.txt").write_text("made here")
    (tree / "data" / "d.lock").touch()
    prepare(PrepareConfig("auto", str(tree), tokenizer="bytes", workers=1), tree / "data" / "d")
    printed = capsys.readouterr().err.splitlines()
    assert printed[:-1] == [
        f"reading 6 files of {tree} as text, {sum(map(len, read(tree)))} bytes",
        "left out: 1 file without an ending, 307 bytes: binary, not UTF-8 text",
        "left out: 1 file ending in .pdf, 17 bytes: binary, not UTF-8 text",
        "left out: 1 file ending in .png, 16 bytes: binary, not UTF-8 text",
        "left out: 1 file ending in .jsonl, 14 bytes: jsonl; set source to jsonl to read it "
        "instead",
        "left out: broken links, pipes, sockets and devices: 1",
        "left out: empty lock files: 1",
        "left out: folders of runs and of prepared data: 3",
        "left out: hidden files and folders: 2",
        "left out: links to folders: 1",
    ]
    index = read_index(tree / "data" / "d")
    shards = index.splits["train"] + index.splits["val"]
    assert sum(shard.bytes for shard in shards) == sum(map(len, read(tree)))
    assert not prepare(PrepareConfig("auto", str(tree), tokenizer="bytes"), tree / "data" / "d")
    assert capsys.readouterr().err == ""


def test_many_endings_are_summed_up(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for i in range(12):
        (tmp_path / f"x.bin{i}").write_bytes(bytes(i + 1))
    lines = select_files(str(tmp_path)).lines()
    assert len(lines) == 12
    assert lines[1] == "left out: 1 file ending in .bin11, 12 bytes: binary, not UTF-8 text"
    assert lines[-1] == "left out: 2 files of 2 more endings, 3 bytes"


def test_a_folder_without_files_of_the_source_names_what_it_has(tree: Path) -> None:
    message = r"no file ending in \.parquet, only 6 files that parquet does not read \(\.log .*\.md"
    with pytest.raises(UserError, match=message):
        select_files(str(tree), "parquet")
    for path in tree.rglob("*"):
        if path.is_file() and path.suffix != ".png":
            path.unlink()
    with pytest.raises(UserError, match=r"holds no text, only 1 file that text does not read"):
        select_files(str(tree))


@pytest.mark.parametrize(
    "state",
    [
        {"_data_files": [{"filename": "gone.arrow"}]},
        {"_data_files": [{"filename": "../there.arrow"}]},
        {"_data_files": 5},
    ],
)
def test_a_damaged_state_of_save_to_disk_is_named(tmp_path: Path, state: object) -> None:
    (tmp_path / "there.arrow").write_text("x")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"state\.json"):
        read(folder, "arrow")


def test_what_cannot_be_decoded_is_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"good " * 9 + b"\xff")
    (tmp_path / "b.txt").write_text("fine")
    (tmp_path / "c.txt").write_bytes(b"\xc3")
    config = PrepareConfig(source="text", path=str(tmp_path), skip_invalid=True)
    skipped = Skipped(allowed=True)
    found = list(read_pieces(config, True, skipped=skipped))
    assert "".join(p.text for p in found) == "".join(read_texts(config)) == "fine"
    assert skipped.count == 2
    printed = capsys.readouterr().err
    assert printed.count("skipped (") == 1
    assert "a.txt is not UTF-8: byte 0xff at offset 45" in printed
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8"):
        list(read_pieces(replace(config, skip_invalid=False), True))


def test_an_empty_file_is_an_error_only_when_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match=r"but .*a\.txt is empty"):
        read(tmp_path)
    (tmp_path / "b.txt").write_text("b")
    assert read(tmp_path) == ["b"]


@settings(max_examples=200)
@given(
    st.text(st.sampled_from("ab1é.\n\n\r \t'"), max_size=80), st.integers(1, 9), st.integers(1, 9)
)
def test_chunks_make_no_difference_to_pieces(text: str, size: int, step: int) -> None:
    chunks = (text[i : i + step] for i in range(0, len(text), step))
    assert list(pieces(chunks, size)) == list(pieces([text], size))


def test_text_that_cannot_be_cut_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_gpt.prepare.pieces.LONGEST", 1000)
    with pytest.raises(DataError, match=r"x\.txt has [\d,]+ characters without a line end"):
        list(pieces(("a" * 100 for _ in range(100)), 10, "x.txt"))
    words = ["a" * 90 + " " for _ in range(100)]
    assert "".join(pieces(words, 10, "x.txt")) == "".join(words)
