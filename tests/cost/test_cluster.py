"""The collectives of a step: bytes and calls of each engine, overlap, the limit of a step."""

from dataclasses import replace
from typing import Any

import pytest

from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.model import ModelConfig
from accel_gpt.config.optim import OptimConfig
from accel_gpt.cost.cluster import LINK_SHARE, Network, step_time
from accel_gpt.cost.flops import parameter_counts
from accel_gpt.cost.memory import Machine

V, L = 50257, 12
COUNTS = parameter_counts(ModelConfig(), V)
P, BLOCKS = COUNTS["total"], COUNTS["attention"] + COUNTS["mlp"]
MATRICES = L * 12 * 768**2
DDP = Machine(16, "h100", 80e9, False, "bf16", "test", nodes=2)
FSDP, HSDP = replace(DDP, sharded=True), replace(DDP, sharded=True, replicas=2)


def config(micro_steps: int = 1, optimizer: str = "adamw", exact: bool = False) -> Config:
    train = TrainConfig(16 * 1024 * micro_steps, micro_batch_size=1, reproducible=exact)
    return Config(train=train, optim=OptimConfig(optimizer))  # type: ignore[arg-type]  # a Literal


def predict(machine: Machine, given: Config, compute: float = 1.0, gbit: float = 400) -> Any:
    return step_time(given, V, Network(machine, gbit * 1e9 / 8), compute)


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_bytes_and_calls_of_each_engine(micro_steps: int) -> None:
    """Rajbhandari et al. 2020, section 7: a ring sends (n - 1) / n of what it passes, once each."""

    def sent(machine: Machine, optimizer: str = "adamw") -> dict[str, tuple[float, float]]:
        found = predict(machine, config(micro_steps, optimizer))["collectives"]
        return {one["name"]: (pytest.approx(one["sent"]), one["calls"]) for one in found}

    assert sent(DDP) == {"all-reduce of gradients": (2 * 15 / 16 * 4 * P, 5)}  # of 100 MiB
    of_blocks = 2 * micro_steps  # gathered forward and backward
    gathers = {
        "all-gather of the root": (15 / 16 * micro_steps * 2 * (P - BLOCKS), micro_steps),
        "all-gather of blocks": (15 / 16 * of_blocks * 2 * BLOCKS, of_blocks * L),
    }
    assert sent(FSDP) == gathers | {"reduce-scatter of gradients": (15 / 16 * 4 * P, L + 1)}
    hsdp = sent(HSDP)  # 8 shards within a node, and pairs of two nodes
    assert hsdp["reduce-scatter of gradients"] == (7 / 8 * 4 * P, L + 1)
    assert hsdp["all-reduce of shards"] == (4 * P / 8, L + 1)
    assert sent(DDP, "muon")["updates of Muon"] == (15 / 16 * 2 * MATRICES, 4)  # in bf16


def test_a_ring_is_as_fast_as_its_slowest_hop() -> None:
    (slow,) = predict(DDP, config(), gbit=400)["collectives"]
    assert slow["transfer"] == pytest.approx(slow["sent"] / 50e9)
    (fast,) = predict(DDP, config(), gbit=8000)["collectives"]
    assert fast["transfer"] == pytest.approx(fast["sent"] / (LINK_SHARE * 450e9))
    shards = predict(HSDP, config(), gbit=400)["collectives"][-1]  # 8 rings share the network
    assert shards["transfer"] == pytest.approx(shards["sent"] / (50e9 / 8))


def test_two_processes_over_a_slow_link_by_hand() -> None:
    """Gradients of one bucket, the loss and the stop: each passes the link there and back."""
    model = ModelConfig(n_layer=2, n_head=2, n_embd=64, block_size=64)
    given = Config(model=model, train=TrainConfig(256, micro_batch_size=2))
    machine = Machine(2, None, None, False, "no", "test", nodes=2)
    found = step_time(given, 257, Network(machine, 12.5e6, 0.05), 0.01)
    size = 4 * parameter_counts(model, 257)["total"]
    gradients = size / 12.5e6 + 2 * 2 * 0.05  # gloo: each hop a round trip
    assert found["total"] == pytest.approx(0.01 + gradients + 2 * 2 * 0.05)
    assert found["limit"] == "the latency of collectives"


@pytest.mark.parametrize("machine", [DDP, FSDP, HSDP])
def test_computation_hides_collectives_but_for_their_ends(machine: Machine) -> None:
    slow, quick = (predict(machine, config(), compute) for compute in (10.0, 1e-6))
    whole = sum(one["seconds"] for one in quick["collectives"])
    assert 0 < slow["exposed"] < 0.5 * whole
    assert quick["exposed"] == pytest.approx(whole, rel=0.01)
    assert slow["limit"] == "compute"
    assert quick["limit"] == "the bandwidth between nodes"
    exact = predict(DDP, config(exact=True), 10.0)  # in float64, after the backward pass
    assert exact["exposed"] == exact["collectives"][0]["seconds"]


def test_one_device_has_nothing_to_wait_for() -> None:
    alone = predict(Machine(1, "h100", None, False, "bf16", "test"), config(16))
    assert alone["total"] == alone["compute"]
