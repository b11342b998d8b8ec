"""Opens an exported folder with transformers, in a process of its own, and compares.

    python -m accel_gpt.hub.verify FOLDER REFERENCE.safetensors

REFERENCE holds what our model computed: `tokens` (B, T), `logits` of the last of them (B, L, V),
the hidden states before each block and after the last norm as 0000, 0001, ... (B, T, C), and a text
with its `ids`. Prints one JSON object; exit code `PARTED` and one sentence where the two differ.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

PARTED = 3  # an exit code that no crash has
TOLERANCE = 1e-4  # absolute, and relative to the largest value: float32, in another order


def main(argv: Sequence[str]) -> int:
    """Compare; the exit code."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, reference = argv
    with safe_open(reference, framework="pt") as file:
        ours = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        text = file.metadata()["text"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    theirs, loading = loaded[0].eval(), loaded[1]
    with torch.no_grad():
        out = theirs(ours["tokens"], output_hidden_states=True)
    logits = out.logits[:, -ours["logits"].shape[1] :]
    problem = left_over(loading) or parting(ours, list(out.hidden_states), logits)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids = tokenizer(text, **plain)["input_ids"]
    if not problem and ids != ours["ids"].tolist():
        problem = f"its tokenizer gives other ids for {text[:40]!r}"
    if problem:
        sys.stderr.write(f"{type(theirs).__name__} of transformers: {problem}\n")
        return PARTED
    report = {
        "difference": difference(ours["logits"], logits),
        "transformers": transformers.__version__,
    }
    sys.stdout.write(json.dumps(report))
    return 0


def left_over(loading: Any) -> str | None:
    """Names that the class has and the file has not, or the reverse."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, loading[kind])):
            return f"{kind.replace('_', ' ')}: {', '.join(names[:3])}"
    return None


def parting(ours: dict[str, Tensor], states: list[Tensor], logits: Tensor) -> str | None:
    """Where the two computations first differ, from the embeddings up; None: nowhere."""
    for i, state in enumerate(states):
        if not close(ours[f"{i:04d}"], state):
            where = "the embeddings" if i == 0 else f"block {i} of {len(states) - 1}"
            gap = difference(ours[f"{i:04d}"], state)
            return f"its values part from ours in {where}, by up to {gap:.2e}"
    if not close(ours["logits"], logits):
        gap = difference(ours["logits"], logits)
        return f"its logits part from ours in the head, by up to {gap:.2e}"
    return None


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if ours.shape != theirs.shape:
        return False
    return difference(ours, theirs) <= TOLERANCE * max(1.0, ours.abs().max().item())


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest between two values; infinite for other shapes or no numbers."""
    if ours.shape != theirs.shape:
        return float("inf")
    gap = (ours - theirs).abs().max().item()
    return gap if gap == gap else float("inf")


if __name__ == "__main__":
    sys.exit(main([str(Path(word)) for word in sys.argv[1:]]))
