"""What goes wrong in a step: only whose fault it is fails, and the others' numbers are those of a quiet run."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from crowd import TUNINGS, Asked, alone, engine, generation, request
from crowd import Recorder as Quiet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragkv.attention.kv import ChunkKV
from ragkv.attention.ownkv import OwnKV
from ragkv.decoding import Decoding
from ragkv.engines import Choose, Engine, Leave, Read, Row, Segment, Shared, answer_from
from ragkv.errors import AnswerInterruptedError, PromptTooLongError, UnsupportedModelError, UsageError
from ragkv.model import interface
from ragkv.runtime import Generation, Runtime, Stream, runtime_of
from ragkv.runtime.decoder import Decoder
from ragkv.runtime.job import Job


def one(name="block", chunks=(0, 3, 5), steps=6, suffix=(80, 81, 82), **changes):
    tuning = next(each for each in TUNINGS if each[0] == name)
    return Asked(
        **(
            {"engine": tuning, "prefix": True, "chunks": chunks, "suffix": suffix, "steps": steps, "heat": 0.0}
            | changes
        )
    )


CROWD = [one("block"), one("ape", (3, 5)), one("pced", (5, 1)), one("full", (0, 2), suffix=(90,)), one("common", (3,))]


def submit(runtime, model, asked, **more):
    return runtime.submit(engine(asked), request(model, asked), generation(asked, Quiet()), **more)


def ids(tokens):
    return [token.token_id for token in tokens]


def finish(runtime, jobs):
    """The tokens of each, and its error."""
    found = []
    for job in jobs:
        tokens, error = [], None
        try:
            tokens.extend(runtime.tokens(job))
        except BaseException as raised:
            error = raised
        found.append((tokens, error))
    return found


def expected(model, asked):
    return ids(alone(model, asked)[0])


class Bad(Engine):
    """A third party's engine that does what it is told."""

    name = "bad"
    encoding = None
    Config = dict

    def __init__(self, program):
        super().__init__()
        self._program = program

    def program(self, request, model):
        return self._program(request, model)


def _raises(request, model):
    yield Read((Row((), 0),), ((5,),))
    raise ArithmeticError("the engine's own")


def _empty(request, model):
    yield Read((Row((), 0),), ((),))


def _nobody(request, model):
    yield Read((), ())


def _twice(request, model):
    row = Row((), 0)
    yield Read((row, row), ((5,), (6,)))


def _nonsense(request, model):
    yield "logits, please"


def _at_once(request, model):
    raise ArithmeticError("the engine's own")
    yield


def _unclosed(request, model):
    try:
        [scores] = yield Read((Row((), 0),), ((5,),))
        while True:
            yield Choose(scores * float("nan"))
    finally:
        raise ArithmeticError("at the very end")


def _beyond(request, model):
    yield Read((Row((), 0),), ((10**6,),))  # no such token


@pytest.mark.parametrize("program", [_raises, _empty, _nobody, _twice, _nonsense, _at_once, _beyond])
def test_an_engine_that_is_wrong_fails_alone(program, make_model):
    model = make_model("llama")
    runtime = Runtime(model)
    jobs = [submit(runtime, model, asked) for asked in CROWD]
    jobs.insert(2, runtime.submit(Bad(program), request(model, CROWD[3]), Generation(max_new_tokens=4)))
    found = finish(runtime, jobs)
    assert found[2][0] == []
    assert isinstance(found[2][1], ArithmeticError | IndexError | TypeError | ValueError)
    del found[2]
    assert [error for _, error in found] == [None] * len(CROWD)
    assert [ids(tokens) for tokens, _ in found] == [expected(model, asked) for asked in CROWD]
    assert runtime.idle


def test_an_engine_that_fails_at_its_end_fails_nobody(make_model, caplog):
    model = make_model("llama")
    runtime = Runtime(model)
    jobs = [submit(runtime, model, CROWD[0])]
    jobs.append(runtime.submit(Bad(_unclosed), request(model, CROWD[3]), Generation(max_new_tokens=2)))
    (tokens, error), (more, none) = finish(runtime, jobs)
    assert (ids(tokens), error) == (expected(model, CROWD[0]), None)
    assert (len(more), none) == (2, None)
    assert "at the very end" in caplog.text
    assert runtime.idle


class Owner:
    """Whatever asks."""


class Faulty:
    """The model's layers, one of which raises when it is run for the n-th time."""

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


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, torch.OutOfMemoryError])
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layer=st.integers(0, 8), after=st.integers(0, 4))
def test_a_pass_that_failed_once_is_made_again(kind, layer, after, make_model, monkeypatch):
    """Nobody is to blame for a pass of several that failed: alone, each of them goes through."""
    model = make_model("gemma3")
    with monkeypatch.context() as patch:
        faulty = Faulty(patch, model)
        runtime = Runtime(model)
        jobs = [submit(runtime, model, asked) for asked in CROWD]
        faulty.set(kind("no more memory"), layer, after)
        found = finish(runtime, jobs)
    assert [error for _, error in found] == [None] * len(CROWD)
    assert [ids(tokens) for tokens, _ in found] == [expected(model, asked) for asked in CROWD]
    assert faulty.met == 1
    assert runtime.idle


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layer=st.integers(0, 8), after=st.integers(0, 9))
def test_who_alone_fails_every_pass_is_the_only_one_that_fails(layer, after, make_model, monkeypatch):
    """One of the requests has a token that the model's layers refuse, at any layer and any time."""
    model, count = make_model("llama"), 0
    with monkeypatch.context() as patch:
        target = model.module.get_decoder().layers[layer]
        forward = target.forward

        def run(*args, **kwargs):
            nonlocal count
            step = interface._running.get().attending
            if any(piece.row is row for piece in step.pieces for row in culprits):
                count += 1
                if count > after:
                    raise RuntimeError("this row is not to be read")
            return forward(*args, **kwargs)

        patch.setattr(target, "forward", run)
        runtime = Runtime(model)
        culprits = [Row((), 0)]
        jobs = [submit(runtime, model, asked) for asked in CROWD]
        jobs.insert(
            1,
            runtime.submit(
                Bad(lambda *_: answer_from(culprits[0], (7, 8))),
                request(model, CROWD[3]),
                Generation(max_new_tokens=99),
            ),
        )
        found = finish(runtime, jobs)
    tokens, error = found.pop(1)
    assert str(error) == "this row is not to be read"
    assert len(tokens) <= after
    assert [error for _, error in found] == [None] * len(CROWD)
    assert [ids(tokens) for tokens, _ in found] == [expected(model, asked) for asked in CROWD]
    assert runtime.idle


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layer=st.integers(0, 8), after=st.integers(0, 4))
def test_an_interrupt_ends_who_was_interrupted(kind, layer, after, make_model, monkeypatch):
    """Whoever drove hears of it; the others' rows are as before the pass, and they go on to the same answers."""
    model = make_model("mistral-sliding")
    with monkeypatch.context() as patch:
        faulty = Faulty(patch, model)
        runtime = Runtime(model, batch_tokens=16)
        jobs = [submit(runtime, model, asked) for asked in CROWD]
        faulty.set(kind(), layer, after)
        [(first, error)] = finish(runtime, jobs[:1])
        assert isinstance(error, kind)
        rest = finish(runtime, jobs[1:])
    assert ids(first) == expected(model, CROWD[0])[: len(first)]
    assert [error for _, error in rest] == [None] * 4
    assert [ids(tokens) for tokens, _ in rest] == [expected(model, asked) for asked in CROWD[1:]]
    assert runtime.idle


@pytest.mark.parametrize("where", ["read", "take", "commit", "send"])
def test_an_interrupt_in_the_middle_of_something_ends_what_it_tore(where, make_model, monkeypatch):
    """A row that was half counted, a program that was half told: such an answer cannot go on, and says so."""
    model = make_model("llama")
    owner, name = {
        "read": (Job, "read"),
        "take": (Decoder, "take"),
        "commit": (OwnKV, "commit"),
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


class Raising:
    def __init__(self, at, error):
        self._left, self._error = at, error

    def __call__(self, ids, scores):
        self._left -= 1
        if self._left < 0:
            raise self._error
        return scores


@pytest.mark.parametrize("how", ["criteria", "processors"])
def test_a_criterion_or_processor_that_raises_ends_its_own_answer(how, make_model):
    model = make_model("llama")
    runtime = Runtime(model)
    jobs = [submit(runtime, model, asked) for asked in CROWD]
    said = ArithmeticError("a criterion's own")
    told = Generation(
        max_new_tokens=6,
        **{how: [Raising(2, said) if how == "processors" else lambda i, s: Raising(len(i[0]) < 3, said)(i, s) is None]},
    )
    jobs.insert(0, runtime.submit(engine(CROWD[0]), request(model, CROWD[0]), told))
    (tokens, error), *rest = finish(runtime, jobs)
    assert error is said
    assert ids(tokens) == expected(model, CROWD[0])[:2]
    assert [ids(tokens) for tokens, _ in rest] == [expected(model, asked) for asked in CROWD]
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


def test_scores_that_are_no_numbers_end_the_draw(make_model):
    model = make_model("llama")
    runtime = Runtime(model)
    drawn = Generation(
        max_new_tokens=4, decoding=Decoding(temperature=1.0, seed=1), processors=[lambda i, s: s * float("nan")]
    )
    jobs = [submit(runtime, model, CROWD[0]), runtime.submit(engine(CROWD[1]), request(model, CROWD[1]), drawn)]
    (tokens, error), (none, theirs) = finish(runtime, jobs)
    assert (ids(tokens), error) == (expected(model, CROWD[0]), None)
    assert none == []
    assert isinstance(theirs, UnsupportedModelError)


def test_numbers_that_are_none_stay_with_who_has_them(make_model):
    """A row whose KV has become NaN: neither the rows beside it nor those that get its memory after it see any."""
    model = make_model("llama")
    [kv] = model.encode([[5, 6, 7]])
    spoilt = ChunkKV(keys=kv.keys, values=tuple(torch.full_like(value, torch.nan) for value in kv.values))

    def program(request, model):
        return answer_from(Row.over((Segment(kv=spoilt, start=0),), position=3), (9,) * 12)

    runtime = Runtime(model)
    for steps in (2, 8):
        jobs = [submit(runtime, model, asked) for asked in CROWD * 2]
        for i in (0, 4, 9):
            jobs.insert(i, runtime.submit(Bad(program), request(model, CROWD[3]), Generation(max_new_tokens=steps)))
        found = finish(runtime, jobs)
        for i in (9, 4, 0):
            found.pop(i)
        assert [error for _, error in found] == [None] * len(found)
        assert [ids(tokens) for tokens, _ in found] == [expected(model, asked) for asked in CROWD * 2]
    jobs = [submit(runtime, model, asked) for asked in CROWD * 2]  # in the memory of those before
    assert [ids(tokens) for tokens, _ in finish(runtime, jobs)] == [expected(model, asked) for asked in CROWD * 2]


def test_a_prompt_that_is_too_long_ends_with_its_sentence(make_model):
    model = make_model("llama")
    runtime = Runtime(model)
    jobs = [submit(runtime, model, CROWD[0]), submit(runtime, model, one("full", suffix=(5,) * 600))]
    (tokens, error), (none, theirs) = finish(runtime, jobs)
    assert (ids(tokens), error) == (expected(model, CROWD[0]), None)
    assert none == []
    assert isinstance(theirs, PromptTooLongError)
    assert "512" in str(theirs)
    assert runtime.idle


def test_the_last_position_is_used_and_no_further(make_model):
    model = make_model("llama")
    long = [one("full", chunks=(), suffix=tuple(range(3, 3 + n)) * 2, steps=99) for n in (240, 245)]
    runtime = Runtime(model)
    found = finish(runtime, [submit(runtime, model, asked) for asked in long])
    for asked, (tokens, error) in zip(long, found, strict=True):
        assert error is None
        assert tokens[-1].finish_reason == "length"
        assert len(tokens) == min(99, 512 - len(asked.suffix) - 7 + 1)


def test_what_runs_in_a_step_cannot_ask_or_close(make_model):
    """It would wait for its own end; it is told so, and fails alone."""
    model = make_model("llama")
    runtime, owner = Runtime(model), Owner()
    for wrong in (
        lambda *_: list(runtime.decode(engine(CROWD[1]), request(model, CROWD[1]), Generation(max_new_tokens=2))),
        lambda *_: runtime.close(owner, "closed"),
        lambda *_: Stream(runtime, engine(CROWD[1]), request(model, CROWD[1])),
    ):
        told = Generation(max_new_tokens=3, criteria=[wrong])
        jobs = [runtime.submit(engine(CROWD[0]), request(model, CROWD[0]), told), submit(runtime, model, CROWD[0])]
        (_, error), (tokens, none) = finish(runtime, jobs)
        assert isinstance(error, UsageError)
        assert (ids(tokens), none) == (expected(model, CROWD[0]), None)
        gc.collect()
        assert runtime.idle


def test_cancelling_and_giving_back_where_the_lock_is_held(make_model):
    """As a finaliser may, in the middle of the runtime's own work: it neither waits nor is it forgotten."""
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
    with runtime._changed:  # as in the midst of a step's own bookkeeping
        runtime.cancel(other)
    runtime.advance()
    assert other.ended
    assert runtime.idle


def test_finalisers_come_at_any_moment(make_model):
    """The collector runs at every few allocations, with streams in its cycles, while others are answered."""
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
        for asked in CROWD * 2:
            litter()
            [(tokens, error)] = finish(runtime, [submit(runtime, model, asked)])
            assert (ids(tokens), error) == (expected(model, asked), None)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert runtime.idle


def test_who_does_not_read_holds_up_nobody(make_model):
    """Rows and KV of a stream that pauses are others' as soon as they need them."""
    model = make_model("llama-long")
    long = one("full", chunks=(), suffix=(80,), steps=200)
    model.eos_ids, eos = frozenset(), model.eos_ids
    try:
        runtime = Runtime(model, max_rows=1, budget=10)
        slow = runtime.submit(
            engine(long), request(model, long), Generation(max_new_tokens=200), lease=runtime.lease({"a": 9})
        )
        while runtime.advance():
            continue
        assert len(slow.tokens) == 64  # it pauses
        lease = runtime.lease({"b": 9})  # the only thread: nobody could read the slow one's tokens meanwhile
        assert slow.ended
        assert runtime.pool.leased == 9
        quick = submit(runtime, model, long, lease=lease)
        held = Stream(Runtime(model, max_rows=1), engine(long), request(model, long))
        assert len(list(runtime.tokens(quick))) == 200 == len(list(runtime.tokens(slow)))
        other = Stream(held._runtime, engine(long), request(model, long))  # a second one led by hand, beside it
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
    assert rest[0][1] is not rest[1][1]  # a traceback of its own
    with pytest.raises(AnswerInterruptedError, match=r"It was closed\."):
        submit(runtime, model, CROWD[0], owner=mine)
    assert runtime.idle


def test_a_sequence_is_prefilled_once_and_taken_over(make_model, monkeypatch):
    """Who prefills it is cancelled half-way: the next one does, and the others wait for that."""
    model = make_model("llama")
    asked = [one("common", chunks=(7, 6), suffix=(80 + i, 81)) for i in range(5)]
    runtime = Runtime(model, batch_tokens=4)
    read, step = [], model.step
    monkeypatch.setattr(
        model, "step", lambda rows, ids, **more: (read.append(sum(map(len, ids))), step(rows, ids, **more))[1]
    )
    jobs = [submit(runtime, model, each) for each in asked]
    for _ in range(3):
        runtime.advance()
    runtime.cancel(jobs[0])
    found = finish(runtime, jobs[1:])
    assert [ids(tokens) for tokens, _ in found] == [expected(model, each) for each in asked[1:]]
    before = 7 + 21 + 13
    assert sum(read) == 4 + before + 4 * (2 + 5)  # what was cut off, the sequence once, questions and tokens
    read.clear()
    [(tokens, _)] = finish(runtime, [submit(runtime, model, asked[0])])  # it is still there
    assert ids(tokens) == expected(model, asked[0])
    assert sum(read) == 2 + 5
    assert runtime.idle


def test_a_shared_sequence_is_never_taken_for_another(make_model):
    """KV before it that is gone leaves its identity to others; what was prefilled after it is not theirs."""
    model = make_model("llama")
    runtime = Runtime(model)
    for token in range(40, 90):
        [before] = model.encode([[token, token + 1]])

        def program(request, model, before=before):
            segments = yield Shared(((5, 6, 7),), before=(Segment(kv=before, start=0),))
            yield from answer_from(Row.over(segments, position=5), (9,))

        [(tokens, _)] = finish(
            runtime, [runtime.submit(Bad(program), request(model, CROWD[3]), Generation(max_new_tokens=1))]
        )
        with model.plain() as plain:
            logits = plain(torch.tensor([[token, token + 1, 5, 6, 7, 9]])).logits[0, -1]
        assert ids(tokens) == [int(logits.argmax())]
        del before, program
        runtime.pool.keep(("filler", token), model.encode([[3]])[0], ())


def test_rows_that_leave_free_their_memory(make_model):
    model = make_model("llama")
    seen = []

    def program(request, model):
        row = Row((), 0)
        yield Read((row,), ((5, 6, 7),))
        yield Leave((row,))
        seen.append(row.own.length)
        yield from answer_from(Row((), 0), (5,))

    runtime = Runtime(model)
    finish(runtime, [runtime.submit(Bad(program), request(model, CROWD[3]), Generation(max_new_tokens=2))])
    assert seen == [0]


def test_the_model_goes_with_the_last_who_holds_it(make_model):
    model = make_model.__wrapped__("llama")
    stream = Stream(runtime_of(model), engine(CROWD[3]), request(model, one("full", chunks=())))
    gone = weakref.ref(model)
    runtime = runtime_of(model)
    gc.disable()
    try:
        del model
        stream.advance(stream.best())  # a request that runs holds it
        del stream
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="hold the model"):
        _ = runtime.model
