"""Convert weights and shapes both ways, against random tiny models of transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from accel_gpt.config.model import ModelConfig
from accel_gpt.errors import UserError
from accel_gpt.model.gpt import GPT
from accel_gpt.transformers_io.hf_config import (
    HF_CLASSES,
    matching_preset,
    read_hf_config,
    write_hf_config,
)
from accel_gpt.transformers_io.hf_weights import export_tensors, load_weights
from tests.conftest import tiny

VOCAB, BLOCK = 65, 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": BLOCK,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": BLOCK}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2 untied, exact gelu, inner": (
        "GPT2",
        GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 48},
    ),
    "llama": ("Llama", COMMON | {"num_key_value_heads": 4}),
    "llama grouped, tied, biases, head_dim": (
        "Llama",
        COMMON
        | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "llama3 positions": ("Llama", COMMON | {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", COMMON | {"sliding_window": None}),
    "mistral, window": ("Mistral", COMMON | {"sliding_window": BLOCK}),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 16, "tie_word_embeddings": True}),
    "nanochat": ("NanoChat", COMMON | {"num_key_value_heads": 4}),
    "nanochat grouped, no cap": ("NanoChat", COMMON | {"final_logit_softcapping": None}),
}
all_of_theirs = pytest.mark.parametrize(
    ("name", "settings"), THEIRS.values(), ids=list(THEIRS.keys())
)


@pytest.fixture(autouse=True)
def short_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale positions from a context of 32 tokens, so that the few of a test show it."""
    for module in ("model.layers", "transformers_io.hf_config"):
        monkeypatch.setattr(f"accel_gpt.{module}.LLAMA3_CONTEXT", 32)


@torch.no_grad()
def make_theirs(name: str, settings: dict[str, Any]) -> Any:
    """Return a random model of transformers in which every weight matters."""
    import transformers

    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**settings)
    tail = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, name + tail)(config).eval()
    for weight in model.parameters():
        weight.add_(0.15 * torch.randn_like(weight))
    return model


def imported(theirs: Any) -> GPT:
    shape = read_hf_config(theirs.config.to_dict(), "the test")
    vocab_size = shape.pop("vocab_size")
    model = GPT.allocate(ModelConfig(**shape), vocab_size).eval()
    tensors = {k: (lambda v=v: v) for k, v in theirs.state_dict().items()}
    load_weights(model, shape["preset"], tensors, "the test")
    return model


def exported(model: GPT) -> Any:
    """Convert our model to a class of transformers; assert that exactly its parameters are set."""
    import transformers

    content = write_hf_config(model.config, model.vocab_size, 7, "float32")
    config = transformers.CONFIG_MAPPING[content["model_type"]].from_dict(content)
    theirs = getattr(transformers, content["architectures"][0])(config).eval()
    tensors = export_tensors(model, matching_preset(model.config), torch.float32)
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    tied = ["lm_head.weight"] if model.config.tie_embeddings else []
    assert missing == tied
    assert not unexpected
    theirs.tie_weights()
    count = sum(p.numel() for p in theirs.parameters())
    assert count == sum(tensor.numel() for tensor in tensors.values())
    return theirs


def draw(length: int = 40) -> Tensor:
    return torch.randint(VOCAB, (3, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@all_of_theirs
def test_theirs_to_ours_and_back_gives_equal_logits(name: str, settings: dict[str, Any]) -> None:
    theirs = make_theirs(name, settings)
    ours, tokens = imported(theirs), draw()
    expected = theirs(tokens).logits
    assert expected.std() > 0.05  # logits are not near zero
    torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=1e-5)
    assert not ours.wte.weight[VOCAB:].any()
    again = exported(ours)
    torch.testing.assert_close(again(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], tensor, atol=0, rtol=0)


OURS = {
    "gpt2": tiny(),
    "gpt2 without biases": tiny(bias=False),
    "gpt2 untied, relu2": tiny(tie_embeddings=False, mlp="relu2"),
    "llama": tiny("llama"),
    "llama grouped, tied": tiny("llama", n_kv_head=2, tie_embeddings=True),
    "qwen3": tiny("qwen3", n_kv_head=2, head_dim=12),
    "fast": tiny("fast"),
    "fast grouped": tiny("fast", n_kv_head=1, logit_softcap=None),
}
all_of_ours = pytest.mark.parametrize("config", OURS.values(), ids=list(OURS.keys()))


@torch.no_grad()
@all_of_ours
def test_ours_to_theirs_and_back_gives_equal_logits(config: ModelConfig) -> None:
    torch.manual_seed(4)
    ours = GPT(config, VOCAB).eval()
    for weight in ours.parameters():
        weight.add_(0.2 * torch.randn_like(weight))
    tokens = draw(16)
    theirs = exported(ours)
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(imported(theirs)(tokens), ours(tokens), atol=1e-6, rtol=1e-6)
    assert type(theirs).__name__ == HF_CLASSES[config.preset]


# --------------------------------------------------------------------------- what is refused


def shape_of(**changes: Any) -> dict[str, Any]:
    import transformers

    content = transformers.LlamaConfig(**COMMON).to_dict()
    return read_hf_config(content | changes, "somewhere")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertModel"]}, "BertModel.*Qwen3ForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type yarn; only default"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2.0; only 1.0"),
        ({"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}, "64; only 32"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act gelu.*only silu"),
        ({"attention_bias": True}, "mlp_bias False; only True"),
        ({"hidden_size": "many"}, "config.json of somewhere is not valid"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        shape_of(**changes)


def test_a_config_of_transformers_4_gives_the_same_shape() -> None:
    import transformers

    new = transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3).to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    old |= {"rope_theta": 500.0, "rope_scaling": scaling}
    assert read_hf_config(old, "") == read_hf_config(new, "")
    assert read_hf_config(new, "")["rope_factor"] == 8.0


@pytest.mark.parametrize("scaling", [{}, {"rope_factor": 2.0}])
def test_transformers_4_reads_the_positions_of_an_export(scaling: dict[str, Any]) -> None:
    """It knows `rope_theta` and `rope_scaling`, and does not know `rope_parameters`."""
    content = write_hf_config(tiny("llama", rope_theta=500.0, **scaling), VOCAB, 7, "float32")
    del content["rope_parameters"]
    assert content["rope_theta"] == 500
    found = read_hf_config(content, "the test")
    assert found["rope_theta"] == 500
    assert found["rope_factor"] == scaling.get("rope_factor", 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "rmsnorm"}, "GPT2LMHeadModel, needs model.norm layernorm"),
        ({"n_kv_head": 2}, "model.n_kv_head 4"),
        ({"qk_norm": True}, "model.qk_norm False"),
        ({"mlp": "swiglu"}, "needs model.mlp gelu"),
        ({"n_head": 3, "head_dim": 12}, "needs model.head_dim 10.6"),
    ],
)
def test_a_shape_that_no_class_computes_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        matching_preset(tiny(**changes))


def test_tied_weights_may_be_stored_under_either_name_but_not_differ() -> None:
    theirs = make_theirs("Llama", COMMON | {"tie_word_embeddings": True})
    shape = read_hf_config(theirs.config.to_dict(), "x")
    model = GPT(ModelConfig(**shape), VOCAB)
    tensors = {k: (lambda v=v: v) for k, v in theirs.state_dict().items()}
    embedding = tensors.pop("model.embed_tokens.weight")
    load_weights(model, "llama", tensors, "x")
    assert torch.equal(model.wte.weight[:VOCAB], embedding())
    other = {"model.embed_tokens.weight": lambda: embedding() + 1}
    with pytest.raises(UserError, match=r"tie_word_embeddings true .* a separate head"):
        load_weights(model, "llama", tensors | other, "x")


def test_a_sliding_window_limits_the_context() -> None:
    from transformers import MistralConfig

    shape = read_hf_config(MistralConfig(**COMMON, sliding_window=24).to_dict(), "x")
    assert shape["block_size"] == 24


def test_tensors_that_no_weight_takes_are_named() -> None:
    theirs = make_theirs("Llama", COMMON)
    shape = read_hf_config(theirs.config.to_dict(), "x")
    model = GPT(ModelConfig(**(shape | {"vocab_size": None})), VOCAB)
    tensors = {k: (lambda v=v: v) for k, v in theirs.state_dict().items()}
    with pytest.raises(UserError, match=r"1 tensors more than .*model\.score\.weight"):
        load_weights(model, "llama", tensors | {"score.weight": lambda: torch.zeros(3)}, "x")
