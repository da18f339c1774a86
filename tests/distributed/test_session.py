"""Ranks that answer together give the results of one process with one index, or with the whole texts."""

import gc

import pytest
import torch.distributed as dist
from rankthreads import WAIT, in_threads, on_ranks

from ragkv import RagKV
from ragkv.config import IndexConfig
from ragkv.distributed import sharding
from ragkv.distributed.session import ContextRankBackend, IndexRankBackend, Session
from ragkv.errors import RagkvError, RanksError, RetrievalError, UsageError
from ragkv.index.answer import AnswerStream, validate_task
from ragkv.index.contexts import Contexts
from ragkv.question import Question
from ragkv.runtime import Runtime

FACTS = {
    "halden": "Halden Works was founded by Mira Oskel in 1907. Halden Works makes clocks.",
    "bolt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.",
    "kesk": "Kesk Mills was founded by Tova Lind. Kesk Mills makes flour and flour again.",
    "orrin": "Orrin Labs makes lamps. Orrin Labs was founded by Jo Marsh.",
    "sella": "Sella Yards builds boats. Sella Yards was founded by Ida Brandt.",
}
SHARDS = [["halden", "orrin", "sella"], [], ["bolt", "kesk"]]  # one is empty, and all sizes differ
QUESTION = "Who founded Kesk Mills?"
MODES = ["bm25", "dense", "sparse", "colbert", "hybrid"]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for name, text in FACTS.items():
        (folder / f"{name}.txt").write_text(text)
    for place, names in [("whole", FACTS), *((f"shard-{rank}", names) for rank, names in enumerate(SHARDS))]:
        settings = {"dtype": "float32", "rerank": False, "tuning": {"mapreduce": {"summary_tokens": 4}}}
        with RagKV.create(folder / place, model="mini", device="cpu", **settings) as made:
            if names:
                made.ingest(*(folder / f"{name}.txt" for name in names))
    return folder


def together(indexes, work, *, shards=True):
    """The results of `work(session)` on each rank, and the errors of those that failed."""
    store, size = dist.HashStore(), len(indexes)

    def run(rank):
        part = IndexRankBackend(indexes[rank], shards=shards)
        session = Session(part, store, rank, size, timeout=WAIT, patience=WAIT)
        try:
            session.join()
            found = work(session)
            session.leave()
        except RagkvError as error:
            session.leave(str(error))
            return error
        return found

    return in_threads(run, range(size))


def answered(session, **options):
    stream = session.stream(QUESTION, options)
    list(stream)
    return stream.answer


@pytest.fixture(scope="module")
def shards(places):
    opened = [RagKV.open(places / f"shard-{rank}", device="cpu") for rank in range(len(SHARDS))]
    yield [rag.index for rag in opened]
    for rag in opened:
        rag.close()


@pytest.fixture(scope="module")
def whole(places):
    with RagKV.open(places / "whole", device="cpu") as rag:
        yield rag


def facts(scored):
    return [(s.chunk, s.source, s.retrieval_score, s.rerank_score, s.score, dict(s.stages)) for s in scored]


def test_retrieval_and_answers_over_shards_are_those_of_one_index(shards, whole):
    some = ("source=*l*.txt",)
    asked = [
        *((mode, False, ()) for mode in MODES),
        ("bm25", False, some),
        ("hybrid", True, some),
        ("colbert", True, ()),
    ]
    engines = ["block", "ape", "pced", "apb", "full", "ippd", "mapreduce"]

    def work(session):
        backend = session._backend
        settings = [Question(question=QUESTION, top_k=3, retrieval=m, rerank=r, where=w) for m, r, w in asked]
        found = [facts(backend._finder.find(each)) for each in settings]
        answers = []
        for engine in engines:
            answers.append(answered(session, engine=engine, max_new_tokens=2))
        with pytest.raises(UsageError, match="No document"):
            backend._finder.find(Question(question=QUESTION, where=("source=nobody.txt",)))
        with pytest.raises(RetrievalError):
            list(session.stream("zzz", {}))
        return found, answers

    found = together(shards, work)
    wanted = [facts(whole.retrieve(QUESTION, top_k=3, retrieval=m, rerank=r, where=w)) for m, r, w in asked]
    for rank in found:
        assert not isinstance(rank, Exception), rank
        for theirs, mine in zip(rank[0], wanted, strict=True):
            same_but_for_noise(theirs, mine)
        for engine, answer in zip(engines, rank[1], strict=True):
            mine = whole.query(QUESTION, engine=engine, max_new_tokens=2)
            assert answer.text == mine.text
            assert [source.chunk_id for source in answer.sources] == [source.chunk_id for source in mine.sources]
            assert [source.tokens_won for source in answer.sources] == [source.tokens_won for source in mine.sources]
            for count in ("hits", "misses", "tokens"):
                assert getattr(answer.kv, count) == getattr(mine.kv, count)


def same_but_for_noise(theirs, mine):
    assert [each[:2] for each in theirs] == [each[:2] for each in mine]
    for one, other in zip(theirs, mine, strict=True):
        assert one[2:5] == pytest.approx(other[2:5], abs=1e-5)  # other batch sizes round differently
        assert one[5] == pytest.approx(other[5], abs=1e-5)
        assert one[5].get("bm25") == other[5].get("bm25")  # bit for bit


def test_one_index_is_split_by_hash(whole, monkeypatch):
    # ids depend on the files' path: a few chunks may all belong to one rank
    order = sorted(chunk.chunk_id for chunk in whole.store.chunks())
    monkeypatch.setattr(sharding, "rank_of", lambda chunk_id, size: order.index(chunk_id) % size)
    drawn = {"engine": "block", "max_new_tokens": 12, "decoding": {"temperature": 1.5, "seed": 3}}

    def work(session):
        return answered(session, **drawn), set(session._backend._owners.values()), session.group.sent

    wanted = whole.query(QUESTION, **drawn)
    for answer, owners, sent in together([whole.index] * 3, work, shards=False):
        assert answer.text == wanted.text
        assert answer.sources == wanted.sources
        assert len(owners) > 1
        assert sent > 0


def test_a_rank_with_other_settings_is_refused_by_name(places, shards, whole):
    with RagKV.create(places / "other", model="mini", dtype="float32", device="cpu", top_k=3) as made:
        errors = together([*shards[:2], made.index], lambda session: None)
    assert all(isinstance(error, RanksError) for error in errors)
    assert {str(error).split(", process")[0].split(" (")[0] for error in errors} == {"Rank 2"}
    assert "setting top_k than rank 0: 3, not 8" in str(errors[0])


def test_a_rank_that_leaves_is_named_by_all(whole):
    """Its connections stay open, as when a process only hangs: pending operations neither succeed nor fail, and must
    not block the other ranks, whenever Python frees the group.
    """
    store, size, sentences, open_still = dist.HashStore(), 3, {}, []

    def run(rank):
        session = Session(IndexRankBackend(whole.index, shards=False), store, rank, size, timeout=WAIT, patience=WAIT)
        session.join()
        if rank == 1:
            open_still.append(session.group._backend)
            session.leave("its disk is full.")
            return
        with pytest.raises(RanksError) as caught:
            answered(session, engine="block", max_new_tokens=4)
        sentences[rank] = str(caught.value)
        session.leave(sentences[rank])
        gc.collect()

    in_threads(run, range(size))
    open_still.clear()
    assert set(sentences) == {0, 2}
    assert any("Rank 1" in sentence and "its disk is full" in sentence for sentence in sentences.values())


def test_a_long_text_is_answered_from_by_all_ranks(make_model):
    model = make_model("llama")
    config = IndexConfig(tuning={"apb": {"block": 40, "anchor": 8, "passing": 6}})
    texts = [("book", "Halden Works was founded by Mira Oskel. " * 4), ("note", "It rained.")]
    with Contexts(model, texts, config) as whole:
        wanted = {}
        for engine in ("apb", "pced", "full"):
            stream = whole.stream("Who founded it?", engine=engine, max_new_tokens=4)
            list(stream)
            wanted[engine] = stream.answer

    def work(group):
        part = ContextRankBackend(model, texts, config)
        backend = part.backend(group, Runtime(model, ranks=group))
        answers = {}
        for engine in wanted:
            stream = AnswerStream(backend, validate_task(config, "Who founded it?", engine=engine, max_new_tokens=4))
            list(stream)
            answers[engine] = stream.answer
        return answers, backend._executor.passed

    for answers, passed in on_ranks(3, work):
        assert {engine: answer.text for engine, answer in answers.items()} == {
            engine: answer.text for engine, answer in wanted.items()
        }
        assert passed > 0
