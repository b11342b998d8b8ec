"""The tables of a model card: the model, its data, its training."""

from collections.abc import Iterable

from accel_gpt.config.plan import plural
from accel_gpt.cost.flops import flops_per_token, parameter_counts
from accel_gpt.hub.facts import CardFacts
from accel_gpt.hub.markdown import duration, given, mark, table

Rows = Iterable[tuple[str, str | None]]


def architecture(facts: CardFacts, model_class: str, dtype: str) -> str:
    """Shape and size."""
    m, total = facts.model, parameter_counts(facts.model, facts.vocab_size)
    mlps = {"gelu": "GELU (tanh)", "gelu_erf": "GELU", "relu2": "squared ReLU", "swiglu": "SwiGLU"}
    norms = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    norm = norms[m.norm] + ("" if m.norm_weight else " without weights")
    norm += ", also of queries and keys" if m.qk_norm else ""
    rope = f"rotary, base {m.rope_theta:g}"
    rope += f", {m.rope_scaling} scaling by {m.rope_factor:g}" if m.rope_scaling != "none" else ""
    rows: Rows = [
        ("Class", f"`{mark(model_class)}` of transformers"),
        ("Layers", f"{m.n_layer}"),
        ("Attention heads", f"{m.n_head} of {m.head_size} channels"),
        ("Key and value heads", f"{m.kv_heads}"),
        ("Channels", f"{m.n_embd:,}"),
        ("Context", f"{m.block_size:,} tokens"),
        ("Vocabulary", f"{facts.vocab_size:,} tokens"),
        ("Positions", "learned" if m.position == "learned" else rope),
        ("Normalization", norm),
        ("MLP", f"{mlps[m.mlp]}, {m.hidden_size:,} channels"),
        ("Biases", "yes" if m.bias else "no"),
        ("Logit cap", f"{m.logit_softcap:g}" if m.logit_softcap else None),
        ("Embedding and head", "tied" if m.tie_embeddings else "separate"),
        ("Parameters", f"{total['total_unpadded']:,}"),
        ("Parameters while training", f"{total['total']:,}, vocabulary padded to a multiple of 64"),
        ("Weights stored as", mark(dtype)),
    ]
    return f"## Model\n\n{table('Architecture', '', rows)}"


def data(facts: CardFacts, licence: str | None) -> str:
    """What it was trained on."""
    several, rows = len(facts.sources) > 1, list[tuple[str, str | None]]()
    for number, source in enumerate(facts.sources, start=1):
        link = f" ([on the Hub](https://huggingface.co/datasets/{source.hub_id}))"
        share = f", {source.share:.1%} of what was read" if several else ""
        title = f"Source {number}" if several else "Name"
        rows.append((title, f"`{source.name}`{link if source.hub_id else ''}{share}"))
        for what, tokens in (("train", source.train_tokens), ("val", source.val_tokens)):
            rows.append((f"Tokens in its {what} split", f"{tokens:,}" if tokens else None))
    turns = ", ".join(
        f"{value:.2f}" + (f" of `{name}`" if name else "") for name, value in facts.epochs.items()
    )
    rows += [
        ("Tokens seen", f"{facts.tokens:,}"),
        ("Epochs", turns or None),
        ("Tokenizer", f"{mark(facts.tokenizer)}, {facts.vocab_size:,} tokens"),
        ("Licence of the data", mark(licence) if licence else "not stated"),
    ]
    return f"## Data\n\n{table('Data', '', rows)}"


def training(facts: CardFacts) -> str:
    """Batch, optimizer, schedule, machine and time."""
    c, plan = facts.config, facts.plan
    rows: list[tuple[str, str | None]] = []
    if plan:
        batch = (
            f"{plan.tokens_per_step:,} = {plural(plan.micro_batch_size, 'sequence')} x "
            f"{plan.block_size:,} tokens x {plural(plan.accumulation_steps, 'micro-step')} x "
            f"{plural(plan.world_size, 'process', 'processes')}"
        )
        fall = f"{c.get('schedule.name')}, {plan.warmup_steps:,} steps of warm-up"
        if c.get("schedule.name") != "constant":
            fall += f", then over {plan.decay_steps:,} to {c.get('schedule.min_lr', 0.0):g}"
        rows += [("Tokens per step", batch), ("Steps planned", f"{plan.max_steps:,}")]
        rows += [("Learning rate", f"{c.get('optim.lr')}"), ("Schedule", fall)]
    betas = f"betas {c.get('optim.beta1')}, {c.get('optim.beta2')}, eps {c.get('optim.eps')}"
    named = c.get("optim.name")
    if named == "muon":
        named += f" (momentum {c.get('optim.muon_momentum')}) on matrices of the blocks, else adamw"
    clip = c.get("optim.grad_clip")
    hours = facts.seconds * facts.processes / 3600
    total = f", {hours:,.1f} device hours" if facts.processes > 1 and hours >= 0.1 else ""
    cost = flops_per_token(facts.model, facts.vocab_size) * facts.tokens
    rows += [
        ("Optimizer", f"{named}, {betas}" if "optim.name" in c else None),
        ("Weight decay", given(c.get("optim.weight_decay"), " on matrices")),
        ("Gradient clipping", (f"norm {clip}" if clip else "none") if clip is not None else None),
        ("Dropout", f"{facts.model.dropout:g}"),
        ("Precision", precision(facts)),
        ("Seed", given(c.get("seed"))),
        ("Hardware", "; then ".join(map(mark, facts.devices)) or f"{facts.processes} processes"),
        ("Time", f"{duration(facts.seconds)}{total}, evaluation and saving included"),
        ("Compute", f"{cost:.2e} FLOP, as 6 N + 12 L H D T for each token (PaLM, appendix B)"),
    ]
    return f"## Training\n\n{table('Setting', '', rows)}"


def precision(facts: CardFacts) -> str | None:
    """What was computed in."""
    found = facts.launch.get("mixed_precision") or facts.config.get("train.mixed_precision")
    names = {"no": "float32", None: None}
    return names.get(found, f"{found}, weights in float32")
