"""Batched questions: the same answers as one by one, a bounded window, and errors that end only their question."""

import asyncio
import itertools
import threading
from types import SimpleNamespace

import pytest
from indexed import indexed

from ragkv import RagKV
from ragkv.config import IndexConfig, RuntimeConfig
from ragkv.engines import make_engine
from ragkv.errors import (
    AnswerInterruptedError,
    ConfigError,
    KVMismatchError,
    NothingFoundError,
    PromptTooLongError,
    RetrievalError,
    UsageError,
)
from ragkv.index.index import Index
from ragkv.runtime import limits_for, scheduler

NAMES = ["Halden", "Bolt", "Kesk", "Varn", "Osk", "Pell"]
ENGINES = ("full", "single", "block", "ape", "pced")
QUESTIONS = [f"Who founded {name} {what}?" for what in ("Works", "Mills") for name in NAMES]


@pytest.fixture(scope="module")
def rag(tmp_path_factory, model_folder):
    texts = {f"{name}.txt": f"{name} Works was founded by Mira {name[::-1]}. {name} Mills is older." for name in NAMES}
    settings = {"chunk_tokens": 128, "top_k": 3}
    settings |= {"embedder": "none", "reranker": "none"}
    with indexed(tmp_path_factory.mktemp("many"), texts, model=model_folder, **settings) as made:
        made.model.eos_ids = frozenset()  # random weights: prevent an early end of an answer
        yield made


def same(answer) -> tuple:
    return answer.question, answer.text, answer.engine, answer.finish_reason, [s.chunk_id for s in answer.sources]


@pytest.fixture(autouse=True)
def unhurried(rag, monkeypatch):
    """No step is too long here: on a slow machine, the runtime would split prefills."""
    monkeypatch.setattr(scheduler, "STALL_SECONDS", 600.0)
    monkeypatch.setattr(rag.index.runtime._stepper._pace, "tokens", 1 << 20)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_answers_of_one_by_one_in_order_and_in_fewer_steps(rag, engine, steps_of):
    steps = steps_of(rag.model)
    alone = [rag.query(question, engine=engine, max_new_tokens=4) for question in QUESTIONS]
    one_by_one, _ = len(steps), steps.clear()
    found = rag.query_many(QUESTIONS, engine=engine, max_new_tokens=4)
    assert [same(answer) for answer in found] == [same(answer) for answer in alone]
    assert len(steps) < one_by_one / 3


def test_each_question_with_options_of_its_own(rag):
    asked = [
        QUESTIONS[0],
        {"question": QUESTIONS[1], "engine": "ape", "max_new_tokens": 9},
        {"question": QUESTIONS[2], "where": ["source=Kesk.txt"], "engine": "full"},
        {"question": QUESTIONS[3], "top_k": 1, "decoding": {"temperature": 1.5, "seed": 3}},
        {"question": QUESTIONS[4], "chunks": rag.retrieve(QUESTIONS[5], top_k=2)},
    ]
    outcome = rag.query_many(asked, engine="block", max_new_tokens=5)
    for each, answer in zip(asked, outcome, strict=True):
        own = {"question": each} if isinstance(each, str) else each
        assert same(answer) == same(rag.query(**({"engine": "block", "max_new_tokens": 5} | own)))
    assert [source.document for source in outcome[2].sources] == ["Kesk.txt"]


def test_results_come_as_they_finish_and_an_error_ends_one_alone(rag):
    def stop(ids, scores):
        raise ZeroDivisionError

    asked = [
        {"question": QUESTIONS[0], "max_new_tokens": 40},
        "",
        {"question": "zzzqqq"},
        {"question": QUESTIONS[1], "stopping_criteria": [stop]},
        {"question": QUESTIONS[2], "engine": "turbo"},
        {"question": QUESTIONS[2], "motor": "ape"},
        {"engine": "ape"},
        {"question": QUESTIONS[0] + " why" * 300},
        {"question": QUESTIONS[3], "max_new_tokens": 2},
    ]
    results = list(rag.query_each(asked, engine="block"))
    assert results[-1].number == 0  # the longest one
    errors = {result.number: type(result.error) for result in results if result.error is not None}
    assert errors == {
        1: UsageError,
        2: NothingFoundError,
        3: ZeroDivisionError,
        4: UsageError,
        5: UsageError,
        6: UsageError,
        7: PromptTooLongError,
    }
    good = {result.number: result for result in results if result.error is None}
    assert {number: result.tokens for number, result in good.items()} == {0: 40, 8: 2}
    assert all(result.answer.text == rag.query(**asked[n], engine="block").text for n, result in good.items())
    assert {r.number: r.question for r in results if r.number < 3} == {0: QUESTIONS[0], 1: "", 2: "zzzqqq"}
    with pytest.raises(UsageError, match="question is empty"):
        rag.query_many([QUESTIONS[0], "", QUESTIONS[1]])


def test_what_is_wrong_for_all_is_said_before_anything_is_asked(rag, monkeypatch):
    with pytest.raises(UsageError, match="Unknown engine"):
        rag.query_each(QUESTIONS, engine="turbo")
    with pytest.raises(UsageError, match="--top-k"):
        rag.query_many([], top_k=0)

    def other(self):
        raise KVMismatchError("another model")

    monkeypatch.setattr(Index, "require_same_model", other)
    with pytest.raises(KVMismatchError):
        list(rag.query_each(QUESTIONS))


def test_only_a_window_is_held_and_taken(rag, monkeypatch):
    """From an endless iterator, only as many questions are taken as there is room for, and their KV is released."""
    runtime = rag.index.runtime
    most, taken = [], []
    budget = 2 * max(
        sum(rag.kv_source.plan(make_engine("block", {}), rag.retrieve(q)).sizes.values()) for q in QUESTIONS
    )
    monkeypatch.setattr(runtime.pool, "budget", budget)
    lease = runtime.pool.lease
    monkeypatch.setattr(runtime.pool, "lease", lambda sizes: (lease(sizes), most.append(runtime.pool.leased))[0])

    def endless():
        for question in itertools.cycle(QUESTIONS):
            taken.append(question)
            yield question

    with rag.query_each(endless(), engine="block", max_new_tokens=3) as results:
        found = [next(results) for _ in range(60)]
    assert len({result.number for result in found}) == 60
    assert max(most) <= budget
    assert len(taken) < 150  # a few tokens, with sixteen questions each
    assert (runtime.pool.leased, runtime._jobs) == (0, {})
    assert list(results) == []


def test_tasks(rag):
    asked = [*QUESTIONS, "zzzqqq"]

    async def run():
        item = asyncio.create_task(rag.aquery(QUESTIONS[0], engine="block", max_new_tokens=4))
        results = [result async for result in rag.aquery_each(asked, engine="block", max_new_tokens=4)]
        with pytest.raises(RetrievalError):
            await rag.aquery_many(asked, engine="block", max_new_tokens=4)
        return await rag.aquery_many(QUESTIONS, engine="block", max_new_tokens=4), results, await item

    many, results, item = asyncio.run(run())
    alone = [same(rag.query(question, engine="block", max_new_tokens=4)) for question in QUESTIONS]
    assert [same(answer) for answer in many] == alone
    by_number = {result.number: result for result in results}
    assert [same(by_number[n].answer) for n in range(len(QUESTIONS))] == alone
    assert isinstance(by_number[len(QUESTIONS)].error, RetrievalError)
    assert same(item) == alone[0]


def test_leaving_a_task_early_ends_the_rest(rag):
    runtime = rag.index.runtime

    async def early():
        async with rag.aquery_each(itertools.cycle(QUESTIONS), engine="ape", max_new_tokens=3) as results:
            return [await anext(aiter(results)) for _ in range(3)]

    async def cancelled():
        begun = asyncio.Event()

        async def ask():
            async for _ in rag.aquery_each(itertools.cycle(QUESTIONS), engine="ape", max_new_tokens=3):
                begun.set()

        task = asyncio.create_task(ask())
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert len(asyncio.run(early())) == 3
    assert (runtime.pool.leased, runtime._jobs) == (0, {})
    assert asyncio.run(cancelled())
    assert (runtime.pool.leased, runtime._jobs) == (0, {})
    assert not [thread for thread in threading.enumerate() if thread.name == "ragkv-answers"]


def test_closing_the_index_ends_them_all(rag):
    with RagKV.open(rag.folder, device="cpu") as own:
        own.model.eos_ids = frozenset()
        results = own.query_each(itertools.repeat(QUESTIONS[0]), engine="full", top_k=1, max_new_tokens=8)
        next(results)
        other = threading.Thread(target=own.close)
        other.start()
        other.join()
        with pytest.raises(AnswerInterruptedError):
            list(results)
        assert own.index.runtime.pool.leased == 0


def test_limits_that_are_set_hold_strictly(rag, steps_of):
    """With a separate model, so that it gets a new runtime."""
    with RagKV.open(rag.folder, device="cpu", max_sequences=2, batch_tokens=40) as own:
        own.model.eos_ids = frozenset()
        own.kv_source.prefix()  # encoded separately
        steps = steps_of(own.model)
        found = own.query_many(QUESTIONS[:4], engine="full", max_new_tokens=3)
        assert [a.text for a in found] == [rag.query(q, engine="full", max_new_tokens=3).text for q in QUESTIONS[:4]]
        counted = [(len(sequences), sum(map(len, ids))) for sequences, ids in steps]
        sequences, tokens = zip(*(each for each in counted if each != (1, 1)), strict=True)
        assert (max(sequences), max(tokens)) == (2, 40)
        with pytest.raises(UsageError, match=r"needs 4 sequences at a time, but --max-sequences is 2; raise it to 4"):
            own.query(QUESTIONS[0], engine="pced", top_k=3)
    with (
        RagKV.open(rag.folder, device="cpu", batch_tokens=3) as own,
        pytest.raises(UsageError, match=r"but --batch-tokens is 3; raise it to 4"),
    ):
        own.query(QUESTIONS[0], engine="pced", top_k=3)
    for wrong in ({"max_sequences": 0}, {"batch_tokens": -1}):
        with pytest.raises(ConfigError, match="must be a number from 1 up"):
            RagKV.open(rag.folder, **wrong)


def test_limits_of_the_index_and_of_the_memory(rag):
    assert "[runtime]" not in IndexConfig().to_toml()
    config = IndexConfig(runtime=RuntimeConfig(max_sequences=8))
    assert IndexConfig.from_toml(config.to_toml()) == config
    with pytest.raises(ConfigError, match=r"max_sequences must be a number"):
        IndexConfig.from_toml('[runtime]\nmax_sequences = "many"\n')
    small, large = (limits_for(rag.model, memory=memory, budget=5) for memory in (1 << 20, 1 << 40))
    token = rag.index.shape.token_bytes
    assert (small.own_tokens, large.own_tokens) == ((1 << 17) // token, (1 << 37) // token)
    assert small.batch_tokens < large.batch_tokens
    assert not large.strict
    assert limits_for(rag.model, memory=1 << 40, budget=5, max_sequences=7).max_sequences == 7


def fake_model(*, device="cpu", joins=True, state_bytes=0, token_bytes=8, **config):
    shape = SimpleNamespace(state_bytes=state_bytes, token_bytes=token_bytes)
    config = SimpleNamespace(hidden_size=10, **config)
    return SimpleNamespace(config=config, device=SimpleNamespace(type=device), kv_shape=shape, joins=joins)


@pytest.mark.parametrize(
    ("device", "config", "memory", "tokens"),
    [
        ("cpu", {"intermediate_size": 20}, 0, 256),
        ("cpu", {"intermediate_size": 20}, 256 * 16 * 4 * 200, 256),
        ("cpu", {"intermediate_size": 20}, 257 * 16 * 4 * 200, 257),
        ("cpu", {"intermediate_size": [20]}, 300 * 16 * 4 * 280, 300),  # per layer: as if four times hidden
        ("cpu", {}, 300 * 16 * 4 * 280, 300),
        ("cpu", {}, 1 << 50, 4096),
        ("cuda", {}, 1 << 50, 8192),
    ],
)
def test_a_step_has_as_many_tokens_as_the_memory_bears(device, config, memory, tokens):
    assert limits_for(fake_model(device=device, **config), memory=memory, budget=1).batch_tokens == tokens


def test_sequences_and_the_budget_follow_from_what_a_sequence_holds():
    plain = limits_for(fake_model(), memory=8 * 8 * 100, budget=7)
    assert (plain.max_sequences, plain.own_tokens, plain.budget, plain.strict) == (256, 100, 7, False)
    assert limits_for(fake_model(token_bytes=0), memory=800, budget=7).own_tokens == 100
    assert limits_for(fake_model(), memory=1, budget=7).own_tokens == 1
    states = fake_model(joins=False, state_bytes=10)
    sequences = [limits_for(states, memory=8 * 10 * n, budget=7).max_sequences for n in (0, 1, 3, 256, 257)]
    assert sequences == [1, 1, 3, 256, 256]
    assert limits_for(states, memory=0, budget=7).budget == 3
    payload = limits_for(states, memory=0, budget=7, batch_tokens=5)
    assert (payload.batch_tokens, payload.max_sequences, payload.strict) == (5, 5, True)
    payload = limits_for(states, memory=8 * 30, budget=7, batch_tokens=5, max_sequences=9)
    assert (payload.batch_tokens, payload.max_sequences, payload.strict) == (5, 9, True)
    assert limits_for(states, memory=0, budget=7, max_sequences=2).strict
