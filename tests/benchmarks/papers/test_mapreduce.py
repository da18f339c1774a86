"""The baselines of PCED's tables: mapreduce against its two stages, written out; `single` against `full`."""

from dataclasses import replace

import asking
import oracle
import pytest
import torch
from asking import CHUNKS, PREFIX, STEPS
from script import by_hand

from ragkv.benchmarks.papers.mapreduce import MapReduce, MapReduceConfig
from ragkv.engines import ContextChunk, Release, Request, make_engine
from ragkv.errors import ConfigError, UsageError
from ragkv.model.prompt import Prompt
from ragkv.runtime import Generation, Stream, runtime_of

QUESTION = "Why?"
PROMPT = Prompt(prefix="", before_question="Q: ", after_question="<eos>\nA:", separator="\n\n")


def request(model, *, chunks=CHUNKS, prompt=PROMPT) -> Request:
    suffix, scores = PROMPT.suffix_ids(model.tokens, QUESTION), [0.2, 0.3, 0.4]
    made = asking.request(
        model, make_engine("mapreduce", {}), chunks=chunks, scores=scores[: len(chunks)], suffix=suffix
    )
    return replace(made, question=QUESTION, prompt=prompt)


def greedy(model, engine, wanted) -> list[int]:
    return asking.greedy(Stream(runtime_of(model), engine, wanted))[0]


def summaries_of(model, engine, wanted) -> list[list[int]]:
    return by_hand(engine.summaries(wanted, model, PROMPT), lambda ask: model.step(ask.sequences, ask.ids))


def literal(model, instruction, summary_tokens, chunks=CHUNKS) -> tuple[list[list[int]], list[int]]:
    """Both stages by plain forward passes over whole sequences: the summaries, then the answer from their text."""
    asked = list(PROMPT.suffix_ids(model.tokens, instruction))
    summaries = []
    with model.plain() as plain:
        for chunk in chunks:
            ids = oracle.full(plain, list(PREFIX), [list(chunk)], asked, summary_tokens)
            ends = [at for at, i in enumerate(ids) if i in model.eos_ids]
            summaries.append(ids[: ends[0]] if ends else ids)
        texts = [model.tokens.decode(ids).strip() for ids in summaries]
        parts = [list(PROMPT.chunk_ids(model.tokens, text)) for text in texts if text]
        return summaries, oracle.full(
            plain, list(PREFIX), parts, list(PROMPT.suffix_ids(model.tokens, QUESTION)), STEPS
        )


@pytest.mark.parametrize(
    ("family", "order"),
    [
        *((family, (0, 1, 2)) for family in ("smollm3", "llama-yarn", "mistral-sliding")),
        *(("gemma3", order) for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1))),
    ],
)
def test_mapreduce_equals_its_two_stages(family, order, make_model):
    """The longest chunk first, last or in the middle: rows are at different positions, each with its own window."""
    model, chunks = make_model(family), [CHUNKS[i] for i in order]
    engine = MapReduce(MapReduceConfig(summary_tokens=12))
    wanted = request(model, chunks=chunks)
    summaries, expected = literal(model, engine.config.instruction, 12, chunks)
    assert summaries_of(model, engine, wanted) == summaries
    assert greedy(model, engine, wanted) == expected


def test_a_summary_ends_at_its_own_end_token(make_model, monkeypatch):
    """Rows of a batch end at different steps; tokens after a row's end are ignored."""
    model = make_model("llama")
    engine = MapReduce(MapReduceConfig(summary_tokens=10))
    long = summaries_of(model, engine, request(model))
    monkeypatch.setattr(model, "eos_ids", frozenset({long[0][4], long[2][1]}))
    summaries, expected = literal(model, engine.config.instruction, 10)
    assert len({len(ids) for ids in summaries}) > 1
    wanted = request(model)
    assert summaries_of(model, engine, wanted) == summaries
    assert greedy(model, engine, wanted) == expected


def test_the_instruction_may_name_the_question(make_model):
    model = make_model("llama")
    engine = make_engine("mapreduce", {"mapreduce": {"instruction": "Notes on {question}", "summary_tokens": 5}})
    summaries, expected = literal(model, "Notes on Why?", 5)
    wanted = request(model)
    assert summaries_of(model, engine, wanted) == summaries
    assert summaries != literal(model, MapReduceConfig().instruction, 5)[0]
    assert greedy(model, engine, wanted) == expected


def test_the_demand_covers_a_question_whose_characters_are_several_tokens(make_model):
    model, question = make_model("llama"), "🜂" * 200
    engine = make_engine("mapreduce", {"mapreduce": {"instruction": "{question}", "summary_tokens": 1}})
    asked = PROMPT.suffix_ids(model.tokens, question)
    wanted = replace(request(model), question=question, suffix_ids=tuple(asked))
    assert engine.demand(wanted, 1).tokens >= len(CHUNKS) * (len(asked) + 1)


def test_nothing_to_summarise_is_the_question_alone(make_model, monkeypatch):
    model = make_model("llama")
    engine, full = MapReduce(MapReduceConfig(summary_tokens=4)), make_engine("full", {})
    nothing = request(model, chunks=())
    alone = greedy(model, full, nothing)
    assert greedy(model, engine, nothing) == alone
    monkeypatch.setattr(model, "eos_ids", frozenset(range(320)))  # every summary is empty
    assert greedy(model, engine, request(model)) == alone


def test_a_cancelled_request_stops_summarising(make_model, monkeypatch):
    model = make_model("llama")
    runtime, honest, steps = runtime_of(model), model.step, []
    wanted = request(model)
    job = runtime.submit(MapReduce(MapReduceConfig(summary_tokens=50)), wanted, Generation(max_new_tokens=9))

    def cancelling(*args, **more):
        steps.append(args)
        if len(steps) == 3:
            runtime.cancel(job)
        return honest(*args, **more)

    monkeypatch.setattr(model, "step", cancelling)
    assert list(runtime.tokens(job)) == []
    assert len(steps) == 3


@pytest.mark.parametrize("lengths", [(3, 1, 2), (1, 1, 1), (0, 4, 2), (5, 5, 5)])
def test_a_finished_summary_is_read_no_further(lengths, make_model):
    """Made-up logits: row i generates 100 + i until its length is reached, then ends and leaves the batch."""
    model = make_model("llama")
    engine, wanted, asked, left = MapReduce(MapReduceConfig(summary_tokens=4)), request(model), [], []
    rows = []

    def read(ask):
        if not asked:
            rows.extend(ask.sequences)
        asked.append([rows.index(row) for row in ask.sequences])
        logits = torch.zeros(len(ask.sequences), 320)
        for at, row in enumerate(asked[-1]):
            logits[at, 100 + row if len(asked) <= lengths[row] else min(model.eos_ids)] = 1.0
        return logits

    found = by_hand(engine.summaries(wanted, model, PROMPT), read, leave=lambda ask: left.extend(ask.sequences))
    assert found == [[100 + row] * min(length, 4) for row, length in enumerate(lengths)]
    steps = range(min(max(lengths) + 1, 4))
    assert asked == [[row for row, length in enumerate(lengths) if length >= step] for step in steps]
    assert sorted(map(id, left)) == sorted(map(id, rows))  # each once, which frees its own KV


def test_the_map_prompts_may_fill_the_models_positions(make_model, monkeypatch):
    """The last summary token is never read, so it needs no position."""
    model = make_model("llama")
    engine = MapReduce(MapReduceConfig(summary_tokens=5))
    wanted, single = request(model), Generation(max_new_tokens=1)
    monkeypatch.setattr(Prompt, "chunk_ids", lambda *_: ())  # makes the answer's prompt shorter
    free = [token.token_id for token in runtime_of(model).decode(engine, wanted, single)]
    asked = len(PROMPT.suffix_ids(model.tokens, engine.config.instruction))
    most = len(PREFIX) + max(map(len, CHUNKS)) + asked + 5 - 1
    monkeypatch.setattr(model, "max_positions", most)
    assert [token.token_id for token in runtime_of(model).decode(engine, wanted, single)] == free
    monkeypatch.setattr(model, "max_positions", most - 1)
    with pytest.raises(UsageError, match="positions"):
        list(runtime_of(model).decode(engine, wanted, single))


def test_a_chunk_without_tokens_is_not_summarised(make_model):
    model = make_model("llama")
    engine, wanted = MapReduce(MapReduceConfig(summary_tokens=6)), request(model)
    empty = ContextChunk(token_ids=(), score=0.5)
    padded = replace(wanted, chunks=(wanted.chunks[0], empty, *wanted.chunks[1:]))
    assert summaries_of(model, engine, padded) == summaries_of(model, engine, wanted)


def test_a_summary_enters_the_answers_prompt_without_the_space_around_it(make_model, monkeypatch):
    model = make_model("llama")
    message = [list(model.tokens.encode(text)) for text in ("  one fact \n", "\n\n", "another")]

    def summaries(*_):
        yield Release(())
        return message

    monkeypatch.setattr(MapReduce, "summaries", summaries)
    answers = Stream(runtime_of(model), MapReduce(MapReduceConfig()), request(model)).scores
    parts = [list(PROMPT.chunk_ids(model.tokens, text)) for text in ("one fact", "another")]
    expected = []
    with model.plain() as plain:
        oracle.full(plain, list(PREFIX), parts, list(PROMPT.suffix_ids(model.tokens, QUESTION)), 1, trace=expected)
    torch.testing.assert_close(answers, expected[0], atol=1e-4, rtol=1e-4)


def test_mapreduce_refusals(make_model):
    for wrong in ({"instruction": " "}, {"summary_tokens": 0}, {"map": "x"}):
        with pytest.raises(ConfigError, match="mapreduce"):
            make_engine("mapreduce", {"mapreduce": wrong})
    model = make_model("llama")
    with pytest.raises(ValueError, match="without `prompt`"):
        greedy(model, make_engine("mapreduce", {}), request(model, prompt=None))


def test_single_reads_the_best_chunk_and_all_reads_all(make_model):
    model = make_model("llama")

    def run(name, wanted):
        tokens = runtime_of(model).decode(make_engine(name, {}), wanted, Generation(max_new_tokens=STEPS))
        return [token.token_id for token in tokens]

    everything, best = request(model), request(model, chunks=CHUNKS[-1:])
    assert run("single", everything) == run("full", best) != run("full", everything)
    assert run("single", request(model, chunks=())) == run("full", request(model, chunks=()))
    assert make_engine("single", {}).name == "single"
