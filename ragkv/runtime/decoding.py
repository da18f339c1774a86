"""From the scores of one request to the text of its answer.

`Sampler` chooses tokens with transformers' own logits processors and a random generator per request. `Detokenizer`
turns them into text, whole characters only. `StopGate` holds back text that may begin a stop string. `TokenMask`
masks the tokens that a schema, regex or grammar forbids. `Decoder` combines them and decides when the answer ends.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ragkv.decoding import GREEDY, Decoding, overlap
from ragkv.engines.base import Sample
from ragkv.errors import UnsupportedModelError, UsageError
from ragkv.model.prompt import Tokens
from ragkv.util.constraints import ByteBudgetCache, Constraint, matcher_limits
from ragkv.util.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ragkv.engines import ModelFacts
else:
    torch = LazyModule("torch")


class Sampler:
    """Chooses one request's tokens. Requests, threads and engines do not share a sampler.

    The order is that of transformers' `generate`: penalties (OpenAI's after the repetition penalty), the caller's own
    processors (and the mask of a constraint), temperature, top-k, top-p, min-p. The draw is that of `torch.multinomial`
    from a `torch.Generator` seeded with `decoding.seed`, so `full` draws what `generate(do_sample=True)` draws after
    `torch.manual_seed` of the same number. If nothing changes the scores, the choice is the engine's own
    (`Sample.best`), which breaks ties in its own way. All choices stay on the device, so that one transfer fetches
    those of all requests.
    """

    def __init__(self, decoding: Decoding, own: Sequence[Any] = ()) -> None:
        self._decoding = decoding.settled()
        self._chain = processors(self._decoding, own)
        self._generator: torch.Generator | None = None

    def choose(self, asked: Sample, ids: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """The token after `ids`, those generated so far, 0-dim; for a draw, also whether all scores were finite."""
        if not self._chain and not self._decoding.effective_temperature:
            return asked.best(), None
        with torch.inference_mode():
            return self._chosen(replace(asked, scores=torch.as_tensor(asked.scores)), ids)

    def _chosen(self, asked: Sample, ids: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        scores = asked.scores[None]  # (1, vocab)
        if self._chain:
            # a copy: a processor may write in place, and the scores are still needed
            generated = torch.tensor([list(ids)], dtype=torch.long).to(scores.device, non_blocking=True)
            scores = self._chain(generated, scores.clone())
        if not self._decoding.effective_temperature:
            return replace(asked, scores=scores[0]).best(), None
        return self._draw(torch.softmax(scores, -1))

    def _draw(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        if self._generator is None:
            self._generator = torch.Generator(device=shares.device)
            self._generator.manual_seed(self._decoding.seed or 0)
        finite = shares.isfinite().all()
        # a draw from non-finite scores is not used, but it must not fail, because other requests are in the batch
        shares = torch.where(finite, shares, torch.ones_like(shares))
        # as torch.multinomial for one draw, without its check of the probabilities, which synchronises with the device
        times = torch.empty_like(shares).exponential_(generator=self._generator)
        return (shares / times).argmax(-1)[0], finite


def processors(decoding: Decoding, own: Sequence[Any] = ()) -> Any:
    """transformers' `LogitsProcessorList` for these settings; empty if they leave the scores unchanged.

    Its `input_ids` are the generated tokens alone, as with `prompt_ignore_length` of transformers' penalty.
    """
    penalties = decoding.presence_penalty, decoding.frequency_penalty
    if decoding.repetition_penalty == 1 and not any((*penalties, own, decoding.effective_temperature)):
        return ()  # without importing transformers
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = LogitsProcessorList()
    if decoding.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(float(decoding.repetition_penalty)))
    if any(penalties):
        chain.append(partial(_penalised, presence=decoding.presence_penalty, frequency=decoding.frequency_penalty))
    chain.extend(own)
    if not decoding.effective_temperature:
        return chain
    if decoding.effective_temperature != 1:
        chain.append(TemperatureLogitsWarper(float(decoding.effective_temperature)))
    if decoding.top_k_tokens is not None:
        chain.append(TopKLogitsWarper(decoding.top_k_tokens))
    if decoding.top_p is not None and decoding.top_p < 1:
        chain.append(TopPLogitsWarper(float(decoding.top_p)))
    if decoding.min_p is not None:
        chain.append(MinPLogitsWarper(float(decoding.min_p)))
    return chain


def _penalised(ids: Tensor, scores: Tensor, *, presence: float, frequency: float) -> Tensor:
    """OpenAI's penalties, by how often a token was generated (transformers has none of them)."""
    counts = torch.zeros_like(scores).scatter_add_(-1, ids, torch.ones_like(ids, dtype=scores.dtype))
    return scores - frequency * counts - presence * (counts > 0)


_COMPILED_BYTES = 256 << 20  # of the compiled constraints that are cached
_COPIES = 256  # of one constraint: they share a lexer, whose number of states is bounded
_MAX_DIGITS = 18  # in a row: the most that fit into 64 bits; a small model may write zeros for ever
_MAX_NUMBER_CHARS = 24  # of a double
_IN_NUMBER = frozenset("0123456789.eE+-")
_NUMBER_HEAD = re.compile(r"[0-9.eE+-]*")
_MAX_CHAR_TOKENS = 4  # the most tokens of one character: its bytes
_PROBE = '{"a b": [1, "ä"]}\n'


class _Vocabulary:
    """A model's vocabulary for llguidance; made for the first constraint, which takes up to a second."""

    def __init__(self, model: ModelFacts) -> None:
        name = model.checkpoint.name
        self.tokens = model.tokens.for_constraints(sorted(model.eos_ids))
        if self.tokens is None:
            raise UnsupportedModelError(
                f"Model {name!r} has no tokenizer.json, which answers by a schema, regex or grammar need."
            )
        ids = list(model.tokens.encode(_PROBE))
        if self.tokens.decode_str(ids).strip() != model.tokens.decode(ids).strip():
            raise UnsupportedModelError(
                f"The tokenizer of model {name!r} changes the text that its tokens spell, so no answer of it can be "
                "held to a schema, regex or grammar."
            )
        hidden = [i for i in model.tokens.control_ids if i < self.tokens.vocab_size and not model.tokens.decode([i])]
        self.banned = [i for i in hidden if not self.tokens.is_special_token(i)]
        """Tokens that llguidance takes for text, but that decode to none."""
        self._compiled: ByteBudgetCache[Constraint, tuple[Any, int]] = ByteBudgetCache(_COMPILED_BYTES)
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> Any:
        """A matcher at the start of an answer. Requests with the same constraint share its compiled form and states."""
        from llguidance import LLMatcher

        with self._lock:
            first, copies = self._compiled.pop(constraint) or (None, 0)
            if first is None or copies == _COPIES:
                first = LLMatcher(self.tokens, constraint.grammar, log_level=0, limits=matcher_limits())
                copies = 0
            if not first.is_error():
                self._compiled.put(constraint, (first, copies + 1), constraint.num_bytes)
            return first.deep_copy()

    def forget(self, constraint: Constraint) -> None:
        """Free the compiled form of a constraint that has failed."""
        with self._lock:
            self._compiled.pop(constraint)


class TokenMask:
    """One request's constraint as a logits processor: it masks the tokens that may not follow those taken so far.

    `json`: the answer is JSON, or with "nested" has objects in it. Their numbers end, where they may end, after as many
    digits as 64 bits hold.
    """

    def __init__(
        self, model: ModelFacts, constraint: Constraint, ends: frozenset[int], *, json: bool | Literal["nested"] = False
    ) -> None:
        self._vocabulary = model.companion(_Vocabulary)
        self._constraint = constraint
        self._matcher = self._vocabulary.matcher(constraint)
        self._ends = ends
        self._json = json
        self._decode = model.tokens.decode
        self._quoted = self._escaped = False
        self._depth = 0 if json == "nested" else 1
        self._number = ""  # that the text so far ends with
        self._require()

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` `(1, vocab)`, modified in place: -inf for tokens that are not allowed. End tokens are allowed if the
        answer is complete.
        """
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8).copy()
        self._require()
        for token_id in self._vocabulary.banned:
            allowed[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
        whole = self._matcher.is_accepting()
        for token_id in self._ends:
            if token_id >> 3 < len(allowed):
                bit = 1 << (token_id & 7)
                allowed[token_id >> 3] = (
                    allowed[token_id >> 3] | bit if whole else allowed[token_id >> 3] & (0xFF ^ bit)
                )
        width = scores.shape[-1]
        barred = np.ones(width, np.uint8)  # unpacked by numpy, which takes a tenth of torch's time here
        bits = np.unpackbits(~allowed, bitorder="little")[:width]
        barred[: len(bits)] = bits
        if len(self._number) >= _MAX_DIGITS // 2:  # a token may have several digits
            left = np.flatnonzero(barred == 0)
            longer = [i for i in left if self._too_long(self._decode([int(i)]))]
            barred[longer] = len(longer) < len(left)
        return scores.masked_fill_(
            torch.from_numpy(barred.view(np.bool_)).to(scores.device, non_blocking=True), -torch.inf
        )

    def take(self, token_id: int) -> bool:
        """Record the chosen token; returns whether the answer is complete and nothing may follow."""
        self._matcher.consume_token(token_id)
        self._require()
        for character in self._decode([token_id]) if self._json else "":
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            else:
                self._quoted = character == '"'
                self._depth += (character in "{[") - (character in "]}" and self._depth > 0)
                self._number = self._number + character if character in _IN_NUMBER and self._depth else ""
        return bool(self._matcher.is_stopped())

    def _too_long(self, text: str) -> bool:
        """Whether `text` would make the number so far too long."""
        head = _NUMBER_HEAD.match(text)
        assert head is not None
        number = self._number + head[0]
        digits = max(map(len, re.split(r"[^0-9]+", number)))
        return bool(head[0]) and (len(number) > _MAX_NUMBER_CHARS or digits > _MAX_DIGITS)

    def _require(self) -> None:
        if self._matcher.is_error():
            self._vocabulary.forget(self._constraint)
            why = self._matcher.get_error().partition("\n")[0]
            raise UsageError(f"The schema, regex or grammar is too complex ({why}); make it simpler.")


class Detokenizer:
    """Decodes a window of ids at each step instead of all ids; its outputs concatenated are the decoding of all ids.

    The window is the ids of the last output, as left context, and those that are not shown yet. Some decoders depend on
    the context: SentencePiece drops the space before its first token. Output waits while the window ends in U+FFFD,
    which may be the beginning of a character, and while it ends in byte tokens (`<0xE4>`), because those decoders judge
    a run of them as a whole.
    """

    def __init__(self, tokens: Tokens, *, control: bool = False, after: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._decode = partial(tokens.decode, control=True) if control else tokens.decode
        self._window = list(after)
        self._context = len(self._window)  # ids at the window's start whose text was returned
        self._text = self._decode(self._window) if after else ""  # of the whole window
        self._shown = len(self._text)  # characters of the text that was returned
        self._in_run = False

    def push(self, token_id: int) -> str:
        """The text that this token completes; it may be empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if token_id in self._tokens.byte_ids:
            self._in_run = True
        elif text != self._text:  # a control token shows nothing and does not end a run
            self._in_run = False
        self._text = text
        if self._in_run or len(text) <= self._shown or text.endswith("\ufffd"):
            return ""
        text = text[self._shown :]
        del self._window[: self._context]
        self._context = len(self._window)
        self._text = self._decode(self._window)
        self._shown = len(self._text)
        return text

    @property
    def provisional(self) -> str:
        """The text that is held back, as far as it goes now; the next tokens may still change it."""
        return self._text[self._shown :].rstrip("\ufffd")

    def flush(self) -> str:
        """The text that is still held back at the end, without an unfinished character."""
        text, shown = self._text, self._shown
        self._shown = len(text)
        for unfinished in range(1, _MAX_CHAR_TOKENS if text.endswith("\ufffd") else 0):
            whole = self._decode(self._window[: max(len(self._window) - unfinished, 0)])
            if not whole.endswith("\ufffd"):
                return whole[shown:]
        return text[shown:]


class StopGate:
    """Lets text through up to the first stop string, and holds back a possible beginning of one.

    The first stop string is the one that is complete first (the longest of those), so the cut does not depend on how
    the text was split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.closed = False

    def push(self, text: str) -> str:
        """The text that may be shown now; `closed` once a stop string was met."""
        if self.closed or not self._stops:
            return "" if self.closed else text
        held = self._held + text
        met = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if met:
            self.closed = True
            self._held = ""
            return held[: min(met)[1]]
        keep = max(overlap(held, stop) for stop in self._stops)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def meets(self, text: str) -> bool:
        """Whether a stop string would be complete after `text`."""
        return not self.closed and any(stop in self._held + text for stop in self._stops)

    def flush(self) -> str:
        """The text held back, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


def _shown(token_id: int, text: Detokenizer, gate: StopGate) -> str:
    """The text that may be shown after a token. A stop string ends the text where it is complete, also in what `text`
    holds back: a line break that is spelt as a byte token would be seen only after the tokens that follow.
    """
    shown = gate.push(text.push(token_id))
    return shown + gate.push(text.flush()) if gate.meets(text.provisional) else shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How one request's tokens are chosen, and when they end.

    `processors` and `criteria` are the caller's own logits processors and stopping criteria, of transformers' types;
    they get the generated ids `(1, n)` and the scores `(1, vocab)`. `control`: the text includes the names of control
    tokens that a grammar allows.
    """

    max_new_tokens: int
    decoding: Decoding = GREEDY
    processors: Sequence[Any] = ()
    criteria: Sequence[Any] = ()
    control: bool = False
    after: Sequence[int] = ()
    """The last tokens of a prompt whose text the answer continues, for the space between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token. `text` is what may be shown now; it is empty while a character is incomplete or the text may
    still become a stop string.

    `winner` is the index of the chunk whose expert proposed it (PCED). `finish_reason` is set on the last token, which
    may be an end token without text; it is never set after a cancellation.
    """

    token_id: int
    text: str
    winner: int | None = None
    thought: bool = False
    """Whether it belongs to the model's thinking before the answer; the marks around that have no text."""
    finish_reason: Literal["stop", "length"] | None = None


class _Thought:
    """The model's thinking before its answer, which the prompt has opened. It ends with its closing mark, generated by
    the model or forced after `most` tokens. No end token is allowed before.
    """

    def __init__(self, model: ModelFacts, generation: Generation, most: int | str, ends: frozenset[int]) -> None:
        if model.tokens.thought is None:
            raise UsageError(
                f"The chat template of model {model.checkpoint.name!r} has no marks of a thought; leave thinking off.",
                param="thinking",
            )
        end = model.tokens.thought[1]
        self._sampler = Sampler(generation.decoding, generation.processors)
        self._ends = sorted(ends)
        self._text = Detokenizer(model.tokens, control=True)
        self._gate = StopGate([end])
        self._left = most if isinstance(most, int) else None
        self._closing = list(model.tokens.encode(f"\n{end}", control=True))

    @property
    def over(self) -> bool:
        return self._gate.closed

    def choose(self, asked: Sample, ids: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        scores = torch.as_tensor(asked.scores)
        if self._left is not None and self._left <= 0:
            return torch.tensor(self._closing[-self._left]).to(scores.device, non_blocking=True), None
        ends = torch.tensor(self._ends, dtype=torch.long).to(scores.device, non_blocking=True)
        return self._sampler.choose(replace(asked, scores=scores.index_fill(0, ends, -torch.inf)), ids)

    def take(self, token_id: int, *, last: bool) -> str:
        if self._left is not None:
            self._left -= 1
        text = _shown(token_id, self._text, self._gate)
        if last:
            text += self._gate.push(self._text.flush()) + self._gate.flush()
        return text


class Decoder:
    """Sampling, text and end of one request: it decides about end tokens, length and stop strings.

    transformers' `StopStringCriteria` reports that a string occurred, but not which text to hold back until that is
    certain.
    """

    def __init__(self, model: ModelFacts, generation: Generation) -> None:
        self._generation = generation
        self._ends = model.eos_ids.union(generation.decoding.stop_ids)
        constraint = generation.decoding.constraint
        decoding = generation.decoding
        json: bool | Literal["nested"] = decoding.schema is not None
        if decoding.grammar is not None and "%json" in decoding.grammar:
            json = "nested"
        self._mask = None if constraint is None else TokenMask(model, constraint, self._ends, json=json)
        own = generation.processors if self._mask is None else (*generation.processors, self._mask)
        self._sampler = Sampler(generation.decoding, own)
        thinking = generation.decoding.thinking
        self._thought = None if thinking == "off" else _Thought(model, generation, thinking, self._ends)
        self._text = Detokenizer(model.tokens, control=generation.control, after=generation.after)
        self._gate = StopGate(generation.decoding.stop)
        self._ids: list[int] = []

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return self._generation.max_new_tokens - len(self._ids)

    def choose(self, asked: Sample) -> tuple[Tensor, Tensor | None]:
        """The next token, 0-dim, and whether the scores could be drawn from (None: greedy)."""
        if self._thought is not None:
            return self._thought.choose(asked, self._ids)
        return self._sampler.choose(asked, self._ids)

    def take(self, asked: Sample, token_id: int, winner: int | None, *, finite: bool, full: bool) -> Token:
        """The chosen token with its text; `full`: the model has no position for another.

        Raises UnsupportedModelError if the scores were not finite, and whatever a stopping criterion raises.
        """
        if not finite:
            raise UnsupportedModelError(
                "The model's scores are not finite numbers, so no token can be drawn; load it in float32 or bfloat16."
            )
        self._ids.append(token_id)
        if self._thought is not None:
            last = full or not self.remaining
            text = self._thought.take(token_id, last=last)
            if self._thought.over:
                self._thought = None
            return Token(
                token_id=token_id, text=text, winner=winner, thought=True, finish_reason="length" if last else None
            )
        ended = token_id in self._ends
        text = "" if ended else _shown(token_id, self._text, self._gate)
        if self._mask is not None and not ended:
            ended = self._mask.take(token_id)
        ended = ended or self._gate.closed or self._enough(asked.scores)
        last = ended or full or not self.remaining
        if last:
            text += self._gate.push(self._text.flush()) + self._gate.flush()
        reason: Literal["stop", "length"] = "stop" if ended or self._gate.closed else "length"
        return Token(token_id=token_id, text=text, winner=winner, finish_reason=reason if last else None)

    def _enough(self, scores: Tensor) -> bool:
        criteria = self._generation.criteria
        if not criteria:
            return False
        with torch.inference_mode():
            scores = torch.as_tensor(scores)
            generated = torch.tensor([self._ids]).to(scores.device, non_blocking=True)
            return any(bool(torch.as_tensor(criterion(generated, scores[None])).all()) for criterion in criteria)
