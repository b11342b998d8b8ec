"""Our model as lm-evaluation-harness asks it; `harness` alone imports this, and only when used.

The answers are those of its own interface to transformers (`--model hf`) on the exported model.
Shapes: B rows of a batch, T tokens, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows
from torch import Tensor
from tqdm import tqdm

from accel_gpt.data.order import derive_seed
from accel_gpt.data.tokenizer import HFTokenizer, Tokenizer
from accel_gpt.data.tokenizer_json import spelling
from accel_gpt.errors import require
from accel_gpt.evals.samples import prompt_ids
from accel_gpt.model.generate import sample_token
from accel_gpt.model.gpt import GPT
from accel_gpt.model.layers import KVCache

Window = tuple[list[int], list[int]]  # inputs, and the tokens to predict after the last of them
NEW_TOKENS = 256  # where a task does not say how many, as lm_eval
TOP_K = 50  # where a task draws and does not say from how many tokens, as transformers


@dataclass(frozen=True)
class Writing:
    """How a task wants its texts to be continued."""

    until: list[str]
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """Log-likelihoods and texts of a model in evaluation mode, as lm_eval wants them.

    Each process is given its own share of the questions, so no process waits for another here.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, accelerator: Accelerator, batch_size: int
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.batch_size = batch_size
        self.max_length = model.config.block_size
        self.opening = opening_ids(tokenizer)
        self.generator = torch.Generator(accelerator.device)
        self.generator.manual_seed(derive_seed("lm_eval", self.rank))

    # ----------------------------------------------------------------------- processes

    @property
    def device(self) -> torch.device:
        """Of this process."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(self.accelerator.process_index)

    @property
    def world_size(self) -> int:
        """Processes that share the questions."""
        return int(self.accelerator.num_processes)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, one after another."""
        gathered: Tensor = self.accelerator.gather(tensor)
        return gathered

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any]:
        """The objects of all processes, on each of them."""
        objects: list[Any] = gather_object([obj]) if self.world_size > 1 else [obj]
        return objects

    def barrier(self) -> None:
        """Wait for the other processes."""
        self.accelerator.wait_for_everyone()

    # ----------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int | None:
        """End-of-text; None where the tokenizer has none."""
        return self.tokenizer.eot_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context follows: beginning-of-text, or what begins a document."""
        beginning = bos_id(self.tokenizer)
        return prompt_ids("", self.tokenizer, 2**62)[-1] if beginning is None else beginning

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids of a text, after what transformers puts before each text (Llama's <s>), if any."""
        ids = self.tokenizer.encode(string) if string else []
        return ids if add_special_tokens is False else self.opening + ids

    def tok_decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        if isinstance(self.tokenizer, HFTokenizer):
            text: str = self.tokenizer.tokenizer.decode(list(ids), skip_special_tokens=True)
            return text
        return self.tokenizer.decode([i for i in ids if i != self.tokenizer.eot_id])

    # ----------------------------------------------------------------------- log-likelihoods

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood (nats) of each answer after its context; whether it is the greedy one."""
        silent = True if disable_tqdm or self.rank else None  # None: shown on a terminal alone
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=silent)
        return answers

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **ignored: Any,
    ) -> list[tuple[float, bool]]:
        """What `loglikelihood` answers, of ids."""
        for (_, text), _, continuation in requests:
            require(bool(continuation), f"the tokenizer makes no token of the answer {text!r}")
        windows = [self._windows(context, answer) for _, context, answer in requests]
        return self._sums(windows, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood (nats) of whole texts, in windows that predict each token once."""
        texts = [self.tok_encode(*request.args) for request in requests]
        windows = [self._rolling(ids, self.prefix_token_id) for ids in texts]
        return [nats for nats, _ in self._sums(windows, disable_tqdm)]

    def _windows(self, context: list[int], continuation: list[int]) -> list[Window]:
        """One window, whose context loses its first tokens where the two are too long.

        A continuation that is too long by itself is rolled over.
        """
        if len(continuation) > self.max_length:
            return self._rolling(continuation, context[-1])
        return [((context + continuation)[-(self.max_length + 1) : -1], continuation)]

    def _rolling(self, ids: list[int], before: int) -> list[Window]:
        """Windows over all of `ids`, which follow the token `before`."""
        return list(get_rolling_token_windows(ids, before, self.max_length, 1))

    def _sums(self, groups: Sequence[Sequence[Window]], silent: bool) -> list[tuple[float, bool]]:
        """Of each group of windows the sum, and whether all are greedy."""
        scores = self._scores([window for group in groups for window in group], silent)
        answers = []
        for group in groups:
            nats, greedy = 0.0, True
            for _ in group:
                score, same = next(scores)
                nats, greedy = nats + score, greedy and same
            answers.append((nats, greedy))
        return answers

    def _scores(self, windows: Sequence[Window], silent: bool) -> Iterator[tuple[float, bool]]:
        """The score of each window, the longest ones computed first, equal inputs once."""
        places = defaultdict(list)
        for place, (inputs, _) in enumerate(windows):
            places[tuple(inputs)].append(place)
        ordered = sorted(places, key=len, reverse=True)
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
        with self._bar("log-likelihoods", len(windows), silent) as bar:
            for first in range(0, len(ordered), self.batch_size):
                rows = ordered[first : first + self.batch_size]
                asked = [(row, place) for row, key in enumerate(rows) for place in places[key]]
                targets = [(row, windows[place][1]) for row, place in asked]
                for (_, place), score in zip(asked, self._score(rows, targets), strict=True):
                    scores[place] = score
                bar.update(len(asked))
        return iter(scores)

    def _score(
        self, rows: Sequence[Sequence[int]], targets: Sequence[tuple[int, list[int]]]
    ) -> list[tuple[float, bool]]:
        """Of each `(row, tokens)`: the log-likelihood of the tokens at the end of that row."""
        lengths = [len(row) for row in rows]
        tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64)  # (B, T)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
        with self.accelerator.autocast():
            logits = self.model.forward(tokens.to(self.device))  # (B, T, V)
        found = []
        for row, ids in targets:
            wanted = torch.tensor(ids, device=self.device)
            last = logits[row, lengths[row] - len(ids) : lengths[row]].float()  # (len(ids), V)
            nats = last.log_softmax(-1).gather(-1, wanted.unsqueeze(-1)).sum()
            found.append(torch.stack((nats, (last.argmax(-1) == wanted).all())))
        return [(nats, bool(greedy)) for nats, greedy in torch.stack(found).tolist()]

    def _bar(self, what: str, total: int, silent: bool = False) -> "tqdm[Any]":
        """Progress on the terminal of the first process."""
        return tqdm(total=total, desc=what, disable=True if silent or self.rank else None)

    # ----------------------------------------------------------------------- texts

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to a stop string, end-of-text or the number of tokens."""
        alike: dict[str, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            alike[repr(sorted(request.args[1].items()))].append(place)
        ways = {key: self._writing(requests[places[0]].args[1]) for key, places in alike.items()}
        texts = [""] * len(requests)
        with self._bar("texts", len(requests), disable_tqdm) as bar:
            for key, places in alike.items():
                contexts = [requests[place].args[0] for place in places]
                for index, text in self._write_all(contexts, ways[key]):
                    texts[places[index]] = text
                    bar.update()
        return texts

    def _write_all(self, contexts: Sequence[str], way: Writing) -> Iterator[tuple[int, str]]:
        """Continue contexts, the longest first: `(index, text)`."""
        room = self.max_length - way.max_new_tokens
        prompts = [(self.tok_encode(text) or [self.prefix_token_id])[-room:] for text in contexts]
        ordered = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        for first in range(0, len(ordered), self.batch_size):
            batch = ordered[first : first + self.batch_size]
            yield from zip(batch, self._write([prompts[i] for i in batch], way), strict=True)

    def _writing(self, asked: dict[str, Any]) -> Writing:
        """What the keys of a task's generation_kwargs mean."""
        given = dict(normalize_gen_kwargs(asked, NEW_TOKENS))
        known = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
        plain = {"num_beams"} if given.get("num_beams") == 1 else set()
        unknown = sorted(given.keys() - known - plain)
        require(
            not unknown,
            f"a task asks for generation with {', '.join(unknown)}, which is not offered; there "
            f"are {', '.join(sorted(known))}",
        )
        new = given["max_gen_toks"]
        require(
            0 < new < self.max_length,
            f"a task asks for up to {new} new tokens, for which a context of {self.max_length} "
            "(model.block_size) has no room beside a prompt",
        )
        eot = self.tokenizer.eot_id
        return Writing(
            until=handle_stop_sequences(
                given["until"], None if eot is None else self.tokenizer.decode([eot])
            ),
            max_new_tokens=new,
            temperature=float(given.get("temperature", 1.0)) if given["do_sample"] else 0.0,
            top_k=given.get("top_k", TOP_K) or None,
            top_p=given.get("top_p", 1.0),
        )

    def _write(self, prompts: Sequence[list[int]], way: Writing) -> list[str]:
        """Continue prompts of any lengths side by side.

        All begin where the shortest ends: the rest of a longer one is given, not chosen.
        """
        lengths = [len(prompt) for prompt in prompts]
        most = max(lengths) + way.max_new_tokens
        tokens = torch.zeros(len(prompts), most, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        tokens = tokens.to(self.device)
        given = torch.tensor(lengths, device=self.device)
        written: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        cache = KVCache(self.model.config, most)
        for length in range(min(lengths), most):
            with self.accelerator.autocast():
                new = tokens[:, cache.position : length]
                logits = self.model.forward(new, cache=cache, last_only=True)[:, -1]  # (B, V)
            logits = logits.float()[:, : self.tokenizer.vocab_size]
            chosen = sample_token(logits, way.temperature, way.top_k, way.top_p, self.generator)
            tokens[:, length] = torch.where(length < given, tokens[:, length], chosen)
            for row, token in enumerate(chosen.tolist()):
                if length >= lengths[row] and not ended[row]:
                    written[row].append(token)
                    ended[row] = self._ends(written[row], way)
            if all(ended):
                break
        return [self._text(ids, way) for ids in written]

    def _ends(self, ids: list[int], way: Writing) -> bool:
        """Whether the newest token ends the text."""
        if ids[-1] == self.tokenizer.eot_id or len(ids) >= way.max_new_tokens:
            return True
        # a stop string of n bytes ends within n tokens; one more, as decoders drop a first space
        longest = max((len(stop.encode()) for stop in way.until), default=0)
        tail = self.tok_decode(ids[-longest - 1 :])
        return any(stop and stop in tail for stop in way.until)

    def _text(self, ids: list[int], way: Writing) -> str:
        """Text of the chosen tokens, before the first stop string."""
        text: str = postprocess_generated_text(self.tok_decode(ids), way.until, None)
        return text


def bos_id(tokenizer: Tokenizer) -> int | None:
    """What transformers calls beginning-of-text in the exported tokenizer, if anything."""
    if not isinstance(tokenizer, HFTokenizer):
        return tokenizer.eot_id
    name = spelling(tokenizer.config.get("bos_token"))
    found: int | None = tokenizer.tokenizer.token_to_id(name) if isinstance(name, str) else None
    return found


def opening_ids(tokenizer: Tokenizer) -> list[int]:
    """What transformers puts before each text: mostly nothing, or beginning-of-text."""
    if "add_bos_token" in tokenizer.config:
        beginning = bos_id(tokenizer)
        return [beginning] if tokenizer.config["add_bos_token"] and beginning is not None else []
    if not isinstance(tokenizer, HFTokenizer):
        return []
    from tokenizers import Tokenizer as WithTemplate  # `tokenizer` encodes without

    ids: list[int] = WithTemplate.from_str(tokenizer.file_text).encode("").ids
    return ids
