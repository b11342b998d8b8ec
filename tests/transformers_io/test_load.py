"""Start from another model: folders of transformers, runs, the Hub; and errors."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Linear

from accel_gpt import cli
from accel_gpt.commands.resolve import load_config
from accel_gpt.commands.sweep_settings import read_grid
from accel_gpt.config.experiment import Config
from accel_gpt.data.corpus import open_corpus
from accel_gpt.data.tokenizer import BytesTokenizer, CharsTokenizer
from accel_gpt.errors import UserError
from accel_gpt.files import sha256
from accel_gpt.model.gpt import GPT
from accel_gpt.model.language_model import LanguageModel, draw_weights
from accel_gpt.model.make import make_model
from accel_gpt.own_code import OwnCode, load_own_code
from accel_gpt.runs.checkpoint import read_state
from accel_gpt.runs.state import InitialWeights
from accel_gpt.runs.tensor_files import weights_of
from accel_gpt.training.reporter import describe_new
from accel_gpt.transformers_io.hf_weights import load_weights
from accel_gpt.transformers_io.load import load_initial_weights, load_pretrained
from accel_gpt.transformers_io.pretrained import inherit
from tests.conftest import launch, reseal, run_here
from tests.faults.attack import zipped
from tests.helpers.hub_server import HubServer, point_at
from tests.test_matrix import work
from tests.test_train import assert_same_weights
from tests.transformers_io.test_convert import make_theirs
from tests.transformers_io.test_export import QUICK

Arguments = Callable[..., list[str]]
ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random GPT-2 of transformers over bytes, and its folder."""
    folder = tmp_path_factory.mktemp("saved") / "gpt2"
    theirs = make_theirs("GPT2", SHAPE)
    theirs.save_pretrained(folder)
    BytesTokenizer().save(folder, 64)
    return theirs, folder


@pytest.fixture
def folder(saved: tuple[Any, Path], tmp_path: Path) -> Path:
    """A copy of the folder of `saved`."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in saved[1].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def started(arguments: list[str]) -> GPT:
    config = load_config(arguments, "test")
    gpt = GPT.allocate(config.model, open_corpus(config).vocab_size)
    load_initial_weights(config, gpt)
    return gpt


def draw(vocab_size: int = 257, length: int = 32) -> Tensor:
    return torch.randint(vocab_size, (2, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_run_starts_from_a_folder_of_transformers_and_crops_its_block(
    saved: tuple[Any, Path], small_run: Arguments
) -> None:
    theirs, place = saved
    model = started(small_run("--model.init_from", str(place)))
    assert model.config.block_size == 32  # from the config; the weights have 64
    assert model.config.dropout == 0.1
    tokens = draw()
    torch.testing.assert_close(model.eval()(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    whole, tokenizer = load_pretrained(str(place))
    assert (whole.config.block_size, tokenizer.kind) == (64, "bytes")


def test_what_is_not_set_comes_with_the_weights(folder: Path) -> None:
    given = {"model.init_from": str(folder), "model.dropout": 0.2, "out_dir": str(folder / "run")}
    assert "data.prepare.tokenizer" not in inherit(given)  # nothing is prepared
    brought = inherit(given | {"data.prepare.source": "text"})
    assert brought["model.n_layer"] == 2
    assert brought["model.vocab_size"] == 257
    assert brought["data.prepare.tokenizer"] == str(folder / "tokenizer.json")
    assert "model.dropout" not in brought
    assert "data.prepare.tokenizer" not in inherit({**given, "data.prepare.tokenizer": "bytes"})


def test_another_tokenizer_is_refused(folder: Path, small_run: Arguments) -> None:
    CharsTokenizer("abc").save(folder, 64)
    with pytest.raises(UserError, match=r"but the tokenizer of .* is bytes of 257"):
        started(small_run("--model.init_from", str(folder)))
    (folder / "tokenizer.json").unlink()
    started(small_run("--model.init_from", str(folder)))  # the data folder has one
    with pytest.raises(UserError, match="has no tokenizer"):
        load_pretrained(str(folder))


@pytest.mark.usefixtures("in_this_process")
def test_a_token_that_was_added_beyond_the_weights(
    folder: Path, small_run: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No document holds a special token, such as [PAD]; any other may occur in one."""
    content = json.loads((folder / "tokenizer.json").read_text())
    pad = content["added_tokens"][0] | {"id": 257, "content": "[PAD]"}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "[PAD]"}))
    texts = ["--data.text", str(tmp_path / "text.txt")]
    for special in (True, False):
        tokens = [*content["added_tokens"], pad | {"special": special}]
        (folder / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": tokens}))
        run = str(tmp_path / f"run_{special}")
        words = small_run(*QUICK, *texts, "--model.init_from", str(folder), "--out_dir", run)
        assert launch(words) == (0 if special else 2)
    told = capsys.readouterr().err
    assert "is 257, but the tokenizer of" in told
    assert "has 258 tokens" in told
    assert run_here(cli.dispatch, ["sample", run.replace("False", "True")]) == 0
    words = ["export", run.replace("False", "True"), "--to", str(tmp_path / "exported")]
    assert run_here(cli.dispatch, words) == 0
    exported = json.loads((tmp_path / "exported" / "tokenizer_config.json").read_text())
    assert "pad_token" not in exported  # the model has no row for it


@pytest.mark.parametrize(
    ("vocabulary", "tokenizer", "message"),
    [
        ("abc", "bytes", "has a different tokenizer (chars of 3"),
        ("", "bytes", "copy has no tokenizer; put the tokenizer.json of the model beside"),
        ("abc", "bpe", "data.prepare.tokenizer bpe makes a tokenizer, but the weights"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_text_is_tokenized(
    folder: Path,
    small_run: Arguments,
    tmp_path: Path,
    vocabulary: str,
    tokenizer: str,
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (folder / "tokenizer.json").unlink()
    if vocabulary:
        CharsTokenizer(vocabulary).save(folder, 64)
    words = small_run("--model.init_from", str(folder), "--data.text", str(tmp_path / "text.txt"))
    words += ["--data.prepare.tokenizer", tokenizer]
    assert launch(words) == 2
    printed = capfd.readouterr()
    assert message in printed.err
    assert "prepared" not in printed.out
    assert not (tmp_path / "run").exists()


def test_no_context_is_longer_than_that_of_the_weights(trained: Callable[..., Path]) -> None:
    """Also with rotary positions: a sliding window would no longer be the whole context."""
    run = str(trained(*QUICK, "--model.preset", "llama"))
    longer = {"model.init_from": run, "model.block_size": 64}
    with pytest.raises(UserError, match=r"leave it unset, or raise model\.rope_factor too"):
        inherit(longer)
    assert "model.block_size" not in inherit({**longer, "model.rope_factor": 2})


def test_a_begun_run_goes_on_when_its_source_has_gone(folder: Path, small_run: Arguments) -> None:
    arguments = small_run("--model.init_from", str(folder), *QUICK)
    assert launch(arguments) == 0
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    longer = ["--train.max_steps", "3", "--checkpoint.allow_change", "train.max_steps"]
    assert launch([*arguments, *longer]) == 0


def test_weights_in_several_files(folder: Path) -> None:
    theirs = make_theirs("GPT2", SHAPE | {"tie_word_embeddings": False})
    theirs.save_pretrained(folder, max_shard_size="50KB")
    (folder / "model.safetensors").unlink()
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    model, _ = load_pretrained(str(folder))
    tokens = draw()
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    next(folder.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(UserError, match=r"lacks \d+ tensors of a GPT2LMHeadModel"):
        load_pretrained(str(folder))


def test_weights_in_a_pickle_are_never_read(
    folder: Path, tmp_path: Path, small_run: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    trap = tmp_path / "executed"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(zipped(trap))
    commands = [
        lambda: run_here(cli.dispatch, ["sample", str(folder)]),
        lambda: launch(small_run("--model.init_from", str(folder))),
    ]
    for command in commands:
        assert command() == 2
        told = capsys.readouterr().err
        assert "no model.safetensors" in told
        assert "save_pretrained" in told
    assert not trap.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert trap.exists(), "the payload would have worked"


@pytest.mark.parametrize("beside_weights", [True, False])
def test_an_adapter_is_merged_first(
    beside_weights: bool,
    folder: Path,
    small_run: Arguments,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its weights would be ignored."""
    file = "adapter_model.safetensors" if beside_weights else "adapter_config.json"
    (folder / file).write_bytes(b"{}")
    if not beside_weights:
        (folder / "config.json").unlink()
        (folder / "model.safetensors").unlink()
    assert run_here(cli.dispatch, ["sample", str(folder)]) == 2
    assert launch(small_run("--model.init_from", str(folder))) == 2
    assert capsys.readouterr().err.count(f"holds {file}, an adapter of PEFT") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 3}, "lacks 12 tensors of a GPT2LMHeadModel"),
        ({"n_embd": 64}, r"wte\.weight is .*\(257, 32\), expected"),
        ({"n_layer": 10**9}, "at most"),  # before memory is allocated
    ],
)
def test_weights_of_another_shape_are_refused(
    folder: Path, change: dict[str, int], message: str
) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=message):
        load_pretrained(str(folder))


def test_a_changed_gpt_starts_from_no_weights_that_lack_its_own(folder: Path) -> None:
    model = load_pretrained(str(folder))[0]
    model.blocks[0].attn.gate = Linear(32, 32, bias=False)
    with pytest.raises(UserError, match="are not those of GPT2LMHeadModel"):
        load_weights(model, "gpt2", {}, "theirs")


# --------------------------------------------------------------------------- where a run began


def test_a_run_keeps_the_name_step_and_hash_of_its_first_weights(
    small_run: Arguments,
    trained: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, tuned = trained(*QUICK), tmp_path / "tuned"
    words = [*QUICK, "--out_dir", str(tuned), "--model.init_from", str(source)]
    words += ["--train.max_steps", "2"]
    assert launch(small_run(*words, "--train.stop_at", "1")) == 0
    (checkpoint,) = (source / "checkpoints").iterdir()
    digest = sha256(checkpoint / "model.safetensors")
    begun = InitialWeights(str(source), read_state(checkpoint).step, digest)
    line = f"\nweights  from {source}, step {begun.step}, sha256 {digest[:12]}\n"
    assert line in capsys.readouterr().err
    (checkpoint / "manifest.json").unlink()  # the run no longer needs its source
    assert launch(small_run(*words)) == 0
    assert line not in capsys.readouterr().err  # it goes on from its own checkpoint
    assert read_state(tuned / "checkpoints" / "step_00000002").initial_weights == begun
    launches = json.loads((tuned / "run.json").read_text())["launches"]
    assert [launch["initial_weights"] for launch in launches] == [asdict(begun)] * 2


def test_the_hash_of_several_files_is_that_of_their_hashes(
    folder: Path, small_run: Arguments, trained: Callable[..., Path]
) -> None:
    def hash_of(place: Path) -> str:
        config = load_config(small_run("--model.init_from", str(place)), "test")
        return load_initial_weights(config, make_model(config, 257)).sha256

    def expected(files: list[Path]) -> str:
        return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()

    assert hash_of(folder) == sha256(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    make_theirs("GPT2", SHAPE).save_pretrained(folder, max_shard_size="50KB")
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    assert hash_of(folder) == expected(files)
    (checkpoint,) = (trained(*QUICK) / "checkpoints").iterdir()
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    parts = [checkpoint / f"weights_{rank}.safetensors" for rank in (0, 1)]  # as FSDP writes them
    save_file({"wte.weight": tensors.pop("wte.weight")}, parts[0])
    save_file(tensors, parts[1])
    reseal(checkpoint)
    assert hash_of(checkpoint) == expected(parts)


# --------------------------------------------------------------------------- new weights

GATES = "blocks.*.mlp.gate.*"


@pytest.fixture
def code(tmp_path: Path) -> list[str]:
    """The options of the file in docs/how-to/own-code.md that gives each MLP a gate."""
    page = (ROOT / "docs/how-to/own-code.md").read_text()
    section = page.partition("\n## From trained weights\n")[2]
    (tmp_path / "gated.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    return ["--code", str(tmp_path / "gated.py")]


def begin(config: Config, start: Callable[[LanguageModel], object]) -> dict[str, Tensor]:
    """Return the weights with which a run of `config` begins, if `start` sets them."""
    model = make_model(config, 257)
    torch.manual_seed(config.seed)
    start(model)
    return weights_of(model)


@pytest.mark.parametrize("source", ["run", "run with gates", "transformers"])
def test_new_weights_are_drawn_as_from_scratch_and_the_others_are_read(
    source: str,
    folder: Path,
    small_run: Arguments,
    trained: Callable[..., Path],
    code: list[str],
    tmp_path: Path,
) -> None:
    place, own = folder, OwnCode()
    if source == "run":
        place = trained(*QUICK)
    elif source == "run with gates":
        place, own = tmp_path / "run", load_own_code(code[1])
        assert launch(small_run(*QUICK, *code)) == 0
    patterns = f"[blocks.1.mlp.up.weight, {GATES}]"
    words = [*code, "--model.init_from", str(place), "--model.new_weights", patterns]
    config = load_config(small_run(*words), "test")
    drawn = begin(config, draw_weights)
    read = weights_of(load_pretrained(str(place), own=own)[0])
    for name, weight in begin(config, partial(load_initial_weights, config)).items():
        is_new = "gate" in name or name == "blocks.1.mlp.up.weight"
        expected = drawn[name] if is_new else read[name][: len(weight)]
        assert torch.equal(weight, expected), name


def test_a_head_that_a_model_of_transformers_lacks_may_be_new(
    folder: Path, small_run: Arguments
) -> None:
    make_theirs("GPT2", SHAPE | {"tie_word_embeddings": False}).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    words = small_run("--model.init_from", str(folder))
    with pytest.raises(
        UserError, match=r"lm_head\.weight; model\.new_weights may list head\.weight"
    ):
        started(words)
    words += ["--model.new_weights", "head.weight"]
    config = load_config(words, "test")
    found = begin(config, partial(load_initial_weights, config))
    assert torch.equal(found["head.weight"], begin(config, draw_weights)["head.weight"])


def test_a_weight_that_is_missing_or_a_pattern_without_a_weight_is_named(
    folder: Path,
    small_run: Arguments,
    trained: Callable[..., Path],
    code: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = str(trained(*QUICK))
    tuned = ["--out_dir", str(tmp_path / "tuned"), *code, "--model.init_from"]
    gates = [f"blocks.{n}.mlp.gate.weight" for n in (0, 1)]
    assert launch(small_run(*tuned, run)) == 4
    assert f"it lacks {gates[0]}; model.new_weights may list it" in capsys.readouterr().err
    assert launch(small_run(*tuned, str(folder))) == 2
    assert f"{', '.join(gates)}; model.new_weights may list them" in capsys.readouterr().err
    assert launch(small_run(*tuned, run, "--model.new_weights", "blocks.*.mlp.gat.*")) == 2
    told = capsys.readouterr().err
    assert "model.new_weights has blocks.*.mlp.gat.*, but no weight of the model matches it" in told
    nearest = told.partition("; the nearest are ")[2].strip().split(", ")
    assert len(nearest) == 3
    assert set(gates) < set(nearest)


def test_the_baseline_of_a_sweep_has_no_new_weights(
    small_run: Arguments, trained: Callable[..., Path], code: list[str]
) -> None:
    words = [f"--code=null,{code[1]}", f"--model.init_from={trained(*QUICK)}"]
    grid = read_grid(small_run(), [*words, f"--model.new_weights={GATES}"])
    assert [one.config.model.new_weights for one in grid.settings] == [(), (GATES,)]


def test_a_run_with_new_weights_names_them_resumes_and_samples(
    small_run: Arguments,
    trained: Callable[..., Path],
    code: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tuned = tmp_path / "tuned"
    words = [*code, "--out_dir", str(tuned), "--model.init_from", str(trained(*QUICK))]
    words += [*QUICK, "--train.max_steps", "2", "--model.new_weights"]
    assert launch(small_run(*words, GATES, "--train.stop_at", "1")) == 0
    names = "blocks.0.mlp.gate.weight, blocks.1.mlp.gate.weight"
    assert f"\nweights  new: {names}\n" in capsys.readouterr().err
    shape = json.loads((tuned / "checkpoints/step_00000001/model.json").read_text())["config"]
    assert shape["new_weights"] == [GATES]
    assert launch(small_run(*words, "blocks.*")) == 0  # acts before the first step only
    told = capsys.readouterr().err
    assert "from step 1 (" in told
    assert "weights  new" not in told
    assert run_here(cli.dispatch, ["sample", str(tuned), *code, "--max_new_tokens", "3"]) == 0


def test_many_new_weights_are_counted() -> None:
    weights = {f"blocks.{n}.gate.weight": torch.zeros(2, 3) for n in range(6)}
    weights["head.weight"] = torch.zeros(5)
    told = describe_new(weights, ["blocks.*.gate.*", "head.*"])
    assert told == "blocks.*.gate.* (6 weights, 36 parameters), head.* (1 weight, 5 parameters)"


@pytest.mark.slow
def test_new_weights_are_the_same_on_one_process_two_and_sharded(
    small_run: Arguments, trained: Callable[..., Path], code: list[str], tmp_path: Path
) -> None:
    words = [*code, "--model.init_from", str(trained(*QUICK)), "--model.new_weights", GATES]
    words += [*QUICK, "--train.micro_batch_size", "2", "--train.mixed_precision", "no"]
    begun = {}
    for engine, processes in {"one": 1, "ddp": 2, "fsdp2": 2}.items():
        run = small_run(*words, "--out_dir", str(tmp_path / engine))
        first = tmp_path / f"{engine}.pt"
        work(engine, processes, [[engine, run, 0, str(first)]], tmp_path)
        begun[engine] = torch.load(first)["before"]
    assert any("gate" in name for name in begun["one"])
    assert_same_weights(begun["one"], begun["ddp"])
    assert_same_weights(begun["one"], begun["fsdp2"])


@pytest.mark.slow
@torch.no_grad()
def test_a_checkpoint_of_nanogpt_is_converted_as_the_docs_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    theirs = make_theirs("GPT2", SHAPE | {"activation_function": "gelu"})
    weights = {}
    for name, tensor in theirs.state_dict().items():
        linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        if name.endswith(".bias"):  # nanoGPT's bias=False
            tensor.zero_()
        else:
            weights[f"_orig_mod.{name}"] = tensor.T.clone() if linear else tensor
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 64, "vocab_size": 257}
    Path("out").mkdir()
    torch.save({"model": weights, "model_args": shape}, "out/ckpt.pt")
    page = (ROOT / "docs/how-to/from-nanogpt.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    subprocess.run([sys.executable, "-c", code], check=True)
    BytesTokenizer().save(Path("out/transformers"), 64)
    ours, _ = load_pretrained("out/transformers")
    tokens = draw()
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)


def test_names_without_a_prefix_and_old_buffers(folder: Path, saved: tuple[Any, Path]) -> None:
    """openai-community/gpt2 stores them."""
    tensors = load_file(folder / "model.safetensors")
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(plain, folder / "model.safetensors")
    tokens = draw()
    found = load_pretrained(str(folder))[0](tokens)
    torch.testing.assert_close(found, saved[0](tokens).logits, atol=1e-5, rtol=1e-5)


# --------------------------------------------------------------------------- the Hub


def test_a_model_comes_from_the_hub_and_then_from_its_cache(
    folder: Path,
    saved: tuple[Any, Path],
    small_run: Arguments,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with HubServer() as hub:
        point_at(monkeypatch, hub, tmp_path / "home")
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        hub.add("openai-community/gpt2", {**files, "consolidated.safetensors": b"much"})
        hub.add("user/pickled", {"config.json": files["config.json"], "pytorch_model.bin": b""})
        hub.add("user/adapter", {"adapter_config.json": b"{}"})
        model = started(small_run("--model.init_from", "gpt2"))
        assert not any("consolidated" in path for _, path in hub.requests)
        options = ["--max_new_tokens", "5", "--temperature", "0"]
        assert run_here(cli.dispatch, ["sample", "gpt2", *options]) == 0
        for place, message in (
            ("user/nothing", "is neither a local folder nor a repository on the Hub"),
            ("gpt2@v9", "gpt2 cannot be read: the Hub answered with status 404"),
            ("user/adapter", "user/adapter holds adapter_config.json, an adapter of PEFT"),
        ):
            assert run_here(cli.dispatch, ["sample", place]) == 2
            assert message in capsys.readouterr().err
        with pytest.raises(UserError, match="has no model"):
            started(small_run("--model.init_from", "user/pickled"))
    again = started(small_run("--model.init_from", "gpt2"))  # without the Hub
    tokens = draw()
    assert torch.equal(model.eval()(tokens), again.eval()(tokens))
    torch.testing.assert_close(again(tokens), saved[0](tokens).logits, atol=1e-5, rtol=1e-5)
