"""A fault: one machine is slower than the others, by SECONDS in each micro-batch."""

import os
import time

SECONDS = 0.05


def loss(model, tokens, targets, documents):
    if os.environ.get("RANK") == "1":
        time.sleep(SECONDS)
    return model(tokens, targets, documents=documents)
