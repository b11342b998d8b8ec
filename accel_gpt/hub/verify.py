"""Compare an exported folder, opened with transformers, with what our model computed.

    python -m accel_gpt.hub.verify FOLDER REFERENCE.safetensors

REFERENCE is what `export.compute_reference` returns, and a text with its `ids`. Prints one JSON
object; exit code `DIFFERENT` and one sentence if the two differ. Imports nothing of this package.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

DIFFERENT = 3  # an exit code that no crash has
EXPORT_TOLERANCE = 1e-4  # absolute, and relative to the largest value: float32, in another order


def main(argv: Sequence[str]) -> int:
    """Compare; return the exit code."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, reference = argv
    with safe_open(reference, framework="pt") as file:
        ours = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = file.metadata()["text"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    model, loading = loaded[0].eval(), loaded[1]
    with torch.no_grad():
        out = model(ours["tokens"], output_hidden_states=True)
    logits = out.logits[:, -ours["logits"].shape[1] :]
    problem = key_mismatch(loading) or first_difference(ours, list(out.hidden_states), logits)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids = tokenizer(text, **plain)["input_ids"]
    if not problem and ids != ours["ids"].tolist():
        problem = f"its tokenizer returns other ids for {text[:40]!r}"
    if problem:
        sys.stderr.write(f"{type(model).__name__} of transformers: {problem}\n")
        return DIFFERENT
    report = {
        "difference": difference(ours["logits"], logits),
        "transformers": transformers.__version__,
    }
    sys.stdout.write(json.dumps(report))
    return 0


def key_mismatch(loading: Any) -> str | None:
    """Return the names of tensors that only the class or only the file has, if any."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, loading[kind])):
            return f"{kind.replace('_', ' ')}: {', '.join(names[:3])}"
    return None


def first_difference(ours: dict[str, Tensor], states: list[Tensor], logits: Tensor) -> str | None:
    """Return where the two computations first differ, from the embeddings up, if they do."""
    layers = ["the embeddings", *(f"block {i} of {len(states) - 1}" for i in range(1, len(states)))]
    pairs = [(layer, ours[f"{i:04d}"], states[i]) for i, layer in enumerate(layers)]
    for layer, expected, found in (*pairs, ("the head", ours["logits"], logits)):
        gap = difference(expected, found)
        if gap > EXPORT_TOLERANCE * max(1.0, expected.abs().max().item()):
            return f"its values differ from ours in {layer}, by up to {gap:.2e}"
    return None


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference; infinite for other shapes or nan."""
    if ours.shape != theirs.shape:
        return float("inf")
    gap = (ours - theirs).abs().max().item()
    return gap if gap == gap else float("inf")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
