"""Shards behind a URL: right bytes under every fault, a cache below its limit, no waiting."""

import hashlib
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_gpt.config.data import DataConfig
from accel_gpt.data import cache as caching
from accel_gpt.data.cache import CHUNK, Patience, RemoteFolder
from accel_gpt.data.order import Order
from accel_gpt.data.remote import FileInfo, FsspecStore, HttpStore, Missing, is_url, reason
from accel_gpt.data.shards import FORMAT, HEADER, VERSION, Shard, Split, open_split, resident
from accel_gpt.data.sources import open_data
from accel_gpt.errors import DataError, UserError
from accel_gpt.redact import redact_url

QUICK = Patience(tries=4, first_pause=0.01, longest_pause=0.05, timeout=0.3, room=1, unused=0.4)
TOKENS = 20_000
SIZE = HEADER + 2 * TOKENS


class Server(http.server.ThreadingHTTPServer):
    """Serves `root`; what goes wrong is set by the test."""

    daemon_threads = True
    block_on_close = False
    root: Path

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: Counter[str] = Counter()
        self.ranges: list[str] = []
        self.statuses: list[int] = []  # answers to the next GETs
        self.drops = 0  # answers that break off in the middle
        self.corrupt = 0  # answers with a wrong byte
        self.delay = 0.0  # seconds before each of four pieces
        self.ignore_range = False
        self.authorization = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is part of the tests."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing."""

    def do_HEAD(self) -> None:
        path = self.file()
        self.send_response(200 if path.is_file() else 404)
        if path.is_file():
            self.send_header("Content-Length", str(path.stat().st_size))
            self.send_header("ETag", hashlib.sha256(path.read_bytes()).hexdigest()[:8])
        self.end_headers()

    def file(self) -> Path:
        self.server.authorization = self.headers.get("Authorization") or ""
        return self.server.root / self.path.partition("?")[0].rpartition("/")[2]

    def do_GET(self) -> None:
        server, path = self.server, self.file()
        server.requests[path.name] += 1
        status = server.statuses.pop(0) if server.statuses else 200 if path.is_file() else 404
        if status != 200:
            self.send_response(status)
            self.end_headers()
            return
        data, start = bytearray(path.read_bytes()), 0
        asked = self.headers.get("Range")
        if asked and not server.ignore_range:
            server.ranges.append(asked)
            start = int(asked[6:-1])
        if server.corrupt:
            server.corrupt -= 1
            data[-7] ^= 1
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        body = bytes(data[start:])
        if server.drops:
            server.drops -= 1
            body = body[: len(body) // 2]
        step = max(1, len(body) // 4)
        for i in range(0, len(body), step):
            time.sleep(server.delay)
            self.wfile.write(body[i : i + step])
            self.wfile.flush()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server() as made:
        made.root = tmp_path / "served"
        made.root.mkdir()
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def shards(server: Server) -> list[Shard]:
    """Ten shards of random tokens, served."""
    draw = np.random.default_rng(0)
    found = []
    for i in range(10):
        tokens = draw.integers(0, 50_000, TOKENS).astype("<u2")
        np.save(server.root / f"train_{i:06d}.npy", tokens)
        data = (server.root / f"train_{i:06d}.npy").read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        found.append(Shard(f"train_{i:06d}.npy", TOKENS, 1, 1, sha256, 49_999))
    return found


Opener = Callable[..., RemoteFolder]


@pytest.fixture
def remote(server: Server, tmp_path: Path) -> Iterator[Opener]:
    opened = []

    def make(shards: float = 100, url: str | None = None) -> RemoteFolder:
        """A folder whose cache has room for so many shards."""
        limit = (shards + 0.5) * SIZE / 1e9
        opened.append(RemoteFolder(url or server.url, str(tmp_path / "cache"), limit, QUICK))
        return opened[-1]

    yield make
    for folder in opened:
        folder.close()


def right(server: Server, path: Path) -> bool:
    return path.read_bytes() == (server.root / path.name).read_bytes()


def used(root: Path) -> int:
    """Bytes of shards in the cache, parts of them included."""
    total = 0
    for path in root.rglob("*"):
        if path.suffix in (".npy", ".part"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    return total


def until(true: Callable[[], bool], seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


# --------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "faults",
    [
        {},
        {"drops": 3},
        {"drops": 2, "ignore_range": True},
        {"statuses": [503, 429, 500]},
        {"corrupt": 2},
        {"drops": 1, "corrupt": 1},
        {"drops": 1, "statuses": [503]},
    ],
    ids=str,
)
def test_bytes_arrive_right_under_every_fault(
    server: Server, shards: list[Shard], remote: Opener, faults: dict[str, Any]
) -> None:
    vars(server).update(faults)
    assert right(server, remote().locate(shards[0]))


def test_broken_transfer_goes_on_where_it_broke(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    server.drops = 1
    remote().locate(shards[0])
    assert server.ranges == [f"bytes={SIZE // 2}-"]


def test_silent_server_is_given_up_and_can_be_tried_again(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    server.statuses = [503] * 4
    folder = remote()
    with pytest.raises(DataError, match=r"train_000000.npy could not be fetched in 4 tries: 503"):
        folder.locate(shards[0])
    folder.prefetch(shards[:2])
    assert right(server, folder.locate(shards[0]))


def test_server_that_is_gone_is_one_sentence(
    server: Server, shards: list[Shard], tmp_path: Path
) -> None:
    folder = RemoteFolder("http://127.0.0.1:9/data", str(tmp_path / "cache"), 1.0, QUICK)
    index = {"format": FORMAT, "version": VERSION, "vocab_size": 50_257}
    (folder.folder / "dataset.json").write_text(json.dumps(index))
    folder.prefetch(shards)
    with pytest.raises(DataError, match="refused>; check the network"):
        folder.has("dataset.json")
    with pytest.raises(DataError, match="refused"):
        folder.locate(Shard("a.npy", 1, sha256="0" * 64))
    folder.close()


def test_hanging_server_times_out(server: Server, shards: list[Shard], remote: Opener) -> None:
    server.delay = 60
    started = time.monotonic()
    with pytest.raises(DataError, match="timed out"):
        remote().locate(shards[0])
    assert time.monotonic() - started < 30


def test_file_that_is_always_corrupt_never_appears(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    server.corrupt = 100
    folder = remote()
    with pytest.raises(
        DataError, match=f"train_000000.*came 3 times.*expected.*{shards[0].sha256}"
    ):
        folder.locate(shards[0])
    assert not (folder.folder / shards[0].name).exists()
    assert server.requests[shards[0].name] == 3


@pytest.mark.parametrize(("status", "kind"), [(404, Missing), (403, UserError), (401, UserError)])
def test_refusal_is_not_tried_again(
    server: Server, shards: list[Shard], remote: Opener, status: int, kind: type[Exception]
) -> None:
    server.statuses = [status]
    with pytest.raises(kind, match=f"train_000000.npy was answered with {status}"):
        remote().locate(shards[0])
    assert server.requests[shards[0].name] == 1


def test_secrets_are_never_shown(server: Server, shards: list[Shard], remote: Opener) -> None:
    url = server.url.replace("://", "://me:sesame@") + "?token=sesame"
    folder = remote(url=url)
    server.statuses = [403]
    with pytest.raises(UserError) as caught:
        folder.locate(shards[0])
    assert "sesame" not in str(caught.value) + str(folder.folder)
    assert server.authorization == "Basic bWU6c2VzYW1l"
    assert "sesame" not in reason(ValueError(f"at '{url}' and s3://a:sesame@b/c?X=sesame"))
    assert redact_url("hf://datasets/a/b@rev/c/") == "hf://datasets/a/b@rev/c"


# --------------------------------------------------------------------------- cache


def test_later_process_trusts_only_what_is_complete(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    path = remote().locate(shards[0])
    assert remote().locate(shards[0]) == path
    assert server.requests[path.name] == 1
    path.write_bytes(path.read_bytes()[:-1])
    assert right(server, remote().locate(shards[0]))
    assert server.requests[path.name] == 2


def test_cache_stays_below_its_limit_at_every_moment(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    folder = remote(3)
    server.delay = 0.002
    worst, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            worst[0] = max(worst[0], used(folder.root))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(2):
        for i in range(10):
            folder.prefetch([shards[(i + k) % 10] for k in range(3)])
            assert right(server, folder.locate(shards[i]))
    done.set()
    watcher.join()
    assert SIZE < worst[0] <= folder.limit


def test_least_recently_used_shard_goes_first(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    folder = remote(3)
    (folder.folder / "mine.npy").write_bytes(b"not ours")
    (server.root / "tokenizer.json").write_bytes(b"x")
    folder.fetch("tokenizer.json")  # no shard: never removed
    for i in (0, 1, 2, 0, 3):
        folder.prefetch(shards[i : i + 1])
        folder.locate(shards[i])
    names = sorted(path.name for path in folder.folder.glob("[a-z]*"))
    numbers = [f"train_{i:06d}.npy" for i in (0, 2, 3)]
    assert names == ["mine.npy", "tokenizer.json", *numbers]


def test_need_beyond_the_limit_names_the_knob(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    folder = remote(2)
    with pytest.raises(UserError, match=r"data.cache_gb is 0\.00010\S*, but 0\.0001\S+ GB"):
        folder.prefetch(shards[:3])
    folder.prefetch(shards[:1], shards[:5])  # ahead of need there may be too many
    assert list(folder.wanted) == [shard.name for shard in shards[:2]]
    folder.prefetch(shards[:2])
    folder.locate(shards[1])
    folder.locate(shards[0])
    with pytest.raises(UserError, match="cache_gb"):  # the two wanted are not given up for it
        folder.locate(shards[5])
    assert right(server, folder.locate(shards[1]))


def test_what_another_process_needs_is_not_removed(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    one, two = remote(3), remote(3)
    one.prefetch(shards[:2])
    one.locate(shards[1])
    for i in range(3, 8):
        two.prefetch(shards[i : i + 1])
        two.locate(shards[i])
        time.sleep(0.2)
    assert (one.folder / shards[0].name).exists()
    assert (one.folder / shards[1].name).exists()
    one.close()
    for i in (3, 4, 5):
        two.prefetch(shards[i : i + 1])
        two.locate(shards[i])
    assert not (one.folder / shards[0].name).exists()


def test_full_disk_is_one_sentence(
    server: Server, shards: list[Shard], remote: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, data: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching, "write_all", full)
    folder = remote()
    with pytest.raises(DataError, match=r"cannot be kept in .*No space left"):
        folder.locate(shards[3])
    assert used(folder.root) == 0


def test_names_cannot_lead_elsewhere(remote: Opener) -> None:
    for name in ("../x", "a/b", ".hidden", "", "a\n"):
        with pytest.raises(DataError, match="names a file"):
            remote().fetch(name)


# --------------------------------------------------------------------------- ahead of need


def test_reader_that_is_slower_than_the_server_never_waits(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    server.delay = 0.01
    folder, waited = remote(5), []
    for i in range(10):
        folder.prefetch(shards[i : i + 4])
        started = time.monotonic()
        folder.locate(shards[i])
        waited.append(time.monotonic() - started)
        time.sleep(0.09)
    assert sum(waited[1:]) < 0.05
    assert set(server.requests.values()) == {1}


def test_what_is_located_goes_before_what_is_ahead(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    server.delay = 0.02
    folder = remote()
    folder.prefetch(shards[:8])
    folder.locate(shards[9])
    assert len(server.requests) <= 3


def test_run_whose_shards_ahead_do_not_fit_goes_on_over_a_border(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    folder = remote(3)
    for i in range(7):
        folder.prefetch(shards[i : i + 2], shards[i + 1 : i + 4])
        assert right(server, folder.locate(shards[i]))
        assert right(server, folder.locate(shards[i + 1]))
        folder.prefetch(shards[i + 1 : i + 2], shards[i + 1 : i + 4])
        assert list(folder.wanted) == [shard.name for shard in shards[i + 1 : i + 4]]
    assert set(server.requests.values()) == {1}


def test_random_order_of_many_shards_is_prefetched_in_no_time(
    server: Server, tmp_path: Path
) -> None:
    many = tuple(Shard(f"{i}.npy", TOKENS) for i in range(10_000))
    lengths = np.full(len(many), TOKENS, np.int64)
    folder = RemoteFolder(server.url, str(tmp_path / "cache"), 1.0, QUICK)
    folder.listed = {shard.name: 1 for shard in many}
    folder.work = lambda: None  # type: ignore[method-assign]
    order = Order(lengths, 100, "global", 0, "")
    split = Split(
        *(tmp_path, "train", many, np.dtype("<u2"), 9, None, "", "", "", lengths),
        store=folder,
    )
    started = time.process_time()
    for k in range(20):
        split.prefetch([k, 7 * k], order.upcoming(k, 4))
    assert time.process_time() - started < 1
    assert len(folder.wanted) == len(many)


def test_what_was_read_into_memory_is_not_held(
    server: Server, corpus: Path, remote: Opener
) -> None:
    served(server, corpus)
    folder = remote()
    folder.fetch("dataset.json")
    split = open_split(folder.folder, "val", folder)
    for _ in range(2):
        kept = resident(split, 10)
        assert kept.read(0, 0, 10).tolist() == open_split(corpus, "val").read(0, 0, 10).tolist()
        assert not folder.here & {shard.name for shard in split.shards}
        assert not split.files.descriptors


def test_no_thread_before_need_and_none_after_close(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    folder = remote()
    folder.has("dataset.json")
    assert folder.thread is None
    server.delay = 0.05
    folder.prefetch(shards)
    thread = folder.thread
    assert thread is not None
    assert thread.daemon
    waiting = threading.Timer(0.05, folder.close)
    waiting.start()
    with pytest.raises(DataError, match="was closed"):
        folder.locate(shards[9])
    waiting.join()
    assert not thread.is_alive()


# --------------------------------------------------------------------------- processes


FETCH = """
import json, sys
from accel_gpt.data.cache import RemoteFolder
from accel_gpt.data.shards import Shard
url, cache, shards = json.loads(sys.argv[1])
folder = RemoteFolder(url, cache, 1.0)
shards = [Shard(*shard) for shard in shards]
folder.prefetch(shards)
for shard in shards:
    folder.locate(shard)
print("done")
"""


def start(server: Server, cache: Path, shards: list[Shard]) -> subprocess.Popen[str]:
    asked = [server.url, str(cache), [(s.name, s.tokens, 1, 1, s.sha256, 9) for s in shards]]
    command = [sys.executable, "-c", FETCH, json.dumps(asked)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_fetch_each_file_once(
    server: Server, shards: list[Shard], tmp_path: Path
) -> None:
    server.delay = 0.01
    both = [start(server, tmp_path / "cache", shards) for _ in range(2)]
    assert [process.communicate(timeout=20)[0] for process in both] == ["done\n"] * 2
    assert server.requests == {shard.name: 1 for shard in shards}


def test_killed_process_leaves_what_the_next_one_goes_on_with(
    server: Server, shards: list[Shard], remote: Opener
) -> None:
    server.delay = 0.3
    folder = remote()
    process = start(server, folder.root, shards[:1])
    assert until(lambda: used(folder.root) > 0, 10)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.delay = 0
    assert not (folder.folder / shards[0].name).exists()
    assert (folder.folder / f".{shards[0].name}.part").exists()
    assert right(server, folder.locate(shards[0]))
    assert used(folder.root) == SIZE


# --------------------------------------------------------------------------- places


def ends(split: Any) -> list[bytes]:
    return [
        split.read(i, first, 100).tobytes()
        for i, shard in enumerate(split.shards)
        for first in (0, shard.tokens - 100)
    ]


def served(server: Server, corpus: Path) -> None:
    for path in corpus.iterdir():
        if path.is_file():
            (server.root / path.name).write_bytes(path.read_bytes())


def test_data_of_a_url_equal_the_local_ones(
    server: Server, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served(server, corpus)
    local, tokenizer = open_data(str(corpus), "train", DataConfig())
    data = DataConfig(cache_dir=str(tmp_path / "cache"))
    split, fetched = open_data(server.url, "train", data)
    split.prefetch(range(len(split.shards)))
    assert ends(split) == ends(local)
    assert (split.fingerprint, fetched.fingerprint) == (local.fingerprint, tokenizer.fingerprint)
    split.store.close()


def test_cached_folder_serves_when_the_network_is_gone(
    server: Server, corpus: Path, remote: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    served(server, corpus)
    for _ in range(2):
        folder = remote()
        assert folder.has("dataset.json")
        folder.fetch("dataset.json")
        split = open_split(folder.folder, "train", folder)
        assert ends(split) == ends(open_split(corpus, "train"))
        server.shutdown()
        server.socket.close()
    assert "going on with the copy" in capsys.readouterr().err


def test_changed_index_is_fetched_anew(server: Server, remote: Opener) -> None:
    index = server.root / "dataset.json"
    for text in ("one", "two"):
        index.write_text(text)
        assert remote().fetch("dataset.json").read_text() == text
    remote().fetch("dataset.json")
    assert server.requests["dataset.json"] == 2


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_other_stores_can_be_listed(tmp_path: Path, scheme: str) -> None:
    import fsspec

    url = f"memory://{tmp_path.name}/x" if scheme == "memory" else f"file://{tmp_path}/x"
    system, path = fsspec.core.url_to_fs(url)
    system.makedirs(f"{path}/inner")
    system.pipe(f"{path}/a.bin", b"abcdef")
    folder = RemoteFolder(url, str(tmp_path / "cache"), 1.0, QUICK)
    assert folder.sizes() == {"a.bin": 6}
    assert folder.tags == {"a.bin": ""}  # times are no content
    assert not folder.has("dataset.json")
    assert folder.locate(Shard("a.bin", 3, offset=0)).read_bytes() == b"abcdef"
    with pytest.raises(Missing, match="does not exist"):
        folder.locate(Shard("b.bin", 3, offset=0))
    folder.close()


def test_web_folder_cannot_be_listed(remote: Opener) -> None:
    with pytest.raises(UserError, match=r"has no dataset\.json"):
        remote().sizes()


def test_missing_package_and_unknown_protocol_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"s3://bucket/x needs the package s3fs; pip install s3fs"):
        RemoteFolder("s3://bucket/x", str(tmp_path), 1.0).has("dataset.json")
    with pytest.raises(UserError, match="nosuch://x/y cannot be read: Protocol not known"):
        RemoteFolder("nosuch://x/y", str(tmp_path), 1.0).sizes()


def test_private_and_missing_on_the_hub_tell_how_to_log_in() -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    error = FileNotFoundError("datasets/a/b")
    error.__cause__ = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    folder = FsspecStore("hf://datasets/a/b")
    assert "`hf auth login` or set HF_TOKEN" in str(folder.explain(error, "x"))
    assert isinstance(folder.explain(FileNotFoundError("x"), "x"), Missing)


class Hub:
    """A file system that tells SHA-256 as the Hub's does."""

    def __init__(self, lfs: Any) -> None:
        self.lfs = lfs

    def info(self, path: str) -> dict[str, Any]:
        return {"size": 3, "lfs": self.lfs, "blob_id": "b"}

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        return [{"name": f"{path}/x", "type": "file", **self.info(path)}]


class Lfs:
    sha256 = "ab"


@pytest.mark.parametrize("lfs", [{"sha256": "ab"}, Lfs()])
def test_hash_of_the_hub_is_known(lfs: Any) -> None:
    folder = FsspecStore("hf://datasets/a/b")
    vars(folder)["folder"] = (Hub(lfs), "p")
    assert folder.info("x") == (3, "ab", "b")
    assert folder.list() == {"x": (3, "ab", "b")}


def test_urls_and_folders() -> None:
    assert is_url("hf://datasets/a/b")
    assert is_url("https://host/x")
    assert not is_url("data/x")
    assert not is_url("C:x")


@pytest.mark.parametrize("known", [True, False])
def test_an_index_without_end_does_not_fill_the_disk(
    known: bool, server: Server, remote: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that gives no size sends on; one that does could give any."""
    monkeypatch.setattr(caching, "LARGEST_TEXT", 3 * CHUNK)
    (server.root / "dataset.json").write_bytes(b" " * 100 * CHUNK)
    if not known:
        monkeypatch.setattr(HttpStore, "info", lambda *_: FileInfo())
    written = []
    monkeypatch.setattr(caching, "write_all", lambda file, data: written.append(len(data)))
    message = "expected at most" if known else "goes on after"
    with pytest.raises(DataError, match=rf"dataset\.json .*{message}"):
        remote(shards=10_000).fetch("dataset.json")
    assert sum(written) <= (0 if known else 4 * CHUNK)
    assert used(tmp_path / "cache") == 0
