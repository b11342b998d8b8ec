"""Documents come in a fixed order, and what cannot be read is named."""

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest

from accel_gpt.config import PrepareConfig
from accel_gpt.data.sources import (
    Piece,
    count_texts,
    documents,
    expected_bytes,
    held_out,
    split_documents,
    split_pieces,
    stdlib_files,
)
from accel_gpt.errors import DataError, UserError

Source = Literal["stdlib", "text", "jsonl", "parquet", "dataset"]


def read(path: object, source: Source = "text", **more: Any) -> list[str]:
    return list(documents(PrepareConfig(source=source, path=str(path), **more)))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.md", "a/b/c.py", "a.TXT", "skip.bin", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_folder_gives_its_text_files_in_order(tree: Path) -> None:
    assert read(tree) == ["a/b/c.py", "a/z.md", "a.TXT", "b.txt"]
    config = PrepareConfig(source="text", path=str(tree))
    assert count_texts(config) == 4
    assert expected_bytes(config) == sum(map(len, read(tree)))


def test_a_file_or_a_glob_may_have_any_ending(tree: Path) -> None:
    assert read(tree / "skip.bin") == ["skip.bin"]
    assert read(tree / "*.[bt]*") == ["b.txt", "skip.bin"]
    assert read(tree / "**/*.py") == ["a/b/c.py"]


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("\ufeffone\r\ntwo\rthree é".encode())
    assert read(tmp_path / "x.txt") == ["one\r\ntwo\rthree é"]


def test_what_is_not_there_is_named(tree: Path) -> None:
    with pytest.raises(UserError, match=r"none\.txt, which does not exist \(looked for /"):
        read(tree / "none.txt")
    with pytest.raises(UserError, match=r"\*\.gone, which matches no file"):
        read(tree / "*.gone")
    (tree / "empty").mkdir()
    with pytest.raises(UserError, match=r"which holds no file ending in \.txt"):
        read(tree / "empty")
    with pytest.raises(UserError, match=r"data\.prepare\.source is not set"):
        documents(PrepareConfig())


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
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\n\xe9\n")
    (tmp_path / "wrong.py").write_bytes(b"\xe9\n")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    texts = list(documents(PrepareConfig(source="stdlib")))
    assert texts == ["# a/x.py\n", "# b.py\n", "# coding: latin-1\né\n"]
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "none"))
    with pytest.raises(UserError, match="no library sources"):
        documents(PrepareConfig(source="stdlib"))


# --------------------------------------------------------------------------- network


class Handler(BaseHTTPRequestHandler):
    """Serves /good.txt; /short.txt breaks off; all else is 404."""

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
    assert server.asked == ["/good.txt?a=1"]
    assert read(f"{server.url}/good.txt?a=2") == ["hello"]
    assert len(server.asked) == 2
    assert len(list((tmp_path / "cache/accel_gpt").iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "message"), [("short.txt", "broke off after 5 of 50 bytes"), ("none.txt", "404")]
)
def test_a_failed_download_leaves_nothing(
    server: Any, tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(UserError, match=rf"{name} could not be downloaded.*{message}.*by hand"):
        read(f"{server.url}/{name}")
    assert list((tmp_path / "cache/accel_gpt").iterdir()) == []


def test_a_machine_without_network_says_so(server: Any) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(
        UserError, match=r"could not be downloaded.*check the address and the network"
    ):
        read(f"{server.url}/good.txt")


# --------------------------------------------------------------------------- data sets


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the lock files of `datasets` out of the home folder."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def test_json_lines_and_parquet_give_their_column(tmp_path: Path) -> None:
    import datasets

    texts = ["one", None, "", "two\nlines", "é"]
    lines = "\n".join(json.dumps({"body": text, "n": 1}) for text in texts)
    (tmp_path / "b[1].jsonl").write_text(lines)
    (tmp_path / "empty.jsonl").write_text("")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"body": "zipped"}\n')
    table = datasets.Dataset.from_dict({"body": texts, "n": [1] * 5})
    table.to_parquet(tmp_path / "x.parquet")
    kept = ["one", "two\nlines", "é"]
    assert read(tmp_path, "jsonl", text_field="body") == [*kept, "zipped"]
    assert read(tmp_path / "x.parquet", "parquet", text_field="body") == kept
    assert expected_bytes(PrepareConfig(source="jsonl", path=str(tmp_path))) is None
    assert count_texts(PrepareConfig(source="parquet", path=str(tmp_path))) is None
    with pytest.raises(UserError, match=r"text_field is 'text', .*; its columns: body, n"):
        read(tmp_path / "x.parquet", "parquet")


def test_a_column_of_numbers_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(DataError, match=r"row 0 of .*n\.jsonl has 3 in column text; expected text"):
        read(tmp_path / "n.jsonl", "jsonl")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"x\.jsonl cannot be read as jsonl"):
        read(tmp_path / "x.jsonl", "jsonl")
    (tmp_path / "x.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as parquet"):
        read(tmp_path / "x.parquet", "parquet")


def test_a_hub_data_set_is_streamed_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> Iterator[dict[str, str]]:
        asked.append((args, kwargs))
        return iter([{"text": "a"}, {"text": "b"}])

    monkeypatch.setattr("datasets.load_dataset", load)
    config = PrepareConfig(
        source="dataset", dataset="me/data", dataset_config="10BT", dataset_split="validation"
    )
    assert list(documents(config)) == ["a", "b"]
    assert asked == [(("me/data", "10BT"), {"split": "validation", "streaming": True})]

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(UserError, match=r"could not be read from the Hub.*Couldn't reach"):
        list(documents(config))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        list(documents(config))


# --------------------------------------------------------------------------- splits


def test_few_texts_are_parted_at_their_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 10)
    (tmp_path / "b.txt").write_text("é" * 7)
    config = PrepareConfig(source="text", path=str(tmp_path), val_fraction=0.1)
    parted = [("train", "abcdefghij" * 9), ("val", "abcdefghij"), ("train", "é" * 6), ("val", "é")]
    assert list(split_documents(config)) == parted


def test_many_texts_are_held_out_whole_by_their_content(tmp_path: Path) -> None:
    for i in range(400):
        (tmp_path / f"{i}.txt").write_text(f"document {i % 200}")
    config = PrepareConfig(source="text", path=str(tmp_path), val_fraction=0.2)
    found = list(split_documents(config))
    assert sorted(text for _, text in found) == sorted(f"document {i % 200}" for i in range(400))
    assert len(set(found)) == 200  # equal texts are in one split
    assert 20 <= sum(split == "val" for split, _ in set(found)) <= 60
    more = {text for split, text in set(found) if split == "val"}
    assert all(held_out(text, 0.5) for text in more)  # a larger share keeps those it had


def test_long_documents_are_cut_only_where_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.data.sources.BATCH_CHARACTERS", 10)
    (tmp_path / "a.txt").write_text("line one\nline two\nline three\n" + "x" * 7)
    config = PrepareConfig(source="text", path=str(tmp_path))
    assert list(split_pieces(config, True)) == [
        Piece("train", "line one\nline two\n", True, False),
        Piece("train", "line three\n", False, False),
        Piece("train", "xxx", False, True),
        Piece("val", "xxxx", True, True),
    ]
    assert [len(piece.text) for piece in split_pieces(config, False)] == [32, 4]


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, accel_gpt.data.prepare as p; print(sorted({'torch', 'datasets', 'tiktoken',"
    code += " 'tokenizers', 'rich'} & set(sys.modules)))"
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
