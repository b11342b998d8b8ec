"""Examples to finetune on: a prompt and its completion, out of a row of JSON lines.

A row is {"prompt": text, "completion": text}, or {"messages": [{"role", "content"}, ...]}, whose
last message is the completion; the chat template of the tokenizer renders them.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from accel_gpt.data.shards import Tokens
from accel_gpt.data.tokenizer import Tokenizer
from accel_gpt.data.tokenizer_json import spelling
from accel_gpt.errors import DataError, first_line


def example_text(row: Mapping[str, Any], where: str) -> str:
    """A row as JSON: [prompt, completion], or the messages. Raises `DataError` for another row."""
    pair = [row.get("prompt"), row.get("completion")]
    messages = row.get("messages")
    if all(isinstance(text, str) for text in pair):
        return json.dumps(pair, ensure_ascii=False)
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return json.dumps(messages, ensure_ascii=False)
    raise DataError(
        f"{where} has no texts prompt and completion, nor a list of messages; its columns: "
        f"{', '.join(row)}"
    )


def example_bytes(text: str) -> int:
    """UTF-8 bytes of what an example says, without what its template adds."""
    parts = (part if isinstance(part, str) else part.get("content") for part in json.loads(text))
    return sum(len(part.encode()) for part in parts if isinstance(part, str))


def encode_example(text: str, tokenizer: Tokenizer) -> Tokens:
    """Stored tokens of an example (see `data/packing.py`), end-of-text included.

    The prompt is encoded by itself, as it is when the model answers it. Raises `DataError` for a
    template that is missing or fails, and for end-of-text within an example.
    """
    parts = json.loads(text)
    if isinstance(parts[0], str):
        prompt, completion = (tokenizer.encode(part) for part in parts)
    else:
        prompt, completion = (
            tokenizer.encode_rendered(p) for p in render_messages(parts, tokenizer)
        )
    assert tokenizer.eot_id is not None
    if completion[-1:] == [tokenizer.eot_id]:
        completion.pop()
    if tokenizer.eot_id in prompt + completion:
        raise DataError(
            f"the chat template writes {tokenizer.eot}, which ends a document, within an example: "
            f"{text[:40]}; give the tokenizer another end-of-text token"
        )
    whole = np.array([*prompt, *completion, tokenizer.eot_id], np.int32)
    whole[: len(prompt)] = ~whole[: len(prompt)]
    return whole


def render_messages(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> tuple[str, str]:
    """The text of all messages but the last, up to where the answer begins, and the rest."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.config.get("chat_template")
    if not isinstance(template, str):
        raise DataError(
            "the rows have messages, but the tokenizer has no chat template; give the tokenizer of "
            "a chat model, put chat_template.jinja beside it, or give rows of prompt and completion"
        )
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens: dict[str, Any] = {n: spelling(tokenizer.config.get(n)) or "" for n in names}

    def text(part: list[dict[str, Any]], answering: bool) -> str:
        settings = {"chat_template": template, "add_generation_prompt": answering, **tokens}
        return render_jinja_template(conversations=[part], **settings)[0][0]

    try:
        prompt, whole = text(messages[:-1], True), text(messages, False)
    except Exception as error:  # of jinja2, and of what a template does with the messages
        raise DataError(
            f"the chat template fails for {json.dumps(messages)[:80]}: {first_line(error)}"
        ) from None
    if not whole.startswith(prompt):
        raise DataError(
            f"the chat template does not end {json.dumps(messages)[:80]} with the answer to the "
            "prompt; expected the last message to be the assistant's"
        )
    return prompt, whole.removeprefix(prompt)
