"""Requests of the doctor are a query's, and its figures those of the distributions; nothing is written."""

import pytest
import torch

from ragkv.decoding import Decoding
from ragkv.doctor.compare import ChunkReader, Comparer, RoundTrip, bit_equal, greedy, next_token_kl, with_kv
from ragkv.engines import make_engine
from ragkv.errors import UnsupportedModelError
from ragkv.runtime import Stream, runtime_of
from ragkv.store import codec_from_config

QUESTION = "Who founded Halden Works?"


def request_of(rag, name):
    return ChunkReader(rag).request(make_engine(name, {}), QUESTION, rag.retrieve(QUESTION))


@pytest.mark.parametrize("name", ["full", "single", "ape", "block", "pced"])
def test_a_request_is_the_one_that_a_query_gets(rag, name):
    engine = make_engine(name, {})
    own, _ = rag.request(engine, QUESTION, rag.retrieve(QUESTION)[: engine.most_chunks][::-1])
    request = request_of(rag, name)
    for field in ("prefix_ids", "suffix_ids", "question", "prompt"):
        assert getattr(request, field) == getattr(own, field)
    assert [(c.token_ids, c.score) for c in request.chunks] == [(c.token_ids, c.score) for c in own.chunks]
    if engine.encoding is None:
        assert request.prefix is None
        return
    assert bit_equal(request.prefix, own.prefix)
    for mine, theirs in zip(request.chunks, own.chunks, strict=True):  # other batch sizes, so other last bits
        torch.testing.assert_close(mine.kv.keys, theirs.kv.keys, atol=1e-5, rtol=1e-5)
        assert mine.kv.encoded_at == theirs.kv.encoded_at


def test_nothing_is_encoded_twice_or_written(rag, monkeypatch):
    before = rag.store.stats()
    reader, scored = ChunkReader(rag), rag.retrieve(QUESTION)
    encoded = []
    encode = rag.model.encode
    monkeypatch.setattr(rag.model, "encode", lambda ids, **more: encoded.append(len(ids)) or encode(ids, **more))
    for name in ("ape", "pced", "block"):
        reader.request(make_engine(name, {}), QUESTION, scored)
    assert encoded == [1, 2, 2]  # the prefix, the chunks after it, the chunks alone
    assert rag.store.stats() == before


def test_codecs_are_tried_on_all_kv_of_a_request(rag, coarse):
    request = request_of(rag, "block")
    for name in ("raw", "zstd"):
        trip = RoundTrip(codec_from_config({"id": name}))
        recoded = with_kv(request, trip)
        assert trip.exact
        assert trip.raw_bytes == request.prefix.nbytes + sum(c.kv.nbytes for c in request.chunks)
        assert all(bit_equal(a.kv, b.kv) for a, b in zip(recoded.chunks, request.chunks, strict=True))
    trip = RoundTrip(codec_from_config({"id": coarse}))
    lossy = with_kv(request, trip)
    assert not trip.exact
    assert not bit_equal(lossy.prefix, request.prefix)
    torch.testing.assert_close(lossy.chunks[0].kv.keys, request.chunks[0].kv.keys, atol=0.05, rtol=0.01)


def test_kl_is_the_textbook_s():
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(50, generator=generator).log_softmax(-1) for _ in range(2))
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    assert next_token_kl(p, q) == pytest.approx(float(expected), abs=1e-6)
    assert next_token_kl(p, p) == 0
    halves = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    assert next_token_kl(*halves) == pytest.approx(0.5 * torch.log(torch.tensor(2.0)).item())
    sure = torch.full((50,), -torch.inf)
    sure[3] = 0.0
    assert next_token_kl(sure, q) == pytest.approx(-float(q[3]), abs=1e-6)
    assert next_token_kl(p, sure) < 100  # finite where a token has probability 0


def test_an_engine_follows_itself_without_a_difference(rag):
    comparer = Comparer(rag.model, max_new_tokens=5)
    for name in ("full", "pced"):
        engine, request = make_engine(name, {}), request_of(rag, name)
        trace = comparer.answer(engine, request)
        again, own = comparer.along(engine, request, trace)
        assert again.kl == (0.0,) * len(trace.ids)
        assert all(again.agreed)
        assert again.same
        assert trace.text == own.text == rag.query(QUESTION, engine=name, max_new_tokens=5).text


def test_an_answer_ends_at_a_stop_of_the_index(rag):
    engine, request = make_engine("full", {}), request_of(rag, "full")

    def answer(**settings):
        return Comparer(rag.model, max_new_tokens=6, decoding=Decoding(**settings)).answer(engine, request)

    whole = answer()
    assert len(whole.ids) == 6
    assert answer(stop_ids=(whole.ids[2],)).ids == whole.ids[: whole.ids.index(whole.ids[2]) + 1]
    letter = whole.text[-1]
    assert answer(stop=("never", letter)).text == whole.text[: whole.text.index(letter)].strip()


def test_scores_that_are_no_numbers_are_refused(rag):
    stream = Stream(runtime_of(rag.model), make_engine("full", {}), request_of(rag, "full"))
    with torch.inference_mode():
        stream.scores.fill_(torch.nan)
    with pytest.raises(UnsupportedModelError, match="computes NaN scores in float32"):
        greedy(rag.model, stream, max_new_tokens=2)
