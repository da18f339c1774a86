"""Blend: recomputed tokens against one dense masked pass, and each selector against its formula, written out."""

from collections import Counter

import oracle
import pytest
import torch
from asking import request, run

from ragkv.attention import batch
from ragkv.attention.batch import Step
from ragkv.attention.sequence import RecomputedSequence
from ragkv.engines import blend as blending
from ragkv.engines import make_engine
from ragkv.errors import ConfigError
from ragkv.runtime import Generation, Runtime, Stream, runtime_of

# chunks shorter and longer than the test models' windows of 8 tokens, at positions 4 to 27
PREFIX = [0, 41, 42, 43]
CHUNKS = [[50, 51, 52, 53, 54], [60, 61], [70 + i for i in range(13)], [90, 91, 92, 93]]
SUFFIX = [100, 101, 102]
CONTEXT = [*PREFIX, *(i for chunk in CHUNKS for i in chunk)]
ASKED = {"prefix": PREFIX, "chunks": CHUNKS, "scores": [0.31, 0.44, 0.82, 0.57], "suffix": SUFFIX, "steps": 3}
SECOND = len(PREFIX) + len(CHUNKS[0])
"""Start of the second chunk: the first candidate over prefixed KV."""
SELECTORS = ("question", "deviation", "first", "random")
SELECTED = [
    {"select": "question"},
    {"select": "deviation"},
    {"select": "random", "seed": 3},
    {"select": "first", "first": 2},
]


@pytest.fixture
def selected(monkeypatch):
    """The sequences of recomputed tokens, in order."""
    output = []

    class Recorded(RecomputedSequence):
        __slots__ = ()

        def __post_init__(self):
            RecomputedSequence.__post_init__(self)
            output.append(self)

    monkeypatch.setattr(blending, "RecomputedSequence", Recorded)
    return output


@pytest.fixture
def forced(monkeypatch):
    """Force the set of recomputed positions."""

    def force(places):
        def chosen(self, context, cache, ids):
            yield from ()
            return sorted(places)

        monkeypatch.setattr(blending.Blend, "_chosen", chosen)
        monkeypatch.setattr(blending.Blend, "_recomputed", lambda self, context: len(places))

    return force


def blended(model, steps=3, **tuning):
    trace = []
    run(model, "blend", tuning=tuning, trace=trace, **ASKED | {"steps": steps})
    return torch.stack(trace)


def dense(model, fresh, over, steps=3, weights=None):
    trace = []
    with model.plain() as plain:
        oracle.block(plain, PREFIX, CHUNKS, SUFFIX, steps, fresh=list(fresh), over=over, trace=trace, weights=weights)
    return torch.stack(trace)


def same(found, expected):
    reach = float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=3e-5 * reach, rtol=0)


def test_every_selection_equals_a_masked_dense_pass(unlike_family, make_model, selected):
    model = make_model(unlike_family)
    for at, tuning in enumerate(SELECTED):
        over = ("prefixed", "standalone")[(at + len(unlike_family)) % 2]
        found = blended(model, over=over, ratio=0.3, steps=2, **tuning)
        same(found, dense(model, selected[-1].indices, over, steps=2))
        assert selected[-1].indices[0] >= (SECOND if over == "prefixed" else len(PREFIX))


@pytest.mark.parametrize("family", ["gpt-oss", "gemma3n", "gemma2-unwindowed", "qwen2-moe-sliding"])
def test_everything_recomputed_is_full_attention(family, make_model):
    """With sinks, layers that share keys, soft caps, and windows that only the mask states."""
    model, full = make_model(family), []
    run(model, "full", trace=full, **ASKED)
    for over in ("prefixed", "standalone"):
        same(blended(model, over=over, ratio=1.0), torch.stack(full))


def test_ratio_one_is_full_and_ratio_nought_is_block(unlike_family, make_model):
    """The selectors have nothing to choose then, so they are tested on one family."""
    model, full, block = make_model(unlike_family), [], []
    run(model, "full", trace=full, **ASKED)
    run(model, "block", trace=block, **ASKED)
    for select in SELECTORS if unlike_family == "llama" else SELECTORS[:1]:
        for over in ("prefixed", "standalone"):
            same(blended(model, over=over, select=select, ratio=1.0, first=99), torch.stack(full))
        assert torch.equal(blended(model, over="standalone", select=select, ratio=0.0, first=0), torch.stack(block))


@pytest.mark.parametrize(
    ("family", "rows"), [("gemma3", 1), ("llama", 2), ("gemma3", 2), ("deepseek3", 2), ("gemma3", 5)]
)
def test_any_set_in_calls_of_any_size(family, rows, make_model, forced, monkeypatch):
    monkeypatch.setattr(batch, "ROWS", rows)
    model = make_model(family)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        places = sorted((torch.randperm(len(CONTEXT) - SECOND, generator=generator)[: 4 + 3 * seed] + SECOND).tolist())
        forced(places)
        same(blended(model), dense(model, places, "prefixed"))


@pytest.mark.parametrize("tuning", SELECTED, ids=str)
def test_stored_numbers_stay_as_they_are(tuning, make_model):
    model = make_model("llama")
    engine = make_engine("blend", {"blend": {"ratio": 0.5, **tuning}})
    asked = request(model, engine, CHUNKS, ASKED["scores"], SUFFIX, PREFIX)
    stored = [asked.prefix, *(chunk.kv for chunk in asked.chunks)]
    before = [[t.clone() for t in kv.tensors] for kv in stored]
    list(runtime_of(model).decode(engine, asked, Generation(max_new_tokens=3)))
    assert all(
        torch.equal(a, b)
        for kv, kept in zip(stored, before, strict=True)
        for a, b in zip(kv.tensors, kept, strict=True)
    )


def attention(model, over):
    """The question's attention over block placement, `(heads, question, all tokens)` for each layer."""
    weights = {}
    dense(model, [], over, steps=1, weights=weights)
    return {layer: each[:, len(CONTEXT) :] for layer, each in weights.items()}


def require_best(chosen, scores, k):
    """Check that the chosen positions are the k highest of `{position: score}`, up to rounding."""
    others = scores.keys() - set(chosen)
    assert len(chosen) == len(set(chosen)) == k
    assert set(chosen) <= scores.keys()
    assert min(scores[place] for place in chosen) > max(scores[place] for place in others) * (1 - 1e-4)


@pytest.mark.parametrize(("over", "layers"), [("prefixed", "middle"), ("standalone", [0, 2])], ids=str)
def test_question_chooses_what_infoflows_formula_does(unlike_family, over, layers, make_model, selected):
    """sqrt of the sum over question tokens of (mean over heads of the attention)², then the mean over layers."""
    model = make_model(unlike_family)
    blended(model, steps=1, over=over, ratio=0.25, **{} if layers == "middle" else {"layers": layers})
    numbers = {3: [2], 4: [2, 3], 7: [4, 5, 6], 9: [5, 6, 7, 8]}[model.layers] if layers == "middle" else layers
    weights, scores = attention(model, over), {}
    for place in range(SECOND if over == "prefixed" else len(PREFIX), len(CONTEXT)):
        entry = []
        for layer in numbers:
            total = 0.0
            for row in range(len(SUFFIX)):
                mean = sum(float(head[row, place]) for head in weights[layer]) / len(weights[layer])
                total += mean**2
            entry.append(total**0.5)
        scores[place] = sum(entry) / len(entry)
    require_best(selected[-1].indices, scores, 6)  # a quarter of 24, also where chunk 1 is not a candidate


def test_sum_chooses_what_prophetkvs_formula_does(unlike_family, make_model, selected):
    """The sum over question tokens and heads of attention to the candidates, then the mean over all layers."""
    model = make_model(unlike_family)
    blended(model, steps=1, preset="prophet")
    weights, scores = attention(model, "prefixed"), Counter()
    for layer in weights.values():
        for head in layer:
            for row in head:
                total = float(row[SECOND : len(CONTEXT)].sum())
                for place in range(SECOND, len(CONTEXT)):
                    scores[place] += float(row[place]) / total if total else 0.0
    require_best(selected[-1].indices, {place: scores[place] for place in range(SECOND, len(CONTEXT))}, 4)  # 20 % of 24


@pytest.mark.parametrize("over", ["prefixed", "standalone"])
def test_deviation_chooses_the_values_that_change_most_in_layer_1(over, make_model, selected):
    """CacheBlend: the new values are those of a prefill of the whole prompt, computed here by transformers."""
    for family in ("llama", "gemma3", "qwen3-yarn", "cohere2"):
        model = make_model(family)
        blended(model, steps=1, over=over, preset="cacheblend")
        whole = []
        with model.plain() as plain:
            project = plain.model.layers[1].self_attn.v_proj
            project.register_forward_hook(lambda module, given, out, whole=whole: whole.append(out[0]))
            plain(input_ids=torch.tensor([CONTEXT]), use_cache=False)
        new = whole[0][len(PREFIX) :].unflatten(1, (-1, 16 if family != "qwen3-yarn" else 32)).transpose(0, 1)
        engine = make_engine("blend", {"blend": {"over": over}})
        stored = torch.cat(
            [chunk.kv.values[1] for chunk in request(model, engine, CHUNKS, ASKED["scores"], SUFFIX, PREFIX).chunks], 1
        )
        apart = (new - stored).square().sum((0, 2))
        first = SECOND if over == "prefixed" else len(PREFIX)
        scores = {place: float(apart[place - len(PREFIX)]) for place in range(first, len(CONTEXT))}
        require_best(selected[-1].indices, scores, 3)  # 16 % of 24


def test_first_takes_the_beginning_of_every_candidate_chunk(make_model, selected):
    model = make_model("llama")
    blended(model, steps=1, preset="epic", first=3)
    assert selected[-1].indices == [9, 10, 11, 12, 13, 24, 25, 26]
    blended(model, steps=1, preset="epic", first=3, over="standalone")
    assert selected[-1].indices == [4, 5, 6, 9, 10, 11, 12, 13, 24, 25, 26]


def test_random_is_known_by_its_seed(make_model, selected):
    model = make_model("llama")
    for seed in (1, 1, 2):
        blended(model, steps=1, select="random", ratio=0.4, seed=seed)
    one, again, other = (sequence.indices for sequence in selected)
    assert one == again != other
    assert len(one) == len(other) == 9
    assert min(one) >= SECOND


def test_the_first_chunk_is_recomputed_unless_it_is_exact(make_model, selected):
    """Without a prefix, a chunk that was encoded alone is at the position at which it was encoded."""
    model = make_model("llama")
    for prefix, first in ((PREFIX, len(PREFIX)), ([], len(CHUNKS[0]))):
        run(model, "blend", tuning={"over": "standalone", "ratio": 1.0}, **ASKED | {"prefix": prefix, "steps": 1})
        assert selected[-1].indices[0] == first
    count = len(selected)
    run(model, "blend", tuning={"ratio": 1.0}, **ASKED | {"chunks": CHUNKS[:1], "scores": [0.5], "steps": 1})
    assert len(selected) == count  # nothing to recompute


@pytest.mark.parametrize(
    "tuning",
    [*SELECTED, {"select": "question", "layers": "all"}, {"ratio": 1.0}, {"ratio": 0.0}, {"over": "standalone"}],
    ids=str,
)
def test_the_charge_counts_every_token_in_every_layer(tuning, make_model, monkeypatch):
    model = make_model("llama")
    counted, attend = Counter(), Step.attend

    def counting(self, call):
        for span in self.spans:
            counted[type(span.sequence).__name__] += span.n
        return attend(self, call)

    monkeypatch.setattr(Step, "attend", counting)
    engine = make_engine("blend", {"blend": {"ratio": 0.4, **tuning}})
    asked = request(model, engine, CHUNKS, ASKED["scores"], SUFFIX, PREFIX)
    counted.clear()
    Stream(runtime_of(model), engine, asked)
    fresh = sum(counted.values()) - counted["TokenSequence"]
    assert counted["TokenSequence"] == len(SUFFIX) * model.layers
    assert engine.charge(asked, model) == pytest.approx(fresh / (model.layers * 24))
    assert make_engine("block", {}).charge(asked, model) is None


@pytest.mark.parametrize("select", SELECTORS)
def test_a_charge_is_spent_and_not_exceeded(select, make_model, selected):
    """The budget includes the selection: the rest buys as many tokens as fit, and too small a budget buys none."""
    model, candidates = make_model("llama-deep"), len(CONTEXT) - SECOND
    for charge in (0.02, 0.1, 0.5, 0.7, 0.79, 1.0):
        engine = make_engine("blend", {"blend": {"select": select, "charge": charge}})
        asked = request(model, engine, CHUNKS, ASKED["scores"], SUFFIX, PREFIX)
        count, results = len(selected), engine.charge(asked, model)
        Stream(runtime_of(model), engine, asked)
        fresh = len(selected[-1].indices) if len(selected) > count else 0
        chosen = {"question": len(SUFFIX) * 9, "deviation": 2 * candidates}.get(select, 0) / model.layers
        chosen *= charge < 0.8  # otherwise all are recomputed, without a selection
        assert results <= charge
        assert results == pytest.approx((fresh + chosen * (fresh > 0)) / 24)
        if select != "first":
            assert fresh == min(candidates, max(0, int(charge * 24 - chosen)))


def test_beside_other_engines_in_small_steps(make_model):
    """Tokens and scores equal those of each request alone, however the steps split prefill and recomputation."""
    for family in ("llama", "gemma3"):
        model = make_model(family)
        asked = [("blend", {"ratio": 0.5, **tuning}) for tuning in SELECTED] + [
            ("block", {}),
            ("pced", {}),
            ("full", {}),
        ]
        engines = [make_engine(name, {name: tuning}) for name, tuning in asked]
        requests = [request(model, engine, CHUNKS, ASKED["scores"], SUFFIX, PREFIX) for engine in engines]
        alone = [
            [token.token_id for token in Runtime(model).decode(engine, item, Generation(max_new_tokens=3))]
            for engine, item in zip(engines, requests, strict=True)
        ]
        for batch_tokens in (2, 7, 40):
            runtime = Runtime(model, batch_tokens=batch_tokens)
            jobs = [
                runtime.submit(engine, item, Generation(max_new_tokens=3))
                for engine, item in zip(engines, requests, strict=True)
            ]
            found = [[token.token_id for token in runtime.tokens(job)] for job in jobs]
            assert found == alone
            assert runtime.idle


def test_a_pass_that_failed_is_read_again(make_model, monkeypatch, runtime_warnings):
    """The numbers of a broken pass are overwritten: the answer is that of an undisturbed one."""
    model, attend = make_model("llama-deep"), Step.attend
    engine = make_engine("blend", {"blend": {"ratio": 0.5}})
    other = make_engine("block", {})
    requests = [request(model, entry, CHUNKS, ASKED["scores"], SUFFIX, PREFIX) for entry in (engine, other)]
    expected = [t.token_id for t in Runtime(model).decode(engine, requests[0], Generation(max_new_tokens=4))]
    for kind in ("AttentionProbe", "RecomputedSequence"):
        failed = []

        def failing(self, call, kind=kind, failed=failed):
            out = attend(self, call)
            if call.layer == 3 and not failed and any(type(s.sequence).__name__ == kind for s in self.spans):
                failed.append(True)
                raise RuntimeError("no memory")
            return out

        monkeypatch.setattr(Step, "attend", failing)
        runtime = Runtime(model)
        jobs = [
            runtime.submit(entry, one, Generation(max_new_tokens=4))
            for entry, one in zip((engine, other), requests, strict=True)
        ]
        assert [t.token_id for t in runtime.tokens(jobs[0])] == expected
        assert failed
        list(runtime.tokens(jobs[1]))
    assert len(runtime_warnings) == 2
    runtime_warnings.clear()


def test_settings(make_model):
    for wrong in (
        {"preset": "mix"},
        {"over": "long"},
        {"select": "all"},
        {"ratio": 1.1},
        {"ratio": "much"},
        {"ratio": -0.1},
        {"first": -1},
        {"charge": 1.5},
        {"charge": 0.1, "ratio": 0.1},
        {"layers": "first"},
        {"layers": []},
        {"layers": [-1]},
        {"score": "max"},
    ):
        with pytest.raises(ConfigError):
            make_engine("blend", {"blend": wrong})
    with pytest.raises(ConfigError, match="names layer 9, but the model has 9"):
        run(make_model("llama-deep"), "blend", tuning={"layers": [2, 9]}, **ASKED)
    config = make_engine("blend", {"blend": {"preset": "prophet", "ratio": 0.1}}).config
    assert (config.settled("ratio"), config.settled("score"), config.settled("layers")) == (0.1, "sum", "all")
    middle = make_engine("blend", {}).config
    assert [sorted(middle.scoring_layers(layers)) for layers in (1, 2, 4, 12, 28, 32)] == [
        [0],
        [1],
        [2, 3],
        [7, 8, 9, 10],
        [17, 18, 19, 20],
        [19, 20, 21, 22],
    ]
