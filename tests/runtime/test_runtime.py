"""Requests in a batch get the answers that they get alone, whatever fails beside them, and all of them end."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, cycle

import pytest
import torch
from clichild import CliChild
from crowd import TUNINGS, Asked, alone, engine, generation, literal, request, together
from crowd import Recorder as Quiet
from crowd import asked as drawn_requests
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from indexed import indexed
from nightly import NIGHTLY

from ragkv import RagKV
from ragkv.attention.kv import ChunkKV
from ragkv.attention.sequence import KVCache
from ragkv.engines import Engine, Forward, PlacedChunk, Release, Sample, Shared, TokenSequence, answer_from
from ragkv.errors import AnswerInterruptedError, StoreError, UsageError
from ragkv.model import attention_hook
from ragkv.runtime import Generation, Runtime, Stream, runtime_of, scheduler
from ragkv.runtime import step as stepper
from ragkv.runtime.decoding import Decoder
from ragkv.runtime.step import Job
from ragkv.store import MemoryTier


def case(name="block", chunks=(0, 3, 5), steps=6, suffix=(80, 81, 82)):
    tuning = next(each for each in TUNINGS if each[0] == name)
    return Asked(engine=tuning, chunks=chunks, suffix=suffix, steps=steps)


CROWD = [
    case("block"),
    case("ape", (3, 5)),
    case("pced", (5, 1)),
    case("full", (0, 2), suffix=(90,)),
    case("common", (3,)),
]


def submit(runtime, model, asked, **more):
    return runtime.submit(engine(asked), request(model, asked), generation(asked, Quiet()), **more)


def ids(tokens):
    return [token.token_id for token in tokens]


def finish(runtime, jobs):
    """The tokens and the error of each job."""
    results = []
    for job in jobs:
        tokens, error = [], None
        try:
            tokens.extend(runtime.tokens(job))
        except BaseException as raised:
            error = raised
        results.append((tokens, error))
    return results


def expected(model, asked):
    return ids(alone(model, asked)[0])


def undisturbed(runtime, model, found, asked=CROWD):
    """Check that each answer equals the one that the request gets alone, and that nothing is still held."""
    assert [error for _, error in found] == [None] * len(asked)
    assert [ids(tokens) for tokens, _ in found] == [expected(model, each) for each in asked]
    assert runtime.idle


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_answers_do_not_depend_on_torchs_default_dtype(dtype, make_model):
    """transformers changes it for all threads while it builds a model in one of them."""
    model = make_model("llama")
    for entry in CROWD:
        alone(model, entry)
    torch.set_default_dtype(dtype)
    try:
        runtime = Runtime(model)
        found = finish(runtime, [submit(runtime, model, entry) for entry in CROWD])
    finally:
        torch.set_default_dtype(torch.float32)
    undisturbed(runtime, model, found)


class Bad(Engine):
    """A third-party engine that runs the given program."""

    name = "bad"
    encoding = None
    Config = dict

    def __init__(self, program):
        super().__init__()
        self._program = program

    def program(self, request, model):
        return self._program(request, model)


def led_by(program, runtime, model, steps):
    """A job that is answered by this program."""
    return runtime.submit(Bad(program), request(model, CROWD[3]), Generation(max_new_tokens=steps))


def _raises(ask=None):
    if ask is not None:
        yield ask
    raise ArithmeticError("the engine's own")


ROW = TokenSequence((), 0)
WRONG = {
    "raises": lambda *_: _raises(Forward((TokenSequence((), 0),), ((5,),))),
    "at once": lambda *_: _raises(),
    "an empty row": lambda *_: _raises(Forward((TokenSequence((), 0),), ((),))),
    "nobody": lambda *_: _raises(Forward((), ())),
    "twice": lambda *_: _raises(Forward((ROW, ROW), ((5,), (6,)))),
    "nonsense": lambda *_: _raises("logits, please"),
    "no such token": lambda *_: _raises(Forward((TokenSequence((), 0),), ((10**6,),))),
}


def _unclosed(request, model):
    try:
        [scores] = yield Forward((TokenSequence((), 0),), ((5,),))
        while True:
            yield Sample(scores * float("nan"))
    finally:
        raise ArithmeticError("at the very end")


@pytest.mark.parametrize("program", WRONG)
def test_an_engine_that_is_wrong_fails_alone(program, make_model, runtime_warnings):
    model = make_model("llama")
    runtime = Runtime(model)
    jobs = [submit(runtime, model, asked) for asked in CROWD]
    jobs.insert(2, led_by(WRONG[program], runtime, model, 4))
    results = finish(runtime, jobs)
    assert results[2][0] == []
    assert isinstance(results[2][1], ArithmeticError | IndexError | TypeError | ValueError)
    assert (type(results[2][1]) is ArithmeticError) == (program in ("raises", "at once"))  # the others stop too
    del results[2]
    undisturbed(runtime, model, results)
    runtime_warnings.clear()  # a pass failed, if a token was out of the vocabulary


def test_an_engine_that_fails_at_its_end_fails_nobody(make_model, runtime_warnings):
    model = make_model("llama")
    runtime = Runtime(model)
    jobs = [submit(runtime, model, CROWD[0]), led_by(_unclosed, runtime, model, 2)]
    (tokens, error), (more, none) = finish(runtime, jobs)
    assert (ids(tokens), error) == (expected(model, CROWD[0]), None)
    assert (len(more), none) == (2, None)
    assert "at the very end" in runtime_warnings.pop()
    assert runtime.idle


class Owner:
    """The owner of a lease."""


def drawn(examples):
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=100 if NIGHTLY else examples, suppress_health_check=checks)


class Faulty:
    """The model's layers; the n-th call of one raises."""

    def __init__(self, monkeypatch, model):
        self.left, self.error, self.layer, self.met = None, None, 0, 0
        for number, layer in enumerate(model.module.get_decoder().layers):
            forward = layer.forward

            def run(*args, number=number, forward=forward, **kwargs):
                if self.left is not None and number == self.layer:
                    self.left -= 1
                    if self.left < 0:
                        self.left = None
                        self.met += 1
                        raise self.error
                return forward(*args, **kwargs)

            monkeypatch.setattr(layer, "forward", run)

    def set(self, error, layer, after):
        self.error, self.layer, self.left = error, layer, after


@drawn(8)
@given(
    kind=st.sampled_from([RuntimeError, MemoryError, torch.OutOfMemoryError]),
    layer=st.integers(0, 3),
    after=st.integers(0, 4),
)
def test_a_pass_that_failed_once_is_made_again(kind, layer, after, make_model, monkeypatch, runtime_warnings):
    """Nobody is to blame for a pass of several that failed: alone, each of them goes through."""
    model = make_model("gemma2")
    with monkeypatch.context() as patch:
        faulty = Faulty(patch, model)
        runtime = Runtime(model)
        jobs = [submit(runtime, model, asked) for asked in CROWD]
        faulty.set(kind("no more memory"), layer, after)
        found = finish(runtime, jobs)
    undisturbed(runtime, model, found)
    assert (faulty.met, len(runtime_warnings)) == (1, 1)
    runtime_warnings.clear()


@drawn(8)
@given(layer=st.integers(0, 2), after=st.integers(0, 9))
def test_who_alone_fails_every_pass_is_the_only_one_that_fails(layer, after, make_model, monkeypatch, runtime_warnings):
    """One of the requests has a token that the model's layers refuse, at any layer and any time."""
    model, count = make_model("llama"), 0
    with monkeypatch.context() as patch:
        target = model.module.get_decoder().layers[layer]
        forward = target.forward

        def run(*args, **kwargs):
            nonlocal count
            step = attention_hook._running.get().attending
            if any(span.sequence is row for span in step.spans for row in culprits):
                count += 1
                if count > after:
                    raise RuntimeError("this row is not to be read")
            return forward(*args, **kwargs)

        patch.setattr(target, "forward", run)
        runtime = Runtime(model)
        culprits = [TokenSequence((), 0)]
        jobs = [submit(runtime, model, asked) for asked in CROWD]
        jobs.insert(1, led_by(lambda *_: answer_from(culprits[0], (7, 8)), runtime, model, 99))
        results = finish(runtime, jobs)
    tokens, error = results.pop(1)
    assert str(error) == "this row is not to be read"
    assert len(tokens) <= after
    undisturbed(runtime, model, results)
    runtime_warnings.clear()


@drawn(8)
@given(kind=st.sampled_from([KeyboardInterrupt, SystemExit]), layer=st.integers(0, 3), after=st.integers(0, 4))
def test_an_interrupt_ends_who_was_interrupted(kind, layer, after, make_model, monkeypatch):
    """The thread that drove the step gets the interrupt. The other rows are as before the pass, and get the same
    answers.
    """
    model = make_model("gemma2")
    with monkeypatch.context() as patch:
        faulty = Faulty(patch, model)
        runtime = Runtime(model, batch_tokens=16)
        jobs = [submit(runtime, model, asked) for asked in CROWD]
        faulty.set(kind(), layer, after)
        [(first, error)] = finish(runtime, jobs[:1])
        assert isinstance(error, kind)
        rest = finish(runtime, jobs[1:])
    assert ids(first) == expected(model, CROWD[0])[: len(first)]
    undisturbed(runtime, model, rest, CROWD[1:])


@pytest.mark.parametrize("where", ["read", "take", "commit", "send"])
def test_an_interrupt_in_the_middle_of_something_ends_what_it_tore(where, make_model, monkeypatch):
    """If a row is partly committed, or a program has partly advanced, the answer cannot continue, and its error says
    so.
    """
    model = make_model("llama")
    owner, name = {
        "read": (Job, "read"),
        "take": (Decoder, "take"),
        "commit": (KVCache, "commit"),
        "send": (Job, "send"),
    }[where]
    original, calls = getattr(owner, name), []
    for stop in range(1, 14, 3):
        runtime = Runtime(model)
        jobs = [submit(runtime, model, asked) for asked in CROWD]
        calls.clear()
        with monkeypatch.context() as patch:

            def stopped(*args, stop=stop, **kwargs):
                calls.append(1)
                if len(calls) == stop:
                    raise KeyboardInterrupt
                return original(*args, **kwargs)

            patch.setattr(owner, name, stopped)
            found = finish(runtime, jobs)
        assert [type(error) for _, error in found].count(KeyboardInterrupt) == 1
        for asked, (tokens, error) in zip(CROWD, found, strict=True):
            wanted = expected(model, asked)
            if error is None:
                assert ids(tokens) == wanted
            else:
                assert isinstance(error, AnswerInterruptedError | KeyboardInterrupt)
                assert ids(tokens) == wanted[: len(tokens)]
        assert runtime.idle


@pytest.mark.parametrize("result", [None, torch.zeros(0), torch.zeros(3, 2, 1), "much"])
def test_a_processor_that_returns_no_scores_ends_its_own_answer(result, make_model):
    model = make_model("llama")
    runtime = Runtime(model)
    jobs = [submit(runtime, model, CROWD[0])]
    wrong = Generation(max_new_tokens=6, processors=[lambda *_: result])
    jobs.append(runtime.submit(engine(CROWD[1]), request(model, CROWD[1]), wrong))
    (tokens, error), (_, theirs) = finish(runtime, jobs)
    assert (ids(tokens), error) == (expected(model, CROWD[0]), None)
    assert theirs is not None or torch.is_tensor(result)
    assert runtime.idle


def test_numbers_that_are_none_stay_with_who_has_them(make_model):
    """A row with NaN in its KV affects neither the rows beside it nor those that reuse its memory."""
    model = make_model("llama")
    [kv] = model.encode([[5, 6, 7]])
    spoilt = ChunkKV(keys=kv.keys, values=tuple(torch.full_like(value, torch.nan) for value in kv.values))

    def program(request, model):
        return answer_from(TokenSequence.over((PlacedChunk(kv=spoilt, start=0),), position=3), (9,) * 12)

    runtime = Runtime(model)
    for steps in (2, 8):
        jobs = [submit(runtime, model, asked) for asked in CROWD * 2]
        for i in (0, 4, 9):
            jobs.insert(i, led_by(program, runtime, model, steps))
        results = finish(runtime, jobs)
        for i in (9, 4, 0):
            results.pop(i)
        assert [error for _, error in results] == [None] * len(results)
        assert [ids(tokens) for tokens, _ in results] == [expected(model, asked) for asked in CROWD * 2]
    jobs = [submit(runtime, model, asked) for asked in CROWD * 2]  # they reuse the memory
    assert [ids(tokens) for tokens, _ in finish(runtime, jobs)] == [expected(model, asked) for asked in CROWD * 2]


def test_what_runs_in_a_step_cannot_ask_or_close(make_model):
    """It would wait for itself, so it gets an error, and fails alone."""
    model = make_model("llama")
    runtime, owner = Runtime(model), Owner()
    for wrong in (
        lambda *_: list(runtime.decode(engine(CROWD[1]), request(model, CROWD[1]), Generation(max_new_tokens=2))),
        lambda *_: runtime.close(owner, "closed"),
        lambda *_: Stream(runtime, engine(CROWD[1]), request(model, CROWD[1])),
    ):
        payload = Generation(max_new_tokens=3, criteria=[wrong])
        jobs = [runtime.submit(engine(CROWD[0]), request(model, CROWD[0]), payload), submit(runtime, model, CROWD[0])]
        (_, error), (tokens, none) = finish(runtime, jobs)
        assert isinstance(error, UsageError)
        assert (ids(tokens), none) == (expected(model, CROWD[0]), None)
        gc.collect()
        assert runtime.idle


def test_cancelling_and_giving_back_where_the_lock_is_held(make_model):
    """As in a finaliser that runs inside the runtime's own code: the call neither blocks nor is lost."""
    model = make_model("llama")
    runtime = Runtime(model)
    job, lease = submit(runtime, model, CROWD[0]), runtime.lease({"a": 3})
    other = submit(runtime, model, CROWD[1])
    with runtime._locked():
        runtime.cancel(job)
        runtime.release(lease)
        runtime.nudge()
        assert not job.ended
    assert job.ended
    assert runtime.pool.leased == 0
    with runtime._changed:  # as in the middle of a step's bookkeeping
        runtime.cancel(other)
    runtime.advance()
    assert other.ended
    assert runtime.idle


def test_finalisers_come_at_any_moment(make_model):
    """The garbage collector runs after few allocations and finds streams in cycles while others are answered."""
    model = make_model("llama")
    runtime = Runtime(model)

    class Cycle:
        pass

    def litter():
        held = Cycle()
        held.itself = held
        held.tokens = runtime.decode(engine(CROWD[1]), request(model, CROWD[1]), Generation(max_new_tokens=50))
        next(held.tokens)
        held.never_begun = runtime.decode(engine(CROWD[2]), request(model, CROWD[2]), Generation(max_new_tokens=50))
        held.stream = Stream(runtime, engine(CROWD[0]), request(model, CROWD[0]))

    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for asked in CROWD:
            litter()
            [(tokens, error)] = finish(runtime, [submit(runtime, model, asked)])
            assert (ids(tokens), error) == (expected(model, asked), None)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert runtime.idle


def test_who_does_not_read_holds_up_nobody(make_model):
    """The rows and the KV of a paused stream are freed as soon as other requests need them."""
    model = make_model("llama-long")
    long = case("full", chunks=(), suffix=(80,), steps=200)
    model.eos_ids, eos = frozenset(), model.eos_ids
    try:
        runtime = Runtime(model, max_sequences=1, budget=10)
        slow = runtime.submit(
            engine(long), request(model, long), Generation(max_new_tokens=200), lease=runtime.lease({"a": 9})
        )
        while runtime.advance():
            continue
        assert len(slow.tokens) == 64  # it is paused
        lease = runtime.lease({"b": 9})  # with one thread, the slow stream's tokens cannot be read meanwhile
        assert slow.ended
        assert runtime.pool.leased == 9
        quick = submit(runtime, model, long, lease=lease)
        held = Stream(Runtime(model, max_sequences=1), engine(long), request(model, long))
        assert len(list(runtime.tokens(quick))) == 200 == len(list(runtime.tokens(slow)))
        other = Stream(held._runtime, engine(long), request(model, long))  # a second stream driven by hand
        assert other.best() == held.best()
    finally:
        model.eos_ids = eos


def test_closing_ends_what_is_asked_and_what_will_be(make_model):
    model = make_model("llama")
    runtime, mine, theirs = Runtime(model, budget=4), Owner(), Owner()
    jobs = [submit(runtime, model, CROWD[i], owner=mine if i else theirs) for i in range(3)]
    runtime.advance()
    full = runtime.lease({"a": 4})
    waiting, outcome = threading.Event(), []

    def lease():
        def looked():
            waiting.set()
            return False

        try:
            runtime.lease({"b": 4}, owner=mine, cancelled=looked)
        except AnswerInterruptedError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=lease)
    thread.start()
    waiting.wait()
    runtime.close(mine, "It was closed.")
    thread.join()
    assert outcome == ["It was closed."]
    runtime.release(full)
    (tokens, none), *rest = finish(runtime, jobs)
    assert (ids(tokens), none) == (expected(model, CROWD[0]), None)
    assert [(type(error), str(error)) for _, error in rest] == [(AnswerInterruptedError, "It was closed.")] * 2
    assert rest[0][1] is not rest[1][1]  # its own traceback
    with pytest.raises(AnswerInterruptedError, match=r"It was closed\."):
        submit(runtime, model, CROWD[0], owner=mine)
    assert runtime.idle


def test_nobody_takes_kv_before_those_who_wait_for_it(make_model, monkeypatch):
    """`try_lease` takes what fits, and nothing while another waits, even for more than the budget; `lease` queues."""
    runtime, waiting, wanted = Runtime(make_model("llama"), budget=4), threading.Event(), []
    monkeypatch.setattr(runtime, "_sleep", lambda: runtime._changed.wait(0.01))
    full = runtime.lease({"a": 3})
    small = runtime.try_lease({"b": 1})
    assert small is not None
    assert runtime.try_lease({"c": 1}) is None
    assert runtime.try_lease({"a": 3}) is not None  # already held
    runtime.release(small)

    def lease():
        wanted.append(runtime.lease({"d": 4}, cancelled=lambda: bool(waiting.set())))

    thread = threading.Thread(target=lease, daemon=True)  # so that a failure does not wait for it
    thread.start()
    waiting.wait(600)
    assert runtime.pool.fits({"b": 1})
    assert runtime.try_lease({"b": 1}) is None
    looks = iter([False, True])  # it waits once, and then gives up
    assert runtime.lease({"b": 1}, cancelled=lambda: next(looks)) is None
    for held in list(runtime.pool._leases):
        runtime.release(held)
    thread.join(600)
    assert runtime.pool.leased == 4
    assert wanted[0] is not full


def test_a_sequence_is_prefilled_once_and_taken_over(make_model, steps_of):
    """The request that prefills it is cancelled half-way: the next one takes over, and the others wait for that."""
    model = make_model("llama")
    asked = [case("common", chunks=(7, 6), suffix=(80 + i, 81)) for i in range(5)]
    wanted = [expected(model, entry) for entry in asked]
    runtime = Runtime(model, batch_tokens=4)
    steps = steps_of(model)
    jobs = [submit(runtime, model, entry) for entry in asked]
    for _ in range(3):
        runtime.advance()
    runtime.cancel(jobs[0])
    found = finish(runtime, jobs[1:])
    assert [ids(tokens) for tokens, _ in found] == wanted[1:]
    before = 7 + 21 + 13
    # the interrupted part, the sequence once, questions and tokens
    assert sum(len(entry) for _, ids in steps for entry in ids) == 4 + before + 4 * (2 + 5)
    steps.clear()
    [(tokens, _)] = finish(runtime, [submit(runtime, model, asked[0])])  # still in the pool
    assert ids(tokens) == wanted[0]
    assert sum(len(entry) for _, ids in steps for entry in ids) == 2 + 5
    assert runtime.idle


def test_a_shared_sequence_is_never_taken_for_another(make_model):
    """Another KV may get the id of freed KV before it; what was prefilled after the old one must not be reused."""
    model = make_model("llama")
    runtime = Runtime(model)
    for token in range(40, 60):
        [before] = model.encode([[token, token + 1]])

        def program(request, model, before=before):
            segments = yield Shared(((5, 6, 7),), before=(PlacedChunk(kv=before, start=0),))
            yield from answer_from(TokenSequence.over(segments, position=5), (9,))

        [(tokens, _)] = finish(runtime, [led_by(program, runtime, model, 1)])
        with model.plain() as plain:
            logits = plain(torch.tensor([[token, token + 1, 5, 6, 7, 9]])).logits[0, -1]
        assert ids(tokens) == [int(logits.argmax())]
        del before, program
        runtime.pool.keep(("filler", token), model.encode([[3]])[0], ())


def test_a_shared_sequence_that_is_cut_elsewhere_is_another(make_model):
    """The same tokens with other boundaries: else a part of one sequence would replace a longer part of the other."""
    model = make_model("llama")
    runtime = Runtime(model)
    tokens = (5, 6, 7, 8, 9)
    with model.plain() as plain:
        expected = plain(torch.tensor([[*tokens, 4]])).logits[0, -1]
    for cut in range(len(tokens) + 1):
        parts = (tokens[:cut], tokens[cut:])

        def program(request, model, parts=parts):
            segments = yield Shared(parts)
            yield from answer_from(TokenSequence.over(segments, position=len(tokens)), (4,))

        found = Stream(runtime, Bad(program), request(model, CROWD[3])).scores
        assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max())), parts
    keys = [Shared((tokens[:cut], tokens[cut:])).keys for cut in range(len(tokens) + 1)]
    assert len({key for pair in keys for key in pair}) == 2 * len(tokens) + 2


def test_rows_that_leave_free_their_memory(make_model):
    model = make_model("llama")
    seen = []

    def program(request, model):
        row = TokenSequence((), 0)
        yield Forward((row,), ((5, 6, 7),))
        yield Release((row,))
        seen.append(row.cache.length)
        yield from answer_from(TokenSequence((), 0), (5,))

    runtime = Runtime(model)
    finish(runtime, [led_by(program, runtime, model, 2)])
    assert seen == [0]


def test_the_model_goes_with_the_last_who_holds_it(make_model):
    model = make_model.__wrapped__("llama")
    stream = Stream(runtime_of(model), engine(CROWD[3]), request(model, case("full", chunks=())))
    gone = weakref.ref(model)
    runtime = runtime_of(model)
    gc.disable()
    try:
        del model
        stream.advance(stream.best())  # a running request holds it
        del stream
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="keep a reference"):
        _ = runtime.model


FACTS = {
    "halden.txt": "Halden Works was founded by Mira Oskel in 1907.",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.",
    "kesk.txt": "Kesk Mills was founded by Tova Lind. Kesk Mills makes flour.",
}
QUESTIONS = [
    "Who founded Halden Works?",
    "What does Bolt Ltd make?",
    "Who founded Kesk Mills?",
    "Who founded Bolt Ltd?",
]
NAMES = ["full", "block", "ape", "pced"]
WAIT = 600


@pytest.fixture(scope="module")
def place(tmp_path_factory, model_folder):
    settings = {"model": model_folder, "chunk_tokens": 128, "embedder": "none", "reranker": "none"}
    with indexed(tmp_path_factory.mktemp("together"), FACTS, **settings) as made:
        return made.folder


@pytest.fixture
def rag(place):
    with RagKV.open(place, device="cpu") as opened:
        opened.model.eos_ids = frozenset()  # random weights: prevent an early end of an answer
        warm(opened)
        yield opened
    assert not [thread for thread in threading.enumerate() if thread.name == "ragkv-answer"]


def warm(rag):
    """Load and encode everything that is needed once: further steps only answer questions."""
    for name in NAMES:
        rag.query(QUESTIONS[0], engine=name, max_new_tokens=1)


class Gate:
    """Holds the model's first step until `wanted` requests have come; records the number of rows of each step."""

    def __init__(self, monkeypatch, rag, wanted):
        self.rows, self.held, self.go_on = [], threading.Event(), threading.Event()
        runtime, step, submit, come = rag.index.runtime, rag.model.step, rag.index.runtime.submit, []
        # no step is too long here: prefills are not split for the sake of decoding rows
        monkeypatch.setattr(scheduler, "STALL_SECONDS", WAIT)
        monkeypatch.setattr(runtime._stepper._pace, "tokens", 1 << 20)

        def counted(*args, **kwargs):
            job = submit(*args, **kwargs)
            come.append(job)
            if len(come) == wanted:
                self.go_on.set()
            return job

        def waiting(sequences, ids, **more):
            self.held.set()
            assert self.go_on.wait(WAIT)
            self.rows.append(len(sequences))
            return step(sequences, ids, **more)

        monkeypatch.setattr(runtime, "submit", counted)
        monkeypatch.setattr(rag.model, "step", waiting)
        self.jobs = come


def ask(rag, i):
    return rag.query(QUESTIONS[i % 4], engine=NAMES[i // 4], max_new_tokens=5).text


def at_once(rag):
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda i: ask(rag, i), range(16)))


def test_threads_are_answered_in_one_batch(rag, monkeypatch):
    wanted = [ask(rag, i) for i in range(16)]
    gate = Gate(monkeypatch, rag, 16)
    assert at_once(rag) == wanted
    assert max(gate.rows) >= 15  # the request that drove the first step was not in the same batch
    assert len(gate.rows) <= 2 * 5 + 1
    assert rag.index.runtime.idle


def test_thirty_two_tasks_are_answered_in_one_batch(rag, monkeypatch):
    wanted = [ask(rag, i) for i in range(16)]
    gate = Gate(monkeypatch, rag, 32)

    async def run():
        return await asyncio.gather(
            *(rag.aquery(QUESTIONS[i % 4], engine=NAMES[i // 4 % 4], max_new_tokens=5) for i in range(32))
        )

    assert [answer.text for answer in asyncio.run(run())] == wanted * 2
    assert max(gate.rows) >= 31
    assert len(gate.rows) <= 2 * 5 + 1
    assert rag.index.runtime.idle


def test_a_lost_record_is_made_again_once_for_all_who_wait(rag, place, monkeypatch):
    """The store is read once for a chunk, and the chunk is encoded once, however many requests wait for it."""
    question, options = QUESTIONS[1], {"engine": "block", "max_new_tokens": 4, "top_k": 1}
    wanted = rag.query(question, **options)
    rag.store.memory("cpu", budget=0)
    lost = rag.kv_source.identity(*_stored(rag, wanted))
    asked, encoded = [], []
    get_many, encode = rag.store.get_many, rag.model.encode
    everybody = threading.Barrier(6, timeout=WAIT)

    def watched(identities, **more):
        results = get_many(identities, **more)
        asked.extend(identities)
        return {identity: kv for identity, kv in results.items() if identity != lost}

    waiting, all_wait, find = [], threading.Event(), MemoryTier.get_many

    def counted(tier, keys, load):
        keys = list(keys)
        waiting.extend(key for key in keys if key == lost.key())
        if len(waiting) == 6:
            all_wait.set()
        return find(tier, keys, load)

    def encoding(ids, **more):
        assert all_wait.wait(WAIT)  # a request after the write would find it dropped
        encoded.extend(ids)
        return encode(ids, **more)

    monkeypatch.setattr(MemoryTier, "get_many", counted)
    monkeypatch.setattr(rag.store, "get_many", watched)
    monkeypatch.setattr(rag.model, "encode", encoding)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: (everybody.wait(), rag.query(question, **options))[1], range(6)))
    assert {answer.text for answer in results} == {wanted.text}
    assert asked.count(lost) == 1
    assert encoded.count(lost.chunk_ids) == 1
    assert sum(answer.kv.misses for answer in results) == 1


def _stored(rag, answer):
    from ragkv.types import Encoding

    chunk = next(c for c in rag.store.chunks() if c.chunk_id == answer.sources[0].chunk_id)
    return Encoding.PREFIXED, chunk.token_ids


def test_closing_ends_all_who_wait(place, monkeypatch):
    """Threads and tasks, in a step and before it; the store closes when nobody reads from it."""
    rag = RagKV.open(place, device="cpu")
    rag.model.eos_ids = frozenset()
    warm(rag)
    gate = Gate(monkeypatch, rag, 99)
    inside = threading.Event()
    step = rag.model.step

    def watched(*args, **kwargs):
        inside.set()
        found = step(*args, **kwargs)
        assert not closed.is_set()
        inside.clear()
        return found

    closed, close = threading.Event(), rag.store.close
    monkeypatch.setattr(rag.model, "step", watched)
    monkeypatch.setattr(rag.store, "close", lambda: (closed.set(), close()))

    def ask(i):
        with pytest.raises(AnswerInterruptedError, match="was closed before the answer"):
            rag.query(QUESTIONS[i % 4], engine=NAMES[i % 4], max_new_tokens=400)
        return True

    async def tasks():
        return await asyncio.gather(
            *(rag.aquery(q, engine="block", max_new_tokens=400) for q in QUESTIONS), return_exceptions=True
        )

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, i) for i in range(6)]
        background = pool.submit(asyncio.run, tasks())
        gate.held.wait()
        while len(gate.jobs) < 10:
            threading.Event().wait(0.001)
        closing = pool.submit(rag.close)
        while rag.index not in rag.index.runtime._closed:
            threading.Event().wait(0.001)
        assert not closed.is_set()  # a step is still reading
        gate.go_on.set()
        closing.result()
        assert all(each.result() for each in asked)
        assert [type(each) for each in background.result()] == [AnswerInterruptedError] * 4
    assert closed.is_set()
    assert not inside.is_set()
    assert rag.index.runtime.idle
    assert not [thread for thread in threading.enumerate() if thread.name == "ragkv-answer"]
    with pytest.raises(StoreError, match="open it again"):
        rag.query(QUESTIONS[0])
    rag.close()  # closing twice is harmless


def test_closing_while_one_is_still_looking_for_its_chunks(place, monkeypatch):
    """It has not reached the runtime yet, and ends with the same error."""
    rag = RagKV.open(place, device="cpu")
    rag.query(QUESTIONS[0], max_new_tokens=1)
    looking, go_on = threading.Event(), threading.Event()
    get = rag.kv_source.get

    def held(*args, **kwargs):
        looking.set()
        assert go_on.wait(WAIT)
        return get(*args, **kwargs)

    monkeypatch.setattr(rag.kv_source, "get", held)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(rag.query, QUESTIONS[0], engine="block")
        assert looking.wait(WAIT)
        rag.close()
        go_on.set()
        with pytest.raises(AnswerInterruptedError, match="was closed before the answer"):
            asked.result()
    assert rag.index.runtime.idle


def test_tasks_that_leave_take_nothing_with_them(rag, monkeypatch):
    """Cancelled, left early, dropped, or ended by an exception: rows, KV and threads are freed at once."""

    async def run():
        task = asyncio.create_task(rag.aquery(QUESTIONS[0], engine="full", max_new_tokens=400))
        stream = rag.astream(QUESTIONS[1], engine="ape", max_new_tokens=400)
        assert await anext(aiter(stream))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in rag.astream(QUESTIONS[2], engine="block", max_new_tokens=400):
            break
        await stream.aclose()
        never = rag.astream(QUESTIONS[3])
        del never
        return (await rag.aquery(QUESTIONS[0], max_new_tokens=3)).text

    assert asyncio.run(run()) == rag.query(QUESTIONS[0], max_new_tokens=3).text
    gc.collect()
    assert rag.index.runtime.idle


def test_a_loop_that_is_closed_over_a_stream(rag):
    """Nobody can receive the stream's events any more: the thread notices that and ends."""
    loop = asyncio.new_event_loop()
    stream = rag.astream(QUESTIONS[0], engine="full", max_new_tokens=400)
    pieces = aiter(stream)
    loop.run_until_complete(anext(pieces))
    loop.close()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "ragkv-answer"]
    thread.join(WAIT)
    assert not thread.is_alive()
    assert rag.index.runtime.idle


def test_a_dropped_stream_gives_everything_back(rag):
    stream = rag.stream(QUESTIONS[0], engine="block", max_new_tokens=400)
    assert next(iter(stream))
    assert rag.index.runtime.pool.leased
    del stream
    gc.collect()
    assert rag.index.runtime.idle


def test_little_memory_is_shared_in_turn(rag, monkeypatch):
    """Memory for the KV of one question: the limit holds, no request starves, and a thread may hold two streams."""
    wanted = [ask(rag, i) for i in range(16)]
    runtime = rag.index.runtime
    most, lease = [], runtime.pool.lease
    monkeypatch.setattr(runtime.pool, "budget", 1)
    monkeypatch.setattr(runtime.pool, "lease", lambda sizes: (lease(sizes), most.append(runtime.pool.leases))[0])
    assert at_once(rag) == wanted
    assert most
    streams = [rag.stream(question, engine="block", max_new_tokens=30) for question in QUESTIONS[:3]]
    texts = ["", "", ""]
    for turn in range(90):
        texts[turn % 3] += next(iter(streams[turn % 3]), "")
    alone = [rag.query(question, engine="block", max_new_tokens=30).text for question in QUESTIONS[:3]]
    assert [text.strip() for text in texts] == alone
    assert runtime.idle


def test_cancelled_while_it_waits_for_memory(rag, monkeypatch):
    runtime = rag.index.runtime
    monkeypatch.setattr(runtime.pool, "budget", 1)
    held = runtime.lease({"everything": 1})  # another request is loading
    waits = threading.Event()
    sleep = runtime._sleep
    monkeypatch.setattr(runtime, "_sleep", lambda: (waits.set(), sleep())[1])
    stream = rag.stream(QUESTIONS[0], engine="block", max_new_tokens=4)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(list, stream)
        assert waits.wait(WAIT)
        stream.cancel()
        assert asked.result() == []
    assert stream.answer.finish_reason == "cancelled"
    runtime.release(held)
    assert runtime.idle


def test_a_program_that_ends_without_closing(place):
    """Half-read streams, a thread that is answering, tasks: the interpreter ends without output."""
    program = textwrap.dedent(
        """
        import asyncio, sys, threading
        from ragkv import RagKV
        rag = RagKV.open(sys.argv[1], device="cpu")
        rag.model.eos_ids = frozenset()
        stream = rag.stream("Who founded Bolt Ltd?", engine="block", max_new_tokens=300)
        print(bool(next(iter(stream))))
        begun = threading.Event()
        def ask():
            for piece in rag.stream("Who founded Halden Works?", engine="pced", max_new_tokens=40):
                begun.set()
        threading.Thread(target=ask).start()
        begun.wait()
        async def leave():
            pieces = rag.astream("What does Bolt Ltd make?", engine="ape", max_new_tokens=40)
            return await anext(aiter(pieces))
        print(bool(asyncio.run(leave())))
        """
    )
    command = [sys.executable, "-W", "error", "-c", program, str(place)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nTrue\n", "")


def test_after_a_fork(place):
    """The child does not inherit what the parent's threads were doing: it gets a new runtime that works."""
    program = textwrap.dedent(
        """
        import os, pickle, sys, threading, warnings
        from ragkv import RagKV
        from ragkv.errors import AnswerInterruptedError
        rag = RagKV.open(sys.argv[1], device="cpu")
        rag.model.eos_ids = frozenset()
        question = "Who founded Bolt Ltd?"
        wanted = rag.query(question, engine="full", max_new_tokens=4).text
        mine = rag.stream(question, engine="block", max_new_tokens=100)
        next(iter(mine))
        inside, go_on, step = threading.Event(), threading.Event(), rag.model.step
        def held(*args, **more):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait()
            return step(*args, **more)
        rag.model.step = held
        other = threading.Thread(target=rag.query, args=(question,), kwargs={"engine": "full", "max_new_tokens": 2})
        other.start()
        inside.wait()
        child = os.fork()
        if not child:
            code = 1
            try:
                assert rag.index.runtime.idle
                try:
                    list(mine)
                except AnswerInterruptedError as error:
                    assert "fork" in str(error)
                else:
                    raise AssertionError
                with RagKV.open(sys.argv[1], device="cpu") as again:
                    again.model.eos_ids = frozenset()
                    assert again.query(question, engine="full", max_new_tokens=4).text == wanted
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        go_on.set()
        other.join()
        assert mine.answer if not list(mine) else True
        with pickle.loads(pickle.dumps(rag)) as copy:
            copy.model.eos_ids = frozenset()
            assert copy.query(question, engine="full", max_new_tokens=4).text == wanted
        rag.close()
        print("well")
        """
    )
    code, out, errors = CliChild(place, program=program).end()
    assert (code, out) == (0, "well\n"), errors


# windows, soft caps, YaRN, sinks; then two kinds of RoPE, layers without RoPE, pairs
FAMILIES = ["gemma2", "qwen3-yarn", "gpt-oss"]
OTHERS = ["gemma3", "cohere2", "llama", "mistral-sliding", "smollm3", "phi4-partial", "glm4"]
several = pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(f, marks=pytest.mark.nightly) for f in OTHERS)])


def as_alone(model, crowd, found):
    for question, (job, tokens, scores) in zip(crowd, found, strict=True):
        assert job.error is None
        answer, their_scores = alone(model, question)
        wanted = len(answer) if question.leaves is None else len(tokens)
        assert named(question, tokens) == named(question, answer)[:wanted]
        for ours, theirs in zip(scores, their_scores, strict=False):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def named(question, tokens):
    """The tokens, with winners as chunks: two experts with the same chunk are equal."""
    return [replace(t, winner=None if t.winner is None else question.chunks[t.winner]) for t in tokens]


@several
@drawn(4)
@given(
    crowd=st.lists(drawn_requests(temperatures=(0.0, 0.0, 0.8)), min_size=2, max_size=7),
    batch_tokens=st.sampled_from([1, 4, 16, 4096]),
    max_sequences=st.sampled_from([1, 3, 256]),
    own_tokens=st.sampled_from([20, 1 << 20]),
)
def test_a_crowd_gets_the_answers_of_one_by_one(family, crowd, batch_tokens, max_sequences, own_tokens, make_model):
    model = make_model(family)
    runtime, found = together(
        model, crowd, batch_tokens=batch_tokens, max_sequences=max_sequences, own_tokens=own_tokens
    )
    as_alone(model, crowd, found)
    assert runtime.idle


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@drawn(8)
@given(crowd=st.lists(drawn_requests(), min_size=4, max_size=9))
def test_no_pass_of_a_crowd_in_half_types_fails(dtype, crowd, make_model):
    """Kernels give results of several types; a pass that cannot merge them is a warning (`runtime_warnings`)."""
    _, found = together(make_model("qwen3", dtype), crowd)
    assert all(job.error is None for job, *_ in found)


@several
@drawn(8)
@given(question=drawn_requests())
def test_who_asks_alone_gets_what_the_equations_give(family, question, make_model):
    model = make_model(family)
    _, scores = alone(model, question)
    assume(scores)  # it did not end at once
    found, wanted = torch.stack(scores), torch.stack(literal(model, question)[: len(scores)])
    torch.testing.assert_close(found, wanted, atol=3e-5 * float(wanted[wanted.isfinite()].abs().max()), rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@drawn(4)
@given(
    crowd=st.lists(drawn_requests(temperatures=(0.0, 0.8)), min_size=2, max_size=7),
    seconds=st.lists(st.floats(0.0, 9.0), min_size=1, max_size=9),
)
def test_how_long_steps_take_changes_no_answer(family, crowd, seconds, make_model):
    """Prefills beside decoding rows are split by the duration of the previous steps, down to single tokens."""
    model = make_model(family)
    times = accumulate(cycle(seconds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "LEAST_PREFILL", 1)
        patch.setattr(stepper, "perf_counter", lambda: next(times))
        _, found = together(model, crowd)
    as_alone(model, crowd, found)


def test_a_long_question_is_read_in_parts_beside_one_that_decodes(make_model, steps_of, monkeypatch):
    """With 10 ms per token, no step is longer than the first one showed."""
    model = make_model("llama")
    read = steps_of(model)
    monkeypatch.setattr(stepper, "perf_counter", lambda: 0.01 * sum(len(entry) for _, ids in read for entry in ids))
    short = Asked(engine=("full", ()), chunks=(), suffix=(3, 4), steps=40)
    long = replace(short, suffix=tuple(range(3, 300)), steps=2, at=4)
    _, ((_, tokens, _), (_, few, _)) = together(model, [short, long])
    assert (len(tokens), len(few)) == (40, 2)
    steps = [[len(entry) for entry in ids] for _, ids in read]
    parts = [entry for entry in steps if 1 in entry and max(entry) > 1]
    assert [max(entry) for entry in parts[:2]] == [2 * scheduler.LEAST_PREFILL, scheduler.LEAST_PREFILL]
    assert max(map(sum, parts)) == 2 * scheduler.LEAST_PREFILL + 1
    assert sum(max(entry) for entry in parts) >= 297
