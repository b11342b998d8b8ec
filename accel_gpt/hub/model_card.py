"""The model card of a checkpoint for the Hugging Face Hub: README.md and loss.png.

What it says comes from `facts.py`, which lets nothing private through; here it becomes Markdown.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from accel_gpt.cost.flops import parameter_counts
from accel_gpt.hub.card_tables import architecture, data, training
from accel_gpt.hub.client import check_repo
from accel_gpt.hub.facts import CardFacts, gather
from accel_gpt.hub.markdown import fenced, mark, nested, one_line, shown, slug, table
from accel_gpt.redact import redact_tokens
from accel_gpt.report.plots import loss_curves, short

LONGEST_SAMPLE = 3000  # characters
MEASURES = (  # key of the metrics; name in the table; type in the model-index; form
    ("eval/val_loss", "Val loss, nats per token", "loss", "{:.4f}"),
    ("eval/val_perplexity", "Val perplexity per token", "perplexity", "{:.2f}"),
    ("eval/val_bits_per_byte", "Val bits per byte", "bits_per_byte", "{:.4f}"),
    ("eval/train_loss", "Train loss, nats per token", "", "{:.4f}"),
    ("eval/hellaswag_acc", "HellaSwag accuracy", "acc", "{:.2%}"),
    ("eval/hellaswag_acc_norm", "HellaSwag accuracy, normalized by length", "acc_norm", "{:.2%}"),
)
USAGE = """## Use it

```python
from transformers import pipeline

generator = pipeline("text-generation", model="{repo}")
texts = generator({prompt}, max_new_tokens={new}, do_sample=True, temperature=0.8)
print(texts[0]["generated_text"])
```

or, step by step:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}")
model = AutoModelForCausalLM.from_pretrained("{repo}")
inputs = tokenizer({prompt}, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens={new}, do_sample=True, temperature=0.8)
print(tokenizer.decode(output[0]))
```

The context is {block} tokens, prompt and continuation together."""


def write_card(
    run: Path,
    checkpoint: Path,
    repo_id: str,
    model_class: str,
    folder: Path,
    *,
    license: str | None,  # noqa: A002
    data_license: str | None,
    dtype: str,
) -> None:
    """Write README.md, and loss.png where the run has metrics, into `folder`.

    `model_class` of transformers; `dtype` of the exported weights; licences as the Hub names them.
    Raises `UserError` for an impossible `repo_id`, `CheckpointError` for an unreadable checkpoint.
    """
    from huggingface_hub import ModelCard

    check_repo(repo_id)
    facts = gather(run, checkpoint)
    name = repo_id.rpartition("/")[2]
    folder.mkdir(parents=True, exist_ok=True)
    if has_curve(facts):
        loss_curves(facts.records, folder / "loss.png")
    licence, data_licence = (one_line(text or "") or None for text in (license, data_license))
    sections = [
        f"# {name}\n\n{opening(facts, model_class)}",
        usage(facts, repo_id),
        results(facts),
        samples(facts),
        architecture(facts, model_class, dtype),
        data(facts, data_licence),
        training(facts),
        reproduction(facts),
        "## Limitations\n\nThis is a base model: it continues text, was not tuned to follow "
        "instructions or to be safe, and repeats the errors and biases of the text it has seen.",
    ]
    body = "\n\n".join(section for section in sections if section)
    head = metadata(facts, name, model_class, licence).to_yaml()
    card = ModelCard(redact_tokens(f"---\n{head}\n---\n\n{body}\n"))
    card.save(folder / "README.md")


def has_curve(facts: CardFacts) -> bool:
    """Whether the run has losses to draw."""
    return any("train/loss" in record or "eval/val_loss" in record for record in facts.records)


def metadata(facts: CardFacts, name: str, model_class: str, licence: str | None) -> Any:
    """The YAML block: what the Hub sorts models by, and the results."""
    from huggingface_hub import EvalResult, ModelCardData

    spoken = data_name(facts)
    hub_ids = list(dict.fromkeys(source.hub_id for source in facts.sources if source.hub_id))
    measured = []
    for key, title, kind, _ in MEASURES:
        if key not in facts.results or not kind:
            continue
        swag = "hellaswag" in key
        measured.append(
            EvalResult(
                task_type="text-generation",
                task_name="Text generation",
                dataset_type="Rowan/hellaswag" if swag else slug(" ".join(hub_ids) or spoken),
                dataset_name="HellaSwag" if swag else f"{spoken}, held-out text",
                dataset_split="validation" if swag else "val",
                metric_type=kind,
                metric_name=title,
                metric_value=round(facts.results[key][1], 6),
            )
        )
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=licence.lower() if licence else None,
        base_model=facts.base_model,
        datasets=hub_ids or None,
        tags=["accel_gpt", model_type(model_class), "text-generation", "pretraining"],
        model_name=name,
        eval_results=measured or None,
    )


# --------------------------------------------------------------------------- sections


def opening(facts: CardFacts, model_class: str) -> str:
    """What it is, in two sentences."""
    parameters = parameter_counts(facts.model, facts.vocab_size)["total_unpadded"]
    size = short(float(f"{parameters:.3g}"))
    start = f"from the weights of `{facts.init_name}` on" if facts.init_name else "from scratch"
    of = f" of {facts.plan.max_steps:,}" if facts.plan else ""
    loss = facts.results.get("eval/val_loss")
    reached = f", and reaches a val loss of {loss[1]:.4f} nats per token" if loss else ""
    return (
        f"A language model of {size} parameters (`{one_line(model_class)}`), trained "
        f"{start} on **{mark(data_name(facts))}** with accel_gpt, a GPT trainer on Hugging Face "
        f"Accelerate. This is the checkpoint after step {facts.step:,}{of}: it has seen "
        f"{facts.tokens:,} tokens{reached}."
    )


def usage(facts: CardFacts, repo_id: str) -> str:
    """Code that writes text with it."""
    block = facts.model.block_size
    prompt = json.dumps(usable_prompt(facts), ensure_ascii=False)
    return USAGE.format(repo=repo_id, prompt=prompt, new=min(200, block // 2), block=f"{block:,}")


def usable_prompt(facts: CardFacts) -> str:
    """A word that the tokenizer knows."""
    word = "The"
    if facts.alphabet is None or set(word) <= set(facts.alphabet):
        return word
    return next((char for char in facts.alphabet if char.isalnum()), facts.alphabet[:1])


def results(facts: CardFacts) -> str:
    """The figures at or before the checkpoint, and the picture of the losses."""
    found = [
        (title, form.format(facts.results[key][1]), facts.results[key][0])
        for key, title, _, form in MEASURES
        if key in facts.results
    ]
    parts = ["## Results"]
    if found:
        steps = {step for *_, step in found}
        limit = held_out(facts)
        about = f" on at most {limit:,} held-out tokens" if limit else ""
        when = f"Measured after step {max(steps):,}{about}." if len(steps) == 1 else ""
        rows = [(t, v if len(steps) == 1 else f"{v} (step {step:,})") for t, v, step in found]
        parts += [table("Measure", "Value", rows), when]
    if has_curve(facts):
        parts.append("![Train and val loss over the tokens seen](loss.png)")
    return "\n\n".join(part for part in parts if part) if len(parts) > 1 else ""


def samples(facts: CardFacts) -> str:
    """Up to three texts as the model wrote them."""
    if not facts.samples:
        return ""
    settings = ", ".join(
        f"{name} {facts.config[f'sample.{name}']}"
        for name in ("temperature", "top_k", "top_p")
        if facts.config.get(f"sample.{name}") is not None
    )
    how = f" ({mark(settings)})" if settings else ""
    parts, before = ["## Samples"], None
    for step, text in facts.samples:
        if step != before:
            parts.append(f"Written after step {step:,}{how}, not chosen:")
        parts.append(fenced(shown(text, LONGEST_SAMPLE), "text"))
        before = step
    return "\n\n".join(parts)


def reproduction(facts: CardFacts) -> str:
    """Command, versions and config."""
    mixed = facts.launch.get("mixed_precision")
    command = (
        "accelerate launch --config_file accelerate_config.yaml "
        f"--num_processes {facts.processes} {f'--mixed_precision {mixed} ' if mixed else ''}"
        "\\\n    accel_gpt/train.py config.yaml"
    )
    versions = facts.launch.get("versions") or {}
    commit = facts.launch.get("commit")
    lines = [f"commit of accel_gpt `{commit}`"] if commit else []
    lines += [f"{name} {version}" for name, version in versions.items()]
    text = yaml.safe_dump(nested(facts.changed), sort_keys=False, allow_unicode=True)
    parts = [
        "## Reproduce it",
        fenced(command, "sh"),
        f"Made with {', '.join(lines)}." if lines else "",
        "Folders and files stand here by their names alone; give your own.",
        "<details>\n<summary>config.yaml: all that differs from the defaults</summary>",
        fenced(text.rstrip("\n"), "yaml"),
        "</details>",
    ]
    return "\n\n".join(part for part in parts if part)


# --------------------------------------------------------------------------- words


def data_name(facts: CardFacts) -> str:
    """The sources in a few words."""
    return " + ".join(source.hub_id or source.name for source in facts.sources)


def model_type(model_class: str) -> str:
    """The name of a family: gpt2 of GPT2LMHeadModel."""
    return one_line(re.sub(r"(LMHeadModel|ForCausalLM)$", "", model_class)).lower()


def held_out(facts: CardFacts) -> int:
    """Most tokens that the val loss is measured on; 0 where that is not known."""
    val = [source.val_tokens or 0 for source in facts.sources]
    limits = [facts.config.get("eval.tokens") or 0, sum(val) if all(val) else 0]
    return min((limit for limit in limits if limit), default=0)
