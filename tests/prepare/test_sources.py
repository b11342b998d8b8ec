"""What a source names is selected in order; what is left out, missing or invalid is named."""

import gc
import gzip
import http.server
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accel_gpt.config.data import PrepareConfig
from accel_gpt.errors import AccelGPTError, DataError, UserError
from accel_gpt.prepare.prepare import prepare
from accel_gpt.prepare.sources import select, source_fingerprint, stdlib_files
from tests.data.test_remote import serving
from tests.helpers.texts import read, read_pieces


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/z.md", "a/b/c.py", "a.TXT", "odd.log", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    return tmp_path


TEXTS = ["a/b/c.py", "a/z.md", "a.TXT", "b.txt", "odd.log"]


def test_a_folder_gives_its_text_files_in_order(tree: Path) -> None:
    assert read(tree) == TEXTS
    assert read(tree / "odd.log") == ["odd.log"]
    assert read(tree / "*.[ltp]*") == ["b.txt", "odd.log"]
    assert read(tree / "**/*.py") == ["a/b/c.py"]
    (tree / "odd.log").write_text("wide", encoding="utf-16")  # with a byte order mark
    assert read(tree) == [*TEXTS[:-1], "wide"]


def test_json_beside_texts_is_text_and_the_kind_with_the_most_bytes_is_read(tree: Path) -> None:
    pretty = json.dumps({"name": "x", "list": [1, 2]}, indent=2)
    (tree / "settings.json").write_text(pretty)
    assert read(tree) == [*TEXTS, pretty]
    packed = json.dumps({"text": os.urandom(99).hex()}).encode()
    (tree / "data.jsonl.gz").write_bytes(gzip.compress(packed))
    assert read(tree) == [json.loads(packed)["text"]]


def test_what_is_left_out_is_one_line(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "rows.jsonl").write_text('{"text": "a"}\n')
    (tree / "program").write_bytes(b"ELF\0")
    (tree / "large.txt").write_bytes(POINTER)
    (tree / "none.txt").touch()
    (tree / "link").symlink_to("a")
    for mark in ("runs/a/run.json", "data/b/dataset.json", "data/c.partial/progress.json"):
        (tree / mark).parent.mkdir(parents=True)
        (tree / mark).write_text("{}")
        (tree / mark).with_name("notes.txt").write_text("made here")
    config = PrepareConfig(source=str(tree), tokenizer="bytes")
    prepare(config, tree / "data" / "d")
    assert capsys.readouterr().err.splitlines()[:2] == [
        f"reading 5 files of {tree} as text, {sum(map(len, TEXTS))} bytes",
        f"left out of {tree}: 1 .jsonl beside text, 1 a pointer of Git LFS, 1 empty, "
        "3 folders of runs or of prepared data, 3 hidden, a lock or a link to a folder, "
        "1 not text (.png), 1 not text (no ending)",
    ]
    assert not prepare(config, tree / "data" / "d")
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
@pytest.mark.parametrize("pattern", ["", "**/*"])
def test_the_splits_of_a_folder_are_kept(
    names: list[str], splits: tuple[str, ...], pattern: str, tmp_path: Path
) -> None:
    """Also those of a glob. The text of a file is its name."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = name * 5
        (tmp_path / name).write_text(json.dumps({"text": text}) if ".json" in name else text)
    config = PrepareConfig(source=str(tmp_path / pattern), val_fraction=0.5)
    found: dict[str, list[str]] = {"train": [], "val": []}
    for piece in read_pieces(config):
        found[piece.split].append(piece.text)
    told = "\n".join(select(config)[1])
    if not splits:
        assert len(found["train"] + found["val"]) == len(names)
        assert "left out" not in told
        return
    train, *rest = names[: len(splits)]
    if "validation" in splits:
        assert found == {"train": [train * 5], "val": [rest[0] * 5]}
        assert " for validation, " in told
    else:
        assert "".join(found["train"] + found["val"]) == train * 5
    assert re.search("left out of .* 1 named test", told)


def test_a_validation_text_of_ones_own_is_used(tmp_path: Path) -> None:
    """A file or a folder; of a folder with splits, its validation split. No train text has it."""
    (tmp_path / "a.txt").write_text("to train on")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.txt").write_text("to train on")
    (tmp_path / "d" / "b.txt").write_text("held out")
    (tmp_path / "b.jsonl").write_text('{"text": "to validate with"}\n')
    for split in SPLITS:
        (tmp_path / "c" / split).mkdir(parents=True)
        (tmp_path / "c" / split / "1.txt").write_text(split)
    for source, val, expected in (
        ("a.txt", "b.jsonl", {"to train on": "train", "to validate with": "val"}),
        ("a.txt", "c", {"to train on": "train", "validation": "val"}),
        ("c", "b.jsonl", {"train": "train", "to validate with": "val"}),
        ("d", "d/../d/b.txt", {"to train on": "train", "held out": "val"}),
    ):
        config = PrepareConfig(source=str(tmp_path / source), val=str(tmp_path / val))
        assert {one.text: one.split for one in read_pieces(config)} == expected
        told = any("left out: the validation split" in line for line in select(config)[1])
        assert told == (source == "c")
    with pytest.raises(
        UserError, match=r"data\.prepare\.val is .*/no\.txt, but there is no such file"
    ):
        select(PrepareConfig(source=str(tmp_path / "a.txt"), val=str(tmp_path / "no.txt")))
    with pytest.raises(UserError, match=r"d/\*, but data\.prepare\.val has all of its files"):
        select(PrepareConfig(source=str(tmp_path / "d" / "*"), val=str(tmp_path / "d")))


def test_the_library_is_read_without_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stdlib_files()
    assert len(real) > 300
    assert not {"test", "tests", "site-packages"} & {part for p in real for part in p.parts[-3:]}
    for name in ("b.py", "a/x.py", "test/t.py", "a/tests/t.py", "site-packages/p.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert read("stdlib") == ["# a/x.py\n", "# b.py\n"]


def test_a_fingerprint_tells_what_is_read(tree: Path) -> None:
    def print_of(**more: str) -> str:
        config = PrepareConfig(**{"source": str(tree), **more})
        return source_fingerprint(config, select(config)[0])

    seen = [print_of()]
    os.utime(tree / "b.txt", ns=(1, 1))  # as in a copy
    assert seen == [print_of()]
    (tree / "b.txt").rename(tree / "c.txt")
    seen.append(print_of())
    (tree / "c.txt").write_text("others")
    seen += [print_of(), print_of(val=str(tree / "c.txt"))]
    seen += [print_of(source="me/data"), print_of(source="me/data", subset="10BT")]
    assert len(set(seen)) == 6


# --------------------------------------------------------------------------- bad input


def broken_parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": [f"{i * i} and more" for i in range(1000)]}), path)
    path.write_bytes(path.read_bytes()[:2000])


def parquet_of(column: pa.Array) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table({"text": column, "n": column}), path)


def cut_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(os.urandom(9000).hex().encode())[:-900])


BAD_INPUT: list[tuple[str, bytes | Callable[[Path], object], type[AccelGPTError], str]] = [
    ("folder", Path.mkdir, UserError, "but it holds no file; expected text"),
    ("pipe", os.mkfifo, UserError, "1 not a regular file"),
    ("x.png", b"\x89PNG\r\0", UserError, r"x\.png, but 1 not text"),
    ("x.txt", b"", UserError, r"x\.txt, but 1 empty"),
    ("a::b.jsonl", b'{"text": "a"}', UserError, "but 1 with :: in its path"),
    ("x.txt", b"version https://git-lfs.github.com/spec/v1\n", UserError, "a pointer of Git LFS"),
    ("x.txt.gz", cut_gzip, DataError, r"x\.txt\.gz cannot be read completely: "),
    ("x.jsonl", b'{"text": 3}\n', DataError, r"text in row 0 of .*x\.jsonl is not text: 3"),
    ("x.jsonl", b'{"a": 1, "b": 2}', UserError, r"is text, but .* no such column; .* a, b$"),
    ("x.csv", b"n,text\n1,one, two\n", DataError, r"x\.csv cannot be read: .* loss of data"),
    ("x.jsonl", b'{"text": "a"}\nnot JSON\n', DataError, r"x\.jsonl cannot be read: JSON parse er"),
    ("x.parquet", broken_parquet, DataError, r"x\.parquet cannot be read: "),
    (
        "x.parquet",
        parquet_of(pa.array([[1]])),
        DataError,
        r"text in row 0 of .* is not text: \[1\]",
    ),
]


# `datasets` leaves a file open that it does not read to its end
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_bad_input_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, (name, content, kind, message) in enumerate(BAD_INPUT):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)
        with pytest.raises(kind, match=message):
            read(path)
    assert not [record for record in caplog.records if record.name.startswith("datasets")]
    gc.collect()  # here, where the warning of an open file is ignored


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

    def put(self, name: str, content: bytes, date: int = 1) -> None:
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


@pytest.mark.parametrize("dates", [True, False])
def test_a_file_that_changed_at_its_url_is_read(dates: bool, web: Web) -> None:
    """Also with the same size, and from a server that says nothing of its files."""
    web.dates = dates
    config = PrepareConfig(source=f"{web.url}/good.txt?a=1")
    seen = set()
    for date, content in ((1, b"one"), (2, b"two"), (2, b"two")):
        web.put("good.txt", content, date)
        assert read(str(config.source)) == [content.decode()]
        seen.add(source_fingerprint(config, select(config)[0]))
    assert len(seen) == 2
    if dates:
        assert web.gets == 2


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("rows.jsonl", PAGE, "an HTML page"),
        ("redirect.txt", b"", "an HTML page"),
        ("large.txt", POINTER, "a pointer of Git LFS"),
    ],
)
def test_a_placeholder_is_refused(name: str, content: bytes, what: str, web: Web) -> None:
    web.put(name, content)
    web.put("login.html", PAGE)
    for _ in range(2):
        with pytest.raises(UserError, match=f"source is {web.url}/{name}, but .* is {what}; expec"):
            read(f"{web.url}/{name}")
    assert "".join(read(f"{web.url}/login.html")) == PAGE.decode()


def test_a_failed_download_leaves_nothing(tmp_path: Path, web: Web) -> None:
    with serving(tmp_path / "served") as server:
        (server.root / "good.txt").write_text("hello")
        server.drops = 9
        for name, message in (
            ("good.txt", "cannot be downloaded: .*(received 2 of 5|payload is not completed)"),
            ("none.txt", "does not exist"),
        ):
            with pytest.raises(UserError, match=rf"{name}.*{message}"):
                read(f"{server.url}/{name}")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
