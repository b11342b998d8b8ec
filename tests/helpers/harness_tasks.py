"""Tasks of lm_eval on made-up questions: data in the original formats, and YAML files.

Each YAML includes the original one, so lm_eval processes questions as usual; no network.
"""

import json
import random
from pathlib import Path
from typing import Any

from tests.conftest import text_of

COUNT = 12
ORIGINALS = {
    "local_hellaswag": ("hellaswag/hellaswag.yaml", "validation"),
    "local_piqa": ("piqa/piqa.yaml", "validation"),
    "local_lambada": ("lambada/lambada_openai.yaml", "test"),
}
ANSWERS = """
task: local_answers
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [king, of the], max_gen_toks: 12}}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def words(draw: random.Random, least: int, most: int) -> str:
    return text_of(draw.randint(least, most), draw.randrange(10**6)).strip()


def hellaswag(draw: random.Random) -> dict[str, Any]:
    begin, then = words(draw, 3, 14), words(draw, 2, 3)
    return {
        "ind": draw.randrange(1000),
        "activity_label": words(draw, 1, 2),
        "ctx_a": f"{begin} [header] the king.",
        "ctx_b": then,
        "ctx": f"{begin} [header] the king. {then}",
        "split": "val",
        "split_type": "zeroshot",
        "label": draw.randrange(4),
        "endings": [f"{words(draw, 2, 9)} [title] end." for _ in range(4)],
        "source_id": "activitynet~v_none",
    }


def piqa(draw: random.Random) -> dict[str, Any]:
    solutions = {"sol1": words(draw, 2, 6), "sol2": words(draw, 2, 6)}
    return {"goal": words(draw, 3, 9) + "?", **solutions, "label": draw.randrange(2)}


def lambada(draw: random.Random) -> dict[str, Any]:
    return {"text": words(draw, 12, 30)}


def answers(draw: random.Random) -> dict[str, Any]:
    return {"question": words(draw, 1, 20), "answer": words(draw, 1, 2)}


def write_tasks(folder: Path) -> None:
    """Write the YAML and JSONL files of four tasks."""
    import lm_eval

    originals = Path(lm_eval.__file__).parent / "tasks"
    makers = [hellaswag, piqa, lambada, answers]
    for seed, make in enumerate(makers):
        draw = random.Random(seed)
        name = f"local_{make.__name__}"
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(make(draw)) + "\n" for _ in range(COUNT)))
        if make is answers:
            content = ANSWERS.format(file=data)
        else:
            original, split = ORIGINALS[name]
            splits = {f"{kind}_split": "null" for kind in ("training", "validation", "test")}
            content = "\n".join(
                [
                    f"include: {originals / original}",
                    f"task: {name}",
                    "dataset_path: json",
                    "dataset_name: null",
                    f"dataset_kwargs: {{data_files: {{{split}: {data}}}}}",
                    *(f"{key}: {value}" for key, value in splits.items() if split not in key),
                    f"{split}_split: {split}",
                ]
            )
        (folder / f"{name}.yaml").write_text(content)
