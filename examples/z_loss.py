"""Cross entropy plus z-loss, which keeps the logits from drifting.

    accel-gpt train quickstart --code examples/z_loss.py

z-loss is 1e-4 log(Z)^2, where Z is the sum of the exponentiated logits (PaLM, Chowdhery et al.
2022, section 5). The log shows both parts, train/cross_entropy and train/z_loss; train/loss is
their sum. Evaluation stays cross entropy, so eval/val_loss compares with a run without z-loss.
"""

from accel_gpt.model.loss import IGNORE, next_token_loss

COEFFICIENT = 1e-4


def loss(model, tokens, targets, documents):
    logits = model(tokens, documents=documents)  # (B, T, V)
    cross_entropy = next_token_loss(logits, targets)
    counts = targets != IGNORE  # (B, T)
    log_z = logits.float().logsumexp(-1)  # (B, T)
    mean_square = (log_z.square() * counts).sum() / counts.sum().clamp(min=1)
    z_loss = COEFFICIENT * mean_square
    return cross_entropy + z_loss, {"cross_entropy": cross_entropy, "z_loss": z_loss}
