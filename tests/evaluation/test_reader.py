"""What the doctor compares is what a query runs on, bit for bit; and the metrics are those of the textbook."""

from __future__ import annotations

import pytest
import torch

from ragkv.decoding import Decoding
from ragkv.engines import make_engine
from ragkv.errors import UnsupportedModelError
from ragkv.evaluation.reader import HeldKV, Reader, bit_equal
from ragkv.evaluation.subject import Subject
from ragkv.evaluation.trace import follow, greedy, next_token_kl
from ragkv.runtime import Stream, runtime_of
from ragkv.store import codec_from_config

QUESTION = "Who founded Halden Works?"


def reader_of(rag, **changes) -> tuple[Subject, Reader]:
    subject = Subject.of(rag)
    return subject, Reader(subject.model, subject.prompt, fingerprint=subject.fingerprint, **changes)


@pytest.mark.parametrize("name", ["full", "single", "ape", "block", "pced", "mapreduce"])
def test_a_request_is_the_one_that_a_query_gets(rag, name):
    subject, reader = reader_of(rag)
    engine = make_engine(name, {})
    own, _ = rag.request(engine, QUESTION, rag.retrieve(QUESTION)[: engine.most_chunks][::-1])
    made = reader.request(engine, QUESTION, subject.retrieve(rag, QUESTION))
    for field in ("prefix_ids", "suffix_ids", "question", "prompt"):
        assert getattr(made, field) == getattr(own, field)
    assert [(c.token_ids, c.score) for c in made.chunks] == [(c.token_ids, c.score) for c in own.chunks]
    if engine.encoding is None:
        assert made.prefix is None
        return
    assert bit_equal(made.prefix, own.prefix)
    for mine, theirs in zip(made.chunks, own.chunks, strict=True):  # batches differ, so the last bits may
        torch.testing.assert_close(mine.kv.keys, theirs.kv.keys, atol=1e-5, rtol=1e-5)
        assert mine.kv.encoded_at == theirs.kv.encoded_at


def test_nothing_is_encoded_twice_or_written(rag, monkeypatch):
    before = rag.stats()
    subject, reader = reader_of(rag)
    chunks = subject.retrieve(rag, QUESTION)
    encoded = []
    encode = rag.model.encode
    monkeypatch.setattr(rag.model, "encode", lambda ids, **more: encoded.append(len(ids)) or encode(ids, **more))
    for name in ("ape", "pced", "block"):
        reader.request(make_engine(name, {}), QUESTION, chunks)
    assert encoded == [1, 2, 2]  # the prefix, the chunks after it, the chunks alone
    assert rag.stats() == before


def test_stored_kv_is_looked_up_before_anything_is_encoded(rag, monkeypatch):
    subject, reader = reader_of(rag, lookup=rag.store.get_kv)
    chunks = subject.retrieve(rag, QUESTION)
    engine = make_engine("ape", {})
    rag.query(QUESTION, engine="ape", max_new_tokens=1)  # stores the prefix's KV
    rag.settle()
    monkeypatch.setattr(rag.model, "encode", None)
    request = reader.request(engine, QUESTION, chunks)
    assert [chunk.kv.tokens for chunk in request.chunks] == [len(chunk.token_ids) for chunk in chunks]


def test_held_kv_drops_the_longest_unused(rag):
    one, two, three = rag.model.encode([[5, 6], [7, 8], [9, 10]])
    held = HeldKV(most_bytes=2 * one.nbytes)
    held.put("one", one)
    held.put("two", two)
    assert held.get("one") is one
    held.put("three", three)
    assert held.get("two") is None
    assert held.get("one") is one
    assert held.get("three") is three


def test_codecs_are_tried_on_all_kv_of_a_request(rag, coarse):
    subject, reader = reader_of(rag)
    engine = make_engine("block", {})
    request = reader.request(engine, QUESTION, subject.retrieve(rag, QUESTION))
    for name in ("raw", "zstd"):
        recoded = reader.recoded(engine, request, codec_from_config({"id": name}))
        assert recoded.exact
        assert recoded.raw_bytes == request.prefix.nbytes + sum(c.kv.nbytes for c in request.chunks)
        assert all(bit_equal(a.kv, b.kv) for a, b in zip(recoded.request.chunks, request.chunks, strict=True))
    lossy = reader.recoded(engine, request, codec_from_config({"id": coarse}))
    assert not lossy.exact
    assert not bit_equal(lossy.request.prefix, request.prefix)
    torch.testing.assert_close(lossy.request.chunks[0].kv.keys, request.chunks[0].kv.keys, atol=0.05, rtol=0.01)


def test_kl_is_the_textbook_s():
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(50, generator=generator).log_softmax(-1) for _ in range(2))
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    assert next_token_kl(p, q) == pytest.approx(float(expected), abs=1e-6)
    assert next_token_kl(p, p) == 0
    sure = torch.full((50,), -torch.inf)
    sure[3] = 0.0
    assert next_token_kl(sure, q) == pytest.approx(-float(q[3]), abs=1e-6)
    assert next_token_kl(p, sure) < 100  # finite where a token is impossible


def test_an_engine_follows_itself_without_a_difference(rag):
    subject, reader = reader_of(rag)
    for name in ("full", "pced"):
        engine = make_engine(name, {})
        request = reader.request(engine, QUESTION, subject.retrieve(rag, QUESTION))
        trace = greedy(subject.model, Stream(runtime_of(subject.model), engine, request), max_new_tokens=5)
        again = follow(subject.model, Stream(runtime_of(subject.model), engine, request), trace)
        assert again.kl == (0.0,) * len(trace.ids)
        assert again.same_answer
        text = rag.query(QUESTION, engine=name, max_new_tokens=5).text
        assert trace.text == text


def test_an_answer_ends_at_a_stop_of_the_index(rag):
    subject, reader = reader_of(rag)
    engine = make_engine("full", {})
    request = reader.request(engine, QUESTION, subject.retrieve(rag, QUESTION))

    def answer(**settings):
        stream = Stream(runtime_of(subject.model), engine, request)
        return greedy(subject.model, stream, max_new_tokens=6, decoding=Decoding(**settings))

    whole = answer()
    assert len(whole.ids) == 6
    assert answer(stop_ids=(whole.ids[2],)).ids == whole.ids[: whole.ids.index(whole.ids[2]) + 1]
    letter = whole.text[-1]
    assert answer(stop=("never", letter)).text == whole.text[: whole.text.index(letter)].strip()


def test_scores_that_are_no_numbers_are_refused(rag):
    subject, reader = reader_of(rag)
    engine = make_engine("full", {})
    stream = Stream(
        runtime_of(subject.model), engine, reader.request(engine, QUESTION, subject.retrieve(rag, QUESTION))
    )
    with torch.inference_mode():
        stream.scores.fill_(torch.nan)
    with pytest.raises(UnsupportedModelError, match="computes NaN scores in float32"):
        greedy(subject.model, stream, max_new_tokens=2)
