"""Add the z-loss of PaLM (Chowdhery et al. 2022, section 5) to the cross entropy."""

from accel_gpt.model.loss import IGNORE, next_token_loss

WEIGHT = 1e-4


def loss(model, tokens, targets, documents):
    logits = model(tokens, documents=documents)
    log_z = logits.logsumexp(-1)[targets != IGNORE]
    z = WEIGHT * log_z.square().sum() / max(len(log_z), 1)
    return next_token_loss(logits, targets) + z, {"z": z}
