"""Requests over token ids, as the pipeline passes them to an engine, and greedy runs of them."""

import torch

from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.runtime import Stream, runtime_of
from ragkv.types import Encoding

PREFIX = [0, 40, 41, 42, 43]
CHUNKS = [[50, 51, 52, 53], [60, 61, 62, 63, 64, 65, 66], [70, 1, 71]]  # one contains the eos token as text
SUFFIX = [80, 81, 82]
SCORES = [0.31, 0.82, 0.57]
STEPS = 6
CONTEXTS = [CHUNKS, [[100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110]]]
QUESTIONS = [[80, 81, 82], [83], [84, 85, 86, 87, 88, 89, 90, 91, 92, 93]]


def request(model, engine, chunks=None, scores=None, suffix=None, prefix=None) -> Request:
    chunks = CHUNKS if chunks is None else chunks
    prefix = PREFIX if prefix is None else prefix
    scores = scores or SCORES[: len(chunks)]
    kvs, prefix_kv = [None] * len(chunks), None
    if engine.encoding is not None:
        prefix_kv = model.encode([prefix])[0] if prefix else None
        prefixed = engine.encoding is Encoding.PREFIXED
        before = prefix_kv if prefixed else None
        made = iter(model.encode([c for c in chunks if c], prefix=before))
        kvs = [next(made) if c else None for c in chunks]  # a chunk without tokens has no KV
    return Request(
        prefix_ids=tuple(prefix),
        prefix=prefix_kv,
        chunks=tuple(
            ContextChunk(token_ids=tuple(c), score=s, kv=kv) for c, s, kv in zip(chunks, scores, kvs, strict=True)
        ),
        suffix_ids=tuple(SUFFIX if suffix is None else suffix),
    )


def run(model, name, *, steps=STEPS, tuning=None, trace=None, **changes):
    """Run `greedy` with an engine by name."""
    engine = make_engine(name, {name: tuning or {}})
    return greedy(Stream(runtime_of(model), engine, request(model, engine, **changes)), steps, trace)


def greedy(stream, steps=STEPS, trace=None):
    """Greedy ids and winners, ignoring end tokens; every step's scores `(vocab,)` are appended to `trace`."""
    ids, winners = [], []
    for _ in range(steps):
        if trace is not None:
            trace.append(stream.scores.clone())
        ids.append(stream.best())
        winners.append(stream.winner(ids[-1]))
        stream.advance(ids[-1])
    return ids, winners


def forced(model, engine, tokens, **changes):
    """The scores before each of these tokens and after the last, `(tokens + 1, vocab)`."""
    stream = Stream(runtime_of(model), engine, request(model, engine, **changes))
    found = [stream.scores]
    for token in tokens:
        stream.advance(token)
        found.append(stream.scores)
    return torch.stack(found)


def teacher_forced(model, parts, name, tuning=None) -> torch.Tensor:
    """`forced` for the response of an `ExampleTokens`."""
    asked = {
        "chunks": parts.chunks,
        "scores": [0.5] * len(parts.chunks),
        "suffix": parts.suffix,
        "prefix": parts.prefix,
    }
    return forced(model, make_engine(name, {name: tuning or {}}), parts.response, **asked)


def continues(model, tuning):
    """Check that transformers' `generate` continues from the cache of engine block like the engine, and leaves the
    stored keys unchanged. Returns the number of tokens in the cache.
    """
    engine = make_engine("block", {"block": tuning})
    asked = request(model, engine)
    before = [k.clone() for k in asked.chunks[1].kv.keys]
    arguments = engine.cache(model, asked)
    cached = arguments["past_key_values"].get_seq_length()
    assert arguments["input_ids"].shape[1] == cached + len(SUFFIX)
    with model.plain() as plain:
        out = plain.generate(
            **arguments, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=2
        )
    assert out[0, cached + len(SUFFIX) :].tolist() == run(model, "block", tuning=tuning)[0]
    assert all(torch.equal(a, b) for a, b in zip(before, asked.chunks[1].kv.keys, strict=True))
    return cached


def requests(model, engine) -> list[Request]:
    """A request for every question of `QUESTIONS` over every context of `CONTEXTS`."""
    pairs = [(chunks, suffix) for chunks in CONTEXTS for suffix in QUESTIONS]
    return [request(model, engine, chunks=c, scores=[0.5] * len(c), suffix=suffix) for c, suffix in pairs]
