"""The files of a source are selected in order; what is left out, missing or invalid is named."""

import gzip
import http.server
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accel_gpt.config.data import PrepareConfig, SourceKind
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.prepare.prepare import prepare
from accel_gpt.prepare.sources import select, source_fingerprint, stdlib_files
from tests.data.test_remote import serving
from tests.helpers.texts import read_pieces, read_texts


def read(path: object, source: SourceKind = "auto", **more: Any) -> list[str]:
    return list(read_texts(PrepareConfig(source=source, path=str(path), **more)))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.md", "a/b/c.py", "a.TXT", "odd.log", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    return tmp_path


def test_a_folder_gives_its_text_files_in_order(tree: Path) -> None:
    assert read(tree) == ["a/b/c.py", "a/z.md", "a.TXT", "b.txt", "odd.log"]
    assert read(tree / "odd.log") == ["odd.log"]
    assert read(tree / "*.[ltp]*") == ["b.txt", "odd.log"]
    assert read(tree / "**/*.py") == ["a/b/c.py"]
    (tree / "lines.jsonl").write_text('{"text": "row"}')
    assert read(tree / "*.jsonl", "text") == ['{"text": "row"}']  # a glob names its files
    (tree / "odd.log").write_text("wide", encoding="utf-16")  # with a byte order mark
    assert read(tree, "text") == ["a/b/c.py", "a/z.md", "a.TXT", "b.txt", "wide"]


def test_the_kind_with_the_most_bytes_is_read(tree: Path) -> None:
    packed = json.dumps({"text": os.urandom(99).hex()}).encode()
    (tree / "data.jsonl.GZ").write_bytes(gzip.compress(packed))
    assert read(tree) == [json.loads(packed)["text"]]
    assert len(read(tree, "text")) == 5
    with pytest.raises(UserError, match=r"holds no parquet to read; .* jsonl, read instead"):
        read(tree, "parquet")


def test_what_is_left_out_is_counted(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "rows.jsonl").write_text('{"text": "a"}\n')
    (tree / "latin.tex").write_bytes(b"caf\xe9")
    (tree / "program").write_bytes(b"ELF\0")
    (tree / "link").symlink_to("a")
    (tree / "gone.txt").symlink_to("nowhere")
    for mark in ("runs/a/run.json", "data/b/dataset.json", "data/c.partial/progress.json"):
        (tree / mark).parent.mkdir(parents=True)
        (tree / mark).write_text("{}")
        (tree / mark).with_name("notes.txt").write_text("made here")
    prepare(PrepareConfig("auto", str(tree), tokenizer="bytes", workers=1), tree / "data" / "d")
    assert capsys.readouterr().err.splitlines()[:-1] == [
        f"reading 5 files of {tree} as text, {sum(map(len, read(tree)))} bytes",
        "left out: folders of runs and of prepared data: 3 (0 bytes)",
        "left out: hidden, a lock, a link to a folder, or not a regular file: 4 (11 bytes)",
        "left out: jsonl, read instead if data.prepare.source is jsonl: 1 (14 bytes)",
        "left out: not UTF-8 text, ending in .png: 1 (16 bytes)",
        "left out: not UTF-8 text, ending in .tex: 1 (4 bytes)",
        "left out: not UTF-8 text, ending in nothing: 1 (4 bytes)",
    ]
    assert not prepare(PrepareConfig("auto", str(tree), tokenizer="bytes"), tree / "data" / "d")
    assert capsys.readouterr().err == ""


SPLITS = ("train", "validation", "test")
LAYOUTS = {
    "hub": ([f"data/{split}-00000-of-00001.jsonl" for split in SPLITS], SPLITS),
    "names": (["wiki.train.txt", "wiki.valid.txt", "eval.txt"], SPLITS),
    "folders": (["train/pos/test_1.txt", "dev/1.txt", "testing/1.txt", "README.md"], SPLITS),
    "no val": (["train.txt", "test.txt"], ("train", "test")),
    "no split": (["a.py", "train.py", "test.py"], ()),
    "no train": (["dev.txt", "test.txt"], ()),
    "two splits in a name": (["train.txt", "train_val.txt"], ()),
}


@pytest.mark.parametrize(("names", "splits"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_splits_of_a_folder_are_kept(
    names: list[str], splits: tuple[str, ...], tmp_path: Path
) -> None:
    """The text of a file is its name."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = name * 5
        (tmp_path / name).write_text(json.dumps({"text": text}) if ".json" in name else text)
    config = PrepareConfig("auto", str(tmp_path))
    found = {split: "" for split in ("train", "val")}
    for piece in read_pieces(config):
        found[piece.split] += piece.text
    told = "\n".join(select(config).lines())
    if not splits:
        assert all(found.values())
        assert sum(map(len, found.values())) == 5 * sum(map(len, names))
        assert "left out" not in told
        return
    train, *rest = names[: len(splits)]
    if "validation" in splits:
        assert found == {"train": train * 5, "val": rest[0] * 5}
        assert "1 of them named validation, used for val" in told
    else:
        assert found["train"] + found["val"] == train * 5
    assert "left out: named test: 1" in told
    assert len(select(replace(config, path=f"{tmp_path}/**/*")).files) == len(names)  # a glob


def test_the_library_is_read_without_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stdlib_files()
    assert len(real) > 300
    assert not {"test", "tests", "site-packages"} & {part for p in real for part in p.parts[-3:]}
    for name in ("b.py", "a/x.py", "test/t.py", "a/tests/t.py", "site-packages/p.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert list(read_texts(PrepareConfig(source="stdlib"))) == ["# a/x.py\n", "# b.py\n"]


def test_a_fingerprint_tells_what_is_read(tree: Path) -> None:
    config = PrepareConfig(source="text", path=str(tree))
    seen = [source_fingerprint(config, select(config).files)]
    os.utime(tree / "b.txt", ns=(1, 1))  # as in a copy
    assert seen == [source_fingerprint(config, select(config).files)]
    (tree / "b.txt").rename(tree / "c.txt")
    seen.append(source_fingerprint(config, select(config).files))
    (tree / "c.txt").write_text("others")
    seen.append(source_fingerprint(config, select(config).files))
    hub = PrepareConfig(source="dataset", dataset="me/data")
    seen += [source_fingerprint(one, []) for one in (hub, replace(hub, dataset_config="10BT"))]
    assert len(set(seen)) == 5


def test_a_text_in_a_folder_that_is_not_utf8_is_named_and_not_left_out(tree: Path) -> None:
    (tree / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8: byte 0xe9 at offset 3"):
        read(tree)


def test_a_table_is_text_only_if_the_source_says_so(tree: Path) -> None:
    (tree / "rows.csv").write_text("id,text\n")
    assert "id,text\n" not in read(tree)
    assert "id,text\n" in read(tree, "text")
    assert read(tree / "rows.csv", "text") == ["id,text\n"]
    (tree / "large.csv").write_text("id,text\n" * 10_000)
    selection = select(PrepareConfig("auto", str(tree)))
    assert selection.source == "text"
    assert "table, read as text if data.prepare.source is text" in selection.left_out


# --------------------------------------------------------------------------- bad input


def broken_parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": [f"{i * i} and more" for i in range(1000)]}), path)
    path.write_bytes(path.read_bytes()[:2000])


def parquet_of(column: pa.Array) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table({"text": column, "n": column}), path)


def cut_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(os.urandom(9000).hex().encode())[:-900])


GOOD = b'{"text": "ab"}\n'
BAD_INPUT: list[tuple[str, bytes | Callable[[Path], object], type[AccelGPTError], str]] = [
    ("empty", Path.mkdir, UserError, "holds no text to read; give a file"),
    ("pipe", os.mkfifo, UserError, "but there is no such file"),
    ("x.png", b"\x89PNG\r", DataError, r"x\.png is not UTF-8: byte 0x89 at offset 0$"),
    ("x.txt", "ab\n".encode("utf-16-le"), DataError, "zero byte at offset 1; expec"),
    ("x.txt", "ab\n".encode("utf-16-be"), DataError, "zero byte at offset 0; expected UTF-8"),
    (
        "x.jsonl",
        '{"text": 1}'.encode("utf-16-le"),
        DataError,
        "zero byte at offset 1; expected UTF-8",
    ),
    ("x.CSV", b"id,text", UserError, r"x\.CSV, a table; expected text"),
    ("x.txt", b"", UserError, r"x\.txt is empty"),
    ("x.txt", b"\xef\xbb\xbf" + b"a" * 9000 + b"\xff", DataError, "0xff at offset 9003$"),
    ("x.jsonl", b'["text"]\n', DataError, r"line 1 of .*x\.jsonl is \['text'\]; expected an obj"),
    ("x.jsonl", b'{"text": 3}\n', DataError, r"line 1 of .*x\.jsonl has 3 in column text; expec"),
    ("x.jsonl", b'{"text": "\xff"}', DataError, r"line 1 of .* is not JSON: 'utf-8'"),
    ("x.jsonl", GOOD * 2 + b'{"a": 1, "b": 2}', UserError, r"line 3 of .* set it to .* a, b$"),
    ("x.jsonl", b" " * 250, DataError, r"line 1 of .*x\.jsonl is longer than 200 bytes; write one"),
    ("x.jsonl.gz", b"no archive", DataError, r"gz cannot be read completely as jsonl: "),
    ("x.txt.gz", cut_gzip, DataError, r"x\.txt\.gz cannot be read completely as text: "),
    ("x.jsonl.zst", b"no archive", DataError, r"zst cannot be read completely as jsonl: "),
    ("x.parquet", broken_parquet, DataError, r"x\.parquet cannot be read completely as parquet"),
    ("x.parquet", parquet_of(pa.array([1])), DataError, "column text of .* holds int64; expected"),
    ("x.parquet", parquet_of(pa.array([[1]])), DataError, "column text of .* holds list<"),
    (
        "x.parquet",
        parquet_of(pa.array([b"a", b"c\xff"]).view(pa.string())),
        DataError,
        r"x\.parquet cannot be read completely as parquet: 'utf-8' codec",
    ),
]


@pytest.mark.parametrize(("name", "content", "kind", "message"), BAD_INPUT)
def test_bad_input_is_named(
    name: str,
    content: bytes | Callable[[Path], object],
    kind: type[AccelGPTError],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 200 if content == b" " * 250 else 10**6
    monkeypatch.setattr("accel_gpt.prepare.readers.LONGEST_JSON_LINE", limit)
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    with pytest.raises(kind, match=message):
        read(path)


# --------------------------------------------------------------------------- network


PAGE = b"<!-- sign in -->\n<!DOCTYPE html>\n<html><body>" + b"<p>Please sign in</p>" * 99


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, with their dates if `Web.dates`; `redirect.txt` leads to a page."""

    server: "Web"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified" or self.server.dates:
            super().send_header(keyword, value)

    def do_GET(self) -> None:
        self.server.gets += 1
        if self.path.startswith("/redirect"):
            self.send_response(302)
            self.send_header("Location", "/login.html")
            self.end_headers()
        else:
            super().do_GET()


class Web(http.server.ThreadingHTTPServer):
    """A server of the files in `root`."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(Handler, directory=str(root)))
        self.root = root
        self.dates = True
        self.gets = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, name: str, content: bytes, date: int = 1_000_000) -> None:
        (self.root / name).write_bytes(content)
        os.utime(self.root / name, (date, date))


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "web").mkdir()
    with Web(tmp_path / "web") as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_url_is_downloaded_once(web: Web) -> None:
    web.put("good.txt", b"hello")
    for _ in range(2):
        for version in (1, 2):
            assert read(f"{web.url}/good.txt?a={version}") == ["hello"]
    assert web.gets == 2


@pytest.mark.parametrize("dates", [True, False])
def test_a_file_that_changed_at_its_url_is_read(
    dates: bool, web: Web, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with the same size, and from a server that says nothing of its files."""
    web.dates = dates
    url = f"{web.url}/good.txt"
    for date, content in enumerate((b"one", b"two", b"two"), 1_000_000):
        web.put("good.txt", content, date)
        config = PrepareConfig("text", url)
        assert read(url) == [content.decode()]
    prints = {source_fingerprint(config, select(config).files)}
    web.put("good.txt", b"six", 2_000_000)
    assert source_fingerprint(config, select(config).files) not in prints
    assert "cache" not in capsys.readouterr().err
    web.shutdown()
    web.server_close()
    assert read(url) == ["six"]
    told = capsys.readouterr().err
    assert re.search(rf"{url} cannot be reached .* from the cache, downloaded on \d{{4}}-", told)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("page.txt", PAGE, "an HTML page"),
        ("rows.jsonl", PAGE, "an HTML page"),
        ("blob", PAGE, "an HTML page"),
        ("redirect.txt", b"", "an HTML page"),
        ("large.txt", POINTER, "a pointer of Git LFS"),
    ],
)
def test_a_placeholder_is_refused(
    name: str, content: bytes, what: str, web: Web, tmp_path: Path
) -> None:
    web.put(name, content)
    web.put("login.html", PAGE)
    with pytest.raises(UserError, match=f"is {web.url}/{name}, but {what} comes from there"):
        read(f"{web.url}/{name}")
    assert not list(tmp_path.glob("cache/accel_gpt/*"))
    web.put(name, b'{"text": "repaired"}')
    if name != "redirect.txt":
        assert "repaired" in read(f"{web.url}/{name}")[0]
    assert read(f"{web.url}/login.html") == [PAGE.decode()]


def test_a_failed_download_leaves_nothing(tmp_path: Path, web: Web) -> None:
    with serving(tmp_path / "served") as server:
        (server.root / "good.txt").write_text("hello")
        server.drops = 9
        for name, message in (
            ("good.txt", "(received 2 of 5 bytes|payload is not completed)"),
            ("none.txt", "does not exist; check"),
        ):
            told = rf"{name} could not be downloaded.*{message}.*yourself"
            with pytest.raises(UserError, match=told):
                read(f"{server.url}/{name}")
    assert list((tmp_path / "cache/accel_gpt").iterdir()) == []
