"""Ask the model questions at each evaluation, and count the right answers.

    accel-gpt train quickstart --code examples/exact_match.py --eval.best "max eval/exact_match"
    accel-gpt train quickstart --code examples/exact_match.py --model.extra.questions mine.jsonl

A line of the file is {"question": "The capital of France is", "answer": " Paris"}. Greedy decoding
must give the answer. If the line also has {"choices": [" Rome", " Paris"]}, the answer must be the
likeliest of them (Brown et al. 2020, section 2.4). Without a file, the questions are about Python.
"""

import json
from pathlib import Path

import torch

QUESTIONS = [
    {"question": "class Shape:\n    def __init__(", "answer": "self"},
    {"question": "    raise ValueError", "answer": "("},
    {"question": "    if value is not", "answer": " None", "choices": [" None", " for", "\n"]},
    {"question": "    while", "answer": " True:", "choices": [" True:", " import", "("]},
]


def _score(run, question, answer):
    """Return the log-probability of the answer, and whether greedy decoding gives it."""
    expected = run.tokenizer.encode(answer)
    ids = torch.tensor(run.tokenizer.encode(question) + expected, device=run.accelerator.device)
    context = ids[:-1][-run.config.model.block_size :]
    logits = run.gpt(context[None])[0, -len(expected) :]  # (n, V), from one forward pass
    chosen = ids[-len(expected) :, None]  # (n, 1)
    log_probability = logits.log_softmax(-1).gather(1, chosen).sum()
    return log_probability.item(), logits.argmax(-1).equal(chosen[:, 0])


def _is_right(run, question, answer, choices=()):
    if choices:
        return answer == max(choices, key=lambda choice: _score(run, question, choice)[0])
    return _score(run, question, answer)[1]


def evaluate(run, config):
    file = config.model.extra.get("questions")
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()] if file else QUESTIONS
    right = 0
    for number, row in enumerate(rows):
        run.on_progress(number, len(rows))
        right += _is_right(run, **row)
    return {"eval/exact_match": right / len(rows)}
