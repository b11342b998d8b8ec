"""Compare an exported folder, opened with transformers, with what our model computed.

    python -m accel_gpt.transformers_io.compare_export FOLDER REFERENCE.safetensors

Reads the folder and REFERENCE: `tokens` (B, T), our `logits` (B, L, V) of the last L, the logits
`trained` of the weights before they were rounded, if they were, and a text with its `ids`, which
the tokenizer must return with its default arguments. Prints one JSON object. If the two differ it
prints one sentence and exits with code `DIFFERENT`. Imports nothing of this package.
"""

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

DIFFERENT = 3  # an exit code that no crash has
# Absolute, and relative to the largest value: sums of float32 in another order. Assumption.
EXPORT_TOLERANCE = 1e-4


def main(argv: Sequence[str]) -> int:
    """Compare; return the exit code."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, reference = argv
    with safe_open(reference, framework="pt") as file:
        names = file.keys()  # a safetensors file cannot be iterated
        ours = {name: file.get_tensor(name) for name in names}
        text = file.metadata()["text"]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    model, loading = loaded
    with torch.no_grad():
        logits = model.eval()(ours["tokens"]).logits[:, -ours["logits"].shape[1] :]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoded = tokenizer(text, verbose=False)
    difference = largest_difference(ours["logits"], logits)
    problem = key_mismatch(loading)
    if difference > EXPORT_TOLERANCE * max(1.0, ours["logits"].abs().max().item()):
        problem = problem or f"its logits differ from ours by up to {difference:.2e}"
    if encoded["input_ids"] != ours["ids"].tolist():
        problem = problem or f"its tokenizer returns different ids for {text[:40]!r}"
    if problem:
        sys.stderr.write(f"{type(model).__name__} of transformers: {problem}\n")
        return DIFFERENT
    report = {"difference": difference, "transformers": transformers.__version__}
    if "trained" in ours:
        report["from_trained"] = largest_difference(ours["trained"], logits)
    sys.stdout.write(json.dumps(report))
    return 0


def key_mismatch(loading: Any) -> str | None:
    """Return the names of tensors that only the class or only the file has, if any."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, loading[kind])):
            return f"{kind.replace('_', ' ')}: {', '.join(names[:3])}"
    return None


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference; infinite if shapes differ or a value is NaN."""
    if ours.shape != theirs.shape:
        return math.inf
    difference = (ours - theirs).abs().max().item()
    return math.inf if math.isnan(difference) else difference


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
