"""IPPD: every question gets the answer that `full` gives alone, and that the paper's single prompt gives."""

import oracle
import pytest
import torch
from asking import CHUNKS, CONTEXTS, PREFIX, QUESTIONS, request, requests
from crowd import Recorder

from ragkv.attention.sequence import ArenaKVCache, KVCache
from ragkv.benchmarks.speed.inference import SHAPE, random_llama
from ragkv.engines import Request, make_engine
from ragkv.runtime import Generation, Runtime, Stream, runtime_of

LENGTHS = [6, 1, 3, 2, 6, 4]


def _generations():
    return [Generation(max_new_tokens=length, criteria=(Recorder(),)) for length in LENGTHS]


def _together(model):
    """Tokens and scores of all questions, submitted together."""
    engine, runtime, generations = make_engine("ippd", {}), Runtime(model), _generations()
    jobs = [
        runtime.submit(engine, each, generation)
        for each, generation in zip(requests(model, engine), generations, strict=True)
    ]
    return [list(runtime.tokens(job)) for job in jobs], [each.criteria[0].scores for each in generations]


def _alone(model):
    engine, runtime, generations = make_engine("full", {}), Runtime(model), _generations()
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
    _equal(_together(model), _alone(model))


def test_the_papers_single_prompt_has_the_same_numbers(unlike_family, make_model):
    """[p, c_1, x_1,1, x_1,2, …, c_2, x_2,1, …] in transformers' forward pass (IPPD Eq. 1-9)."""
    model = make_model(unlike_family)
    asked = [([i for chunk in chunks for i in chunk], question) for chunks in CONTEXTS for question in QUESTIONS]
    with model.plain() as plain:
        ids, scores = oracle.stacked(plain, PREFIX, asked, LENGTHS)
    tokens, results = _together(model)
    reach = 3e-5 * max(float(each[each.isfinite()].abs().max()) for some in scores for each in some)
    for number, length in enumerate(map(len, tokens)):  # an answer may end before the reference does
        assert [token.token_id for token in tokens[number]] == ids[number][:length]
        mine, theirs = torch.stack(results[number]), torch.stack(scores[number][:length])
        torch.testing.assert_close(mine.flatten(), theirs.flatten(), atol=reach, rtol=0)


GREEDY = Generation(max_new_tokens=5)


def test_instruction_and_contexts_are_read_once(make_model, steps_of):
    """And shared tokens reserve no memory beside the questions: that would allocate and zero-fill a context for many
    rows.
    """
    model = make_model("llama")
    steps = steps_of(model)
    _together(model)
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
    results = []
    for name in ("ippd", "full"):
        wanted = request(model, make_engine(name, {}), chunks=[], scores=[], prefix=prefix)
        results.append([t.token_id for t in runtime_of(model).decode(make_engine(name, {}), wanted, GREEDY)])
    assert results[0] == results[1]


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
    item, two = (Request(prefix_ids=(1, 2), chunks=chunks, suffix_ids=ids) for ids in ((3,), (4, 5)))
    assert engine.demand(item, 4).tokens == 5
    assert engine.demand(item, 4).shared == engine.demand(two, 4).shared
    assert list(engine.demand(item, 4).shared.values()) == [2, sum(map(len, CHUNKS))]
    other = Request(prefix_ids=(1, 2), chunks=chunks[:1], suffix_ids=(3,))
    assert len(engine.demand(item, 4).shared.keys() & engine.demand(other, 4).shared.keys()) == 1
