"""IPPD, shared or as one prompt: every question gets the answer that `full` gives alone."""

import pytest
import torch
from asking import CHUNKS, CONTEXTS, PREFIX, QUESTIONS, request, requests
from crowd import Recorder

from ragkv.attention.sequence import ArenaKVCache, KVCache
from ragkv.benchmarks.speed.inference import SHAPE, random_llama
from ragkv.decoding import Decoding
from ragkv.engines import Forward, Request, make_engine
from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.runtime import Generation, Runtime, Stream, runtime_of

LENGTHS = [6, 1, 3, 2, 6, 4]


def _generations():
    return [Generation(max_new_tokens=length, criteria=(Recorder(),)) for length in LENGTHS]


def _together(model, tuning=None, generations=None, name="ippd-stacked", **limits):
    """Tokens and scores of all questions, submitted together."""
    engine, runtime = make_engine(name, {name: tuning or {}}), Runtime(model, **limits)
    generations = generations or _generations()
    jobs = [
        runtime.submit(engine, each, generation)
        for each, generation in zip(requests(model, engine), generations, strict=True)
    ]
    return [list(runtime.tokens(job)) for job in jobs], [each.criteria[0].scores for each in generations]


def _alone(model, name="full", generations=None):
    engine, runtime = make_engine(name, {}), Runtime(model)
    generations = generations or _generations()
    pairs = zip(requests(model, engine), generations, strict=True)
    found = [list(runtime.decode(engine, each, generation)) for each, generation in pairs]
    return found, [each.criteria[0].scores for each in generations]


def _equal(found, expected):
    assert found[0] == expected[0]
    for mine, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(torch.stack(mine), torch.stack(theirs), rtol=1e-4, atol=1e-4)


def test_every_answer_is_that_of_full_asked_alone(unlike_family, make_model):
    """Contexts, questions and answers of different lengths."""
    model = make_model(unlike_family)
    expected = _alone(model)
    for name in ("ippd", "ippd-stacked"):
        _equal(_together(model, name=name), expected)


@pytest.mark.parametrize("tuning", [{"contexts": 1}, {"tokens": 1}, {"tokens": 30}])
def test_the_size_of_a_prompt_and_of_its_pieces_changes_nothing(tuning, make_model):
    model = make_model("gemma2")
    for limits in ({}, {"batch_tokens": 7}):
        _equal(_together(model, tuning, **limits), _alone(model))


def test_a_stack_of_one(make_model):
    model = make_model("qwen3")
    _equal(_alone(model, "ippd-stacked"), _alone(model))


def test_answers_may_fill_the_models_positions(make_model, monkeypatch):
    """A prompt of 58 tokens in which no position exceeds 31."""
    model = make_model("llama")
    monkeypatch.setattr(model, "max_positions", 31)
    _equal(_together(model), _alone(model))


def test_it_is_one_row_and_one_pass_per_token(make_model, steps_of):
    model = make_model("llama")
    steps = steps_of(model)
    lengths = [len(tokens) for tokens in _together(model)[0]]
    passes = [[len(each) for each in ids] for _, ids in steps]
    contexts = sum(len(ids) for chunks in CONTEXTS for ids in chunks)
    header = 5 + contexts + len(CONTEXTS) * sum(map(len, QUESTIONS))
    assert passes == [[header], *([sum(n > step for n in lengths)] for step in range(1, max(lengths)))]


def test_dead_answers_are_given_up(make_model):
    """When most of the row belongs to finished answers, it is compacted without an effect on the others."""
    model = make_model("gemma3")
    lengths = [9, 1, 1, 1, 1, 1]

    def generations():
        return [Generation(max_new_tokens=n, criteria=(Recorder(),)) for n in lengths]

    held = []
    runtime, engine = Runtime(model), make_engine("ippd-stacked", {})
    asked = generations()
    jobs = [runtime.submit(engine, r, g) for r, g in zip(requests(model, engine), asked, strict=True)]
    while not jobs[0].ended:
        runtime.advance()
        if isinstance(jobs[0].operation, Forward):
            held.append(jobs[0].operation.rows[0].cache.length)
    assert held[0] == 5 + 14 + 3 + 1  # of 58: the instruction, its context, the question and a token
    found = [list(runtime.tokens(job)) for job in jobs], [each.criteria[0].scores for each in asked]
    _equal(found, _alone(model, generations=generations()))


def test_stops_and_sampling_are_each_answers_own(make_model):
    model = make_model("llama")
    settings = [Decoding(temperature=1.5, seed=seed) for seed in range(5)]

    def generations():
        free = [Generation(max_new_tokens=6, decoding=each, criteria=(Recorder(),)) for each in settings]
        ends = Decoding(stop_ids=tuple(range(0, 320, 2)))
        return [*free, Generation(max_new_tokens=6, decoding=ends, criteria=(Recorder(),))]

    _equal(_together(model, generations=generations()), _alone(model, generations=generations()))


def test_an_error_and_a_cancelled_answer_end_alone(make_model):
    model = make_model("llama")
    engine, runtime = make_engine("ippd-stacked", {}), Runtime(model)

    def fails(ids, scores):
        if ids.shape[1] == 2:
            raise RuntimeError("no more")
        return torch.tensor([False])

    generations = [Generation(max_new_tokens=6, criteria=(fails,) if i == 1 else ()) for i in range(len(LENGTHS))]
    jobs = [runtime.submit(engine, r, g) for r, g in zip(requests(model, engine), generations, strict=True)]
    first = next(runtime.tokens(jobs[2]))  # and closes the iterator, which cancels it
    assert first.finish_reason is None
    expected = [
        list(runtime.decode(make_engine("full", {}), r, Generation(max_new_tokens=6)))
        for r in requests(model, make_engine("full", {}))
    ]
    with pytest.raises(RuntimeError, match="no more"):
        list(runtime.tokens(jobs[1]))
    for index in (0, 3, 4, 5):
        assert list(runtime.tokens(jobs[index])) == expected[index]


def test_the_one_that_reads_may_be_cancelled_half_way(make_model):
    model = make_model("mistral-sliding")
    engine, runtime = make_engine("ippd-stacked", {}), Runtime(model, batch_tokens=9)
    generations = _generations()
    jobs = [runtime.submit(engine, r, g) for r, g in zip(requests(model, engine), generations, strict=True)]
    runtime.advance()
    runtime.advance()
    [leader] = [job for job in jobs if isinstance(job.operation, Forward)]
    runtime.cancel(leader)
    expected = _alone(model)
    for job, tokens, generation, scores in zip(jobs, expected[0], generations, expected[1], strict=True):
        if job is not leader:
            assert list(runtime.tokens(job)) == tokens
            torch.testing.assert_close(
                torch.stack(generation.criteria[0].scores), torch.stack(scores), rtol=1e-4, atol=1e-4
            )


def test_a_question_that_is_too_long_is_refused_alone(make_model):
    model = make_model("llama")
    engine, runtime = make_engine("ippd-stacked", {}), runtime_of(model)
    long, short = (request(model, engine, suffix=suffix) for suffix in ([80] * 600, [80, 81]))
    jobs = [runtime.submit(engine, each, Generation(max_new_tokens=2)) for each in (long, short)]
    with pytest.raises(PromptTooLongError, match="needs 619 positions"):
        list(runtime.tokens(jobs[0]))
    assert len(list(runtime.tokens(jobs[1]))) == 2


@pytest.mark.parametrize("tuning", [{"contexts": 0}, {"tokens": 0}])
def test_settings_are_checked(tuning):
    with pytest.raises(ConfigError, match="at least 1"):
        make_engine("ippd-stacked", {"ippd-stacked": tuning})


GREEDY = Generation(max_new_tokens=5)


def test_instruction_and_contexts_are_read_once(make_model, steps_of):
    """And shared tokens reserve no memory beside the questions: that would allocate and zero-fill a context for many
    rows.
    """
    model = make_model("llama")
    steps = steps_of(model)
    _together(model, name="ippd")
    whole = [tuple(i for chunk in chunks for i in chunk) for chunks in CONTEXTS]
    read = [(tuple(each), type(row.cache)) for rows, ids in steps for row, each in zip(rows, ids, strict=True)]
    long = [ids for ids, _ in read if len(ids) > 1]
    assert long.count(tuple(PREFIX)) == 1
    assert [long.count(each) for each in whole] == [1, 1]
    asked = [tuple(ids) for ids in QUESTIONS for _ in CONTEXTS if len(ids) > 1]
    assert sorted(long) == sorted([tuple(PREFIX), *whole, *asked])
    for ids, cache in read:
        assert len(ids) == 1 or cache is (ArenaKVCache if ids in asked else KVCache)


@pytest.mark.parametrize("prefix", [[], PREFIX])
def test_without_a_context_the_instruction_is_all(prefix, make_model):
    model = make_model("llama")
    found = []
    for name in ("ippd", "full"):
        wanted = request(model, make_engine(name, {}), chunks=[], scores=[], prefix=prefix)
        found.append([t.token_id for t in runtime_of(model).decode(make_engine(name, {}), wanted, GREEDY)])
    assert found[0] == found[1]


def _merged_adapter(model):
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False), model.module)
    _ = Stream(runtime_of(model), make_engine("ippd", {}), _wanted(model))
    for module in model.module.modules():
        if hasattr(module, "lora_A"):
            module.merge()


def _scaled(model):
    for parameter in model.module.parameters():
        parameter.data.mul_(-1.1)


def _trained(model):
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(torch.ones_like(parameter) / 8)


def _assigned(model):
    model.module.load_state_dict({k: -v for k, v in model.module.state_dict().items()}, assign=True)


def _hooked(model):
    model.module.model.layers[0].register_forward_hook(lambda module, args, out: out * 2)


SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def _wanted(model):
    return request(model, make_engine("ippd", {}))


@pytest.mark.parametrize("change", [_trained, _scaled, _assigned, _merged_adapter, _hooked])
def test_nothing_that_other_weights_computed_is_used_again(change):
    model = random_llama("float32", "cpu", SHAPE | SMALL)
    engine, runtime = make_engine("ippd", {}), runtime_of(model)
    before = Stream(runtime, engine, _wanted(model)).scores
    assert torch.equal(before, Stream(runtime, engine, _wanted(model)).scores)
    change(model)
    after = Stream(runtime, engine, _wanted(model)).scores
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, Stream(Runtime(model), engine, _wanted(model)).scores)


def test_a_shared_sequence_counts_once():
    engine = make_engine("ippd", {})
    chunks = request(None, make_engine("full", {})).chunks
    one, two = (Request(prefix_ids=(1, 2), chunks=chunks, suffix_ids=ids) for ids in ((3,), (4, 5)))
    assert engine.demand(one, 4).tokens == 5
    assert engine.demand(one, 4).shared == engine.demand(two, 4).shared
    assert list(engine.demand(one, 4).shared.values()) == [2, sum(map(len, CHUNKS))]
    other = Request(prefix_ids=(1, 2), chunks=chunks[:1], suffix_ids=(3,))
    assert len(engine.demand(one, 4).shared.keys() & engine.demand(other, 4).shared.keys()) == 1
