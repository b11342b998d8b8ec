"""Preparation killed at random moments: the same bytes as undisturbed, in bounded memory.

    python benchmarks/killed.py FOLDER [--gigabytes 5] [--kills 10] [--tokenizer gpt2] [--workers 2]
        [--text TEXT.jsonl]

Makes a corpus of JSON lines in FOLDER (documents cut and shuffled from those of TEXT, or of the
standard library), prepares it undisturbed, then again with SIGKILL at random moments, and compares
the two data folders byte for byte. Prints the times and the peak memory of all processes together
(proportional set size, so that shared pages count once).
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from accel_gpt.config.data import PrepareConfig
from accel_gpt.text.documents import documents

FILES = 10


def main() -> None:
    """Make, prepare, kill, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    text = options.folder / "text"
    if not text.exists():
        make_corpus(text, options.gigabytes, options.text)
    size = sum(path.stat().st_size for path in text.iterdir())
    print(f"corpus: {size / 1e9:.2f} GB of JSON lines in {FILES} files", flush=True)
    command = [sys.executable, "-m", "accel_gpt.cli", "prepare", "--source", "jsonl"]
    command += ["--path", str(text), "--tokenizer", options.tokenizer, "--val_fraction", "0.001"]
    command += ["--workers", str(options.workers)]
    seconds, peak = run([*command, "--out", str(options.folder / "whole")], None)
    print(f"undisturbed: {seconds:.0f} s, {size / seconds / 1e6:.1f} MB/s, {peak:.0f} MB at most")
    draw = random.Random(1)
    killed = [*command, "--out", str(options.folder / "killed")]
    total = 0.0
    for number in range(options.kills):
        after = draw.uniform(0.02, 1.8) * seconds / options.kills
        spent, at_most = run(killed, after)
        total, peak = total + spent, max(peak, at_most)
        print(f"kill {number + 1}: after {spent:.0f} s", flush=True)
    spent, at_most = run(killed, None)
    print(f"killed {options.kills} times: {total + spent:.0f} s in all, ", end="")
    print(f"{max(peak, at_most):.0f} MB at most")
    whole, again = (hashes(options.folder / name) for name in ("whole", "killed"))
    same = whole == again
    print(f"{len(whole)} files, {'identical' if same else 'DIFFERENT'}")
    sys.exit(not same)


def run(command: list[str], kill_after: float | None) -> tuple[float, float]:
    """Seconds that a command took, and the peak MB of its processes; killed after so many s."""
    start = time.monotonic()
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, memory_mb(process))
        time.sleep(0.5)
        if kill_after is not None and time.monotonic() - start > kill_after:
            process.send_signal(signal.SIGKILL)
            process.wait()
            break
    if kill_after is None and process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return time.monotonic() - start, peak


def memory_mb(process: psutil.Process) -> float:
    """Of a process and those that it started; 0 for those that have ended meanwhile."""
    total = 0
    try:
        for one in (process, *process.children(recursive=True)):
            total += one.memory_full_info().pss
    except psutil.NoSuchProcess:
        pass
    return total / 1e6


def make_corpus(folder: Path, gigabytes: float, text: Path | None) -> None:
    """Files of JSON lines: documents of 200 to 8,000 characters, cut from real text at random."""
    folder.mkdir(parents=True)
    pool = "\n".join(texts(text))
    draw = random.Random(0)
    for number in range(FILES):
        written = 0
        with (folder / f"{number:02d}.jsonl").open("w", encoding="utf-8") as file:
            while written < gigabytes * 1e9 / FILES:
                start = draw.randrange(len(pool) - 8000)
                line = json.dumps({"text": pool[start : start + draw.randint(200, 8000)]})
                written += file.write(line + "\n")


def texts(path: Path | None) -> Iterator[str]:
    """Real text."""
    if path is None:
        yield from documents(PrepareConfig(source="stdlib", tokenizer="bytes"))
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


if __name__ == "__main__":
    main()
