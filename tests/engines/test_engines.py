"""Every engine against its slow literal reference, on every family; and what must hold whatever the model."""

from __future__ import annotations

import math

import oracle
import pytest
import torch

from ragkv.engines import ContextChunk, Request, decode, engine_names, make_engine
from ragkv.engines.evidence import divergence
from ragkv.errors import ConfigError, UsageError
from ragkv.types import Encoding

PREFIX = [0, 40, 41, 42, 43]
CHUNKS = [[50, 51, 52, 53], [60, 61, 62, 63, 64, 65, 66], [70, 1, 71]]  # one holds the eos token as text
SUFFIX = [80, 81, 82]
SCORES = [0.31, 0.82, 0.57]
STEPS = 6


def request(model, engine, chunks=None, scores=None, suffix=None, prefix=None) -> Request:
    chunks = CHUNKS if chunks is None else chunks
    prefix = PREFIX if prefix is None else prefix
    scores = scores or SCORES[: len(chunks)]
    if engine.encoding is None:
        kvs, prefix_kv = [None] * len(chunks), None
    else:
        prefix_kv = model.encode([prefix])[0] if prefix else None
        kvs = model.encode(chunks, prefix=prefix_kv if engine.encoding is Encoding.PREFIXED else None)
    return Request(
        prefix_ids=tuple(prefix),
        prefix=prefix_kv,
        chunks=tuple(
            ContextChunk(token_ids=tuple(c), score=s, kv=kv) for c, s, kv in zip(chunks, scores, kvs, strict=True)
        ),
        suffix_ids=tuple(SUFFIX if suffix is None else suffix),
    )


def run(model, name, *, steps=STEPS, tuning=None, **changes):
    """Greedy ids and winners, end tokens not heeded."""
    engine = make_engine(name, {name: tuning or {}})
    stream = engine.start(model, request(model, engine, **changes))
    ids, winners = [], []
    for _ in range(steps):
        ids.append(stream.best())
        winners.append(stream.winner(ids[-1]))
        stream.advance(ids[-1])
    return ids, winners


def test_full_equals_plain_greedy_decoding(family, make_model):
    model = make_model(family)
    with model.plain() as plain:
        expected = oracle.full(plain, PREFIX, CHUNKS, SUFFIX, STEPS)
    assert run(model, "full")[0] == expected


def test_block_equals_the_block_mask_forward(family, make_model):
    model = make_model(family)
    if model.windows:
        pytest.skip("transformers puts no window on a 4-D mask; tests/test_model.py has the windowed case")
    with model.plain() as plain:
        expected = oracle.block(plain, PREFIX, CHUNKS, SUFFIX, STEPS)
    assert run(model, "block")[0] == expected


@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (0.9, 0.9), (0.6, 1.0), (0.5, 0.7)])
def test_ape_equals_equation_5(family, temperature, scale, make_model):
    model = make_model(family)
    with model.plain("ragkv-oracle") as plain:
        plain.set_attn_implementation("ragkv-oracle")
        expected = oracle.ape(plain, PREFIX, CHUNKS, SUFFIX, STEPS, temperature=temperature, scale=scale)
    assert run(model, "ape", tuning={"temperature": temperature, "scale": scale})[0] == expected


@pytest.mark.parametrize("beta", ["per_expert", "shared", 0.5])
def test_pced_equals_separate_forwards(family, beta, make_model):
    model = make_model(family)
    with model.plain() as plain:
        expected = oracle.pced(plain, PREFIX, CHUNKS, SUFFIX, SCORES, STEPS, beta=beta)
    assert run(model, "pced", tuning={"beta": beta}) == expected


@pytest.mark.parametrize("name", ["ape", "pced"])
def test_chunk_order_does_not_matter(name, make_model):
    model = make_model("llama3-scaling")
    order = [2, 0, 1]
    forward = run(model, name)
    shuffled = run(model, name, chunks=[CHUNKS[i] for i in order], scores=[SCORES[i] for i in order])
    assert shuffled[0] == forward[0]
    if name == "pced":
        assert [order[w] for w in shuffled[1]] == forward[1]


def test_one_chunk_without_reweighing_is_plain_attention(make_model):
    model = make_model("qwen3")
    alone = {"chunks": [CHUNKS[1]], "scores": [0.9]}
    single = run(model, "full", **alone)[0]
    assert run(model, "ape", tuning={"temperature": 1.0, "scale": 1.0}, **alone)[0] == single
    assert run(model, "pced", tuning={"beta": 0.0, "gamma": 0.0}, **alone)[0] == single


@pytest.mark.parametrize("name", ["full", "ape", "block", "pced"])
def test_edges(name, make_model):
    model = make_model("llama")
    assert len(run(model, name, suffix=[80])[0]) == STEPS  # a question of one token
    assert len(run(model, name, chunks=[[9]], scores=[0.5])[0]) == STEPS  # a chunk of one token
    assert run(model, name, chunks=[], scores=[])[0] == run(model, "full", chunks=[], scores=[])[0]
    many = [[i % 300 + 3, i % 7 + 3] for i in range(120)]
    assert len(run(model, name, chunks=many, scores=[0.5] * 120, steps=2)[0]) == 2


def test_block_sinks(make_model):
    model = make_model("llama")
    with model.plain() as plain:
        nothing = oracle.block(plain, [], CHUNKS, SUFFIX, STEPS)
        first = oracle.block(plain, PREFIX[:1], CHUNKS, SUFFIX, STEPS)
    assert run(model, "block", tuning={"sink": "none"})[0] == nothing
    assert run(model, "block", tuning={"sink": "bos"})[0] == first


def test_block_warns_about_models_that_were_not_tuned(make_model):
    model = make_model("llama")
    assert "finetune" not in (make_engine("full", {}).warning(model) or "")
    assert "not trained for Block-Attention" in make_engine("block", {}).warning(model)


def test_ties_go_to_the_higher_score_then_the_earlier_expert(make_model):
    model = make_model("llama")
    same = [CHUNKS[0]] * 3
    _, winners = run(model, "pced", chunks=same, scores=[0.5, 0.7, 0.7], tuning={"gamma": 0.0}, steps=2)
    assert winners == [2, 2]  # chunks come in ascending relevance: the last of equals is the most relevant


def test_low_scores_make_an_expert_inert(make_model):
    model = make_model("llama")
    _, winners = run(model, "pced", scores=[0.0, 0.9, 0.0])
    assert set(winners) == {1}


@pytest.mark.parametrize("rule", ["moe", "poe"])
def test_probability_space_rules(rule, make_model):
    """Table 7's ablations against their formulas, first token, β and weights by hand."""
    model = make_model("llama")
    engine = make_engine("pced", {"pced": {"aggregation": rule, "beta": 0.5}})
    stream = engine.start(model, request(model, engine))
    with model.plain() as plain:
        streams = [[*PREFIX, *SUFFIX], *([*PREFIX, *c, *SUFFIX] for c in CHUNKS)]
        logits = torch.stack([plain(input_ids=torch.tensor([s])).logits[0, -1] for s in streams])
    contrasted = torch.log_softmax(1.5 * logits[1:] - 0.5 * logits[0], -1)
    weights = torch.tensor(SCORES).pow(2.5)
    weights = (weights / weights.sum())[:, None]
    expected = (weights * contrasted.exp()).sum(0).log() if rule == "moe" else (weights * contrasted).sum(0)
    torch.testing.assert_close(stream.scores, expected, atol=1e-4, rtol=1e-4)


def test_divergence_is_bounded_and_zero_for_equals():
    logits = torch.randn(5, 40) * 20
    assert (divergence(logits, logits[0])[0] < 1e-6).all()
    found = divergence(logits, torch.randn(40) * 20)
    assert (found >= 0).all()
    assert (found <= math.log(2)).all()
    apart = torch.full((1, 2), -1e4)
    apart[0, 0] = 1e4
    torch.testing.assert_close(divergence(apart, -apart[0]), torch.tensor([math.log(2)]))


def test_decoding_stops_at_an_end_token_and_at_the_limit(make_model, monkeypatch):
    model = make_model("llama")
    engine = make_engine("full", {})
    wanted = request(model, engine)
    limited = list(decode(model, engine.start(model, wanted), max_new_tokens=4))
    assert [t.finish_reason for t in limited] == [None, None, None, "length"]
    monkeypatch.setattr(model, "eos_ids", frozenset({limited[2].token_id}))
    stopped = list(decode(model, engine.start(model, wanted), max_new_tokens=9))
    assert stopped[-1].finish_reason == "stop"
    first = [t.token_id for t in limited].index(limited[2].token_id)
    assert len(stopped) == first + 1
    assert stopped[-1].text == ""


def test_text_is_cut_between_characters(make_model):
    model = make_model("llama")
    ids = list(model.tokens.encode("né 漢字 ok 🙂!"))

    class Script:
        def __init__(self):
            self.at = 0

        def best(self):
            return ids[self.at]

        def winner(self, token_id):
            return None

        def advance(self, token_id):
            self.at += 1

    pieces = [t.text for t in decode(model, Script(), max_new_tokens=len(ids))]
    assert "".join(pieces) == "né 漢字 ok 🙂!"
    assert all("\ufffd" not in piece for piece in pieces)


def test_names_and_settings():
    assert {"all", "ape", "block", "full", "mapreduce", "pced", "single"} <= set(engine_names())
    with pytest.raises(UsageError, match="Unknown engine 'warp'; choose one of all, ape, block"):
        make_engine("warp", {})
    for name, tuning in (
        ("ape", {"temperature": 0.0}),
        ("ape", {"scale_mode": "odd"}),
        ("ape", {"heat": 1.0}),
        ("block", {"sink": "drain"}),
        ("pced", {"gamma": -1.0}),
        ("pced", {"beta": "sometimes"}),
        ("full", {"anything": 1}),
    ):
        with pytest.raises(ConfigError):
            make_engine(name, {name: tuning})
