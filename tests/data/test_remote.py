"""Remote shards: correct bytes under every fault, a bounded cache, no waiting."""

import contextlib
import errno
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
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from accel_gpt import train
from accel_gpt.config.data import DataConfig, PrepareConfig
from accel_gpt.config.experiment import Config, EvalConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.plan import Plan
from accel_gpt.data import downloads, loader, remote
from accel_gpt.data.corpus import open_corpus
from accel_gpt.data.downloads import Cache, RemoteFolder
from accel_gpt.data.loader import read_sequences
from accel_gpt.data.order import Shuffle
from accel_gpt.data.remote import Missing, Store, Unreachable
from accel_gpt.data.shards import HEADER
from accel_gpt.data.sources import open_data
from accel_gpt.errors import DataError, MachineError, UserError
from accel_gpt.prepare.prepare import prepare
from tests.conftest import text_of

TOKENS = 300_000  # a quarter of a shard exceeds the 128 KiB that Python 3.14 buffers for a file
SIZE = HEADER + 2 * TOKENS
NAMES = [f"train_{i:06d}.npy" for i in range(10)]


class Server(http.server.ThreadingHTTPServer):
    """Serves `root`; the test sets the faults."""

    daemon_threads = True
    block_on_close = False
    root: Path

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: Counter[str] = Counter()
        self.statuses: list[int] = []  # answers to the next GETs
        self.drops = 0  # answers that break off in the middle
        self.corrupt = 0  # answers with a wrong byte
        self.delay = 0.0  # seconds before each of four pieces

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect; tests do that."""


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def __init__(self, request: Any, client: Any, server: Server) -> None:
        super().__init__(request, client, server, directory=str(server.root))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""

    def do_GET(self) -> None:
        self.server.requests[self.path.rpartition("/")[2]] += 1
        if self.server.statuses:
            self.send_error(self.server.statuses.pop(0))
        else:
            super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        server = self.server
        body = bytearray(source.read())
        if server.corrupt:
            server.corrupt -= 1
            body[-7] ^= 1
        if server.drops:
            server.drops -= 1
            body = body[: len(body) // 2]
        step = max(1, len(body) // 4)
        for i in range(0, len(body), step):
            time.sleep(server.delay)
            outputfile.write(body[i : i + step])


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep cached shards in the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PAUSE_SECONDS", 0.01)


@contextlib.contextmanager
def serving(root: Path) -> Iterator[Server]:
    """Serve the files of a new folder."""
    root.mkdir()
    with Server() as running:
        running.root = root
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of ten shards of random tokens, and files that a test adds."""
    with serving(tmp_path / "served") as running:
        draw = np.random.default_rng(0)
        for name in NAMES:
            np.save(running.root / name, draw.integers(0, 50_000, TOKENS).astype("<u2"))
        yield running


Opener = Callable[..., RemoteFolder]


@pytest.fixture
def opened(server: Server) -> Iterator[Opener]:
    folders = []

    def make(shards: float = 100, seconds: float = 60) -> RemoteFolder:
        """A folder whose cache has room for `shards` shards."""
        cache = Cache((shards + 0.5) * SIZE / 1e9, "run", seconds)
        folders.append(RemoteFolder(server.url, cache))
        for name in NAMES:
            digest = hashlib.sha256((server.root / name).read_bytes()).hexdigest()
            folders[-1].expect(name, SIZE, digest)
        return folders[-1]

    yield make
    for folder in folders:
        folder.close()


def right(server: Server, path: Path) -> bool:
    """Return whether a cached shard, KEY-NAME, equals the shard on the server."""
    return path.read_bytes() == (server.root / path.name.partition("-")[2]).read_bytes()


def used(folder: RemoteFolder) -> int:
    """Return the bytes of shards in the cache, including partial shards."""
    total = 0
    for path in folder.cache.root.rglob("*"):
        if path.suffix in (".npy", ".part"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
    return total


def until(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


# --------------------------------------------------------------------------- faults


def test_bytes_arrive_right_under_every_fault(server: Server, opened: Opener) -> None:
    server.drops, server.corrupt, server.statuses = 1, 1, [503, 429]
    assert right(server, opened().fetch(NAMES[0]))


def test_a_server_that_fails_is_given_up_and_can_be_tried_again(
    server: Server, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.statuses = [503] * 10_000
    folder = opened(seconds=0.2)
    with pytest.raises(DataError, match=r"train_000000.npy could not .*step_timeout\): 503"):
        folder.fetch(NAMES[0])
    server.statuses.clear()
    folder.cache.timeout = 60.0
    folder.prefetch(NAMES[:2])
    assert right(server, folder.fetch(NAMES[0]))
    assert until(folder.path(NAMES[1]).exists)
    server.delay = 60
    monkeypatch.setattr(remote, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(DataError, match=r"Timeout.*; check the network"):
        opened(seconds=0.3).fetch(NAMES[2])


def test_file_that_is_always_corrupt_never_appears(server: Server, opened: Opener) -> None:
    server.corrupt = 10_000
    folder = opened(seconds=0.2)
    with pytest.raises(
        DataError, match=r"train_000000.*step_timeout\): it came with .*expected.*[0-9a-f]{64}"
    ):
        folder.fetch(NAMES[0])
    assert not folder.path(NAMES[0]).exists()
    assert server.requests[NAMES[0]] > 1


@pytest.mark.parametrize(("status", "kind"), [(404, Missing), (403, UserError)])
def test_refusal_is_not_tried_again(
    server: Server, opened: Opener, status: int, kind: type[Exception]
) -> None:
    server.statuses = [status]
    with pytest.raises(kind, match=r"train_000000.npy (does not exist|may not be read: 40)"):
        opened().fetch(NAMES[0])
    assert server.requests[NAMES[0]] == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, Missing), (410, Missing), (403, UserError), (429, Unreachable), (503, Unreachable)],
)
def test_the_status_of_an_answer_decides_for_every_client(
    status: int, kind: type[Exception]
) -> None:
    """Not every client raises `FileNotFoundError` for 404, as that of http does."""

    class Refused(Exception):
        def __init__(self, **answer: object) -> None:
            super().__init__("refused")
            vars(self).update(answer)

    answer = SimpleNamespace(status_code=status)
    for error in (Refused(status=status), Refused(status_code=status), Refused(response=answer)):
        with pytest.raises(kind) as raised, Store("s3://bucket/data").explained("train.npy"):
            raise error
        assert raised.type is kind


def test_a_reader_says_what_it_waits_for(
    server: Server, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened()
    download = folder.store.download
    said = []

    def noting(name: str, target: Path) -> None:
        said.append(folder.waits_for)
        download(name, target)

    monkeypatch.setattr(folder.store, "download", noting)
    server.statuses = [503]
    folder.fetch(NAMES[0])
    where = f"{server.url}/{NAMES[0]}"
    assert said[0] == f"{where} (neither an answer nor room in the cache yet)"
    assert said[1].startswith(f"{where} (503")
    assert folder.waits_for == ""


def test_a_run_says_once_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TELL_SECONDS", 0.0)
    ready = iter([False, False, False, True])
    said: list[str] = []
    run: Any = SimpleNamespace(
        state=SimpleNamespace(step=0),
        plan=Plan(1, 1, 8, 1, 9, 0, 9),
        loader=SimpleNamespace(fetch=lambda count: next(ready), waited=0.0),
        corpus=SimpleNamespace(waits_for="s3://bucket/a.npy (503)"),
        reporter=SimpleNamespace(log=said.append, heartbeat=lambda: None),
        writer=SimpleNamespace(seconds=0.0),
    )
    stop: Any = SimpleNamespace(group=None, agree_to_stop=lambda waits: (False, waits))
    assert not train.wait_for_data(run, stop)
    assert said == ["WARNING: waiting for s3://bucket/a.npy (503)"]
    assert run.loader.waited > 0


# --------------------------------------------------------------------------- cache


def test_a_later_launch_keeps_what_is_complete_and_did_not_change(
    server: Server, opened: Opener
) -> None:
    path = opened().fetch(NAMES[0])
    assert opened().fetch(NAMES[0]) == path
    assert server.requests[NAMES[0]] == 1
    np.save(server.root / NAMES[0], np.zeros(TOKENS, dtype="<u2"))
    changed = opened().fetch(NAMES[0])
    assert right(server, changed)
    assert changed != path


def test_each_run_has_its_own_cache() -> None:
    one, other = (Cache(1, run, 60) for run in ("a", "b"))
    process = Cache(1, None, 60)
    assert len({one.root, other.root, process.root}) == 3
    other.root.mkdir()
    one.remove()
    assert other.root.exists()
    left = process.root
    del process
    assert not left.exists()


def test_cache_stays_below_its_limit_at_every_moment(server: Server, opened: Opener) -> None:
    """Also if a prefetched shard finds no room."""
    folder = opened(3)
    server.delay = 0.002
    worst, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            worst[0] = max(worst[0], used(folder))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(20):
        now = [NAMES[(i + k) % 10] for k in range(4)]
        folder.prefetch(now[:2], now)
        assert right(server, folder.fetch(now[0]))
    assert until(lambda: all(folder.path(name).exists() for name in now[:3]))
    time.sleep(0.3)  # the fourth finds no room
    done.set()
    watcher.join()
    assert SIZE < worst[0] <= folder.cache.limit


def test_what_the_run_needs_last_goes_first(
    server: Server, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First shards that it does not need soon, then the last of the upcoming ones."""
    monkeypatch.setattr(RemoteFolder, "download_wanted", lambda self: None)
    (server.root / "tokenizer.json").write_bytes(b"x")
    folder = opened(4)
    folder.fetch("tokenizer.json")  # not a shard: never removed
    for i in (0, 1, 2, 3):
        folder.fetch(NAMES[i])
    folder.prefetch([NAMES[1]], [NAMES[3], NAMES[2]])
    for i, gone in ((4, 0), (5, 4), (6, 5)):
        folder.fetch(NAMES[i])
        assert not folder.path(NAMES[gone]).exists()
    folder.prefetch([NAMES[1], NAMES[7]], [NAMES[3], NAMES[2], NAMES[6]])
    folder.fetch(NAMES[7])
    kept = sorted(path.name.rpartition("-")[2] for path in folder.folder.iterdir())
    assert kept == ["tokenizer.json", *(NAMES[i] for i in (1, 2, 3, 7))]


def test_a_full_disk_is_told_at_once(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(remote.Store, "locate", full)
    with pytest.raises(MachineError, match=r"train_000003.npy cannot be stored: No space left"):
        opened().fetch(NAMES[3])


# --------------------------------------------------------------------------- prefetching


def test_the_next_shards_come_while_the_reader_is_busy(server: Server, opened: Opener) -> None:
    folder = opened(5)
    assert folder.thread is None  # no prefetch yet
    for i in range(10):
        folder.prefetch(NAMES[i : i + 4])
        folder.fetch(NAMES[i])
        following = [folder.path(name) for name in NAMES[i + 1 : i + 4]]
        assert until(lambda following=following: all(path.exists() for path in following))
    assert set(server.requests.values()) == {1}
    folder.close()
    assert until(lambda: not folder.thread.is_alive())


# --------------------------------------------------------------------------- processes


FETCH = """
import json, sys
from accel_gpt.data.downloads import Cache, RemoteFolder
url, files = json.loads(sys.argv[1])
folder = RemoteFolder(url, Cache(1.0, "run", 60))
for file in files:
    folder.expect(*file)
folder.prefetch([name for name, *_ in files])
for name, *_ in files:
    folder.fetch(name)
print("done")
"""


def start(server: Server, names: list[str]) -> subprocess.Popen[str]:
    hashes = [hashlib.sha256((server.root / name).read_bytes()).hexdigest() for name in names]
    files = [(name, SIZE, digest) for name, digest in zip(names, hashes, strict=True)]
    command = [sys.executable, "-c", FETCH, json.dumps([server.url, files])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_download_that_hangs_delays_no_other(
    server: Server, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, other = opened(), opened()
    begun, go_on = threading.Event(), threading.Event()
    download = hanging.store.download

    def hang(name: str, target: Path) -> None:
        begun.set()
        go_on.wait(60)
        download(name, target)

    monkeypatch.setattr(hanging.store, "download", hang)
    threads = [
        threading.Thread(target=folder.fetch, args=(name,))
        for folder, name in ((hanging, NAMES[0]), (other, NAMES[1]))
    ]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(20)
    came = other.path(NAMES[1]).exists()
    go_on.set()
    for thread in threads:
        thread.join()
    assert came
    assert right(server, hanging.path(NAMES[0]))


def test_two_processes_of_a_run_fetch_each_file_once(server: Server, opened: Opener) -> None:
    server.delay = 0.05
    process = start(server, NAMES)
    folder = opened()
    assert until(lambda: used(folder) > 0)
    folder.prefetch(NAMES)
    assert all(right(server, folder.fetch(name)) for name in NAMES)
    assert process.communicate(timeout=120)[0] == "done\n"
    assert server.requests == dict.fromkeys(NAMES, 1)


def test_downloads_of_another_process_count_against_the_limit(
    server: Server, opened: Opener
) -> None:
    """Until it is killed. It leaves nothing that looks complete."""
    server.delay = 60
    process = start(server, NAMES[:1])
    folder = opened(1)
    assert until(lambda: any(folder.folder.glob("*.part")))
    other = folder.path(NAMES[1])
    assert not folder.cache.make_room(other, other.with_suffix(".part"), SIZE)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.delay = 0
    assert folder.cache.make_room(other, other.with_suffix(".part"), SIZE)
    assert not folder.path(NAMES[0]).exists()
    assert right(server, folder.fetch(NAMES[0]))
    assert used(folder) == SIZE


# --------------------------------------------------------------------------- folders


@pytest.mark.usefixtures("many")
def test_a_shard_that_another_process_removes_before_it_is_opened_is_fetched_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, _ = open_data(server.url, "train", DataConfig())
    local, _ = open_data(str(server.root), "train", DataConfig())
    fetch, removed = RemoteFolder.fetch, set()

    def remove_once(folder: RemoteFolder, name: str) -> Path:
        path = fetch(folder, name)
        if name not in removed:
            removed.add(name)
            path.unlink()
        return path

    monkeypatch.setattr(RemoteFolder, "fetch", remove_once)
    for number, length in enumerate(local.lengths):
        assert (split.read(number, 0, int(length)) == local.read(number, 0, int(length))).all()
    assert len(removed) == len(split.shards)


@pytest.fixture
def many(server: Server, tmp_path: Path) -> Callable[..., Config]:
    """The config of data behind the server: thirty-two shards of 500 tokens at most."""
    text = tmp_path / "text.txt"
    text.write_text(text_of(4000))
    source = PrepareConfig(source=str(text), tokenizer="bytes", shard_tokens=500)
    prepare(source, server.root / "many")
    for path in (server.root / "many").iterdir():
        path.rename(server.root / path.name)

    def config(shuffle: Shuffle, shards: float, url: str = server.url) -> Config:
        """Return a config with a cache of `shards` shards."""
        gb = (shards * 1130 + 9000) / 1e9  # plus the index and tokenizer
        data = DataConfig(url, shuffle=shuffle, cache_gb=gb)
        return Config(data=data, model=ModelConfig(block_size=32), eval=EvalConfig(tokens=100))

    return config


def test_a_cache_of_two_groups_reads_each_shard_once(
    server: Server, many: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", 2000)  # bytes; a group has 8,000
    found, requests = {}, Counter()
    for name, url in (("remote", server.url), ("local", str(server.root))):
        mixture = open_corpus(many("groups", 16, url)).mixtures[0]
        server.requests.clear()  # requests of the evaluation
        chunks = read_sequences(mixture, Plan(1, 4, 32, 1, 9, 0, 9), 257, 0, 0)
        epoch = mixture.orders[0].sequences_per_epoch
        found[name] = np.concatenate([next(chunks)[0, 0] for _ in range(epoch // 28)])
        requests = requests or server.requests.copy()
        assert len(found[name]) >= epoch - 28
    assert (found["remote"] == found["local"]).all()
    assert len(requests) >= 24  # the last group of the evaluation is still cached
    assert sum(requests.values()) <= 32 + 8  # plus the first group of the next epoch


def test_an_order_that_needs_more_than_the_cache_is_refused(
    server: Server, many: Callable[..., Config]
) -> None:
    """The index is downloaded once for the splits of a folder."""
    open_corpus(many("shards", 1))
    assert server.requests["dataset.json"] == server.requests["tokenizer.json"] == 1
    with pytest.raises(UserError, match=r"data.shuffle groups needs .*set data.shuffle to shards"):
        open_corpus(many("groups", 4))
    with pytest.raises(UserError, match=r"data.shuffle global needs .* set data.shuffle to groups"):
        open_corpus(many("global", 16))


def test_changed_index_is_fetched_anew(server: Server, opened: Opener) -> None:
    index = server.root / "dataset.json"
    for text in ("one", "two"):
        index.write_text(text)
        folder = opened()
        for _ in range(2):
            assert folder.fetch("dataset.json").read_text() == text
    assert server.requests["dataset.json"] == 2
    index.unlink()
    with pytest.raises(Missing):
        opened().fetch("dataset.json")


def test_other_stores_can_be_listed(tmp_path: Path) -> None:
    import fsspec

    url = f"memory://{tmp_path.name}/x"
    system, path = fsspec.core.url_to_fs(url)
    system.makedirs(f"{path}/inner")
    system.pipe(f"{path}/a.bin", b"abcdef")
    folder = RemoteFolder(url, Cache(1, None, 60))
    with pytest.raises(Missing, match="does not exist"):
        folder.fetch("dataset.json")
    (info,) = folder.list().values()
    assert info[:3] == (6, None, "")  # times are not part of the identity
    assert folder.fetch("a.bin").read_bytes() == b"abcdef"
