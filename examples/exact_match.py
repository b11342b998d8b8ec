"""Ask the model questions at each evaluation, and count the greedy answers that are right.

    accel-gpt train quickstart --code examples/exact_match.py
    accel-gpt train quickstart --code examples/exact_match.py --model.extra.questions mine.jsonl
    accel-gpt evaluate runs/quickstart --code examples/exact_match.py

A line of the file is {"question": "The capital of France is", "answer": " Paris"}. Without a file,
the questions are those below, about Python, for the quickstart. The share of right answers is
logged as eval/exact_match.
"""

import json
from pathlib import Path

import torch

QUESTIONS = [
    {"question": "class Shape:\n    def __init__(", "answer": "self"},
    {"question": "    for i in", "answer": " range("},
    {"question": "    if value is not", "answer": " None"},
    {"question": "    raise ValueError", "answer": "("},
    {"question": "    while", "answer": " True:"},
    {"question": "        self.name =", "answer": " name"},
]


def _questions(config):
    file = config.model.extra.get("questions")
    if file is None:
        return QUESTIONS
    return [json.loads(line) for line in Path(file).read_text().splitlines() if line.strip()]


def _is_right(run, question, answer):
    """Return whether greedy decoding continues the question with the answer.

    It does if each token of the answer is the likeliest after all tokens before it. One forward
    pass tells this for all of them.
    """
    asked = run.tokenizer.encode(question)
    expected = run.tokenizer.encode(answer)
    ids = (asked + expected)[:-1]
    context = ids[-run.config.model.block_size :]
    logits = run.gpt(torch.tensor([context], device=run.accelerator.device))  # (1, T, V)
    likeliest = logits[0, -len(expected) :].argmax(-1)
    return likeliest.tolist() == expected


def evaluate(run):
    questions = _questions(run.config)
    right = 0
    for number, row in enumerate(questions):
        run.on_progress(number, len(questions))
        right += _is_right(run, row["question"], row["answer"])
    return {"eval/exact_match": right / len(questions)}
