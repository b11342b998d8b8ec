"""Learn the answers of chats only (Ouyang et al. 2022), for any chat template.

    accel-gpt train quickstart --code examples/answers_only.py --data.train data/chats \\
        --model.extra.answer "<|assistant|>" --model.extra.end "<|end|>"

The template writes these two texts before and after an answer; a text may be several tokens, the
same in a chat as alone. Everything after the first text is learned, up to and including the second
one. A sequence that begins within an answer does not learn the rest of it.
"""

import functools

import torch
import torch.nn.functional as F

from accel_gpt.data.tokenizer import load_tokenizer


@functools.cache
def _ids(folder, text, device):
    return torch.tensor(load_tokenizer(folder).encode_prompt(text), device=device)


def _last_end(tokens, ids):
    """Return for each token where the last `ids` up to it end: (B, T), 1 for the first token."""
    windows = F.pad(tokens, (len(ids) - 1, 0), value=-1).unfold(1, len(ids), 1)  # (B, T, n)
    position = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    return (position * (windows == ids).all(-1)).cummax(1).values


def targets(tokens, targets, config):
    folder, extra = config.data.train, config.model.extra
    begin, end = (
        _last_end(tokens, _ids(folder, extra[name], tokens.device)) for name in ("answer", "end")
    )
    return targets.masked_fill((begin == 0) | (begin < end), -100)
