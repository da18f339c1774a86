"""A question's KV from memory, store and model: the right KV in the right order, and the right counts."""

import gc
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from indexed import indexed
from package import in_child

from ragkv import RagKV
from ragkv.attention.kv import ChunkKV
from ragkv.engines import make_engine
from ragkv.errors import CorruptStoreError, RetrievalError
from ragkv.index.index import WriteBehind
from ragkv.index.kv_source import Prefetch
from ragkv.store import KVIdentity
from ragkv.types import Encoding

TEXTS = {
    "halden.txt": "Halden Works was founded by Mira Oskel in 1907.",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn, far from any sea.",
    "carr.txt": "Carr is a town.",
}


TUNING = {"block": {"over": "standalone"}}
QUESTION = "Who founded Halden Works?"


@pytest.fixture
def rag(tmp_path, model_folder):
    with indexed(tmp_path, TEXTS, model=model_folder, chunk_tokens=128, engines=("block",), tuning=TUNING) as made:
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
    """Equal up to the rounding of the default codec."""
    for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=2**-10)


@pytest.mark.parametrize("engine", ["block", "ape"])
@pytest.mark.parametrize("names", [("halden.txt", "bolt.txt", "carr.txt"), ("carr.txt", "halden.txt", "bolt.txt")])
def test_every_chunk_has_its_own_kv_in_the_order_of_the_question(rag, engine, names):
    """First stored or newly encoded, then from memory, after a question with another order."""
    scored = by_source(rag, *names)
    for order in (scored, scored[::-1], scored[1:] + scored[:1]):
        request, _ = asked(rag, order, engine)
        prefix = request.prefix if engine == "ape" else None
        for chunk, given in zip(request.chunks, order, strict=True):
            assert (chunk.token_ids, chunk.score) == (given.chunk.token_ids, given.score)
            assert chunk.kv.encoded_at == (len(request.prefix_ids) if engine == "ape" else 0)
            same(chunk.kv, expected(rag, given, prefix))


def test_hits_and_misses_are_counted_by_chunk(rag):
    """Stored KV is a hit, missing KV a miss; two chunks with the same text are two hits or misses."""
    halden, carr = by_source(rag, "halden.txt", "carr.txt")
    own = replace(carr, chunk=rag.chunk("Dorn is a river.", chunk_id="dorn"), source="mine")
    twin = replace(halden, chunk=replace(halden.chunk, chunk_id="my own"))
    again = replace(own, chunk=replace(own.chunk, chunk_id="my own too"))
    sizes = {s.source: expected(rag, s).nbytes // 2 for s in (halden, own, carr)}  # in memory as float16
    request, use = asked(rag, [halden, twin, own, again])
    assert (use.hits, use.misses, use.memory_hits) == (2, 2, 0)
    assert (use.bytes, use.tokens) == (2 * sizes[halden.source], 2 * len(halden.chunk.token_ids))
    assert request.chunks[0].kv is request.chunks[1].kv
    assert request.chunks[2].kv is request.chunks[3].kv
    request, use = asked(rag, [halden, twin, carr, own])
    assert (use.hits, use.misses, use.memory_hits) == (4, 0, 3)
    assert use.bytes == 2 * sizes[halden.source] + sizes[carr.source] + sizes[own.source]


def test_what_a_question_is_given(rag):
    request, use = asked(rag, by_source(rag, *TEXTS), "full")
    assert request.prefix is None
    assert [chunk.kv for chunk in request.chunks] == [None] * 3
    assert (use.hits, use.misses, use.bytes, use.tokens) == (0, 0, 0, 0)
    [scored] = by_source(rag, "halden.txt")
    request, _ = asked(rag, [replace(scored, retrieval_score=7.5, rerank_score=-3.0, score=0.25)], "pced")
    assert [chunk.score for chunk in request.chunks] == [0.25]
    [scored] = by_source(rag, "carr.txt")
    foreign = replace(scored, chunk=replace(scored.chunk, token_ids=(5, 10**6)))
    with pytest.raises(CorruptStoreError, match="tokens that its model does not have"):
        asked(rag, [foreign])
    identity = rag.kv_source.identity(Encoding.STANDALONE, asked(rag, [])[0].prefix_ids)
    assert rag.store.has_kv(identity)
    request, _ = asked(rag, by_source(rag, "carr.txt"), "ape")
    same(request.prefix, rag.model.encode([request.prefix_ids])[0])


def test_only_what_memory_lacks_is_loaded_ahead(rag):
    halden, bolt, carr = by_source(rag, *TEXTS)
    asked(rag, [halden])
    read, honest = [], rag.store.get_many

    def watched(identities, **more):
        read.append([identity.chunk_ids for identity in identities])
        return honest(identities, **more)

    rag.store.get_many = watched
    try:
        source, block = rag.kv_source, make_engine("block", TUNING)
        assert source.prefetch(block, [halden]) is None
        assert source.prefetch(make_engine("full", {}), [bolt]) is None
        prefetch = source.prefetch(block, [halden, bolt])
        kvs, use = source.get(source.plan(block, [carr, bolt, halden]), prefetch)
        prefetch.drop()
    finally:
        del rag.store.get_many
    assert sorted(read, key=len) == sorted([[bolt.chunk.token_ids], [carr.chunk.token_ids]], key=len)
    assert (use.hits, use.memory_hits) == (3, 1)
    for kv, scored in zip(kvs, (carr, bolt, halden), strict=True):
        same(kv, expected(rag, scored))


def test_chunks_of_ones_own_are_kept_only_on_request(rag):
    """Encoded for the question, and stored for the next one if `keep` is set."""
    [scored] = by_source(rag, "carr.txt")
    for keep, text in ((False, "Dorn is a river."), (True, "Erle is a lake.")):
        own = replace(scored, chunk=rag.chunk(text, chunk_id="mine"))
        _, use = rag.kv_source.get(rag.kv_source.plan(make_engine("block", TUNING), [own]), keep=keep)
        assert (use.hits, use.misses) == (0, 1)
        assert rag.store.has_kv(rag.kv_source.identity(Encoding.STANDALONE, own.chunk.token_ids)) is keep


# --- what is on its way


def key_of(number):
    return KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=(number,))


def tiny():
    return ChunkKV(keys=(torch.zeros(1, 1, 2),), values=(torch.zeros(1, 1, 2),))


@pytest.mark.parametrize("taken", [True, False])
def test_what_is_taken_or_dropped_was_waited_for(taken):
    """The load ends only after, or just before, the caller waits for it; after that the store may be closed."""
    gate, ended = threading.Event(), threading.Event()

    def load():
        gate.wait(600)
        ended.set()
        return {key_of(1): tiny(), key_of(2): tiny()}

    prefetch = Prefetch(load)
    threading.Timer(0.05, gate.set).start()
    if taken:
        assert set(prefetch.take([key_of(2), key_of(3)])) == {key_of(2)}
        assert ended.is_set()
    prefetch.drop()
    assert ended.is_set()


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), RuntimeError("out of memory"), CorruptStoreError("bad")], ids=repr
)
def test_whatever_prevents_a_load_ahead_is_left_to_the_answers_own(error, monkeypatch):
    def load():
        raise error

    assert Prefetch(load).take([key_of(1)]) == {}

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    prefetch = Prefetch(lambda: {key_of(1): tiny()})
    assert prefetch.take([key_of(1)]) == {}
    prefetch.drop()


def test_what_was_taken_or_dropped_is_held_no_longer():
    """KV is large: unneeded or released KV must not live as long as the loader."""
    prefetch = Prefetch(lambda: {key_of(1): tiny(), key_of(2): tiny()})
    taken = prefetch.take([key_of(1)])
    held = weakref.ref(taken[key_of(1)].keys[0])
    del taken
    gc.collect()
    assert held() is None
    loads = [{key_of(1): tiny()}]
    watched = weakref.ref(loads[0][key_of(1)].keys[0])
    other = Prefetch(loads.pop)
    other.drop()
    gc.collect()
    assert other.take([key_of(1)]) == {}
    prefetch.drop()
    assert watched() is None


# ---- ondemand

DOCUMENTS = {
    "halden.txt": "Halden Works was founded by Mira Oskel in 1907. Halden Works makes paper in Tarn.",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn, far from any sea.",
    "carr.txt": "Carr is a town on the river Orm. Carr Mills was founded by Ida Brock in 1921.",
}
QUESTIONS = ["Who founded Halden Works?", "What does Bolt Ltd make?", "Who founded Carr Mills?"]


def index_of(tmp_path, name="index", **settings):
    documents = tmp_path / "documents"
    documents.mkdir(exist_ok=True)
    for file, text in DOCUMENTS.items():
        (documents / file).write_text(text)
    rag = RagKV.create(tmp_path / name, model="mini", device="cpu", embedder="none", reranker="none", **settings)
    rag.ingest(documents)
    return rag


def ask(rag, question=QUESTIONS[0], engine="block", **options):
    return rag.query(question, **{"engine": engine, "top_k": 2, "max_new_tokens": 6, **options})


def stored(rag):
    return rag.store.stats().kv_records


def test_answers_are_those_of_kv_that_an_ingest_made(tmp_path):
    """Asked twice, on demand, with room for two chunks and for none: new KV is rounded before it is read."""
    with index_of(tmp_path, "all", codec="q8") as rag:
        expected = {(q, e): ask(rag, q, e).text for q in QUESTIONS[:2] for e in ("ape", "block")}
        token = rag.index.shape.token_bytes
    for number, settings in enumerate(
        ({"kv": "on-demand"}, {"kv": "on-demand", "kv_budget": 60 * token}, {"kv_budget": 0}, {"memory_budget": 0})
    ):
        with index_of(tmp_path, str(number), codec="q8", **settings) as rag:
            assert (stored(rag) == 0) == (number != 3)
            for _ in range(2):
                for (question, engine), text in expected.items():
                    assert ask(rag, question, engine).text == text
                    rag.maintenance.settle()
                    budget = rag.config.budget
                    # the prefix belongs to no chunk, and is always stored
                    prefix = rag.index.shape.nbytes(len(rag.index.prefix_ids))
                    assert budget is None or rag.store.kv_bytes <= max(budget, prefix)
            assert rag.maintenance.verify().ok
            assert (rag.store.ledger().misses > 0) == (number != 3)


def test_the_second_question_finds_what_the_first_made(tmp_path):
    with index_of(tmp_path, kv="on-demand") as rag:
        first = ask(rag)
        rag.maintenance.settle()
        assert (first.kv.hits, first.kv.misses) == (0, 2)
        assert stored(rag) == 3  # two chunks and the prefix
        ledger = rag.store.ledger()
        assert (ledger.hits, ledger.misses) == (0, 2)
        assert ledger.seconds_per_token > 0
    with RagKV.open(tmp_path / "index", device="cpu") as rag:
        second = ask(rag)
        assert (second.kv.hits, second.kv.misses, second.text) == (2, 0, first.text)
    with RagKV.open(tmp_path / "index", device="cpu") as rag:
        assert rag.store.ledger().hits == 2  # recorded on close


def test_what_is_missing_is_one_pass_beside_the_loading_of_the_rest(tmp_path, monkeypatch):
    with index_of(tmp_path, kv="on-demand") as rag:
        ask(rag, top_k=1)
        rag.maintenance.settle()
        passes, loads = [], []
        encode, get_many = rag.model.encode, rag.store.get_many

        def encoding(chunks, **more):
            passes.append(len(chunks))
            return encode(chunks, **more)

        monkeypatch.setattr(rag.model, "encode", encoding)

        def loading(identities, **more):
            loads.append(threading.current_thread().name)
            return get_many(identities, **more)

        monkeypatch.setattr(rag.store, "get_many", loading)
        rag.kv_source.memory().resize(0)
        chunks = rag.retrieve("Halden Bolt Carr founded", top_k=3)
        rag.kv_source.__dict__["_budget"] = 0
        _, use = rag.kv_source.get(rag.kv_source.plan(make_engine("block", TUNING), chunks))
    assert (use.hits, use.misses) == (1, 2)
    assert passes == [2]
    assert loads == ["ragkv-prefetch"]


@pytest.mark.parametrize("engine", ["block", "ape"])
def test_nothing_is_written_before_the_first_token(tmp_path, monkeypatch, engine):
    with index_of(tmp_path, kv="on-demand") as rag:
        _ = rag.index.shape
        commits = []
        write = rag.store._database.write
        monkeypatch.setattr(rag.store._database, "write", lambda *a, **k: commits.append(1) or write(*a, **k))
        later = WriteBehind.submit
        result = []
        monkeypatch.setattr(WriteBehind, "submit", lambda self, each: result.append(list(commits)) or later(self, each))
        with rag.stream(QUESTIONS[0], engine=engine, top_k=2, max_new_tokens=6) as stream:
            next(iter(stream))
            assert result
            assert result[0] == []  # nothing is committed before the first token is emitted
            for _ in stream:
                continue
        rag.maintenance.settle()
        assert stored(rag) == 3


def test_a_cancelled_answer_and_a_closed_index_keep_what_was_made(tmp_path):
    rag = index_of(tmp_path, kv="on-demand")
    stream = rag.stream(QUESTIONS[0], engine="block", top_k=2, max_new_tokens=50)
    next(iter(stream))
    stream.close()
    rag.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ragkv-write-behind"]
    with RagKV.open(tmp_path / "index", readonly=True) as rag:
        assert stored(rag) == 3


def test_a_batch_encodes_each_chunk_once_also_without_memory(tmp_path, monkeypatch):
    with index_of(tmp_path, kv="on-demand", memory_budget=0) as rag:
        _ = rag.index.shape
        encoded, encode = [], rag.model.encode

        def counted(chunks, **more):
            encoded.extend(map(tuple, chunks))
            return encode(chunks, **more)

        monkeypatch.setattr(rag.model, "encode", counted)
        answers = rag.query_many([QUESTIONS[0]] * 5, engine="block", top_k=2, max_new_tokens=3)
        assert len({answer.text for answer in answers}) == 1
        assert len(encoded) == len(set(encoded)) == 3


def test_a_read_only_index_answers_and_records_nothing(tmp_path):
    with index_of(tmp_path, kv="on-demand") as rag:
        expected = ask(rag).text
        rag.maintenance.settle()
        before = rag.store.ledger()
    with RagKV.open(tmp_path / "index", device="cpu", readonly=True) as rag:
        assert ask(rag).text == expected
        assert ask(rag, engine="ape").kv.misses == 2
        rag.maintenance.settle()
        assert rag.store.ledger() == before


def test_a_child_of_a_fork_waits_for_no_thread_of_the_parent(tmp_path):
    with index_of(tmp_path, kv="on-demand") as rag:
        write_behind = rag.index.write_behind
        hold, held = threading.Event(), threading.Event()

        def slow():
            held.set()
            hold.wait(600)

        write_behind.submit(write_behind.defer(slow, [b"k" * 32], 10))
        held.wait(600)

        def settle():
            write_behind.settle(whole=True)
            assert not write_behind.unstored

        assert in_child(settle) == 0
        assert write_behind.unstored
        hold.set()
        rag.maintenance.settle()
        assert not write_behind.unstored


def test_what_no_thread_could_be_started_for_is_written_when_the_index_is_closed(monkeypatch):
    """Otherwise closing would wait for a thread that never started."""
    start = threading.Thread.start

    def limited(thread):
        if thread.name == "ragkv-write-behind":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    write_behind, wrote = WriteBehind(SimpleNamespace(readonly=False)), []
    for n in range(2):
        write_behind.submit(write_behind.defer(lambda n=n: wrote.append(n), [bytes([n])], 10))
    write_behind.settle()
    assert len(write_behind.unstored) == 2
    closing = threading.Thread(target=write_behind.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    assert wrote == [0, 1]
    assert not write_behind.unstored


def test_an_ingest_makes_kv_while_there_is_room_and_says_what_it_left(tmp_path):
    with index_of(tmp_path, "all") as rag:
        whole, count, token = rag.store.kv_bytes, stored(rag), rag.index.shape.token_bytes
    with index_of(tmp_path, "some", kv_budget=whole // 2) as rag:
        assert 0 < stored(rag) < count
        assert rag.store.kv_bytes <= whole // 2
        assert rag.maintenance.verify().ok
        longer = tmp_path / "documents" / "more.txt"
        longer.write_text("Dorn is a river. " * 200)
        report = rag.ingest(longer)
        assert report.kv_later > 0
        assert rag.store.kv_bytes <= whole // 2 + token
        (tmp_path / "documents" / "halden.txt").write_text("Halden Works is gone.")
        rag.ingest(tmp_path / "documents")
        assert rag.maintenance.verify().ok


def test_the_lease_of_a_running_answer_keeps_its_kv(tmp_path):
    with index_of(tmp_path, kv="on-demand") as rag:
        ask(rag)
        rag.maintenance.settle()
        with rag.stream(QUESTIONS[0], engine="block", top_k=2, max_new_tokens=50) as stream:
            next(iter(stream))
            rag.store.set_budget(0)
            assert stored(rag) == 3
        rag.store.set_budget(0)
        assert stored(rag) == 1


def test_warming_makes_what_is_asked_for_and_no_more_the_second_time(tmp_path):
    with index_of(tmp_path, kv="on-demand", engines=("block",)) as rag:
        wanted = rag.maintenance.wanted(questions=[{"question": QUESTIONS[0], "engine": "block", "top_k": 1}])
        report = rag.maintenance.warm(wanted)
        assert (report.wanted, report.encoded, report.present, report.refused) == (1, 1, 0, 0)
        assert rag.maintenance.warm(wanted).present == 1
        assert ask(rag, top_k=1).kv.hits == 1
        rag.maintenance.settle()
        assert rag.maintenance.warm(rag.maintenance.wanted(documents=["carr.txt"])).encoded == 1
        assert rag.maintenance.warm(rag.maintenance.wanted(documents=["*"])).encoded == 1
        assert rag.store.ledger().misses == 0
        assert rag.maintenance.wanted(questions=[{"question": QUESTIONS[0], "engine": "full"}]) == {}
        rag.store.set_budget(0)
        [(identity, _)] = rag.maintenance.wanted(most=1).items()
        assert identity.chunk_ids == rag.retrieve(QUESTIONS[0], top_k=1)[0].chunk.token_ids
        assert rag.maintenance.warm(rag.maintenance.wanted(documents=["*"])).refused == 3
        assert rag.maintenance.verify().ok


def test_a_question_without_chunks_is_no_use(tmp_path):
    with index_of(tmp_path, kv="on-demand") as rag:
        with pytest.raises(RetrievalError):
            ask(rag, "zzzz qqqq")
        rag.request(make_engine("block", {}), QUESTIONS[0], [])
        rag.maintenance.settle()
        assert (rag.store.ledger().hits, rag.store.ledger().misses) == (0, 0)
