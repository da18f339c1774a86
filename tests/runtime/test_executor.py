"""The contract of an executor: requests get the same answers from any that can serve their engine, and a refusal else.

`Stated` is made up, as llama.cpp would be: chunk KV is an opaque state without tensors that torch could read, which it
moves and joins itself, and several sequences share its batch. It computes by transformers alone, over token ids.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import pytest
import torch
from asking import CHUNKS, PREFIX, SUFFIX, request

from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.errors import PromptTooLongError, UnsupportedModelError, UsageError
from ragkv.runtime import Generation, Runtime
from ragkv.runtime.batch_executor import BatchExecutor
from ragkv.runtime.executor import ExecutorTraits
from ragkv.types import Capability, Encoding


@dataclass(frozen=True, eq=False)
class State:
    """A chunk's KV as its executor sees it: the tokens that were seen before it, and its own."""

    seen: tuple[int, ...]
    ids: tuple[int, ...]
    encoded_at: int

    @property
    def tokens(self):
        return len(self.ids)

    @property
    def nbytes(self):
        return 64 * len(self.ids)


@dataclass
class Own:
    """A sequence's own tokens."""

    ids: list[int] = field(default_factory=list)
    reserve: int = 0

    @property
    def length(self):
        return len(self.ids)


class Stated:
    """Each token attends to the placed chunks, each encoded after what it saw, and to the sequence's own tokens."""

    traits = ExecutorTraits(
        name="the stated executor",
        device=torch.device("cpu"),
        serves=frozenset({Capability.MERGE, Capability.MOVE}),
        weighs=False,
        max_sequences=2,
    )

    def __init__(self, model):
        self._model = weakref.ref(model)
        self.passes: list[int] = []
        self.fail = 0

    @property
    def model(self):
        return self._model()

    def generation(self):
        return 0

    def reserve(self, sequences, ids, *, answer, running):
        for sequence, some in zip(sequences, ids, strict=True):
            if sequence.position + len(some) > 100:
                raise PromptTooLongError("the stated executor has 100 positions")
            if not isinstance(sequence.cache, Own):
                sequence.cache = Own()

    def lay_out(self, sequences, ids, active):
        pass

    def forward(self, sequences, ids):
        if self.fail:
            self.fail -= 1
            raise RuntimeError("out of memory")
        self.passes.append(len(sequences))
        logits = [self._logits(*pair) for pair in zip(sequences, ids, strict=True)]
        for sequence, some in zip(sequences, ids, strict=True):
            sequence.cache.ids += some
            sequence.position += len(some)
        wanted = [row for row, sequence in zip(logits, sequences, strict=True) if not sequence.silent]
        return torch.stack(wanted) if wanted else torch.empty((0, 0))

    def _logits(self, sequence, ids):
        """By transformers, with a mask: what each token sees."""
        tokens, places, groups = [], [], []
        for chunk in sequence.segments:
            tokens += chunk.kv.seen + chunk.kv.ids
            first = chunk.start - len(chunk.kv.seen)
            places += range(first, chunk.end)
            groups.append((len(chunk.kv.seen), len(chunk.kv.ids)))
        own = [*sequence.cache.ids, *ids]
        start = sequence.position - sequence.cache.length
        tokens, places = [*tokens, *own], [*places, *range(start, start + len(own))]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf)
        place, visible = 0, []
        for seen, count in groups:
            for i in range(seen + count):
                mask[place + i, place : place + i + 1] = 0
            visible += range(place + seen, place + seen + count)
            place += seen + count
        for i in range(len(own)):
            mask[place + i, visible] = 0
            mask[place + i, place : place + i + 1] = 0
        with self.model.plain("eager") as plain:
            return (
                plain(
                    input_ids=torch.tensor([tokens]),
                    position_ids=torch.tensor([places]),
                    attention_mask=mask[None, None],
                )
                .logits[0, -1]
                .float()
            )

    def copied(self, chunks, *, reserve):
        raise AssertionError("the runtime has read `copies`")

    def chunk_kv(self, sequence, *, encoded_at):
        seen = tuple(i for chunk in sequence.segments for i in chunk.kv.ids)
        return State(seen=seen, ids=tuple(sequence.cache.ids), encoded_at=encoded_at)

    def release(self, sequences):
        for sequence in sequences:
            sequence.cache = Own()

    def request_ended(self):
        pass


def _stated_request(model, engine, suffix=SUFFIX):
    """`asking.request`, with opaque states for KV."""
    if engine.encoding is None:
        return request(model, engine, suffix=suffix)
    seen = tuple(PREFIX) if engine.encoding is Encoding.PREFIXED else ()
    states = [State(seen=seen, ids=tuple(ids), encoded_at=len(seen)) for ids in CHUNKS]
    return Request(
        prefix_ids=tuple(PREFIX),
        prefix=State(seen=(), ids=tuple(PREFIX), encoded_at=0),
        chunks=tuple(
            ContextChunk(token_ids=tuple(ids), score=0.5, kv=kv) for ids, kv in zip(CHUNKS, states, strict=True)
        ),
        suffix_ids=tuple(suffix),
    )


def _batch_request(model, engine, suffix=SUFFIX):
    return request(model, engine, suffix=suffix)


EXECUTORS = {"transformers": (BatchExecutor, _batch_request), "stated": (Stated, _stated_request)}


@pytest.fixture(params=EXECUTORS)
def executor(request, make_model, monkeypatch):
    """(a function that makes a runtime, one that makes a request for an engine)"""
    model = make_model("llama")
    monkeypatch.setattr(model, "eos_ids", frozenset())
    kind, ask = EXECUTORS[request.param]
    return (lambda **limits: Runtime(model, executor=kind, **limits)), (lambda *given: ask(model, *given))


def _answers(runtime, engine, asked, steps=5):
    jobs = [runtime.submit(engine, each, Generation(max_new_tokens=steps)) for each in asked]
    return [[token.token_id for token in runtime.tokens(job)] for job in jobs]


@pytest.mark.parametrize("name", ["full", "block", "ippd", "pced"])
def test_every_executor_gives_the_same_answer(name, executor, make_model):
    runtime, ask = executor
    engine = make_engine(name, {})
    output = runtime()
    if output.executor.traits.max_sequences == 2 and name == "pced":
        with pytest.raises(
            UsageError, match=r"needs 4 sequences at a time, and the stated executor has 2; lower --top-k"
        ):
            output.submit(engine, ask(engine), Generation(max_new_tokens=5))
        return
    model = make_model("llama")
    expected = _answers(Runtime(model), engine, [request(model, engine)])
    assert _answers(output, engine, [ask(engine)]) == expected


def test_requests_together_get_the_answers_of_each_alone(executor):
    runtime, ask = executor
    suffixes = [SUFFIX, [83], [84, 85, 86, 87]]
    for name in ("full", "block"):
        engine = make_engine(name, {})
        alone = [_answers(runtime(), engine, [ask(engine, suffix)])[0] for suffix in suffixes]
        for limits in ({}, {"batch_tokens": 3}):
            assert _answers(runtime(**limits), engine, [ask(engine, suffix) for suffix in suffixes]) == alone


def test_sequences_share_passes_up_to_the_executors_number(make_model, monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(model, "eos_ids", frozenset())
    runtime, engine = Runtime(model, executor=Stated), make_engine("block", {})
    _answers(runtime, engine, [_stated_request(model, engine) for _ in range(3)])
    assert max(runtime.executor.passes) == 2


def test_what_an_executor_cannot_do_is_refused_by_name(make_model):
    model = make_model("llama")
    runtime = Runtime(model, executor=Stated)
    ape = make_engine("ape", {"ape": {"temperature": 0.5}})
    blend = make_engine("blend", {})
    for engine, reason in (
        (ape, "the stated executor cannot weigh chunks against the question"),
        (blend, "needs chunks that can be read as tensors"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            _answers(runtime, engine, [_stated_request(model, engine)])
    assert runtime.idle


def test_a_pass_that_fails_ends_only_who_fails_again(make_model, monkeypatch, runtime_warnings):
    model = make_model("llama")
    monkeypatch.setattr(model, "eos_ids", frozenset())
    engine = make_engine("block", {})
    asked = [_stated_request(model, engine, suffix) for suffix in ([80], [81])]
    alone = [_answers(Runtime(model, executor=Stated), engine, [each])[0] for each in asked]
    runtime = Runtime(model, executor=Stated)
    runtime.executor.fail = 1
    assert _answers(runtime, engine, asked) == alone
    assert len(runtime_warnings) == 1
    runtime_warnings.clear()
    runtime.executor.fail = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        _answers(runtime, engine, asked)
    runtime_warnings.clear()


def test_a_question_beyond_the_executors_positions_is_refused(make_model):
    model = make_model("llama")
    engine = make_engine("block", {})
    with pytest.raises(PromptTooLongError, match="100 positions"):
        _answers(Runtime(model, executor=Stated), engine, [_stated_request(model, engine, [80] * 90)])
