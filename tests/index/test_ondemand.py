"""KV that the first question makes: the same answers, one pass, stored after the first token, within the budget."""

from __future__ import annotations

import os
import threading

import pytest

from ragkv import RagKV
from ragkv.engines import make_engine
from ragkv.errors import RetrievalError
from ragkv.index.keeper import Keeper
from ragkv.store import environment
from ragkv.types import Encoding

TEXTS = {
    "halden.txt": "Halden Works was founded by Mira Oskel in 1907. Halden Works makes paper in Tarn.",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn, far from any sea.",
    "carr.txt": "Carr is a town on the river Orm. Carr Mills was founded by Ida Brock in 1921.",
}
QUESTIONS = ["Who founded Halden Works?", "What does Bolt Ltd make?", "Who founded Carr Mills?"]
ENGINES = ("ape", "block", "pced", "full")


def made(tmp_path, name="index", **settings):
    documents = tmp_path / "documents"
    documents.mkdir(exist_ok=True)
    for file, text in TEXTS.items():
        (documents / file).write_text(text)
    rag = RagKV.create(tmp_path / name, model="mini", device="cpu", embedder="none", reranker="none", **settings)
    rag.ingest(documents)
    return rag


def ask(rag, question=QUESTIONS[0], engine="block", **options):
    return rag.query(question, **{"engine": engine, "top_k": 2, "max_new_tokens": 6, **options})


def stored(rag):
    return rag.store.stats().kv_records


def test_answers_are_those_of_kv_that_an_ingest_made(tmp_path):
    """Asked once and again, on demand, and with room for two chunks, and for none."""
    with made(tmp_path, "all") as rag:
        expected = {(q, e): ask(rag, q, e).text for q in QUESTIONS for e in ENGINES}
        token = rag.index.shape.token_bytes
    for number, settings in enumerate(
        ({"kv": "on-demand"}, {"kv": "on-demand", "kv_budget": 60 * token}, {"kv_budget": 0}, {"memory_budget": 0})
    ):
        with made(tmp_path, str(number), **settings) as rag:
            assert (stored(rag) == 0) == (number != 3)
            for _ in range(2):
                for (question, engine), text in expected.items():
                    assert ask(rag, question, engine).text == text
                    rag.settle()
                    budget = rag.config.budget
                    # the prefix belongs to no chunk, and is always kept
                    prefix = rag.index.shape.nbytes(len(rag.index.prefix_ids))
                    assert budget is None or rag.store.kv_bytes <= max(budget, prefix)
            assert rag.verify().ok
            assert (rag.store.ledger().misses > 0) == (number != 3)


def test_the_second_question_finds_what_the_first_made(tmp_path):
    with made(tmp_path, kv="on-demand") as rag:
        first = ask(rag)
        rag.settle()
        assert (first.kv.hits, first.kv.misses) == (0, 2)
        assert stored(rag) == 3  # two chunks and the prefix
        ledger = rag.store.ledger()
        assert (ledger.hits, ledger.misses) == (0, 2)
        assert ledger.seconds_per_token > 0
    with RagKV.open(tmp_path / "index", device="cpu") as rag:
        second = ask(rag)
        assert (second.kv.hits, second.kv.misses, second.text) == (2, 0, first.text)
    with RagKV.open(tmp_path / "index", device="cpu") as rag:
        assert rag.store.ledger().hits == 2  # recorded when it was closed


def test_what_is_missing_is_one_pass_beside_the_loading_of_the_rest(tmp_path, monkeypatch):
    with made(tmp_path, kv="on-demand") as rag:
        ask(rag, top_k=1)
        rag.settle()
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
        rag.recall.memory().resize(0)
        chunks = rag.retrieve("Halden Bolt Carr founded", top_k=3)
        rag.recall.__dict__["_budget"] = 0
        _, use = rag.recall.chunks(Encoding.STANDALONE, chunks)
    assert (use.hits, use.misses) == (1, 2)
    assert passes == [2]
    assert loads == ["ragkv-prefetch"]


@pytest.mark.parametrize("engine", ["block", "ape"])
def test_nothing_is_written_before_the_first_token(tmp_path, monkeypatch, engine):
    with made(tmp_path, kv="on-demand") as rag:
        _ = rag.index.shape
        commits = []
        write = rag.store._database.write
        monkeypatch.setattr(rag.store._database, "write", lambda *a, **k: commits.append(1) or write(*a, **k))
        later = Keeper.later
        told = []
        monkeypatch.setattr(Keeper, "later", lambda self, each: told.append(list(commits)) or later(self, each))
        with rag.stream(QUESTIONS[0], engine=engine, top_k=2, max_new_tokens=6) as stream:
            next(iter(stream))
            assert told
            assert told[0] == []  # no commit before the first was handed over, after the first token
            for _ in stream:
                continue
        rag.settle()
        assert stored(rag) == 3


def test_a_cancelled_answer_and_a_closed_index_keep_what_was_made(tmp_path):
    rag = made(tmp_path, kv="on-demand")
    stream = rag.stream(QUESTIONS[0], engine="block", top_k=2, max_new_tokens=50)
    next(iter(stream))
    stream.close()
    rag.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ragkv-keeper"]
    with RagKV.open(tmp_path / "index", readonly=True) as rag:
        assert stored(rag) == 3


def test_threads_that_miss_the_same_chunks_encode_them_once(tmp_path, monkeypatch):
    with made(tmp_path, kv="on-demand") as rag:
        _ = rag.index.shape
        encoded = []
        encode = rag.model.encode

        def counted(chunks, **more):
            encoded.extend(map(tuple, chunks))
            return encode(chunks, **more)

        monkeypatch.setattr(rag.model, "encode", counted)
        threads = [threading.Thread(target=ask, args=(rag,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(encoded) == len(set(encoded))


def test_a_batch_encodes_each_chunk_once_also_without_memory(tmp_path, monkeypatch):
    with made(tmp_path, kv="on-demand", memory_budget=0) as rag:
        _ = rag.index.shape
        encoded = []
        encode = rag.model.encode

        def counted(chunks, **more):
            encoded.extend(map(tuple, chunks))
            return encode(chunks, **more)

        monkeypatch.setattr(rag.model, "encode", counted)
        answers = rag.query_many([QUESTIONS[0]] * 5, engine="block", top_k=2, max_new_tokens=3)
        assert len({answer.text for answer in answers}) == 1
        assert len(encoded) == len(set(encoded)) == 3


def test_a_read_only_index_answers_and_records_nothing(tmp_path):
    with made(tmp_path, kv="on-demand") as rag:
        expected = ask(rag).text
        rag.settle()
        before = rag.store.ledger()
    with RagKV.open(tmp_path / "index", device="cpu", readonly=True) as rag:
        assert ask(rag).text == expected
        assert ask(rag, engine="ape").kv.misses == 2
        rag.settle()
        assert rag.store.ledger() == before


@pytest.mark.parametrize(("settings", "asked"), [({}, 0), ({"kv_budget": "1GB"}, 2), ({"kv": "on-demand"}, 2)])
def test_statistics_of_a_large_index_cost_a_question_no_check_of_all_pages(tmp_path, monkeypatch, settings, asked):
    """Where a budget or what is made depends on the uses, they are recorded all the same."""
    with made(tmp_path, **settings) as rag:
        ask(rag)  # the first stores what all need, the prefix
        rag.settle()
        before = rag.store.ledger()
    monkeypatch.setattr(environment, "FEW_CHUNKS", 2)
    (tmp_path / "index" / "store" / "checked").unlink()  # as if nobody had left word that all pages are sound
    with RagKV.open(tmp_path / "index", device="cpu") as rag:
        ask(rag)
        rag.settle()
        assert rag.store.writes_cheaply == bool(asked)
        assert rag.store.ledger().hits == before.hits + asked
        ask(rag)
        rag.delete("nothing")  # a write of its own, after which another costs nothing
        ask(rag)
        rag.settle()
        assert rag.store.ledger().hits == before.hits + (6 if asked else 4)


def test_a_child_of_a_fork_waits_for_no_thread_of_the_parent(tmp_path):
    with made(tmp_path, kv="on-demand") as rag:
        keeper = rag.index.keeper
        hold, held = threading.Event(), threading.Event()

        def slow():
            held.set()
            hold.wait(600)

        keeper.later(keeper.noted(slow, [b"k" * 32], 10))
        held.wait(600)
        child = os.fork()
        if not child:
            keeper.settle(whole=True)
            os._exit(7 if not keeper.unstored else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert keeper.unstored
        hold.set()
        rag.settle()
        assert not keeper.unstored


def test_an_ingest_makes_kv_while_there_is_room_and_says_what_it_left(tmp_path):
    with made(tmp_path, "all") as rag:
        whole, count, token = rag.store.kv_bytes, stored(rag), rag.index.shape.token_bytes
    with made(tmp_path, "some", kv_budget=whole // 2) as rag:
        assert 0 < stored(rag) < count
        assert rag.store.kv_bytes <= whole // 2
        assert rag.verify().ok
        longer = tmp_path / "documents" / "more.txt"
        longer.write_text("Dorn is a river. " * 200)
        report = rag.ingest(longer)
        assert report.kv_later > 0
        assert rag.store.kv_bytes <= whole // 2 + token
        (tmp_path / "documents" / "halden.txt").write_text("Halden Works is gone.")
        rag.ingest(tmp_path / "documents")
        assert rag.verify().ok


def test_the_lease_of_a_running_answer_keeps_its_kv(tmp_path):
    with made(tmp_path, kv="on-demand") as rag:
        ask(rag)
        rag.settle()
        with rag.stream(QUESTIONS[0], engine="block", top_k=2, max_new_tokens=50) as stream:
            next(iter(stream))
            rag.store.set_budget(0)
            assert stored(rag) == 3
        rag.store.set_budget(0)
        assert stored(rag) == 1


def test_warming_makes_what_is_asked_for_and_no_more_the_second_time(tmp_path):
    with made(tmp_path, kv="on-demand", engines=("block",)) as rag:
        wanted = rag.wanted(questions=[{"question": QUESTIONS[0], "engine": "block", "top_k": 1}])
        report = rag.warm(wanted)
        assert (report.wanted, report.made, report.present, report.refused) == (1, 1, 0, 0)
        assert rag.warm(wanted).present == 1
        assert ask(rag, top_k=1).kv.hits == 1
        rag.settle()
        assert rag.warm(rag.wanted(documents=["carr.txt"])).made == 1
        assert rag.warm(rag.wanted(documents=["*"])).made == 1
        assert rag.store.ledger().misses == 0
        assert rag.wanted(questions=[{"question": QUESTIONS[0], "engine": "full"}]) == {}
        rag.store.set_budget(0)
        [(identity, _)] = rag.wanted(most=1).items()
        assert identity.chunk_ids == rag.retrieve(QUESTIONS[0], top_k=1)[0].chunk.token_ids
        assert rag.warm(rag.wanted(documents=["*"])).refused == 3
        assert rag.verify().ok


def test_warming_within_a_budget_never_makes_what_pushes_out_what_it_made(tmp_path):
    with made(tmp_path, kv="on-demand", engines=("block",)) as rag:
        sizes = [rag.index.shape.nbytes(len(chunk.token_ids)) for chunk in rag.store.chunks()]
        rag.store.set_budget(max(sizes) * 2)
        report = rag.warm(rag.wanted(documents=["*"]))
        assert report.made + report.refused == 3
        assert report.made >= 1
        assert rag.store.ledger().evictions == 0


def test_a_question_without_chunks_is_no_use(tmp_path):
    with made(tmp_path, kv="on-demand") as rag:
        with pytest.raises(RetrievalError):
            ask(rag, "zzzz qqqq")
        rag.request(make_engine("block", {}), QUESTIONS[0], [])
        rag.settle()
        assert (rag.store.ledger().hits, rag.store.ledger().misses) == (0, 0)
