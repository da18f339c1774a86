"""A question's KV from memory, store and model: whose it is, in which order it comes, and what is counted as what."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from ragkv import RagKV
from ragkv.attention.kv import ChunkKV
from ragkv.engines import make_engine
from ragkv.errors import CorruptStoreError
from ragkv.index.recall import Ahead
from ragkv.store import KVIdentity
from ragkv.types import Encoding

TEXTS = {
    "halden.txt": "Halden Works was founded by Mira Oskel in 1907.",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn, far from any sea.",
    "carr.txt": "Carr is a town.",
}
QUESTION = "Who founded Halden Works?"


@pytest.fixture
def rag(tmp_path, model_folder):
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    folder = tmp_path / "index"
    made = RagKV.create(folder, model=str(model_folder), device="cpu", chunk_tokens=128, engines=("block",))
    with made:
        made.ingest(*(tmp_path / name for name in TEXTS))
        yield made


def asked(rag, scored, engine="block"):
    return rag.request(make_engine(engine, {}), QUESTION, scored)


def by_source(rag, *names):
    found = {scored.source.rsplit("/")[-1]: scored for scored in rag.retrieve("Halden, Bolt, Carr", top_k=3)}
    return [found[name] for name in names]


def expected(rag, scored, prefix=None):
    [kv] = rag.model.encode([scored.chunk.token_ids], prefix=prefix)
    return kv


def same(one, other):
    for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", ["block", "ape"])
@pytest.mark.parametrize("names", [("halden.txt", "bolt.txt", "carr.txt"), ("carr.txt", "halden.txt", "bolt.txt")])
def test_every_chunk_has_its_own_kv_in_the_order_of_the_question(rag, engine, names):
    """First from the store or newly encoded, then from memory, with another order in between."""
    scored = by_source(rag, *names)
    for order in (scored, scored[::-1], scored[1:] + scored[:1]):
        made, _ = asked(rag, order, engine)
        prefix = made.prefix if engine == "ape" else None
        for chunk, given in zip(made.chunks, order, strict=True):
            assert (chunk.token_ids, chunk.score) == (given.chunk.token_ids, given.score)
            assert chunk.kv.encoded_at == (len(made.prefix_ids) if engine == "ape" else 0)
            same(chunk.kv, expected(rag, given, prefix))


def test_the_score_is_the_fused_one(rag):
    [scored] = by_source(rag, "halden.txt")
    made, _ = asked(rag, [replace(scored, retrieval_score=7.5, rerank_score=-3.0, score=0.25)], "pced")
    assert [chunk.score for chunk in made.chunks] == [0.25]


def test_hits_and_misses_are_counted_by_chunk(rag):
    """What the store has is a hit, what it has not a miss; two chunks of the same words are two of either."""
    halden, carr = by_source(rag, "halden.txt", "carr.txt")
    own = replace(carr, chunk=rag.chunk("Dorn is a river.", chunk_id="dorn"), source="mine")
    twin = replace(halden, chunk=replace(halden.chunk, chunk_id="my own"))
    again = replace(own, chunk=replace(own.chunk, chunk_id="my own too"))
    sizes = {s.source: expected(rag, s).nbytes for s in (halden, own, carr)}
    made, use = asked(rag, [halden, twin, own, again])
    assert (use.hits, use.misses, use.memory_hits) == (2, 2, 0)
    assert (use.bytes, use.tokens) == (2 * sizes[halden.source], 2 * len(halden.chunk.token_ids))
    assert made.chunks[0].kv is made.chunks[1].kv
    assert made.chunks[2].kv is made.chunks[3].kv
    made, use = asked(rag, [halden, twin, carr, own])
    assert (use.hits, use.misses, use.memory_hits) == (4, 0, 3)
    assert use.bytes == 2 * sizes[halden.source] + sizes[carr.source] + sizes[own.source]


def test_an_engine_without_stored_kv_gets_and_counts_none(rag):
    made, use = asked(rag, by_source(rag, *TEXTS), "full")
    assert made.prefix is None
    assert [chunk.kv for chunk in made.chunks] == [None] * 3
    assert (use.hits, use.misses, use.bytes, use.tokens) == (0, 0, 0, 0)


def test_the_prefix_is_encoded_once_and_kept(rag):
    identity = rag.recall.identity(Encoding.STANDALONE, asked(rag, [])[0].prefix_ids)
    assert rag.store.has_kv(identity)
    made, _ = asked(rag, by_source(rag, "carr.txt"), "ape")
    same(made.prefix, rag.model.encode([made.prefix_ids])[0])


def test_only_what_memory_lacks_is_loaded_ahead(rag):
    halden, bolt, carr = by_source(rag, *TEXTS)
    asked(rag, [halden])
    read, honest = [], rag.store.get_many

    def watched(identities, **more):
        read.append([identity.chunk_ids for identity in identities])
        return honest(identities, **more)

    rag.store.get_many = watched
    try:
        assert rag.recall.ahead(Encoding.STANDALONE, [halden]) is None
        assert rag.recall.ahead(None, [bolt]) is None
        ahead = rag.recall.ahead(Encoding.STANDALONE, [halden, bolt])
        kvs, use = rag.recall.chunks(Encoding.STANDALONE, [carr, bolt, halden], ahead)
        ahead.drop()
    finally:
        del rag.store.get_many
    assert sorted(read, key=len) == sorted([[bolt.chunk.token_ids], [carr.chunk.token_ids]], key=len)
    assert (use.hits, use.memory_hits) == (3, 1)
    for kv, scored in zip(kvs, (carr, bolt, halden), strict=True):
        same(kv, expected(rag, scored))


def test_chunks_of_ones_own_are_kept_only_on_request(rag):
    """Encoded for the question, and in the store for the next one if `keep` says so."""
    [scored] = by_source(rag, "carr.txt")
    for keep, text in ((False, "Dorn is a river."), (True, "Erle is a lake.")):
        own = replace(scored, chunk=rag.chunk(text, chunk_id="mine"))
        _, use = rag.recall.chunks(Encoding.STANDALONE, [own], keep=keep)
        assert (use.hits, use.misses) == (0, 1)
        assert rag.store.has_kv(rag.recall.identity(Encoding.STANDALONE, own.chunk.token_ids)) is keep


def test_tokens_that_the_model_does_not_have_are_refused(rag):
    [scored] = by_source(rag, "carr.txt")
    foreign = replace(scored, chunk=replace(scored.chunk, token_ids=(5, 10**6)))
    with pytest.raises(CorruptStoreError, match="tokens that its model does not have"):
        asked(rag, [foreign])


# --- what is on its way


def one(number):
    return KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=(number,))


def tiny():
    return ChunkKV(keys=(torch.zeros(1, 1, 2),), values=(torch.zeros(1, 1, 2),))


def test_what_is_taken_was_waited_for():
    """The load ends only after somebody has begun to wait for it, or a moment later."""
    gate, ended = threading.Event(), threading.Event()

    def load():
        gate.wait(600)
        ended.set()
        return {one(1): tiny(), one(2): tiny()}

    ahead = Ahead(load)
    threading.Timer(0.05, gate.set).start()
    assert set(ahead.take([one(2), one(3)])) == {one(2)}
    assert ended.is_set()
    ahead.drop()


def test_dropping_waits_too_and_leaves_no_thread():
    """The store may be closed after it."""
    gate, ended = threading.Event(), threading.Event()

    def load():
        gate.wait(600)
        ended.set()
        return {}

    ahead = Ahead(load)
    threading.Timer(0.05, gate.set).start()
    ahead.drop()
    assert ended.is_set()


def test_what_was_taken_or_dropped_is_held_no_longer():
    """KV is large: what a question did not need, or has let go, must not live as long as the loader."""
    ahead = Ahead(lambda: {one(1): tiny(), one(2): tiny()})
    taken = ahead.take([one(1)])
    held = weakref.ref(taken[one(1)].keys[0])
    del taken
    gc.collect()
    assert held() is None
    loads = [{one(1): tiny()}]
    watched = weakref.ref(loads[0][one(1)].keys[0])
    other = Ahead(loads.pop)
    other.drop()
    gc.collect()
    assert other.take([one(1)]) == {}
    ahead.drop()
    assert watched() is None
