"""`accel-gpt plan`: every shipped config, the arithmetic, one sentence for a mistake."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accel_gpt.cli import dispatch
from accel_gpt.config.experiment import Config, TrainConfig
from accel_gpt.config.model import PRESETS, ModelConfig
from accel_gpt.config.parse import load_config
from accel_gpt.console import format_hours, run_main
from accel_gpt.cost.devices import DEVICES, device_memory
from accel_gpt.cost.flops import flops_per_token, padded_vocab_size, parameter_counts
from accel_gpt.data.planning import evaluation_tokens
from accel_gpt.data.shards import open_split
from accel_gpt.data.tokenizer import CharsTokenizer
from accel_gpt.model.gpt import GPT
from accel_gpt.transformers_io.pretrained import inherit_published
from tests.helpers.runs import LAUNCH, make_run

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
GPT2 = str(next(path for path in CONFIGS if path.stem == "gpt2_124m"))
OPTIONS = {  # from the comments in the configs
    "llama_7b": ("--gpus", "8", "--distribution", "fsdp"),
}


def plan(capsys: pytest.CaptureFixture[str], *words: Any) -> Any:
    """Return the report as JSON."""
    code = run_main(dispatch, ["plan", *map(str, words), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (report["memory"]["fits"] is False)
    return report


def mistake(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """Return the one sentence on stderr."""
    assert run_main(dispatch, ["plan", *map(str, words)]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.count("\n") == 1
    return told.err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_is_shipped(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(path), *OPTIONS.get(path.stem, ()))
    report = plan(capsys, *words, "--gpu", "h200", "--train.mixed_precision", "bf16")
    assert report["memory"]["fits"] is True
    assert report["memory"]["total"] == sum(report["memory"]["parts"].values())
    assert run_main(dispatch, ["plan", *words]) == 0
    text = capsys.readouterr().out
    assert f"{report['parameters']['total']:,}" in text
    assert "memory of the device is unknown; give --gpu or --memory_gb" in text


def check_flops(config: ModelConfig) -> None:
    """Compare with torch's count on the meta device, with a vocabulary that needs no padding.

    The counter sees the padded rows of the head; ours leaves out this useless work.
    """
    vocab_size = padded_vocab_size(50257)
    with torch.device("meta"):
        model = GPT(config, vocab_size)
        tokens = torch.empty(1, config.block_size, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        # per sequence, so that the loss is not computed in chunks, which the counter does not see
        model(tokens, tokens, per_sequence=True).sum().backward()
    counted = counter.get_total_flops() / config.block_size
    assert flops_per_token(config, vocab_size) == pytest.approx(counted, rel=0.02)
    padding = 6 * (vocab_size - 50257) * config.n_embd
    assert flops_per_token(config, vocab_size) - flops_per_token(config, 50257) == padding


@pytest.mark.parametrize("preset", PRESETS)
def test_flops_at_a_real_vocabulary_equal_those_that_torch_counts(preset: str) -> None:
    shape = {"n_layer": 2, "n_head": 12, "n_kv_head": 4, "n_embd": 768, "block_size": 1024}
    check_flops(ModelConfig(**{**shape, **PRESETS[preset]}))  # type: ignore[arg-type]  # mixed


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_flops_of_every_config_equal_those_that_torch_counts(path: Path) -> None:
    config = load_config([str(path)], "test", inherit_published).model
    check_flops(replace(config, n_layer=min(config.n_layer, 3)))  # all layers are alike


def test_the_arithmetic_of_gpt2(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--gpus", 8, "--gpu", "h100", "--mfu", 0.5, "--price", 2)
    report = plan(capsys, GPT2, *options, "--train.mixed_precision=bf16")
    length, time, disk = report["length"], report["time"], report["disk"]
    assert report["parameters"]["total_unpadded"] == 124_439_808
    assert length["steps"] == 19_074
    assert length["tokens"] == 19_074 * 524_288
    assert length["tokens_per_parameter"] == length["tokens"] / 124_439_808
    assert length["flops_per_step"] == length["flops_per_token"] * 524_288
    rate = 0.5 * 989.5e12 * 8 / length["flops_per_token"]
    assert time["step"]["compute"] == pytest.approx(524_288 / rate)
    # a step waits for the last bucket
    assert time["tokens_per_second"] == pytest.approx(rate, rel=0.01)
    rate = time["tokens_per_second"]
    # of val and train, every 250 of 19,074 steps and at the last; forward only
    evaluated = 77 * (10_485_760 + 524_288) / 3
    assert time["hours"] == pytest.approx((length["tokens"] + evaluated) / rate / 3600)
    assert time["cost"] == pytest.approx(time["hours"] * 8 * 2)
    assert disk["data_read"] == 19_074 * 512 * 1025 * 2
    assert disk["checkpoint"] == 12 * report["parameters"]["total"]
    assert disk["checkpoints_kept"] == 3


def test_a_step_between_nodes_needs_their_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = (GPT2, "--gpu", "h100", "--nodes", 2, "--gpus_per_node", 8)
    step = plan(capsys, *nodes)["time"]["step"]
    assert (step["total"], step["exposed"]) == (step["compute"], None)
    assert run_main(dispatch, ["plan", *map(str, nodes)]) == 0
    assert "unknown; give --bandwidth" in capsys.readouterr().out
    times = [plan(capsys, *nodes, "--bandwidth", gbit)["time"] for gbit in (3200, 25)]
    assert times[0]["step"]["limit"] == "compute"
    assert times[1]["step"]["limit"] == "the bandwidth between nodes"
    assert times[1]["hours"] > times[0]["hours"]
    assert times[1]["tokens_per_second"] == 524_288 / times[1]["step"]["total"]


def test_a_shape_other_than_that_of_init_from_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Training rejects it too; the published sizes of GPT-2 need no network."""
    told = mistake(capsys, GPT2, "--model.init_from", "gpt2-xl")
    assert "model.n_layer is 12, but gpt2-xl, which model.init_from names, has 48" in told


def held(capsys: pytest.CaptureFixture[str], *words: Any, precision: str = "no") -> dict[str, int]:
    asked = (GPT2, "--train.mixed_precision", precision, *words)
    parts: dict[str, int] = plan(capsys, *asked)["memory"]["parts"]
    return parts


def test_each_setting_changes_the_part_that_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    total = parameter_counts(Config().model, 50257)["total"]
    alone = held(capsys, "--gpu", "h100")
    assert (alone["weights"], alone["optimizer"]) == (4 * total, 8 * total)
    assert alone["gradients"] == 4 * total  # from earlier micro-steps
    assert "gradient buckets of ddp" not in alone
    ddp = held(capsys, "--gpu", "h100", "--gpus", 8)
    assert ddp["gradient buckets of ddp"] == ddp["gradients"] == 4 * total
    # one micro-step: gradients lie in the buckets
    one = held(capsys, "--gpu", "h100", "--gpus", 16)
    assert "gradients" not in one
    fsdp = held(capsys, "--gpu", "h100", "--gpus", 8, "--distribution", "fsdp")
    assert fsdp["weights"] == 4 * total // 8
    assert fsdp["gradients not yet reduced"] == 4 * total
    sharded = ("--gpu", "h100", "--gpus", 8, "--distribution", "fsdp")
    synced = held(capsys, *sharded, "--train.sync_each_batch", "true")
    assert "gradients not yet reduced" not in synced
    bf16 = held(capsys, "--gpu", "h100", precision="bf16")
    assert alone["activations"] / 2 < bf16["activations"] < alone["activations"]
    hidden = 2 * 32 * 1024 * 768  # their gradient is as wide as what the head takes
    assert bf16["logits and loss"] == alone["logits and loss"] - hidden  # chunks of equal size
    chunk = 2 * 16384 * padded_vocab_size(50257)
    assert chunk < bf16["logits and loss"] < 1.2 * chunk
    blocks = held(capsys, "--gpu", "h100", "--train.activation_checkpointing", "blocks")
    kept = 4 * 32 * 1024 * 768
    assert 12 * kept < blocks["activations"] < 16 * kept < alone["activations"] / 9
    exact = held(capsys, "--train.reproducible", "true", "--train.compile", "false")
    assert exact["exact gradients"] == 8 * total
    assert "gradients" not in exact
    saved = held(capsys, "--checkpoint.async_save", "true")
    assert saved["snapshot of async_save"] == 12 * total


def test_the_host_holds_the_models_of_its_processes_and_what_is_being_saved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """DDP: each rank builds the model, rank 0 copies it; FSDP: each its share and one parameter."""
    total = parameter_counts(Config().model, 50257)["total"]
    asked = (GPT2, "--gpu", "h100", "--nodes", 2, "--gpus_per_node", 4, "--distribution")
    saving = ("--checkpoint.async_save", "true")
    waiting = ("--checkpoint.async_save", "false")
    table = 4 * padded_vocab_size(50257) * 768
    expected = {
        "ddp": (4 * 4 * total, 12 * total),
        "fsdp": (4 * (4 * total // 8 + table), 4 * (12 * total // 8)),
        "hsdp": (4 * (4 * total // 4 + table), 4 * (12 * total // 4)),
    }
    for distribution, (start, saved) in expected.items():
        host = plan(capsys, *asked, distribution, *saving)["memory"]["host"]
        assert (host["model at the start"], host["snapshot of async_save"]) == (start, saved)
    assert "snapshot of async_save" not in plan(capsys, *asked, "ddp", *waiting)["memory"]["host"]
    weights = plan(capsys, *asked, "hsdp")["memory"]["parts"]["weights"]
    assert weights == 4 * total // 4  # a node holds all weights


def test_nodes_and_devices_follow_from_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for words, machine in (
        (("--gpus", 8), "8 x h100, ddp, bf16"),
        (("--gpus", 16), "2 nodes of 8 x h100, ddp, bf16"),
        (("--gpus", 16, "--nodes", 1), "16 x h100, ddp, bf16"),
        (("--gpus", 16, "--gpus_per_node", 4), "4 nodes of 4 x h100, ddp, bf16"),
        (("--nodes", 2, "--gpus_per_node", 4), "2 nodes of 4 x h100, ddp, bf16"),
        (
            ("--gpus", 4, "--nodes", 2, "--distribution", "hsdp"),
            "2 nodes of 2 x h100, hsdp, bf16",
        ),
    ):
        assert plan(capsys, GPT2, "--gpu", "h100", *words)["machine"] == machine
    four = (GPT2, "--gpus", 16, "--gpus_per_node", 4, "--train.mixed_precision", "no")
    assert plan(capsys, *four)["machine"] == "4 nodes of 4 x CPU process, ddp, float32"


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("gpt2_774m --gpus 8 --gpu rtx_4090", 1),
        ("gpt2_124m --gpus 2 --gpu l40 --memory_gb 4 --train.mixed_precision no", 3),
        ("gpt2_1558m --gpus 8 --gpu v100", 2),
        ("gpt2_1558m --gpus 8 --gpu v100 --train.micro_batch_size auto", 3),
        ("gpt2_350m --gpu t4 --train.mixed_precision no", 1),
        ("gpt2_350m --gpus 8 --gpu t4 --train.reproducible true --train.compile false", 1),
    ],
)
def test_the_named_settings_make_a_run_fit(
    words: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words.split()
    found = plan(capsys, *asked)["memory"]["try"]
    assert {len(planned["settings"]) for planned in found} == {count}
    assert run_main(dispatch, ["plan", *asked]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("It does not fit. It fits with ")
    for planned in found:
        assert " and ".join(planned["settings"][-2:]) in told
        tried = plan(capsys, *asked, *" ".join(planned["settings"]).split())["memory"]
        assert (tried["fits"], tried["total"]) == (True, planned["total"])


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (
            "gpt2_1558m --gpu rtx_4090",
            ["--train.activation_checkpointing blocks", "--train.micro_batch_size 1"],
        ),
        ("gpt2_1558m --gpu t4 --train.micro_batch_size auto", None),
        (
            "gpt2_1558m --gpu t4 --train.micro_batch_size 1 "
            "--train.activation_checkpointing blocks --train.mixed_precision fp16",
            [],
        ),
    ],
)
def test_where_no_settings_help_the_nearest_are_named(
    words: str, nearest: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words.split()
    found = plan(capsys, *asked)["memory"]["try"]
    assert run_main(dispatch, ["plan", *asked]) == 1
    told = capsys.readouterr().out.splitlines()[-1]
    assert "It fits" not in told
    assert "bf16" not in told
    assert told.endswith("Use devices with more memory, more devices, or a smaller model.")
    for planned in found:
        assert " and ".join(planned["settings"][-2:]) in told
        tried = plan(capsys, *asked, *" ".join(planned["settings"]).split())["memory"]
        assert (tried["fits"], tried["total"]) == (False, planned["total"])
    if nearest is not None:
        assert [planned["settings"] for planned in found] == [nearest][: len(nearest)]


@pytest.mark.parametrize(
    ("words", "machine"),
    [
        ("--gpu t4", "1 x t4, fp16"),
        ("--gpu v100 --gpus 8", "8 x v100, ddp, fp16"),
        ("--gpu v100 --gpus 8 --distribution fsdp", "8 x v100, fsdp, float32"),
        ("--gpu v100 --train.reproducible true --train.compile false", "1 x v100, float32"),
        ("--gpu a100", "1 x a100, bf16"),
    ],
)
def test_auto_plans_with_the_precision_that_the_gpu_has(
    words: str, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(capsys, GPT2, *words.split())["machine"] == machine


def test_70b_on_512_gpus_fits_once_blocks_are_recomputed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = {"n_layer": 80, "n_head": 64, "n_kv_head": 8, "n_embd": 8192, "mlp_hidden": 28672}
    shape |= {"preset": "llama", "block_size": 4096, "vocab_size": 32000}
    asked = [GPT2, *(f"--model.{key}={value}" for key, value in shape.items())]
    asked += ["--gpus", 512, "--gpu", "h100", "--distribution", "fsdp"]
    asked += ["--train.mixed_precision=bf16", "--train.tokens_per_step=4194304"]
    asked += ["--train.micro_batch_size=2"]
    assert plan(capsys, *asked)["memory"]["fits"] is False
    blocks = ("--train.activation_checkpointing", "blocks")
    memory = plan(capsys, *asked, *blocks)["memory"]
    assert memory["fits"] is True
    assert memory["total"] < 30e9


def test_what_hsdp_cannot_hold_fsdp_can(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (GPT2, "--gpu", "h100", "--memory_gb", 3, "--nodes", 8, "--gpus_per_node", 2)
    asked += ("--train.mixed_precision", "bf16", "--train.activation_checkpointing", "blocks")
    asked += ("--train.micro_batch_size", 1, "--distribution")
    memory = plan(capsys, *asked, "hsdp")["memory"]
    assert memory["fits"] is False
    assert [planned["settings"] for planned in memory["try"]] == [["--distribution fsdp"]]
    assert plan(capsys, *asked, "fsdp")["memory"]["fits"] is True


def test_a_run_that_fits_is_told_how_far_it_may_grow(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (GPT2, "--gpu", "h100", "--train.micro_batch_size", 1)
    largest = plan(capsys, *asked)["memory"]["largest_micro_batch_size"]
    assert largest > 1
    grown = (*asked[:-1], largest)
    assert plan(capsys, *grown)["memory"]["fits"] is True
    assert plan(capsys, *asked[:-1], 2 * largest)["memory"]["fits"] is False


def test_the_vocabulary_is_that_of_data_tokenizer_or_option(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{train: {corpus}}}\ntrain: {{max_steps: 9, tokens_per_step: 16384}}\n")
    assert plan(capsys, path)["vocabulary"] == {"tokens": 257, "source": str(corpus)}
    away = ("--data.train", tmp_path / "away")
    assert "away is not prepared; set model.vocab_size" in mistake(capsys, path, *away)
    assert plan(capsys, path, *away, "--vocab_size", 99)["vocabulary"]["tokens"] == 99
    assert plan(capsys, path, *away, "--data.tokenizer", "gpt2")["vocabulary"]["tokens"] == 50257
    bpe = ("--data.prepare.source=stdlib", "--data.prepare.tokenizer=bpe")
    assert plan(capsys, path, *away, *bpe)["vocabulary"]["tokens"] == 4096
    CharsTokenizer("abcde").save(tmp_path)
    file = tmp_path / "tokenizer.json"
    assert plan(capsys, path, *away, "--data.tokenizer", file)["vocabulary"]["tokens"] == 5


def test_the_vocabulary_of_another_projects_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """nanoGPT's: raw ids, and the characters in meta.pkl."""
    folder, path = tmp_path / "chars", tmp_path / "config.yaml"
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        np.arange(60, dtype="<u2").tofile(folder / name)
    chars = {chr(65 + i): i for i in range(60)}
    meta = {"vocab_size": 60, "stoi": chars, "itos": {i: c for c, i in chars.items()}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    path.write_text(f"data: {{train: {folder}}}\ntrain: {{max_steps: 9, tokens_per_step: 16384}}\n")
    assert plan(capsys, path)["vocabulary"] == {"tokens": 60, "source": str(folder)}
    (folder / "meta.pkl").unlink()
    assert "do not name their tokenizer; set data.tokenizer" in mistake(capsys, path)


def test_every_split_that_is_evaluated_takes_its_time(corpus: Path, tmp_path: Path) -> None:
    """Each named val set has its own budget, and the last step may read all of it."""
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{train: {corpus}}}\neval: {{every: 4, tokens: 512}}\n")

    def tokens(*words: str) -> int | None:
        return evaluation_tokens(load_config([str(path), *words], "test"), 12)

    train, val = (open_split(corpus, name).tokens for name in ("train", "val"))
    sets = ("--data.val", f"{{web: {corpus}, code: {corpus}}}")
    assert tokens() == 3 * (512 + 512)
    assert tokens(*sets) == 3 * (512 + 2 * 512)
    assert tokens(*sets, "--eval.whole_at_end", "true") == 3 * (512 + 2 * 512) + 2 * val
    assert tokens("--eval.tokens", "10000") == 3 * (10_000 + val)
    assert tokens(*sets, "--eval.tokens", "null") == 3 * (train + 2 * val)
    nowhere = ("--data.train", str(tmp_path / "nowhere"))
    assert tokens(*nowhere, "--eval.tokens", "1000000") == 3 * (524_288 + 1_000_000)
    away = ("--data.val", str(tmp_path / "away"))
    assert tokens(*away) == 3 * (512 + 512)
    assert tokens(*away, "--eval.tokens", "null") is None


def test_an_accelerate_config_brings_processes_precision_and_fsdp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\n")
    report = plan(capsys, GPT2, "--config_file", path, "--gpu", "h100")
    assert report["machine"] == "4 x h100, fsdp, bf16"
    over = plan(capsys, GPT2, "--config_file", path, "--gpus", 2, "--distribution", "ddp")
    assert over["machine"] == "2 x CPU process, ddp, bf16"
    two = "num_machines: 2\nparallelism_config: {parallelism_config_dp_replicate_size: %s}\n"
    path.write_text("distributed_type: FSDP\nnum_processes: 16\n" + two % 2)
    report = plan(capsys, GPT2, "--config_file", path, "--gpu", "h100")
    assert report["machine"] == "2 nodes of 8 x h100, hsdp, bf16"
    path.write_text("distributed_type: FSDP\nnum_processes: 16\n" + two % 3)
    told = mistake(capsys, GPT2, "--config_file", path, "--gpu", "h100")
    assert "dp_replicate_size in" in told
    assert "is 3; it must divide the number of devices, 16" in told
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: many\n")
    assert "num_processes in" in mistake(capsys, GPT2, "--config_file", path)


def test_times_are_written_as_people_do() -> None:
    given = (0.01, 0.4, 1.995, 2.17, 80.0)
    assert [*map(format_hours, given)] == ["36 s", "24 min", "2 h 0 min", "2 h 10 min", "3.3 days"]


def test_a_run_in_out_dir_gives_the_speed_of_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    words = (GPT2, "--out_dir", run)
    report = plan(capsys, *words)
    assert report["time"]["tokens_per_second"] is None  # the run has another model
    flops = report["length"]["flops_per_token"]
    launch = LAUNCH | {"model": {"flops_per_token": flops}}
    (run / "run.json").write_text(json.dumps({"launches": [launch]}))
    found = plan(capsys, *words)["time"]
    assert found["tokens_per_second"] == pytest.approx(500, rel=1e-3)
    assert f"measured by the run in {run}" in found["source"]
    assert "assumed MFU" in plan(capsys, *words, "--gpu", "h100")["time"]["source"]


@pytest.mark.parametrize(("flags", "shown"), [((), "float32"), (("amx_bf16",), "bf16")])
def test_auto_is_the_precision_of_this_cpu(
    flags: tuple[str, ...],
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("accel_gpt.cost.devices.cpu_flags", lambda: frozenset(flags))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    found = plan(capsys, GPT2, "--train.mixed_precision", "auto")
    assert found["machine"] == f"1 x CPU process, {shown}"
    assert found["precision"]["is"] == shown.replace("float32", "no")


def test_auto_is_the_precision_of_the_run_that_a_launch_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.cost.devices.cpu_flags", lambda: frozenset[str]())
    words = (GPT2, "--out_dir", tmp_path / "run", "--train.mixed_precision", "auto")
    assert plan(capsys, *words)["machine"] == "1 x CPU process, float32"
    make_run(tmp_path / "run", train=TrainConfig(mixed_precision="bf16"))
    found = plan(capsys, *words)
    assert found["machine"] == "1 x CPU process, bf16"
    source = f"train.mixed_precision auto, as in {tmp_path / 'run' / 'config.yaml'}"
    assert found["precision"]["source"] == source
    assert plan(capsys, *words, "--gpu", "t4")["precision"]["is"] == "fp16"


def test_auto_is_the_precision_that_a_launcher_set_for_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_gpt.cost.devices.cpu_flags", lambda: frozenset[str]())
    run = make_run(tmp_path / "run", launches=[LAUNCH | {"mixed_precision": "bf16"}])
    found = plan(capsys, GPT2, "--out_dir", run, "--train.mixed_precision", "auto")
    assert found["precision"]["is"] == "bf16"
    assert found["precision"]["source"].endswith("run.json")


def test_every_device_has_its_memory() -> None:
    assert all(list(device.memory_gb) == sorted(device.memory_gb) for device in DEVICES.values())
    assert device_memory("a100") == 40e9
    assert device_memory("NVIDIA A100-SXM4-80GB") == 80e9
    assert device_memory("cpu") is None


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from accel_gpt.cli import dispatch\n"
        f"dispatch(['plan', {GPT2!r}, '--gpu', 'h100'])\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'datasets')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0
