"""Learn only tokens that have some context: the first 16 targets of a sequence are left out."""

CONTEXT = 16  # tokens


def targets(tokens, targets):
    targets = targets.clone()
    targets[:, :CONTEXT] = -100
    return targets
