"""A fault: the targets are shifted by one too few, so each token predicts itself."""

from accel_gpt.model.loss import next_token_loss


def loss(model, tokens, documents):
    return next_token_loss(model(tokens, documents=documents), tokens)
