"""Sampling and detokenisation: equal to transformers', and text that must stay hidden is never emitted."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from asking import request
from controlled import tokens_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from script import NOTHING, Script

from ragkv.config import build_config
from ragkv.decoding import Decoding
from ragkv.engines import Sample, make_engine
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.runtime import Generation, Runtime, Stream, runtime_of
from ragkv.runtime.decoding import Detokenizer, Sampler, StopGate, processors
from ragkv.runtime.step import AHEAD

PREFIX, CHUNKS, SUFFIX = [0, 40, 41, 42], [[50, 51, 52], [60, 61, 62, 63, 64], [70, 71]], [80, 81, 82]
PROMPT = [*PREFIX, *itertools.chain(*CHUNKS), *SUFFIX]


def asked(model, name):
    """The engine, and a request over three chunks."""
    engine = make_engine(name, {})
    return engine, request(model, engine, CHUNKS, [0.3, 0.6, 0.8], SUFFIX, PREFIX)


def decode(model, engine, request, steps=12, decoding=None, **more):
    generation = Generation(max_new_tokens=steps, decoding=decoding or Decoding(), **more)
    return runtime_of(model).decode(engine, request, generation)


def answer(model, name, decoding=None, steps=12, **more) -> list[int]:
    return [token.token_id for token in decode(model, *asked(model, name), steps, decoding, **more)]


SAMPLED = [
    Decoding(temperature=1.0, seed=11),
    Decoding(temperature=0.7, seed=12),
    Decoding(top_p=0.8, seed=13),
    Decoding(temperature=1.5, top_k_tokens=5, seed=14),
    Decoding(temperature=2.0, min_p=0.1, seed=15),
    Decoding(temperature=1.3, top_k_tokens=40, top_p=0.9, min_p=0.02, repetition_penalty=1.4, seed=16),
]


def generated(model, decoding):
    """Generate with transformers' `generate` after `torch.manual_seed`; its repetition penalty ignores the prompt."""
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    own, drawn = LogitsProcessorList(), {}
    if decoding.repetition_penalty != 1:
        own.append(RepetitionPenaltyLogitsProcessor(decoding.repetition_penalty, prompt_ignore_length=len(PROMPT)))
    if decoding.effective_temperature:
        drawn = {
            "temperature": decoding.effective_temperature,
            "top_k": decoding.top_k_tokens or 0,
            "min_p": decoding.min_p,
        }
        drawn["top_p"] = decoding.top_p or 1.0
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    with model.plain() as plain, torch.random.fork_rng():
        torch.manual_seed(decoding.seed or 0)
        how = {"do_sample": bool(drawn), "max_new_tokens": 12, "logits_processor": own, **drawn}
        whole = plain.generate(torch.tensor([PROMPT]), attention_mask=mask, **how)
    return whole[0, len(PROMPT) :].tolist()


GREEDY = [Decoding(repetition_penalty=penalty) for penalty in (1.3, 3.0, 0.5)]


@pytest.mark.parametrize("decoding", [*SAMPLED, *GREEDY], ids=lambda d: f"seed{d.seed}-{d.repetition_penalty}")
def test_full_writes_what_generate_writes(decoding, make_model):
    model = make_model("llama")
    found = answer(model, "full", decoding)
    assert found == generated(model, decoding)
    assert decoding.repetition_penalty < 3 or found != answer(model, "full")


@pytest.mark.parametrize("name", ["ape", "block", "pced"])
def test_scores_of_every_engine_go_through_transformers_chain(name, make_model):
    """For PCED these are the combined scores: contrasted logits plus prior."""
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    decoding = Decoding(temperature=1.4, top_k_tokens=30, top_p=0.9, repetition_penalty=1.2, seed=5)
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(30),
            TopPLogitsWarper(0.9),
        ]
    )
    model = make_model("llama")
    stream, sampler = Stream(runtime_of(model), *asked(model, name)), Sampler(decoding)
    generator, ids = torch.Generator().manual_seed(5), []
    for _ in range(8):
        before = stream.scores.clone()
        processed = chain(torch.tensor([ids], dtype=torch.long), before[None].clone())
        assert torch.equal(processors(decoding)(torch.tensor([ids], dtype=torch.long), before[None]), processed)
        expected = int(torch.multinomial(torch.softmax(processed, -1), 1, generator=generator))
        chosen, finite = sampler.choose(Sample(stream.scores), ids)
        ids.append(int(chosen))
        assert ids[-1] == expected
        assert bool(finite)
        assert torch.equal(stream.scores, before)
        stream.advance(ids[-1])


@pytest.mark.parametrize("drawn", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["full", "pced"])
def test_openai_penalties_are_subtracted_by_counts(name, drawn, make_model):
    """Against the formula, token by token; and the answers of requests together are those of each alone."""
    model = make_model("llama")
    penalties = [(1.5, 0.0), (0.0, -2.0), (-0.5, 0.75)]
    asks = [Decoding(presence_penalty=p, frequency_penalty=f, **drawn) for p, f in penalties]
    alone = [answer(model, name, each) for each in asks]
    for (presence, frequency), ids in zip(penalties, alone, strict=True):
        stream, generator = Stream(runtime_of(model), *asked(model, name)), torch.Generator().manual_seed(5)
        for at, token in enumerate(ids):
            scores = stream.scores.clone()
            for seen in set(ids[:at]):
                scores[seen] -= presence + frequency * ids[:at].count(seen)
            if drawn:
                shares = torch.softmax(scores[None] / 0.8, -1)
                assert token == int(torch.multinomial(shares, 1, generator=generator))
            else:
                assert scores[token] == scores.max()
            stream.advance(token)
    assert len({*map(tuple, [*alone, answer(model, name, Decoding(**drawn))])}) > (1 if drawn else 2)
    runtime = runtime_of(model)
    jobs = [runtime.submit(*asked(model, name), Generation(max_new_tokens=12, decoding=each)) for each in asks]
    assert [[token.token_id for token in runtime.tokens(job)] for job in jobs] == alone


@pytest.mark.parametrize(
    "decoding",
    [
        Decoding(temperature=1e-4),
        Decoding(top_k_tokens=1),
        Decoding(top_p=1e-6),
        Decoding(min_p=1.0),
        Decoding(temperature=0, top_p=0.5, top_k_tokens=9, seed=1),
    ],
    ids=["cold", "top-k", "top-p", "min-p", "zero"],
)
def test_sampling_that_leaves_one_token_is_greedy(decoding, make_model):
    model = make_model("llama")
    assert answer(model, "pced", decoding) == answer(model, "pced")


def test_processors_of_the_callers_own_may_write_in_place(make_model):
    model = make_model("llama")
    stream = Stream(runtime_of(model), *asked(model, "pced"))
    best, rest = stream.best(), stream.scores.clone()

    def ban(ids, scores):
        scores[:, best] = -torch.inf
        return scores

    assert Sampler(Decoding(), [ban]).choose(Sample(stream.scores), []) == (rest.topk(2).indices[1], None)
    assert torch.equal(stream.scores, rest)
    assert best not in answer(model, "pced", processors=[ban])


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_processors_of_the_callers_own_stand_where_generate_puts_them(temperature):
    """After the repetition penalty, before the temperature; they see only the generated ids."""
    seen = []

    def watch(ids, scores):
        seen.append((ids.tolist(), scores[0].tolist()))
        return scores

    decoding = Decoding(temperature=temperature, repetition_penalty=2.0, seed=1)
    Sampler(decoding, [watch]).choose(Sample(torch.tensor([1.0, -1.0, 3.0, 2.0])), [2, 1, 2])
    assert seen == [([[2, 1, 2]], [1.0, -2.0, 1.5, 2.0])]


@pytest.mark.parametrize(("lengths", "tokens"), [([3], 3), ([7, 2], 2)])
def test_any_of_the_callers_stopping_criteria_ends_the_answer(lengths, tokens, make_model):
    from transformers import MaxLengthCriteria

    model, criteria = make_model("llama"), [MaxLengthCriteria(length) for length in lengths]
    found = list(decode(model, *asked(model, "ape"), 9, criteria=criteria))
    assert [t.finish_reason for t in found] == [None] * (tokens - 1) + ["stop"]


@pytest.mark.parametrize("scores", [[0.0, float("nan")], [float("inf"), 0.0], [float("-inf")] * 2], ids=str)
def test_scores_that_are_no_numbers_are_refused(scores, make_model):
    model, drawn = make_model("llama"), Decoding(temperature=1.0, seed=11)
    alone = answer(model, "full", drawn)
    refused = decode(model, *asked(model, "full"), 4, drawn, processors=[lambda *_: torch.tensor([scores])])
    beside = decode(model, *asked(model, "full"), 12, drawn)
    ids = [next(beside).token_id]
    with pytest.raises(UnsupportedModelError, match="not finite"):
        list(refused)
    assert ids + [token.token_id for token in beside] == alone  # the other request in the batch continues as if alone


def test_the_tail_is_cut_by_top_p_before_min_p():
    """In `generate`'s order: top-p looks at all tokens, min-p at the remaining ones; the reverse order cuts more."""
    from transformers import LogitsProcessorList, MinPLogitsWarper, TopPLogitsWarper

    scores = torch.tensor([[0.4, 0.2, 0.15, 0.15, 0.1]]).log()
    decoding = Decoding(top_p=0.62, min_p=0.45, seed=1)
    ids = torch.zeros((1, 0), dtype=torch.long)
    expected = LogitsProcessorList([TopPLogitsWarper(0.62), MinPLogitsWarper(0.45)])(ids, scores.clone())
    assert torch.equal(processors(decoding)(ids, scores.clone()), expected)


MANY = [("full", SAMPLED[0]), ("pced", SAMPLED[5]), ("ape", SAMPLED[1]), ("full", Decoding()), ("pced", SAMPLED[0])]


def test_threads_do_not_influence_each_other(make_model):
    model = make_model("llama")
    alone = [answer(model, name, decoding, steps=12) for name, decoding in MANY]
    state = torch.get_rng_state()
    results: list[list[int]] = [[] for _ in MANY]
    gate = threading.Barrier(len(MANY))

    def work(i: int) -> None:
        gate.wait()
        results[i] = answer(model, MANY[i][0], MANY[i][1], steps=12)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(MANY))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == alone
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn from the process's generator


def test_a_seed_is_drawn_where_none_was_given_and_repeats_the_answer(make_model):
    model = make_model("llama")
    one, two = Decoding(temperature=3.0).settled(), Decoding(temperature=3.0).settled()
    assert one.seed != two.seed
    assert answer(model, "block", one) == answer(model, "block", one)
    assert answer(model, "block", one) != answer(model, "block", two)
    unsettled = Decoding(temperature=3.0)
    assert answer(model, "block", unsettled) != answer(model, "block", unsettled)
    assert Decoding().settled() == Decoding(temperature=0.0)


KINDS = ["mini", "byte-level BPE", "metaspace BPE", "metaspace BPE, prefixed", "Unigram"]
"""Every way in which tokenizers' decoders join text."""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_together_are_the_decoding_of_all_ids(kind, data):
    tokens = tokens_of(kind)
    vocabulary = len(tokens._tokenizer)
    odd = st.lists(st.integers(0, vocabulary - 1) | st.sampled_from([0, 1, 2, vocabulary - 1]), max_size=5)
    written = st.text(max_size=4).map(lambda text: list(tokens.encode(text)))
    ids = [i for part in data.draw(st.lists(odd | written, max_size=6)) for i in part]
    detokenizer = Detokenizer(tokens)
    pieces = [detokenizer.push(i) for i in ids]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    text, whole = "".join(pieces) + detokenizer.flush(), tokens.decode(ids)
    # an unfinished character at the end is left out
    assert text in [tokens.decode(ids[: len(ids) - n]) for n in range(4 if whole.endswith("\ufffd") else 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_at_once_and_from_a_short_window(kind, monkeypatch):
    """Text is not decoded repeatedly, and ordinary words are emitted at once."""
    tokens = tokens_of(kind)
    ids = tokens.encode("the cat sat at the cat. " * 40)
    lengths = []
    plain = tokens.decode
    monkeypatch.setattr(tokens, "decode", lambda part: lengths.append(len(part)) or plain(part))
    detokenizer = Detokenizer(tokens)
    late = 0
    for at, i in enumerate(ids):
        detokenizer.push(i)
        late = max(late, len(detokenizer._window) - detokenizer._context)
        assert at < 8 or late <= 6
    assert max(lengths) <= 12  # at most a word in byte tokens, and its left context


def test_a_run_of_byte_tokens_waits_until_it_is_judged():
    """A later invalid byte turns the whole run into U+FFFD, so no part of it may be emitted earlier."""
    tokens = tokens_of("metaspace BPE")
    good = [tokens._tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "漢".encode()]
    bad = tokens._tokenizer.convert_tokens_to_ids("<0xFF>")
    [word] = tokens._tokenizer.convert_tokens_to_ids(["▁the"])
    assert tokens.decode([*good, bad]) == "\ufffd" * 4
    detokenizer = Detokenizer(tokens)
    assert [detokenizer.push(i) for i in [*good, word, word]] == ["", "", "", "漢 the", " the"]


def test_what_waited_comes_out_once():
    tokens = tokens_of("metaspace BPE")
    detokenizer, gate = Detokenizer(tokens), StopGate(["##"])
    for name in ("<0x41>", "<0xE5>"):  # the second begins a character
        assert detokenizer.push(tokens._tokenizer.convert_tokens_to_ids(name)) == ""
    assert [detokenizer.flush(), detokenizer.flush()] == ["A", ""]
    assert gate.push("one#") == "one"
    assert [gate.flush(), gate.flush()] == ["#", ""]


STOPS = st.lists(st.text("abn\n", min_size=1, max_size=5), max_size=4)


def whole(text: str, stops: list[str]) -> str:
    """Slow reference: read letters until a stop string ends, and cut before the longest one that ends there."""
    for end in range(1, len(text) + 1):
        if met := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, met))]
    return text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("abn\n", max_size=6), max_size=8), STOPS)
@example(["ab", "ab", "an"], ["aban"])
@example(["aab"], ["ab"])
@example(["abcd"], ["abcde", "bc"])
@example([*"xab#cd#e"], ["ab#d", "#e", "b#cx"])
def test_stop_strings_cut_the_same_however_the_text_is_split(pieces, stops):
    gate = StopGate(stops)
    shown = ""
    for piece in pieces:
        shown += gate.push(piece)
        if not gate.closed:  # held back: exactly the longest suffix that may become a stop string
            waiting = shown + gate._held
            ends = [n for stop in stops for n in range(1, len(stop)) if waiting.endswith(stop[:n])]
            assert len(gate._held) == max(ends, default=0)
    shown += gate.flush()
    assert shown == whole("".join(pieces), stops)
    assert gate.closed == (shown != "".join(pieces))


def script(model, text, *, steps=None, **settings_):
    ids = model.tokens.encode(text)
    return list(decode(model, Script(ids), NOTHING, steps or len(ids), Decoding(**settings_)))


def test_a_stop_string_is_never_shown_and_ends_the_answer(make_model):
    model = make_model("llama")
    tokens = script(model, "one\n\ntwo\n\n\nthree", stop=["\n\n\n", "##"])
    assert "".join(t.text for t in tokens) == "one\n\ntwo"
    assert tokens[-1].finish_reason == "stop"
    texts = [t.text for t in tokens]
    assert texts[3:6] == ["", "", "\n\nt"]  # held back, then emitted when a letter followed
    assert len(tokens) == len("one\n\ntwo\n\n\n")


def test_what_was_held_back_comes_out_at_the_end(make_model):
    model = make_model("llama")
    limited = script(model, "one\n", stop=["\n\n"])
    assert [t.text for t in limited] == ["o", "n", "e", "\n"]
    assert limited[-1].finish_reason == "length"
    ended = list(decode(model, Script([*model.tokens.encode("one#"), 1]), NOTHING, 9, Decoding(stop=("##",))))
    assert "".join(t.text for t in ended) == "one#"
    assert ended[-1].finish_reason == "stop"


def test_characters_stay_whole_beside_stop_strings(make_model):
    model = make_model("llama")
    tokens = script(model, "né 漢字 🙂 fin 漢字!", stop=["fin 漢字"])
    assert "".join(t.text for t in tokens) == "né 漢字 🙂 "
    assert all("\ufffd" not in t.text for t in tokens)
    cut = script(model, "a漢", steps=3)
    assert model.tokens.decode([t.token_id for t in cut]) == "a\ufffd"
    assert "".join(t.text for t in cut) == "a"


class Facts(SimpleNamespace):
    """The attributes that the runtime reads of a model that is never run."""


def facts(tokens):
    return Facts(
        tokens=tokens,
        eos_ids=frozenset(),
        max_positions=None,
        missing_capabilities={},
        moves_within=None,
        device=torch.device("cpu"),
    )


def test_a_stop_string_that_only_the_end_completes():
    """A run of byte tokens is decoded when it ends. At the token limit, that completes the stop string, which is
    hidden.
    """
    tokens = tokens_of("metaspace BPE")
    ids = [*tokens.encode("at "), *(tokens._tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "字".encode())]
    model = facts(tokens)

    def message(**settings_):
        generation = Generation(max_new_tokens=len(ids), decoding=Decoding(**settings_))
        found = list(Runtime(model).decode(Script(ids), NOTHING, generation))
        return "".join(token.text for token in found).strip(), found[-1].finish_reason

    assert message() == ("at 字", "length")
    assert message(stop=("字",)) == ("at", "stop")
    assert message(stop=("字!",)) == ("at 字", "length")


@pytest.mark.parametrize("stop", ["\n", "\n\n", "at\n", "字", "t\n\n字"])
def test_a_stop_string_of_byte_tokens_ends_the_answer_with_the_token_that_completes_it(stop):
    """Llama 2 spells a line break as <0x0A>. A run of such tokens may go on for long before it is judged."""
    tokens = tokens_of("metaspace BPE")
    ids = [*tokens.encode("at"), *(tokens._tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "\n\n字".encode())]
    expected = next(n for n in range(len(ids) + 1) if stop in tokens.decode(ids[:n]))
    model, generation = facts(tokens), Generation(max_new_tokens=99, decoding=Decoding(stop=(stop,)))
    found = list(Runtime(model).decode(Script([*ids, *[ids[-4]] * 25]), NOTHING, generation))
    assert (len(found), found[-1].finish_reason) == (expected, "stop")
    assert "".join(token.text for token in found) == whole(tokens.decode(ids[:expected]), [stop])


@pytest.mark.parametrize("name", ["full", "ape", "pced"])
def test_an_answer_ends_with_the_models_positions(name, make_model, monkeypatch):
    model = make_model("llama")
    endless = Decoding(repetition_penalty=1.3)
    monkeypatch.setattr(model, "eos_ids", frozenset())
    engine, wanted = asked(model, name)
    runtime = runtime_of(model)
    first = Stream(runtime, engine, wanted).position
    monkeypatch.setattr(model, "max_positions", first + 3)
    job = runtime.submit(engine, wanted, Generation(max_new_tokens=50, decoding=endless))
    tokens = list(runtime.tokens(job))
    assert len(tokens) == 4  # the last one is emitted, and never read
    assert tokens[-1].finish_reason == "length"
    assert job.position == first + 3


def test_stop_ids_end_the_answer_without_text(make_model):
    model = make_model("llama")
    [semicolon] = model.tokens.encode(";")
    tokens = script(model, "a;b", stop_ids=[semicolon])
    assert [(t.text, t.finish_reason) for t in tokens] == [("a", None), ("", "stop")]


def test_a_cancelled_answer_has_no_first_token(make_model, monkeypatch):
    """An answer that is cancelled during prefill emits nothing."""
    model = make_model("llama")
    runtime, honest = runtime_of(model), model.step
    job = runtime.submit(*asked(model, "full"), Generation(max_new_tokens=6))
    monkeypatch.setattr(model, "step", lambda *args, **more: runtime.cancel(job) or honest(*args, **more))
    assert list(runtime.tokens(job)) == []


def test_an_answer_that_was_cancelled_before_it_began_reads_nothing(make_model, monkeypatch):
    model = make_model("llama")
    runtime = runtime_of(model)
    job = runtime.submit(*asked(model, "full"), Generation(max_new_tokens=6))
    runtime.cancel(job)
    monkeypatch.setattr(model, "step", None)  # any call fails
    assert list(runtime.tokens(job)) == []


def test_cancelling_ends_before_the_next_token(make_model, monkeypatch):
    model = make_model("llama")
    runtime = runtime_of(model)
    whole, honest, steps = answer(model, "full"), model.step, []
    monkeypatch.setattr(model, "step", lambda *args, **more: steps.append(args) or honest(*args, **more))
    job = runtime.submit(*asked(model, "full"), Generation(max_new_tokens=12))
    tokens = runtime.tokens(job)
    assert [next(tokens).token_id, next(tokens).token_id] == whole[:2]
    runtime.cancel(job)
    assert list(tokens) == []
    assert len(steps) == 2  # no further model step


def test_tokens_that_wait_are_not_given_out_after_cancelling(make_model):
    """The thread that drives the step computes the tokens of all requests, also of those that are read slowly."""
    model = make_model("llama")
    runtime = runtime_of(model)
    job = runtime.submit(*asked(model, "full"), Generation(max_new_tokens=12))
    slow = runtime.tokens(job)
    next(slow)
    list(decode(model, *asked(model, "ape"), 6))
    assert job.tokens
    runtime.cancel(job)
    assert list(slow) == []


def test_a_slow_reader_is_not_run_ahead_of_without_end(make_model):
    model, engine = make_model("llama"), Script([40] * 500)
    runtime = runtime_of(model)
    job = runtime.submit(engine, NOTHING, Generation(max_new_tokens=500))
    slow = runtime.tokens(job)
    next(slow)
    assert engine.asked <= AHEAD + 1
    assert len(list(slow)) == 499


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -1}, "temperature must be 0 .greedy. or from 0.0001 to 100, not -1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": 1e-9}, "temperature must be"),
        ({"temperature": True}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.2}, "top_p must be"),
        ({"top_k_tokens": 0}, "top_k_tokens must be a whole number from 1, not 0"),
        ({"top_k_tokens": 2.5}, "top_k_tokens must be"),
        ({"min_p": 2}, "min_p must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from 0.01 to 100"),
        ({"repetition_penalty": None}, "repetition_penalty must be from"),
        ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": 1 << 63}, "seed must be a whole number"),
        ({"seed": 10**400}, "seed must be a whole number"),
        ({"stop": "abc"}, "stop must be a list of strings"),
        ({"stop": [""]}, "stop must hold strings that are not empty"),
        ({"stop": [3]}, "stop must hold strings"),
        ({"stop_ids": [-3]}, "stop_ids must hold token ids"),
        ({"stop_ids": 3}, "stop_ids must be a list"),
    ],
)
def test_bad_settings_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        Decoding(**wrong)


def test_settings_from_plain_values():
    found = build_config(Decoding, {"temperature": 1, "stop": ["a", "b"], "stop_ids": [3]}, "decoding")
    assert found == Decoding(temperature=1, stop=("a", "b"), stop_ids=(3,))
    for wrong in ({"stop": ["a", 3]}, {"stop_ids": ["a"]}, {"temperature": "hot"}, {"heat": 1}):
        with pytest.raises(ConfigError):
            build_config(Decoding, wrong, "decoding")


def test_sampling_begins_where_it_is_asked_for():
    assert Decoding().effective_temperature == 0
    assert Decoding(seed=1, repetition_penalty=1.2).effective_temperature == 0
    sampling = Decoding(top_p=0.9), Decoding(top_k_tokens=4), Decoding(min_p=0.1)
    assert [each.effective_temperature for each in sampling] == [1, 1, 1]
    assert Decoding(top_p=0.9, temperature=0).effective_temperature == 0
