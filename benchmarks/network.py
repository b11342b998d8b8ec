"""Steps over a throttled link between two nodes, beside what `accel-gpt plan` predicts of them.

    python benchmarks/network.py [--delay MS] [--rate MBIT] [--steps 20] [--section.key value ...]

Linux only, without root: two network namespaces are the nodes, and a process that delays packets
the link. Real processes over gloo: 1, then 1 + 1 and 2 + 2 on the two nodes. What a step computes
is measured with the same processes on one node.
"""

import argparse
import ctypes
import fcntl
import multiprocessing
import os
import queue
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import ROOT, call, facts, headline, pace, table

from accel_gpt.commands.plan import PlanCommand, forecast
from accel_gpt.config.parse import load_config
from accel_gpt.training.setup import ensure_data

CONFIG = """
data: {{train: {folder}/data, prepare: {{source: stdlib, tokenizer: bytes}}}}
model: {{block_size: 64, n_head: 2, n_layer: {layers}, n_embd: {width}}}
train: {{tokens_per_step: {tokens}, max_steps: {steps}, cpu_threads: 1, micro_batch_size: auto}}
eval: {{every: 0, tokens: 256}}
checkpoint: {{every: 0}}
sample: {{every: 0}}
log: {{every: 1, trackers: []}}
"""
TOKENS = 256  # a step
SHAPES = ((2, 80), (4, 224))  # 0.7 and 10 MB of gradients
INSIDE = "ACCEL_GPT_NETWORK"  # set within the namespaces: the process whose network is node 1's
NODES = f'unshare -n sleep infinity & {INSIDE}=$! exec "$@"'
ADDRESSES = {"left": "10.9.0.1", "right": "10.9.0.2"}
Packets = queue.SimpleQueue[tuple[float, bytes]]
TUNSETIFF, IFF_TUN, IFF_NO_PI, MTU = 0x400454CA, 1, 0x1000, 9000  # linux/if_tun.h


def main() -> None:
    """Measure and predict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", type=float, default=50, help="ms, each way")
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s, each way")
    parser.add_argument("--steps", type=int, default=20)
    args, options = parser.parse_known_args()
    if INSIDE not in os.environ:
        command = ["unshare", "-Urn", "bash", "-c", NODES, "bash", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, check=False).returncode)
    time.sleep(1)  # until `unshare` has made the second node's network
    link = multiprocessing.get_context("fork").Process(target=join, args=(args.delay, args.rate))
    link.start()
    try:
        report(args, options)
    finally:
        link.kill()
        os.kill(int(os.environ[INSIDE]), signal.SIGKILL)


def join(delay: float, rate: float) -> None:
    """Join the networks of the two nodes by a link of `delay` ms and `rate` Mbit/s, each way."""
    ends, setns = [], ctypes.CDLL(None, use_errno=True).setns
    for name, process in (("right", os.environ[INSIDE]), ("left", str(os.getppid()))):
        network = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
        assert setns(network, 0) == 0, os.strerror(ctypes.get_errno())
        ends.append(os.open("/dev/net/tun", os.O_RDWR))
        fcntl.ioctl(ends[-1], TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        for key, value in (("slow_start_after_idle", "0"), ("congestion_control", "reno")):
            Path(f"/proc/sys/net/ipv4/tcp_{key}").write_text(value)
        call(["ip", "link", "set", "lo", "up"])
        call(["ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", name])
        call(["ip", "link", "set", name, "mtu", str(MTU), "up"])
    for source, target in (ends, ends[::-1]):
        waiting: Packets = queue.SimpleQueue()
        words = (source, waiting, delay / 1e3, rate * 1e6 / 8)
        threading.Thread(target=take, args=words).start()
        threading.Thread(target=give, args=(target, waiting)).start()


def take(source: int, waiting: Packets, delay: float, rate: float) -> None:
    """Queue the packets that a node sends, with the time at which they arrive."""
    free = 0.0  # when the last packet has left
    while packet := os.read(source, MTU):
        free = max(free, time.monotonic()) + len(packet) / rate
        waiting.put((free + delay, packet))


def give(target: int, waiting: Packets) -> None:
    """Hand packets to the other node when they are due."""
    while True:
        due, packet = waiting.get()
        time.sleep(max(0.0, due - time.monotonic()))
        os.write(target, packet)


def report(args: argparse.Namespace, options: list[str]) -> None:
    """The table: both shapes, each number of processes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for layers, width in SHAPES:
            path = Path(folder) / "config.yaml"
            shape = {"layers": layers, "width": width}
            path.write_text(CONFIG.format(folder=folder, tokens=TOKENS, steps=args.steps, **shape))
            for world in (1, 2, 4):
                rows.append(compare(args, path, world, options))
                print(*rows[-1], sep="  ", flush=True)
    print(headline(facts(threads=1)))
    head = ("gradients, MB", "processes", "computes, ms", "measured, ms", "planned, ms", "")
    print(table(head, rows))


def compare(args: argparse.Namespace, path: Path, world: int, options: list[str]) -> list[str]:
    """Milliseconds of a step of `world` processes: on one node, on two, and on two as planned."""
    keys = [*options, "--train.micro_batch_size", str(TOKENS // 64 // world)]
    config = load_config([str(path), *keys], "benchmarks/network.py")
    ensure_data(config.data)
    nodes = (1, 2, 1) if world > 1 else (1, 1)
    before, *between, after = (launch([str(path), *keys], world, number) for number in nodes)
    near = (before + after) / 2  # others may use the cores now more, now less
    far = between[0] if between else near
    network = {"nodes": 2, "bandwidth": args.rate / 1e3, "latency": args.delay}
    command = PlanCommand(
        str(path),
        gpus=world,
        tokens_per_second=TOKENS / near * 1e3,
        **(network if world > 1 else {}),
    )
    found = forecast(command, config)
    planned = found["time"]["step"]["total"] * 1e3
    size = f"{4 * found['parameters']['total'] / 1e6:.1f}"
    times = [f"{ms:,.0f}" for ms in (near, far, planned)]
    return [size, str(world), *times, f"{planned / far - 1:+.0%}"]


def launch(words: list[str], world: int, nodes: int) -> float:
    """The median milliseconds of a step of `world` processes, half of them on the second node."""
    each = world // nodes
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "accel_gpt.cli", "train", *words, "--out_dir", out]
        processes = []
        for rank in range(world):
            node = rank // each
            ranks = {"RANK": rank, "LOCAL_RANK": rank % each, "WORLD_SIZE": world}
            ranks |= {"LOCAL_WORLD_SIZE": each, "MASTER_PORT": 29400, "OMP_NUM_THREADS": 1}
            ranks["MASTER_ADDR"] = ADDRESSES["left"] if nodes > 1 else "127.0.0.1"
            if nodes > 1:
                ranks["GLOO_SOCKET_IFNAME"] = list(ADDRESSES)[node]
            there = ["nsenter", "-t", os.environ[INSIDE], "-n"] * node
            env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
            env |= {key: str(value) for key, value in ranks.items()} if world > 1 else {}
            output = Path(out) / f"{rank}.txt"
            with output.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [*there, *command], env=env, stdout=file, stderr=file, cwd=ROOT
                    )
                )
        if any([process.wait() for process in processes]):
            sys.exit(output.read_text())
        return pace(Path(out), 5)["step_ms"]


if __name__ == "__main__":
    main()
