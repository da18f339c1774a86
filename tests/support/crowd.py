"""Random requests of every engine over one bank of chunks, answered alone and in a batch.

In a batch, each request must give the same tokens as alone, and logits within 1e-4. Requests come at different steps,
some are cancelled, and the runtime has little memory, so that prefills are split and rows wait. Alone, a request must
give what the paper's equations give (`literal`).
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import oracle
import torch
from hypothesis import strategies as st

from ragkv.decoding import Decoding
from ragkv.engines import ContextChunk, Engine, Request, Shared, TokenSequence, answer_from, make_engine
from ragkv.model.prompt import Prompt
from ragkv.runtime import Generation, Job, Runtime
from ragkv.types import Encoding

__all__ = ["Asked", "Common", "Recorder", "alone", "asked", "literal", "request", "together"]

LENGTHS = (1, 2, 3, 5, 8, 9, 13, 21)
PROMPT = Prompt(prefix="", before_question="Q ", after_question=":", separator=".")
TUNINGS: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("full", ()),
    ("single", ()),
    ("block", ()),
    ("block", (("sink", "bos"),)),
    ("block", (("sink", "none"),)),
    ("block", (("preset", "prompt-cache"),)),
    ("block", (("preset", "no-positions"),)),
    ("ape", ()),
    ("ape", (("temperature", 0.9), ("scale", 0.9))),
    ("ape", (("temperature", 0.6), ("scale", 0.7), ("scale_mode", "log"))),
    ("ape", (("scale", 1.3), ("scale_mode", "log"))),
    ("pced", ()),
    ("pced", (("beta", "shared"), ("group_experts", 2))),
    ("pced", (("beta", "released"), ("aggregation", "moe"))),
    ("pced", (("beta", 0.3), ("aggregation", "poe"), ("group_experts", 1))),
    ("common", ()),
    ("ippd", ()),
)


class Common(Engine):
    """`full`, but the tokens before the question are prefilled once for all requests that share them."""

    name = "common"
    encoding = None
    Config = dict

    def program(self, request: Request, model: Any) -> Any:
        parts = (request.prefix_ids, *(chunk.token_ids for chunk in request.chunks))

        def run() -> Any:
            segments = yield Shared(parts)
            at = sum(map(len, parts))
            yield from answer_from(TokenSequence.over(segments, position=at), request.suffix_ids)

        return run()


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: its chunks, its engine, and its behaviour in a batch."""

    engine: tuple[str, tuple[tuple[str, Any], ...]]
    prefix: bool = True
    chunks: tuple[int, ...]
    """Numbers in the bank; -1 for a chunk without tokens."""
    suffix: tuple[int, ...]
    steps: int
    temperature: float = 0.0
    at: int = 0
    """The step at which it is submitted."""
    leaves: int | None = None
    """It is cancelled after this many tokens."""

    @property
    def content(self) -> tuple[Any, ...]:
        """What its answer depends on."""
        return self.engine, self.prefix, self.chunks, self.suffix, self.steps, self.temperature


@st.composite
def asked(draw: st.DrawFn, temperatures: tuple[float, ...] = (0.0,)) -> Asked:
    return Asked(
        engine=draw(st.sampled_from(TUNINGS)),
        prefix=draw(st.sampled_from([True, True, True, False])),
        chunks=tuple(draw(st.lists(st.sampled_from([-1, *range(len(LENGTHS))]), max_size=5))),
        suffix=tuple(draw(st.lists(st.integers(3, 300), min_size=1, max_size=14))),
        steps=draw(st.integers(1, 7)),
        temperature=draw(st.sampled_from(temperatures)),
        at=draw(st.integers(0, 6)),
        leaves=draw(st.sampled_from([None, None, None, 0, 1, 3])),
    )


PREFIX = (0, 40, 41, 42, 43, 44, 45)


@cache
def _bank(model: Any, encoding: Encoding, prefix: bool) -> tuple[Any, list[Any]]:
    """(the prefix's KV, the chunks' KV)."""
    before = model.encode([PREFIX])[0] if prefix else None
    after = before if encoding is Encoding.PREFIXED else None
    return before, [model.encode([ids], prefix=after)[0] for ids in _texts()]


@cache
def _texts() -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(11)
    return tuple(tuple(torch.randint(3, 300, (n,), generator=generator).tolist()) for n in LENGTHS)


def engine(one: Asked) -> Engine:
    name, tuning = one.engine
    return Common() if name == "common" else make_engine(name, {name: dict(tuning)})


def _score(chunk: int) -> float:
    return 0.2 + 0.09 * chunk


def request(model: Any, one: Asked) -> Request:
    encoding = engine(one).encoding
    prefix, kvs = (None, [None] * len(LENGTHS)) if encoding is None else _bank(model, encoding, one.prefix)
    bos = one.engine == ("block", (("sink", "bos"),))
    return Request(
        prefix_ids=PREFIX if one.prefix else (),
        prefix=prefix,
        chunks=tuple(
            ContextChunk(token_ids=() if i < 0 else _texts()[i], score=_score(i), kv=None if i < 0 else kvs[i])
            for i in one.chunks
        ),
        suffix_ids=one.suffix,
        question="why",
        prompt=None if bos and not one.prefix else PROMPT,
    )


@dataclass
class Recorder:
    """A stopping criterion that never stops, and records the scores of each step."""

    scores: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> bool:
        self.scores.append(scores[0].clone())
        return False


def generation(one: Asked, recorder: Recorder) -> Generation:
    decoding = Decoding(temperature=one.temperature, top_p=0.95, seed=5) if one.temperature else Decoding()
    return Generation(max_new_tokens=one.steps, decoding=decoding, criteria=[recorder])


_ALONE: dict[Any, tuple[list[Any], list[torch.Tensor]]] = {}


def alone(model: Any, one: Asked) -> tuple[list[Any], list[torch.Tensor]]:
    """The tokens and scores of a request that runs alone."""
    key = (id(model), one.content)
    if key not in _ALONE:
        recorder = Recorder()
        made = make_engine("full", {}) if one.engine[0] == "common" else engine(one)
        tokens = list(Runtime(model).decode(made, request(model, one), generation(one, recorder)))
        _ALONE[key] = tokens, recorder.scores
    return _ALONE[key]


def literal(model: Any, one: Asked) -> list[torch.Tensor]:
    """Every greedy step's scores by transformers' forward pass (`oracle`), ignoring end tokens."""
    name, tuning = one.engine[0], dict(one.engine[1])
    prefix = list(PREFIX) if one.prefix else []
    chunks, scores = [[] if i < 0 else list(_texts()[i]) for i in one.chunks], [_score(i) for i in one.chunks]
    found: list[torch.Tensor] = []
    more: dict[str, Any] = {"steps": one.steps, "trace": found}
    with model.plain() as plain:
        if name == "ape":
            rule = {"temperature": tuning.get("temperature", 1.0), "scale": tuning.get("scale", 1.0)}
            mode = tuning.get("scale_mode", "power")
            oracle.ape(plain, prefix, chunks, [*one.suffix], **rule, mode=mode, **more)
        elif name == "block":
            sink = {"bos": prefix[:1], "none": []}.get(tuning.get("sink", "prefix"), prefix)
            kept = tuning.get("preset") == "no-positions"
            oracle.block(plain, sink, chunks, [*one.suffix], reencode=not kept, **more)
        elif name == "pced" and any(chunks):
            rule = {"beta": tuning.get("beta", "per_expert"), "rule": tuning.get("aggregation", "max")}
            read, of = zip(*((ids, score) for ids, score in zip(chunks, scores, strict=True) if ids), strict=True)
            oracle.pced(plain, prefix, [*read], [*one.suffix], [*of], **rule, **more)
        else:
            read = {"single": chunks[-1:], "pced": []}.get(name, chunks)
            oracle.full(plain, prefix, read, [*one.suffix], **more)
    return found


def together(
    model: Any, limiter: list[Asked], **limits: int
) -> tuple[Runtime, list[tuple[Job, list[Any], list[torch.Tensor]]]]:
    """The same requests in one runtime, to their end: (job, tokens, scores) of each."""
    runtime = Runtime(model, **limits)
    found: list[tuple[Job, list[Any], list[torch.Tensor]] | None] = [None] * len(limiter)
    step = 0
    while any(each is None or not each[0].ended for each in found):
        for i, one in enumerate(limiter):
            if one.at == step:
                recorder = Recorder()
                job = runtime.submit(engine(one), request(model, one), generation(one, recorder))
                found[i] = (job, [], recorder.scores)
        for one, each in zip(limiter, found, strict=True):
            if each is not None:
                while each[0].tokens:
                    each[1].append(each[0].tokens.popleft())
                if one.leaves is not None and len(each[1]) >= one.leaves:
                    runtime.cancel(each[0])
        assert runtime.advance() or step <= max(one.at for one in limiter) or all(e and e[0].ended for e in found)
        step += 1
    for each in found:
        assert each is not None
        each[1].extend(each[0].tokens)
    return runtime, [each for each in found if each is not None]
